"""The parts of a figure of the page, and tables that compare the paper's numbers with ours."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from simulator.paper.curves import Runner
from simulator.paper.drawing import Picture

Data = Mapping[str, Any]
"""The measurements of a figure, as in its JSON file."""

Range = tuple[float, float]
Number = float | Range

TOLERANCE = 0.25
"""A larger difference from the paper is explained on the page."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure or table of the paper.

    Attributes:
        name: Name of its files, and on the command line.
        title: Heading of its section.
        measure: Simulates or measures it.
        draw: Draws it; None for a table.
        section: The text of its section in Markdown, without heading and picture.
        claims: The paper's claims that it supports, for the summary of the page.
    """

    name: str
    title: str
    measure: Callable[[Runner], dict[str, Any]]
    section: Callable[[Data], str]
    draw: Callable[[Data], Picture] | None = None
    claims: "Callable[[Data], Sequence[Comparison]] | None" = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """One number, or a range of numbers, of the paper and of ours. `ours` is None if it could not be obtained."""

    what: str
    paper: Number
    ours: Number | None
    form: str = "{:.1f}"

    @property
    def difference(self) -> float | None:
        """Our number divided by the paper's, minus 1; for ranges, at the end that differs more."""
        if self.ours is None:
            return None
        pairs = zip(_ends(self.ours), _ends(self.paper), strict=True)
        return max((own / paper - 1 for own, paper in pairs), key=abs)

    @property
    def is_off(self) -> bool:
        """Whether the page must explain the difference."""
        return self.difference is None or abs(self.difference) > TOLERANCE

    @property
    def cells(self) -> tuple[str, str, str]:
        """The name, the paper's number and ours."""
        return self.what, self._text(self.paper), "-" if self.ours is None else self._text(self.ours)

    @property
    def row(self) -> str:
        difference = "not reached" if self.difference is None else f"{self.difference:+.0%}"
        if difference in ("+0%", "-0%"):
            difference = "0%"
        return f"| {' | '.join((*self.cells, f'**{difference}**' if self.is_off else difference))} |"

    def _text(self, number: Number) -> str:
        low, high = _ends(number)
        first, last = self.form.format(low), self.form.format(high)
        return first if first == last else f"{first} to {last}"


def _ends(number: Number) -> Range:
    return number if isinstance(number, tuple) else (number, number)


def compared(rows: Sequence[Comparison], reason: str) -> str:
    """A table of comparisons, followed by the reason if any is off."""
    lines = ["| | paper | ours | difference |", "|---|---|---|---|", *(row.row for row in rows)]
    if any(row.is_off for row in rows):
        lines += ["", reason]
    return "\n".join(lines)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
