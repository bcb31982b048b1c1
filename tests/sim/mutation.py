"""Puts a fault into loaded code: functions get the code of a changed source, and later their own code again.

No module is imported anew, so existing references to a function also run the changed code. A change must be inside
functions or methods, which must not gain or lose variables of enclosing functions.
"""

import ast
import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import CodeType, FunctionType, ModuleType
from typing import Any


class StalePatchError(Exception):
    """A patch no longer applies: the source has changed since the patch was written."""


@dataclass(frozen=True, slots=True)
class Patch:
    """A change to a module's source: `old`, which occurs exactly once, becomes `new`."""

    module: str
    old: str
    new: str

    def apply(self, source: str) -> str:
        """The source with this change applied. Raises StalePatchError."""
        if (count := source.count(self.old)) != 1:
            raise StalePatchError(f"{self.module} has the text {count} times, not once: {self.old!r}")
        return source.replace(self.old, self.new)


@contextmanager
def patched(*patches: Patch) -> Iterator[None]:
    """Applies the patches inside the block.

    Raises StalePatchError.
    """
    with ExitStack() as stack:
        for name in dict.fromkeys(patch.module for patch in patches):
            changes = _changes(name, tuple(patch for patch in patches if patch.module == name))
            stack.enter_context(_with_codes(changes))
        yield


@contextmanager
def _with_codes(changes: Sequence[tuple[FunctionType, CodeType]]) -> Iterator[None]:
    before = [(function, function.__code__) for function, _ in changes]
    try:
        for function, code in changes:
            function.__code__ = code
        yield
    finally:
        for function, code in before:
            function.__code__ = code


_REACHED: set[Patch] = set()
_PROBES: list[Patch] = []


class Reach:
    """Records which patches a run reaches. A run that reaches none of the statements that a patch changes behaves the
    same with the patch. Inside the block, functions record a visit before each of these statements."""

    def __init__(self, patches: Iterable[Patch]) -> None:
        self._patches = list(patches)
        self._stack = ExitStack()

    def __enter__(self) -> "Reach":
        for name in dict.fromkeys(patch.module for patch in self._patches):
            module = import_module(name)
            source = inspect.getsource(module)
            tree = ast.parse(source)
            for patch in self._patches:
                if patch.module == name:
                    _probe(patch, tree, source)
            code = compile(ast.fix_missing_locations(tree), module.__file__ or name, "exec", dont_inherit=True)
            self._stack.enter_context(_with_codes(_replaced(module, code)))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def take(self) -> set[Patch]:
        """Returns the patches that were reached since the last call."""
        reached = set(_REACHED)
        _REACHED.clear()
        return reached


def reached(number: int) -> None:
    """Records that a run reaches the code that the patch with this number changes."""
    _REACHED.add(_PROBES[number])


def _probe(patch: Patch, tree: ast.Module, source: str) -> None:
    """Inserts a call of `reached` before each of the smallest statements that a patch changes."""
    patch.apply(source)
    old, new = patch.old.splitlines(), patch.new.splitlines()
    same = next((place for place, pair in enumerate(zip(old, new, strict=False)) if pair[0] != pair[1]), len(new))
    begin = source.count("\n", 0, source.index(patch.old)) + 1
    note = f"__import__({__name__!r}, fromlist=['reached']).reached({len(_PROBES)})"
    _PROBES.append(patch)
    for line in range(begin + min(same, len(old) - 1), begin + len(old)):
        block, place = min(
            ((body, place) for body in _bodies(tree) for place, each in enumerate(body) if _has(each, line)),
            key=lambda found: (found[0][found[1]].end_lineno or 0) - found[0][found[1]].lineno,
        )
        block.insert(place, ast.parse(note).body[0])


def _bodies(tree: ast.Module) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            if isinstance(body := getattr(node, name, None), list):
                yield body


def _has(statement: ast.stmt, line: int) -> bool:
    return statement.lineno <= line <= (statement.end_lineno or statement.lineno)


@cache
def _changes(name: str, patches: tuple[Patch, ...]) -> Sequence[tuple[FunctionType, CodeType]]:
    """The functions of a module that patches change, each with its new code. They must have their own code now."""
    module = import_module(name)
    source = inspect.getsource(module)
    for patch in patches:
        source = patch.apply(source)
    changes = _replaced(module, _compiled(module, source))
    if len(changes) < len(patches):
        raise StalePatchError(f"{len(patches)} patches change {len(changes)} functions of {module.__name__}")
    return changes


def _replaced(module: ModuleType, changed: CodeType) -> list[tuple[FunctionType, CodeType]]:
    """The functions of a module that differ in changed code, each with its code there."""
    codes = {code.co_qualname: code for code in _codes(changed)}
    return [
        (function, code)
        for function in _functions(module)
        if (code := codes.get(function.__code__.co_qualname)) is not None and not _is_same(code, function.__code__)
    ]


def _compiled(module: ModuleType, source: str) -> CodeType:
    try:
        return compile(source, module.__file__ or module.__name__, "exec", dont_inherit=True)
    except SyntaxError as error:
        raise StalePatchError(f"{module.__name__} is no Python when it is changed: {error}") from error


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A code object and all code objects within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    """The functions and methods that a module defines, without their wrappers."""
    seen: set[int] = set()
    for value in list(vars(module).values()):
        owned = [value]
        if inspect.isclass(value) and value.__module__ == module.__name__:
            owned = list(vars(value).values())
        for each in owned:
            for function in _unwrapped(each):
                if function.__module__ == module.__name__ and id(function) not in seen:
                    seen.add(id(function))
                    yield function


def _unwrapped(value: Any) -> Iterator[FunctionType]:
    if isinstance(value, property):
        parts = [value.fget, value.fset, value.fdel]
    elif isinstance(value, classmethod | staticmethod):
        parts = [value.__func__]
    else:
        parts = [value]
    for part in parts:
        inner = inspect.unwrap(part) if callable(part) else part
        if isinstance(inner, FunctionType):
            yield inner


def _is_same(left: CodeType, right: CodeType) -> bool:
    """Whether two functions do the same, regardless of their line numbers."""
    if (left.co_code, left.co_names, left.co_varnames) != (right.co_code, right.co_names, right.co_varnames):
        return False
    pairs = zip(left.co_consts, right.co_consts, strict=False)
    return len(left.co_consts) == len(right.co_consts) and all(
        _is_same(one, other) if isinstance(one, CodeType) and isinstance(other, CodeType) else one == other
        for one, other in pairs
    )
