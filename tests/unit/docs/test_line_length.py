"""Lines of text files have at most 120 columns. Data, licences and generated files are exempt."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
MAX_COLUMNS = 120
SKIPPED = re.compile(r"(^|/)(build|dist|node_modules|__pycache__|\.[^/]+)/|\.so$")
GENERATED_OR_DATA = re.compile(r"\.(json|safetensors|png|gif|svg|csv|jsonl|ipynb|gz)|heldout.txt|LICENSE")
GENERATED_FOLDER = ROOT / "deploy" / "rendered"


def test_no_line_is_wider_than_120_columns() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    tracked = [ROOT / name for name in listed.stdout.split("\0") if name]
    # For an unpacked archive: all files outside the folders of builds and of tools.
    files = tracked or [path for path in ROOT.rglob("*") if not SKIPPED.search(str(path.relative_to(ROOT)))]
    wide = [
        f"{file}:{number}: {len(line)} columns"
        for file in files
        if file.is_file() and not GENERATED_OR_DATA.search(file.name) and file.parent != GENERATED_FOLDER
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1)
        if len(line) > MAX_COLUMNS
    ]
    assert wide == []
