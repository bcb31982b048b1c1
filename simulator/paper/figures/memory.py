"""The use of memory: table 1 and figure 2."""

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from simulator.hardware import Hardware
from simulator.paper.curves import Runner
from simulator.paper.drawing import PUBLISHED, legend, panels
from simulator.paper.figure import Comparison, Data, Figure, compared, table
from simulator.paper.figures.loads import sharegpt_load
from simulator.paper.systems import MAX, OPT_13B, OPT_66B, OPT_175B, ORACLE, POW2, QUIRE, Job

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Picture

_GPU_MEMORY_UTILIZATION = 0.9
_BLOCK_SIZE = 16

_TABLE_1 = {OPT_13B: (26, 12, 15.7), OPT_66B: (132, 21, 9.7), OPT_175B: (346, 264, 60.1)}
"""Gigabytes of parameters and of the KV memory, thousands of slots."""


def _measure_sizes(runner: Runner) -> dict[str, Any]:
    del runner
    data: dict[str, Any] = {}
    for setup in _TABLE_1:
        shape, hardware = setup.shape, Hardware.named(setup.hardware)
        num_slots = hardware.num_blocks(shape, _BLOCK_SIZE, _GPU_MEMORY_UTILIZATION) * _BLOCK_SIZE
        data[setup.model] = {
            "hardware": setup.hardware,
            "parameter_gb": shape.weight_bytes / 1e9,
            "kv_gib": num_slots * shape.slot_bytes / 2**30,
            "slot_kib": shape.slot_bytes / 1024,
            "slots_k": num_slots / 1e3,
        }
    return data


def _size_section(data: Data) -> str:
    rows: list[Comparison] = []
    for setup, (parameters, kv, slots) in _TABLE_1.items():
        own, name = data[setup.model], f"{setup.model.upper()} on {data[setup.model]['hardware']}"
        rows += [
            Comparison(f"{name}: parameters, GB", parameters, own["parameter_gb"]),
            Comparison(f"{name}: KV memory, GiB", kv, own["kv_gib"]),
            Comparison(f"{name}: slots, thousands", slots, own["slots_k"]),
        ]
    text = (
        "Computed from the configuration of each model and the memory of its devices; "
        f"{_GPU_MEMORY_UTILIZATION:.0%} of it is used. The paper's slots follow from its gigabytes taken as GiB. All "
        "simulations below run with the paper's number of slots, so that this difference is in none of them.\n\n"
    )
    return text + compared(rows, "")


TABLE_1 = Figure("table1", "Table 1: sizes of models and of their KV memory", _measure_sizes, _size_section)

_FIGURE_2 = {MAX: 0.204, POW2: 0.268, ORACLE: 0.382, QUIRE: 0.963}


def _measure_shares(runner: Runner) -> dict[str, Any]:
    points = runner.run(Job(system, OPT_13B, sharegpt_load(OPT_13B), math.inf) for system in _FIGURE_2)
    return {system: asdict(point) for system, point in zip(_FIGURE_2, points, strict=True)}


def _parts(system: str, data: Data) -> dict[str, float]:
    shares = data[system]["shares"]
    given_out = shares["tokens"] + shares["reserved"] + shares["wasted"]
    return {
        "token states": shares["tokens"],
        "reserved": shares["reserved"],
        "internal": shares["wasted"],
        "external, free": 1 - given_out,
    }


def _draw_shares(data: Data) -> "Picture":
    picture, (axes,) = panels(1, 1, width=5)
    bottom = [0.0] * len(data)
    names = list(data)
    for part in _parts(names[0], data):
        shares = [100 * _parts(system, data)[part] for system in names]
        drawn = axes.bar(names, shares, bottom=bottom, label=part, width=0.6)
        axes.bar_label(
            drawn, [f"{share:.1f}" if share >= 2 else "" for share in shares], label_type="center", fontsize=7
        )
        bottom = [low + share for low, share in zip(bottom, shares, strict=True)]
    published = [100 * _FIGURE_2[system] for system in names]
    axes.plot(names, published, "D", **PUBLISHED, label="token states, paper")
    axes.set(ylabel="% of the KV memory", ylim=(0, 100))
    legend(picture, axes)
    return picture


def _share_rows(data: Data) -> list[Comparison]:
    return [
        Comparison(f"{system}: % of the memory with tokens", 100 * paper, 100 * data[system]["shares"]["tokens"])
        for system, paper in _FIGURE_2.items()
    ]


def _share_section(data: Data) -> str:
    rows = _share_rows(data)
    text = (
        "OPT-13B, 15,700 slots, lengths of ShareGPT, always more requests waiting than fit; mean over time. Reserved "
        "slots will hold a token, internal fragmentation never will, and slots that are free or lost to the rounding "
        "of the buddy allocator count as external.\n\n"
    )
    other = table(
        ["", *_parts(QUIRE, data), "requests that run", "preempted"],
        [
            [
                system,
                *(f"{100 * share:.1f}%" for share in _parts(system, data).values()),
                f"{data[system]['batched']:.1f}",
                f"{data[system]['preemptions']:.2f}",
            ]
            for system in data
        ],
    )
    return f"{text}{compared(rows, '')}\n\n{other}"


FIGURE_2 = Figure(
    "fig2",
    "Figure 2: share of the KV memory that holds tokens",
    _measure_shares,
    _share_section,
    _draw_shares,
    lambda data: [each for each in _share_rows(data) if each.what.startswith((MAX, QUIRE))],
)
