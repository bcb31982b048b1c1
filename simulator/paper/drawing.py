"""Draws the figures of the page, all in one style. matplotlib is imported only for drawing: simulations need none."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from simulator.paper.systems import FASTER_TRANSFORMER, MAX, ORACLE, POW2, QUIRE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Picture
else:
    Axes = Picture = Any

COLORS = {QUIRE: "#1b6ca8", ORACLE: "#2a9d5c", POW2: "#e08e0b", MAX: "#c8443b", FASTER_TRANSFORMER: "#7d5ba6"}
PUBLISHED: dict[str, Any] = {"markersize": 5, "markerfacecolor": "none", "color": "black"}
"""The style of a point of the paper."""
_MARKERS = {QUIRE: "o", ORACLE: "s", POW2: "^", MAX: "v", FASTER_TRANSFORMER: "x"}


def panels(num_rows: int, num_columns: int, width: float = 3.6, height: float = 2.7) -> tuple[Picture, list[Axes]]:
    """An empty picture with `num_rows` by `num_columns` panels, row by row."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams.update(
        {"font.size": 8, "svg.fonttype": "none", "svg.hashsalt": "quire", "axes.grid": True, "grid.alpha": 0.3}
    )
    picture = Figure(figsize=(width * num_columns, height * num_rows), layout="constrained")
    axes = picture.subplots(num_rows, num_columns, squeeze=False)
    return picture, list(axes.flat)


def save(picture: Picture, path: Path) -> None:
    """Writes an SVG that depends only on the picture."""
    picture.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")


def legend(picture: Picture, *axes: Axes) -> None:
    """One legend for all these axes, above the picture, where it covers nothing."""
    found = [each.get_legend_handles_labels() for each in axes]
    unique = {name: line for lines, names in found for line, name in zip(lines, names, strict=True)}
    columns = min(len(unique), 6 if len(axes) > 2 else 3)
    picture.legend(unique.values(), unique.keys(), loc="outside upper center", ncols=columns, fontsize=7)


def draw_curves(
    axes: Axes, title: str, curves: Mapping[str, Mapping[str, Any]], published: tuple[float, float] | None = None
) -> None:
    """Normalized latency against request rate. `published` is a rate and a latency of the paper's system."""
    for system, curve in curves.items():
        rates = [point["rate"] for point in curve["points"]]
        seconds = [point["normalized_s"] for point in curve["points"]]
        axes.plot(
            rates, seconds, marker=_MARKERS[system], markersize=3, linewidth=1, color=COLORS[system], label=system
        )
    lowest = min(point["normalized_s"] for curve in curves.values() for point in curve["points"])
    axes.set(title=title, xlabel="requests a second", ylabel="s / token", ylim=(0, lowest * 12))
    axes.set_xlim(left=0)
    if published is not None:
        axes.plot(*published, "D", **PUBLISHED, label="paper's vLLM")


def draw_bars(axes: Axes, groups: Sequence[str], bars: Mapping[str, Sequence[float]], form: str = "{:.1f}") -> None:
    """Bars side by side, a cluster for each group."""
    width = 0.8 / len(bars)
    places = np.arange(len(groups))
    for index, (name, values) in enumerate(bars.items()):
        drawn = axes.bar(
            places + (index - (len(bars) - 1) / 2) * width, values, width, label=name, color=COLORS.get(name)
        )
        axes.bar_label(drawn, [form.format(value) for value in values], fontsize=5)
    axes.set_xticks(places, groups)
