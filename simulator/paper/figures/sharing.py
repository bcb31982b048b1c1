"""Figure 15: blocks that sharing saves."""

from typing import Any

from simulator.paper.curves import Runner
from simulator.paper.drawing import PUBLISHED, Picture, draw_bars, legend, panels
from simulator.paper.figure import Comparison, Data, Figure, compared
from simulator.paper.systems import OPT_13B, QUIRE, Job, alpaca_load, sharegpt_load

_WIDTHS = (2, 4, 6)
_LOADS = {"Alpaca": alpaca_load, "ShareGPT": sharegpt_load}
_PUBLISHED = {
    "samples, Alpaca": (6.1, 9.8),
    "beams, Alpaca": (37.6, 55.2),
    "samples, ShareGPT": (16.2, 30.5),
    "beams, ShareGPT": (44.3, 66.3),
}
_SHARE = 0.6
"""Share of the loads of other figures: the saved blocks depend only on lengths."""
_RATES = {"Alpaca": 90.0, "ShareGPT": 2.7}
"""Sequences a second, so low that nothing is preempted."""


def _measure(runner: Runner) -> dict[str, Any]:
    keys = [(kind, name, width) for name in _LOADS for kind in ("samples", "beams") for width in _WIDTHS]
    jobs: list[Job] = []
    for kind, name, width in keys:
        n, beam_width = (width, None) if kind == "samples" else (1, width)
        load = _LOADS[name](OPT_13B, n=n, beam_width=beam_width).scaled(_SHARE)
        jobs.append(Job(QUIRE, OPT_13B, load, _RATES[name] / width))
    data: dict[str, Any] = {f"{kind}, {name}": {} for kind, name, _ in keys}
    for (kind, name, width), point in zip(keys, runner.run(jobs), strict=True):
        data[f"{kind}, {name}"][str(width)] = point.shares.saved
    return data


def _draw(data: Data) -> Picture:
    picture, (axes,) = panels(1, 1, width=6)
    bars = {f"{width} sequences": [100 * saved[str(width)] for saved in data.values()] for width in _WIDTHS}
    draw_bars(axes, [title.replace(", ", "\n") for title in data], bars)
    for place, title in enumerate(data):
        label = "paper, 2 and 6 sequences" if place == 0 else None
        axes.plot([place - 0.27, place + 0.27], _PUBLISHED[title], "D", **PUBLISHED, label=label)
    axes.set(ylabel="% of blocks saved")
    legend(picture, axes)
    return picture


def _rows(data: Data) -> list[Comparison]:
    return [
        Comparison(f"{title}: % of blocks saved, 2 to 6", paper, _range(data[title]))
        for title, paper in _PUBLISHED.items()
    ]


def _section(data: Data) -> str:
    text = (
        "OPT-13B, at rates that leave some memory free. Saved is the share of the blocks that all sequences would hold "
        "without sharing, mean over time. If memory is always full, more is saved: preempted requests begin again, and "
        "young ones share most of their blocks. The place at which beams part depends on the model; here candidates "
        "follow one another at random distances of up to 4 in their log probability. "
        "[memory.md](../memory.md#blocks-that-sharing-saves) has quire-tiny's own beams.\n\n"
    )
    return text + compared(_rows(data), _REASON)


def _range(saved: dict[str, float]) -> tuple[float, float]:
    shares = [100 * saved[str(width)] for width in _WIDTHS]
    return shares[0], shares[-1]


_REASON = (
    "Alpaca's prompts are drawn with an assumed variation, and a block is shared only where the prompt fills it or the "
    "samples have not yet written to it; with mean prompts of 19 tokens and blocks of 16 small changes of either count."
)

FIGURE_15 = Figure(
    "fig15", "Figure 15: blocks that sharing saves", _measure, _section, _draw, lambda data: _rows(data)[1:2]
)
