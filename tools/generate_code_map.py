"""Writes the list of modules in docs/internals/code.md: the first sentence of each docstring, by package.

usage: python -m tools.generate_code_map [--check]   (--check writes nothing and fails if the page is not current)
"""

import ast
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "internals" / "code.md"
PACKAGES = (
    "scheduler_svc",
    "gateway",
    "worker_svc",
    "quire_kernels",
    "quire",
    "quire_cli",
    "simulator",
    "quire_torture",
)
NOTICE = "<!-- The rest is made by tools/generate_code_map.py (make code-map) from docstrings. Do not edit it. -->\n"
WIDTH = 120


def first_sentence(module: Path) -> str:
    """The first sentence of a module's docstring. Raises ValueError if the module has none."""
    text = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8")))
    if not text:
        raise ValueError(f"{module} has no docstring")
    sentence, stop, _ = " ".join(text.partition("\n\n")[0].split()).partition(". ")
    return sentence + stop.rstrip()


def render(folder: Path) -> Iterator[str]:
    """The lines about a package, its modules and its inner packages; none if it has no modules but generated ones."""
    modules = {path.name: path for path in sorted(folder.glob("*.py")) if "_pb2" not in path.name}
    if (package := modules.pop("__init__.py", None)) is None:
        return
    name = folder.relative_to(ROOT).as_posix()
    yield from ["", f"{'#' if folder.parent == ROOT else '##'}# `{name}/`", ""]
    yield from textwrap.wrap(first_sentence(package), WIDTH, break_on_hyphens=False)
    yield from [""] if modules else []
    for path in modules.values():
        line = f"- `{path.name}`: {first_sentence(path)}"
        yield from textwrap.wrap(line, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    for inner in sorted(path for path in folder.iterdir() if path.is_dir()):
        yield from render(inner)


def main(arguments: list[str]) -> int:
    """Writes or checks the page; returns the exit status."""
    written = PAGE.read_text(encoding="utf-8")
    lines = [line for name in PACKAGES for line in render(ROOT / name)]
    current = written.partition(NOTICE)[0] + NOTICE + "\n".join(lines) + "\n"
    if arguments == ["--check"]:
        if written != current:
            print(f"{PAGE.relative_to(ROOT)} is not current; run make code-map")
            return 1
        return 0
    PAGE.write_text(current, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
