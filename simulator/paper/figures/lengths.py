"""Figure 11: the lengths of prompts and outputs."""

from typing import TYPE_CHECKING, Any

import numpy as np

from quire.load import alpaca, describe, sharegpt, take
from simulator.paper.curves import Runner
from simulator.paper.drawing import panels
from simulator.paper.figure import Comparison, Data, Figure, compared
from simulator.paper.figures.loads import MAX_MODEL_LEN, VOCAB_SIZE

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Picture

_NUM_DRAWN = 10_000
_PUBLISHED = {"ShareGPT": (161.31, 337.99), "Alpaca": (19.31, 58.45)}
_EDGES = {"ShareGPT": np.linspace(0, 2048, 65), "Alpaca": np.linspace(0, 300, 61)}


def _measure(runner: Runner) -> dict[str, Any]:
    del runner
    data: dict[str, Any] = {}
    for name, dataset in (("ShareGPT", sharegpt), ("Alpaca", alpaca)):
        drawn = take(dataset(MAX_MODEL_LEN, VOCAB_SIZE), _NUM_DRAWN, seed=0)
        lengths = {
            "prompt": [len(request.token_ids) for request in drawn],
            "output": [request.output_len or 0 for request in drawn],
        }
        data[name] = {
            "facts": describe(drawn),
            "histograms": {side: np.histogram(values, _EDGES[name])[0].tolist() for side, values in lengths.items()},
        }
    return data


def _draw(data: Data) -> "Picture":
    picture, axes = panels(1, 2)
    for each, (name, drawn) in zip(axes, data.items(), strict=True):
        edges = _EDGES[name]
        for side, counts in drawn["histograms"].items():
            density = np.array(counts) / _NUM_DRAWN / np.diff(edges)
            label = f"{side} (mean {drawn['facts'][f'{side}_mean']:.1f})"
            each.stairs(density, edges, fill=True, alpha=0.5, label=label)
        each.set(title=name, xlabel="tokens", ylabel="density")
        each.legend(loc="upper right")
    return picture


def _section(data: Data) -> str:
    rows = [
        Comparison(f"{name}, mean {side} in tokens", paper, data[name]["facts"][f"{side}_mean"])
        for name, published in _PUBLISHED.items()
        for side, paper in zip(("prompt", "output"), published, strict=True)
    ]
    text = (
        "The data sets are not part of this repository. Lengths are drawn from lognormal distributions with the means "
        "of the paper's figure, as `quire bench --dataset sharegpt` and `alpaca` draw them; token ids are random. "
        f"{_NUM_DRAWN:,} requests.\n\n"
    )
    return text + compared(rows, "")


FIGURE_11 = Figure("fig11", "Figure 11: lengths of prompts and outputs", _measure, _section, _draw)
