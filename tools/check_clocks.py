"""Finds services' modules that read a clock or a source of randomness by themselves, past `quire.runtime.clock` and
`quire.runtime.entropy`. A simulation cannot run what such a module does as a function of its seed.

Usage: python -m tools.check_clocks
"""

import ast
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_CHECKED = ("gateway", "scheduler_svc", "worker_svc", "quire", "quire_cli/supervisor")
_SEAMS = (Path("quire/runtime/clock.py"), Path("quire/runtime/entropy.py"))
_FORBIDDEN_MODULES = frozenset({"time", "random", "secrets", "uuid"})
_FORBIDDEN_NAMES = frozenset({"os.urandom", "datetime.now", "datetime.utcnow", "datetime.today", "date.today"})


@dataclass(frozen=True, slots=True)
class Finding:
    """A place that reads a clock or draws a number by itself."""

    path: Path
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}"


def findings_in(source: str, path: Path) -> Iterator[Finding]:
    """The places in a module's source, in order."""
    tree = ast.parse(source)
    found = [*_imports(tree), *_reads(tree, dict(_modules(tree)))]
    for line, _, what in sorted(found):
        yield Finding(path, line, what)


def _modules(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """The forbidden modules that are imported, by the names that they have here."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((each.asname or each.name, each.name) for each in node.names if each.name in _FORBIDDEN_MODULES)


def _imports(tree: ast.Module) -> Iterator[tuple[int, int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any(
            node.module in _FORBIDDEN_MODULES or f"{node.module}.{each.name}" in _FORBIDDEN_NAMES for each in node.names
        ):
            names = ", ".join(each.name for each in node.names)
            yield node.lineno, node.col_offset, f"from {node.module} import {names}"


def _reads(tree: ast.Module, modules: Mapping[str, str]) -> Iterator[tuple[int, int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            name = _name_of(node)
            first, _, rest = name.partition(".")
            if first in modules:
                yield node.lineno, node.col_offset, f"{modules[first]}.{rest}"
            elif any(name == each or name.endswith(f".{each}") for each in _FORBIDDEN_NAMES):
                yield node.lineno, node.col_offset, name


def _name_of(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_name_of(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def main() -> int:
    """Prints each place; returns 1 where there is one."""
    found = [
        finding
        for package in _CHECKED
        for path in sorted(Path(package).rglob("*.py"))
        if path not in _SEAMS
        for finding in findings_in(path.read_text(), path)
    ]
    for each in found:
        print(each)
    print(f"{len(found)} places in {len({each.path for each in found})} modules", file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
