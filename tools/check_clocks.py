"""Finds services' modules that read a clock or a source of randomness by themselves, past `quire.clock` and
`quire.entropy`. A simulation cannot run what such a module does as a function of its seed.

Usage: python -m tools.check_clocks
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_CHECKED = ("gateway", "scheduler_svc", "worker_svc", "quire/client", "quire/rpc", "quire_cli/supervisor")
_FORBIDDEN_MODULES = frozenset({"time", "random", "secrets", "uuid"})
_FORBIDDEN_CALLS = frozenset({"os.urandom", "datetime.now", "datetime.utcnow", "datetime.today", "date.today"})


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
    for node in sorted(_nodes(ast.parse(source)), key=lambda node: (node.lineno, node.col_offset)):
        if isinstance(node, ast.Attribute):
            yield Finding(path, node.lineno, _name_of(node))
        else:
            yield Finding(path, node.lineno, f"from {node.module} import {', '.join(each.name for each in node.names)}")


def _nodes(tree: ast.Module) -> Iterator[ast.Attribute | ast.ImportFrom]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            name = _name_of(node)
            # Not `self.clock.time`: the first name is the module's.
            is_of_module = isinstance(node.value, ast.Name) and node.value.id in _FORBIDDEN_MODULES
            if is_of_module or any(name == each or name.endswith(f".{each}") for each in _FORBIDDEN_CALLS):
                yield node
        elif isinstance(node, ast.ImportFrom) and node.module in _FORBIDDEN_MODULES:
            yield node


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
        for finding in findings_in(path.read_text(), path)
    ]
    print(*found, sep="\n")
    print(f"{len(found)} places in {len({each.path for each in found})} modules", file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
