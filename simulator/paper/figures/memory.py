"""The use of memory, and the lengths of requests: table 1, figures 2 and 11."""

import math
from dataclasses import asdict
from typing import Any

import numpy as np

from quire.load import alpaca, describe, sharegpt, take
from simulator.hardware import Hardware
from simulator.paper.curves import Runner
from simulator.paper.drawing import PUBLISHED, Picture, legend, panels
from simulator.paper.figure import Comparison, Data, Figure, compared, table
from simulator.paper.systems import (
    MAX,
    MAX_MODEL_LEN,
    OPT_13B,
    OPT_66B,
    OPT_175B,
    ORACLE,
    POW2,
    QUIRE,
    VOCAB_SIZE,
    Job,
    sharegpt_load,
)

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


def _draw_shares(data: Data) -> Picture:
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


_NUM_DRAWN = 10_000
_FIGURE_11 = {"ShareGPT": (161.31, 337.99), "Alpaca": (19.31, 58.45)}
_EDGES = {"ShareGPT": np.linspace(0, 2048, 65), "Alpaca": np.linspace(0, 300, 61)}


def _measure_11(runner: Runner) -> dict[str, Any]:
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


def _draw_11(data: Data) -> Picture:
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


def _section_11(data: Data) -> str:
    rows = [
        Comparison(f"{name}, mean {side} in tokens", paper, data[name]["facts"][f"{side}_mean"])
        for name, published in _FIGURE_11.items()
        for side, paper in zip(("prompt", "output"), published, strict=True)
    ]
    text = (
        "The data sets are not part of this repository. Lengths are drawn from lognormal distributions with the means "
        "of the paper's figure, as `quire bench --dataset sharegpt` and `alpaca` draw them; token ids are random. "
        f"{_NUM_DRAWN:,} requests.\n\n"
    )
    return text + compared(rows, "")


FIGURE_11 = Figure("fig11", "Figure 11: lengths of prompts and outputs", _measure_11, _section_11, _draw_11)
