"""Which test files have tests of a tier, by their text: the others are not imported, which takes seconds."""

import re
from collections.abc import Iterator
from pathlib import Path

from _pytest.mark.expression import Expression

MARKERS = frozenset({"extended", "all_isas"})
_ROOT = Path(__file__).parents[1]
# A file has tests with one of `MARKERS` only if it, or a conftest.py that it uses, has one of these texts.
_SOME = re.compile(r"\bmark\.(extended|all_isas)\b|\bcpu_kernels\b")
_ALL_EXTENDED = re.compile(r"^pytestmark = pytest\.mark\.extended$", re.MULTILINE)


def may_select(expression: str, path: Path) -> bool:
    """False if `-m expression` selects no test of the file; also true if it names other markers than those of tiers."""
    try:
        compiled = Expression.compile(expression)
    except SyntaxError:  # pytest says so.
        return True
    if not compiled.idents() or not compiled.idents() <= MARKERS:
        return True
    text = path.read_text(encoding="utf-8")
    if _ALL_EXTENDED.search(text):
        possible = [frozenset({"extended"}), MARKERS]
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
