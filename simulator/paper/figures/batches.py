"""Figure 13: how many requests run at once."""

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from simulator.paper.curves import Runner
from simulator.paper.drawing import draw_bars, panels
from simulator.paper.figure import Comparison, Data, Figure, compared
from simulator.paper.figures.loads import alpaca_load, sharegpt_load
from simulator.paper.systems import MAX, OPT_13B, ORACLE, POW2, QUIRE, Job

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Picture

_SYSTEMS = (MAX, POW2, ORACLE, QUIRE)
_CHATS, _INSTRUCTIONS = "ShareGPT, 2 requests/s", "Alpaca, 30 requests/s"
_LOADS = {_CHATS: (sharegpt_load, 2.0), _INSTRUCTIONS: (alpaca_load, 30.0)}
_PUBLISHED = {_CHATS: (7.0, 9.8, 13.6, 30.4), _INSTRUCTIONS: (7.0, 43.24, 72.75, 132.44)}


def _measure(runner: Runner) -> dict[str, Any]:
    keys = [(title, system, saturated) for title in _LOADS for system in _SYSTEMS for saturated in (False, True)]
    jobs: list[Job] = []
    for title, system, saturated in keys:
        load, rate = _LOADS[title]
        jobs.append(Job(system, OPT_13B, load(OPT_13B), math.inf if saturated else rate))
    data: dict[str, Any] = {title: {system: {} for system in _SYSTEMS} for title in _LOADS}
    for (title, system, saturated), point in zip(keys, runner.run(jobs), strict=True):
        data[title][system]["saturated" if saturated else "at_rate"] = asdict(point)
    return data


def _draw(data: Data) -> "Picture":
    picture, axes = panels(1, 2)
    for each, (title, measured) in zip(axes, data.items(), strict=True):
        bars = {
            "paper": _PUBLISHED[title],
            "ours": [measured[system]["at_rate"]["batched"] for system in _SYSTEMS],
            "ours, requests always wait": [measured[system]["saturated"]["batched"] for system in _SYSTEMS],
        }
        draw_bars(each, [system.replace(" ", "\n") for system in _SYSTEMS], bars)
        each.set(title=title, ylabel="requests that run")
    return picture


def _section(data: Data) -> str:
    at_rate, saturated = (
        [
            Comparison(f"{title.split(',')[0] if key == 'saturated' else title}, {system}", paper, own[key]["batched"])
            for title, measured in data.items()
            for paper, (system, own) in zip(_PUBLISHED[title], measured.items(), strict=True)
        ]
        for key in ("at_rate", "saturated")
    )
    return (
        "OPT-13B. Requests that run, mean over the time in which requests come.\n\n"
        f"{compared(at_rate, _REASON_AT_RATE)}\n\n"
        "The same where requests always wait, so that memory alone decides:\n\n"
        f"{compared(saturated, _REASON_SATURATED)}"
    )


_REASON_AT_RATE = (
    "A modelled step is faster than the paper's, so fewer requests are in the system at the same rate. By "
    "Little's law the paper's 30.4 requests at 2 requests/s of 338 tokens take 45 ms a token, and its 132.4 "
    "requests at 30 requests/s of 58 tokens 76 ms; modelled steps take 17 to 25 ms, as the host's time and "
    "kernels below the peak are not in the model. Where memory limits the paper's system, as it does its Orcas, "
    "the step's time does not matter: that is the next table."
)
_REASON_SATURATED = (
    "The paper's vLLM serves these rates without filling its memory; in this table Quire's memory is full. The "
    "Orcas' is full in both."
)

FIGURE_13 = Figure("fig13", "Figure 13: requests that run at once", _measure, _section, _draw)
