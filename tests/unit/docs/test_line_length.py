"""Lines of text files have at most 120 columns. Data, licences and what tools write are exempt."""

import os
import subprocess
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
    if listed.returncode == 0 and listed.stdout:
        files = [ROOT / name for name in listed.stdout.split("\0") if name]
    else:
        files = [Path(folder) / name for folder, name in walk(ROOT)]
    files = [file for file in files if file.is_file() and file.parent != GENERATED_FOLDER]
    return [file for file in files if not file.name.endswith(GENERATED_OR_DATA)]


def walk(root: Path) -> list[tuple[str, str]]:
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [each for each in folders if each not in SKIPPED_FOLDERS and not each.startswith(".")]
        found += [(folder, name) for name in names]
    return found


def wide_lines(file: Path) -> list[str]:
    lines = file.read_text(encoding="utf-8").splitlines()
    return [
        f"{file}:{number}: {len(line)} columns" for number, line in enumerate(lines, start=1) if len(line) > MAX_COLUMNS
    ]


def test_no_line_is_wider_than_120_columns() -> None:
    files = text_files()
    assert ROOT / "README.md" in files
    assert [line for file in files for line in wide_lines(file)] == []


def test_a_wide_line_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a" * 120 + "\n" + "a" * 121 + "\n", encoding="utf-8")
    assert wide_lines(page) == [f"{page}:2: 121 columns"]
