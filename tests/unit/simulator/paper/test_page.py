"""The page docs/paper/README.md: its comparisons, and an explanation of every difference."""

import sys
from pathlib import Path

import pytest

from simulator.paper.__main__ import main
from simulator.paper.curves import Runner
from simulator.paper.figure import Comparison, compared
from simulator.paper.figures import FIGURES
from simulator.paper.page import make_section, write_figure, write_page

PAGE = Path(__file__).parents[4] / "docs" / "paper"


def test_a_reason_stands_below_what_is_off_by_the_largest_difference() -> None:
    assert Comparison("a", (1.0, 2.0), (0.5, 2.2)).difference == pytest.approx(-0.5)
    assert Comparison("a", 5, None).is_off
    assert "because" not in compared([Comparison("a", 10, 12)], "because")
    assert "because" in compared([Comparison("a", 10, 13)], "because")


@pytest.mark.parametrize("name", [name for name in FIGURES if (PAGE / f"{name}.json").exists()])
def test_the_page_has_the_figure_and_explains_it(name: str) -> None:
    section = make_section(FIGURES[name], PAGE)
    assert section in (PAGE / "README.md").read_text()
    assert "not known yet" not in section
    assert "--scale" not in section
    assert (PAGE / f"{name}.svg").exists() == (FIGURES[name].draw is not None)


def test_wrong_flags_are_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = {
        "fig99": "fig99 is no figure; there are table1, fig2",
        "--scale=2": "2 is no share",
        "--jobs=0": "0 is no number of processes",
    }
    for argv, message in refused.items():
        monkeypatch.setattr(sys, "argv", ["simulator.paper", argv])
        with pytest.raises(SystemExit):
            main()
        assert message in capsys.readouterr().err.splitlines()[-1]


def test_a_figure_of_shortened_loads_says_so(tmp_path: Path) -> None:
    figure = FIGURES["table1"]
    with Runner(1) as runner:
        write_figure(figure, tmp_path, figure.measure(runner), scale=0.5)
    write_page(tmp_path)
    page = (tmp_path / "README.md").read_text()
    assert "Made with loads of 50% of their length" in page
    assert "`make paper ARGS=fig12` makes it" in page
