"""Tiers of tests, and files with tests of a tier, which are found by their text: the others are not imported."""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark.expression import Expression
from hypothesis import settings

MARKERS = frozenset({"extended", "all_isas", "real", "long"})
_ROOT = Path(__file__).parents[1]
# A file has tests with one of `MARKERS` only if it, or a conftest.py that it uses, has one of these texts.
_SOME = re.compile(r"\bmark\.(extended|all_isas|real|long)\b|\b(cpu_kernels|parametrize_once|parametrize_in_turn)\b")
_ALL_EXTENDED = re.compile(r"^pytestmark = pytest\.mark\.extended$", re.MULTILINE)
_ALL_LONG = re.compile(r"^pytestmark = pytest\.mark\.long$", re.MULTILINE)
_ALL_REAL = re.compile(r"^pytestmark = pytest\.mark\.real$", re.MULTILINE)


def is_third_tier() -> bool:
    """Whether tests take the time that `make test-long` has."""
    return settings().max_examples > 100


def few_examples() -> settings:
    """For a property with slow examples: 20 of them in the first tier, the usual number in the third."""
    return settings() if is_third_tier() else settings(max_examples=20)


def parametrize_once(
    names: str, cases: Sequence[Any], *, second_tier: int | None = None, **options: Any
) -> pytest.MarkDecorator:
    """Parametrizes a test with the first of these cases; with the others it is an extended test. With `second_tier`,
    only that number of the others are in the second tier, and the rest in the third."""
    several = "," in names
    marks = [
        pytest.mark.extended if second_tier is None or n < second_tier else pytest.mark.long
        for n in range(len(cases) - 1)
    ]
    rest = [
        pytest.param(*(case if several else (case,)), marks=mark) for case, mark in zip(cases[1:], marks, strict=True)
    ]
    return pytest.mark.parametrize(names, [cases[0], *rest], **options)


def parametrize_in_turn(names: str, first: Iterable[Any], others: Sequence[tuple[Any, ...]]) -> pytest.MarkDecorator:
    """Parametrizes a test with each value of `first` and each of `others`. The first two tiers run each value of
    `first` with one of `others`, in turn; `make test-long` runs all pairs."""
    return pytest.mark.parametrize(
        names,
        [
            pytest.param(one, *other, marks=() if place == number % len(others) else pytest.mark.long)
            for number, one in enumerate(first)
            for place, other in enumerate(others)
        ],
    )


def may_select(expression: str, path: Path) -> bool:
    """False if `-m expression` selects no test of the file; also true if it names a marker that is no tier."""
    try:
        compiled = Expression.compile(expression)
    except SyntaxError:  # pytest says so.
        return True
    if not compiled.idents() or not compiled.idents() <= MARKERS:
        return True
    text = path.read_text(encoding="utf-8")
    if _ALL_EXTENDED.search(text):
        possible = [frozenset({"extended"}), MARKERS]
    elif _ALL_LONG.search(text):
        possible = [frozenset({"long"})]
    elif _ALL_REAL.search(text):
        possible = [frozenset({"real"}), frozenset({"real", "extended"})]
    elif _SOME.search(text) or any(map(_SOME.search, _texts_of_conftests(path))):
        return True
    else:
        possible = [frozenset()]
    return any(compiled.evaluate(lambda name, marks=marks, **_: name in marks) for marks in possible)


def _texts_of_conftests(path: Path) -> Iterator[str]:
    for folder in path.parents:
        if folder == _ROOT:
            return
        conftest = folder / "conftest.py"
        if conftest.exists():
            yield conftest.read_text(encoding="utf-8")
