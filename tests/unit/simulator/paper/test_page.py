"""The page docs/paper/README.md: what is compared, and that every difference is explained."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from simulator.paper.figure import Comparison, compared
from simulator.paper.figures import FIGURES
from simulator.paper.page import wrapped

PAGE = Path(__file__).parents[4] / "docs" / "paper"


@pytest.mark.parametrize(
    ("paper", "ours", "difference"),
    [(10, 12, 0.2), ((1.0, 2.0), (1.1, 3.0), 0.5), ((1.0, 2.0), (0.5, 2.2), -0.5), (5, None, None)],
)
def test_differences(paper: float, ours: float | None, difference: float | None) -> None:
    comparison = Comparison("what", paper, ours)
    assert comparison.difference == (None if difference is None else pytest.approx(difference))
    assert comparison.is_off == (difference is None or abs(difference) > 0.25)


def test_a_reason_stands_below_what_is_off() -> None:
    assert "because" not in compared([Comparison("a", 10, 12)], "because")
    assert "because" in compared([Comparison("a", 10, 13)], "because")


@pytest.mark.parametrize("name", [name for name in FIGURES if (PAGE / f"{name}.json").exists()])
def test_the_page_has_the_figure_and_explains_it(name: str) -> None:
    data = json.loads((PAGE / f"{name}.json").read_text())
    section = FIGURES[name].section(data)
    page = (PAGE / "README.md").read_text()
    assert wrapped(section) in page
    assert "not known yet" not in section
    assert (PAGE / f"{name}.svg").exists() == (FIGURES[name].draw is not None)


def test_an_unknown_figure_is_refused_in_one_line() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "simulator.paper", "fig99"], capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == 2
    assert "invalid choice: 'fig99'" in ended.stderr.splitlines()[-1]
