"""Lines of text files have at most 120 columns. Data, licences and what tools write are exempt."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
MAX_COLUMNS = 120
GENERATED_OR_DATA = (
    ".json",
    ".safetensors",
    ".png",
    ".svg",
    ".csv",
    ".jsonl",
    ".ipynb",
    ".gz",
    "heldout.txt",
    "LICENSE",
)
GENERATED_FOLDER = ROOT / "deploy" / "rendered"
SKIPPED_FOLDERS = {"build", "dist", "node_modules", "__pycache__"}


def text_files() -> list[Path]:
    """The files that git tracks; in an unpacked archive, all files outside hidden folders and build folders."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    tracked = [ROOT / name for name in listed.stdout.split("\0") if name]
    files = [file for file in tracked or walk(ROOT) if file.is_file() and file.parent != GENERATED_FOLDER]
    return [file for file in files if not file.name.endswith(GENERATED_OR_DATA)]


def walk(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.is_file():
            yield path
        elif path.name not in SKIPPED_FOLDERS and not path.name.startswith("."):
            yield from walk(path)


def test_no_line_is_wider_than_120_columns() -> None:
    files = text_files()
    assert ROOT / "README.md" in files
    wide = [
        f"{file}:{number}: {len(line)} columns"
        for file in files
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1)
        if len(line) > MAX_COLUMNS
    ]
    assert wide == []
