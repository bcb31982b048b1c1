"""Figure 13: the number of requests that run at once."""

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from simulator.paper.curves import Runner
from simulator.paper.drawing import draw_bars, legend, panels
from simulator.paper.figure import Comparison, Data, Figure, compared
from simulator.paper.figures.loads import alpaca_load, sharegpt_load
from simulator.paper.systems import MAX, OPT_13B, ORACLE, POW2, QUIRE, Job

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Picture

SYSTEMS = (MAX, POW2, ORACLE, QUIRE)
CHATS, INSTRUCTIONS = "ShareGPT, 2 requests/s", "Alpaca, 30 requests/s"
LOADS = {CHATS: (sharegpt_load, 2.0), INSTRUCTIONS: (alpaca_load, 30.0)}
PUBLISHED_BATCHES = {
    CHATS: dict(zip(SYSTEMS, (7.0, 9.8, 13.6, 30.4), strict=True)),
    INSTRUCTIONS: dict(zip(SYSTEMS, (7.0, 43.24, 72.75, 132.44), strict=True)),
}


def _measure(runner: Runner) -> dict[str, Any]:
    keys = [(title, system, saturated) for title in LOADS for system in SYSTEMS for saturated in (False, True)]
    jobs: list[Job] = []
    for title, system, saturated in keys:
        load, rate = LOADS[title]
        jobs.append(Job(system, OPT_13B, load(OPT_13B), math.inf if saturated else rate))
    data: dict[str, Any] = {title: {system: {} for system in SYSTEMS} for title in LOADS}
    for (title, system, saturated), point in zip(keys, runner.run(jobs), strict=True):
        data[title][system]["saturated" if saturated else "at_rate"] = asdict(point)
    return data


def _draw(data: Data) -> "Picture":
    picture, axes = panels(1, 2)
    for each, (title, measured) in zip(axes, data.items(), strict=True):
        bars = {
            "paper": [*PUBLISHED_BATCHES[title].values()],
            "ours": [measured[system]["at_rate"]["batched"] for system in SYSTEMS],
            "ours, requests always wait": [measured[system]["saturated"]["batched"] for system in SYSTEMS],
        }
        draw_bars(each, [system.replace(" ", "\n") for system in SYSTEMS], bars)
        each.set(title=title, ylabel="requests that run")
    legend(picture, *axes)
    return picture


def _claims(data: Data) -> list[Comparison]:
    """The claims of the paper's text: the number of requests that Quire runs divided by an Orca's."""
    own, published = data[CHATS], PUBLISHED_BATCHES[CHATS]
    batched = {system: own[system]["saturated"]["batched"] for system in SYSTEMS}
    return [
        Comparison(
            f"ShareGPT: requests that run at once by {system}'s",
            published[QUIRE] / published[system],
            batched[QUIRE] / batched[system],
        )
        for system in (ORACLE, MAX)
    ]


def _section(data: Data) -> str:
    at_rate, saturated = (
        [
            Comparison(f"{title.split(',')[0] if key == 'saturated' else title}, {system}", paper, own[key]["batched"])
            for title, measured in data.items()
            for paper, (system, own) in zip(PUBLISHED_BATCHES[title].values(), measured.items(), strict=True)
        ]
        for key in ("at_rate", "saturated")
    )
    return (
        "OPT-13B. Requests that run, mean over the time in which requests come.\n\n"
        f"{compared(at_rate, _REASON_AT_RATE)}\n\n"
        "The same if requests always wait, so that only memory decides:\n\n"
        f"{compared(saturated, _REASON_SATURATED)}\n\n"
        "The paper's text has the first picture as ratios, 2.2 and 4.3; ours are the ones if requests always wait:\n\n"
        f"{compared(_claims(data), _REASON_CLAIMS)}"
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

_REASON_CLAIMS = (
    "At 2 requests/s the paper's vLLM has room left; with a full memory Quire runs 36.8 requests, not 30.4. "
    "[Below](#the-same-with-one-fitted-constant) is the ratio at the paper's rate, with steps as long as the paper's."
)

FIGURE_13 = Figure("fig13", "Figure 13: requests that run at once", _measure, _section, _draw, _claims)
