"""Each class of the product can be read in one sitting: it has few methods, its bases included, and few lines."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("quire", "gateway", "scheduler_svc", "worker_svc", "quire_kernels", "simulator", "quire_cli")
MAX_METHODS, MAX_LINES = 35, 500


class ClassSize(NamedTuple):
    name: str
    bases: frozenset[str]
    methods: frozenset[str]
    num_lines: int


def statements(node: ast.AST) -> Iterator[ast.stmt]:
    """All statements within a node. Their expressions, nine tenths of a tree, are not visited."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        for each in getattr(node, name, ()):
            if isinstance(each, ast.stmt):
                yield each
            yield from statements(each)


def classes() -> Iterator[ClassSize]:
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            if path.stem.endswith(("_pb2", "_pb2_grpc")):
                continue
            for node in statements(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
                    methods = {
                        each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
                    }
                    num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
                    yield ClassSize(node.name, frozenset(bases), frozenset(methods), num_lines)


def test_no_class_has_more_methods_or_lines_than_a_reader_can_keep_in_mind() -> None:
    found = list(classes())
    known = {each.name: each for each in found}

    def methods(each: ClassSize) -> frozenset[str]:
        return each.methods.union(*(methods(known[base]) for base in each.bases if base in known and base != each.name))

    assert len(known) > 500
    assert {each.name: len(methods(each)) for each in found if len(methods(each)) > MAX_METHODS} == {}
    assert {each.name: each.num_lines for each in found if each.num_lines > MAX_LINES} == {}
