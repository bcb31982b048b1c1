"""Pictures of results: latency and throughput against the request rate.

Needs matplotlib, of the extra quire-llm[bench].
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.load.report import Report, Statistics
from quire.load.results import LoadResult, Run, replace_file

SUFFIXES = (".svg", ".png")


@dataclass(frozen=True, slots=True)
class _Panel:
    """One picture of the four, with a line for each of these statistics of a latency; without one, of the output."""

    title: str
    unit: str
    latency: str | None
    lines: tuple[str, ...]

    def value(self, report: Report, line: str) -> float | None:
        if self.latency is None:
            return report.output_tokens_per_s
        statistics: Statistics | None = getattr(report, self.latency)
        return None if statistics is None else getattr(statistics, line) * 1e3


_PANELS = (
    _Panel("normalized latency, mean", "ms/token", "normalized", ("mean",)),
    _Panel("time to first token", "ms", "ttft", ("p50", "p99")),
    _Panel("time per output token", "ms", "tpot", ("p50", "p99")),
    _Panel("output", "tokens/s", None, ("output",)),
)


def check_picture(path: Path) -> None:
    """ValueError where the name of the file is not one of a picture, ModuleNotFoundError without matplotlib."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f'"{path}" must end in {" or ".join(SUFFIXES)}')
    import matplotlib as _  # noqa: F401, ICN001


def plot(results: Sequence[LoadResult], path: Path) -> None:
    """Draws all results into one picture: four panels against the request rate.

    A run with an infinite rate stands at the rate that it reached, with a hollow mark; where all runs have one, they
    stand at their limits of concurrency. The same results give the same file. Raises as `check_picture`, and OSError.
    """
    check_picture(path)
    import matplotlib as mpl
    from matplotlib.figure import Figure

    is_closed = all(math.isinf(run.report.request_rate) for result in results for run in result.runs)
    # Names of parts in an SVG are random otherwise.
    with mpl.rc_context({"svg.hashsalt": "quire", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(9, 6), layout="constrained")
        for axes, panel in zip(figure.subplots(2, 2).flat, _PANELS, strict=True):
            for number, result in enumerate(results):
                _draw_lines(axes, panel, result, f"C{number % 10}", is_closed)
            axes.set_title(f"{panel.title} ({panel.unit})", fontsize=10)
            axes.set_xlabel("requests at once" if is_closed else "requests/s")
            axes.set_ylim(bottom=0)
            axes.grid(visible=True, alpha=0.3)
            if axes.lines:
                axes.legend(fontsize=8)
        save_picture(figure, path)


def as_text(name: str) -> str:
    """A name as matplotlib shows it letter by letter: it takes `$` for formulas, and leaves `_x` out of a legend."""
    return (" " if name.startswith("_") else "") + name.replace("$", r"\$")


def save_picture(figure: Any, path: Path) -> None:
    """Writes the same file for the same figure. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # An SVG would have the date of the drawing.
    metadata = {"Date": None} if path.suffix == ".svg" else None
    replace_file(path, lambda made: figure.savefig(made, metadata=metadata))


def _draw_lines(axes: Any, panel: _Panel, result: LoadResult, color: str, is_closed: bool) -> None:
    for label, style in zip(panel.lines, ("-", "--"), strict=False):
        points = sorted(
            (_place(run, is_closed), value, math.isinf(run.report.request_rate))
            for run in result.runs
            if (value := panel.value(run.report, label)) is not None
        )
        if not points:
            continue
        places, values, _ = zip(*points, strict=True)
        shown = as_text(result.name)
        name = shown if len(panel.lines) == 1 else f"{shown}, {label}"
        axes.plot(places, values, style, color=color, label=name)
        for place, value, is_infinite in points:
            is_hollow = is_infinite and not is_closed
            axes.plot(place, value, "o", color=color, markersize=4, fillstyle="none" if is_hollow else "full")


def _place(run: Run, is_closed: bool) -> float:
    """Where a run stands on the axis of rates, or of concurrency."""
    report = run.report
    if is_closed:
        return float(report.max_concurrency or report.requests)
    return report.requests_per_s if math.isinf(report.request_rate) else report.request_rate
