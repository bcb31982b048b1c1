"""Reads commands in documents, and the names that a section explains."""

import re


def command_lines(block: str) -> list[str]:
    """The commands of a shell block, each in one line."""
    return block.replace("\\\n", " ").splitlines()


def explained_names(page: str, heading: str) -> set[str]:
    """The names at the beginnings of the entries, in the lists and tables of a section."""
    section = re.split(r"\n#+ ", page.partition(f"# {heading}\n")[2])[0]
    lines = section.replace("\n  ", " ").splitlines()
    entries = [re.split(r": | \(| \| ", line[2:])[0] for line in lines if line.startswith(("- `", "| `"))]
    return {name for entry in entries for name in re.findall(r"`([\w.]+)`", entry)}
