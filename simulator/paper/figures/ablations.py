"""Figures 18 and 19: block sizes, and recompute against swap."""

import math
from dataclasses import asdict
from typing import Any

from scheduler_svc.core.config import PreemptionMode
from scheduler_svc.core.step import StepWork
from simulator.paper.curves import Runner
from simulator.paper.drawing import Picture, legend, panels
from simulator.paper.figure import Comparison, Data, Figure, compared, table
from simulator.paper.figures.small import bench
from simulator.paper.systems import OPT_13B, QUIRE, Job, alpaca_load, sharegpt_load

_BLOCK_SIZES = (1, 4, 16, 32, 64, 128, 256)
_LOADS = {"ShareGPT": sharegpt_load, "Alpaca": alpaca_load}
_CONTEXTS = (256, 1024)
_LOAD_SHARE = 0.95
"""Share of the rate that blocks of 16 serve if requests always wait: memory limits, and the queue does not grow."""


def _measure_18(runner: Runner) -> dict[str, Any]:
    keys = [(name, size) for name in _LOADS for size in _BLOCK_SIZES]
    saturated = runner.run(Job(QUIRE, OPT_13B, _LOADS[name](OPT_13B), math.inf, size) for name, size in keys)
    served = {key: point.served_rate for key, point in zip(keys, saturated, strict=True)}
    rates = {name: _LOAD_SHARE * served[name, 16] for name in _LOADS}
    points = runner.run(Job(QUIRE, OPT_13B, _LOADS[name](OPT_13B), rates[name], size) for name, size in keys)
    by_load: dict[str, Any] = {name: {} for name in _LOADS}
    for (name, size), point in zip(keys, points, strict=True):
        by_load[name][str(size)] = asdict(point) | {"served_saturated": served[name, size]}
    sizes = [str(size) for size in _BLOCK_SIZES]
    contexts = [str(context) for context in _CONTEXTS]
    kernel = bench(
        "blocks", "--block-sizes", *sizes, "--contexts", *contexts, "--num-threads", "1", "--moved-tokens", "0"
    )
    return {"simulated": by_load, "kernel": kernel}


def _overhead(data: Data, context: int, size: int) -> float:
    """Time of attention over blocks divided by the time over contiguous memory."""
    medians = data["kernel"]["medians"]
    name = f"attention, {context} tokens"
    return medians[f"{name}, blocks of {size}"] / medians[f"{name}, contiguous"]


def _draw_18(data: Data) -> Picture:
    picture, (kernel, latency) = panels(1, 2)
    for context in _CONTEXTS:
        times = [_overhead(data, context, size) for size in _BLOCK_SIZES]
        kernel.plot(_BLOCK_SIZES, times, marker="o", markersize=3, label=f"{context} tokens")
    kernel.axhline(1, color="gray", linewidth=0.8)
    kernel.set(title="attention kernel, CPU", ylabel="time by that over contiguous memory", ylim=(0, None))
    for name, points in data["simulated"].items():
        seconds = [1e3 * points[str(size)]["normalized_s"] for size in _BLOCK_SIZES]
        latency.plot(_BLOCK_SIZES, seconds, marker="o", markersize=3, label=name)
    latency.set(title="OPT-13B, simulated", ylabel="ms / token", ylim=(0, None))
    for axes in (kernel, latency):
        axes.set_xscale("log", base=2)
        axes.set_xticks(_BLOCK_SIZES, [str(size) for size in _BLOCK_SIZES])
        axes.set_xlabel("block size")
    kernel.legend(loc="lower center")
    latency.legend(loc="upper left")
    return picture


def _section_18(data: Data) -> str:
    kernel = table(
        ["context", *(f"blocks of {size}" for size in _BLOCK_SIZES)],
        [
            [f"{context} tokens", *(f"{_overhead(data, context, size):.2f}" for size in _BLOCK_SIZES)]
            for context in _CONTEXTS
        ],
    )
    head = [title for name in _LOADS for title in (f"{name}: ms/token", "serves, requests/s")]
    simulated = table(
        ["block size", *head],
        [
            [size, *(cell for name in _LOADS for cell in _cells(data["simulated"][name][str(size)]))]
            for size in _BLOCK_SIZES
        ],
    )
    worst = max(_overhead(data, context, 16) for context in _CONTEXTS)
    best = min(_overhead(data, context, 16) for context in _CONTEXTS)
    rows = [Comparison("attention over blocks of 16 by contiguous memory", (1.20, 1.26), (best, worst), "{:.2f}")]
    machine = data["kernel"]["machine"]
    return (
        f"The kernel: decode of 8 rows with 40 heads of 128, bfloat16, one thread of {machine['processor']} "
        f"({machine['instruction_set']}), by its time over contiguous memory, which is one block a sequence. The paper "
        f"measures a GPU.\n\n{compared(rows, _REASON_18)}\n\n{kernel}\n\n"
        f"Simulated, at {_LOAD_SHARE:.0%} of the rate that blocks of 16 serve if requests always wait. The paper "
        "finds 16 to 128 best for ShareGPT, and 16 and 32 for Alpaca, whose sequences are shorter than larger blocks. "
        "The cost model has no kernels that small blocks slow down, so the left end of the paper's curve is missing; "
        f"the right end follows from memory.\n\n{simulated}"
    )


def _cells(point: Data) -> tuple[str, str]:
    return f"{1e3 * point['normalized_s']:.1f}", f"{point['served_saturated']:.2f}"


_REASON_18 = (
    "The CPU kernel looks a block up once for all of its tokens and heads, and waits for memory meanwhile, so "
    "tables of blocks of 4 and more have no measurable cost. The paper's overhead comes from lookups, branches and "
    "variable lengths, and is relative to another kernel, which has none of these."
)

FIGURE_18 = Figure("fig18", "Figure 18: the attention kernel and block sizes", _measure_18, _section_18, _draw_18)

_MOVED_TOKENS = 1024
_SIZES_19 = (1, 4, 16, 64, 256)
_MODES = {"recompute": PreemptionMode.RECOMPUTE, "swap": PreemptionMode.SWAP}


def _measure_19(runner: Runner) -> dict[str, Any]:
    load = sharegpt_load(OPT_13B)
    (probe,) = runner.run([Job(QUIRE, OPT_13B, load, math.inf)])
    rate = probe.served_rate
    keys = [(mode, size) for mode in _MODES for size in _SIZES_19]
    points = runner.run(Job(QUIRE, OPT_13B, load, rate, size, _MODES[mode]) for mode, size in keys)
    simulated: dict[str, Any] = {mode: {} for mode in _MODES}
    for (mode, size), point in zip(keys, points, strict=True):
        simulated[mode][str(size)] = asdict(point)
    sizes = [str(size) for size in _SIZES_19]
    real = bench("blocks", "--block-sizes", *sizes, "--contexts", "--moved-tokens", str(_MOVED_TOKENS))
    modelled = {str(size): _modelled_ms(size) for size in _SIZES_19}
    return {"rate": rate, "simulated": simulated, "modelled": modelled, "real": real}


def _modelled_ms(block_size: int) -> dict[str, float]:
    """Milliseconds by the cost model: a sequence goes out and comes back, or is computed again."""
    costs, nothing = OPT_13B.costs(block_size), StepWork(0, 0, 0, 0, 0, 0)
    idle = costs.seconds(nothing).device
    swapped = StepWork(0, 0, 0, 0, 0, 0, swapped_blocks=2 * -(-_MOVED_TOKENS // block_size))
    pairs = _MOVED_TOKENS * (_MOVED_TOKENS + 1) // 2
    computed = StepWork(_MOVED_TOKENS, 1, _MOVED_TOKENS, 1, _MOVED_TOKENS, pairs)
    return {"swap": 1e3 * (costs.seconds(swapped).device - idle), "recompute": 1e3 * costs.seconds(computed).device}


def _real_ms(data: Data, block_size: int) -> dict[str, float]:
    """Milliseconds on this machine: twice the way to the other pool; the prefill as the scheduler plans it."""
    medians = data["real"]["medians"]
    return {
        "swap": 2 * medians[f"move, {_MOVED_TOKENS} tokens, blocks of {block_size}"],
        "recompute": medians[f"prefill, {_MOVED_TOKENS} tokens"],
    }


def _draw_19(data: Data) -> Picture:
    picture, axes = panels(1, 3)
    modelled = {mode: [data["modelled"][str(size)][mode] for size in _SIZES_19] for mode in _MODES}
    real = {mode: [_real_ms(data, size)[mode] for size in _SIZES_19] for mode in _MODES}
    latency = {
        mode: [1e3 * data["simulated"][mode][str(size)]["normalized_s"] for size in _SIZES_19] for mode in _MODES
    }
    titles = ("OPT-13B on an A100, modelled", "llama-160m on this CPU, real", f"OPT-13B, {data['rate']:.1f} requests/s")
    for each, title, lines in zip(axes, titles, (modelled, real, latency), strict=True):
        for mode, values in lines.items():
            each.plot(_SIZES_19, values, marker="o", markersize=3, label=mode)
        each.set_xscale("log", base=2)
        each.set_xticks(_SIZES_19, [str(size) for size in _SIZES_19])
        each.set(title=title, xlabel="block size", ylabel="ms", ylim=(0, None))
    axes[2].set_ylabel("ms / token")
    legend(picture, axes[0])
    return picture


def _section_19(data: Data) -> str:
    rows = [
        [
            size,
            *(f"{data['modelled'][str(size)][mode]:.1f}" for mode in ("swap", "recompute")),
            *(f"{_real_ms(data, size)[mode]:.1f}" for mode in ("swap", "recompute")),
            *(f"{1e3 * data['simulated'][mode][str(size)]['normalized_s']:.1f}" for mode in ("swap", "recompute")),
        ]
        for size in _SIZES_19
    ]
    head = [
        "block size",
        "A100: swap",
        "recompute",
        "CPU: swap",
        "recompute",
        "served: swap, ms/token",
        "recompute, ms/token",
    ]
    ratios = [data["modelled"][str(size)]["recompute"] / data["modelled"][str(size)]["swap"] for size in _SIZES_19]
    both = data["simulated"]
    middle = [both["swap"][size]["normalized_s"] / both["recompute"][size]["normalized_s"] for size in ("16", "64")]
    compared_rows = [
        Comparison("largest time of recompute by that of swap", 1.2, max(ratios), "{:.2f}"),
        Comparison("served, blocks of 16 and 64: swap by recompute", 1.0, (min(middle), max(middle)), "{:.2f}"),
    ]
    return (
        f"A sequence of {_MOVED_TOKENS:,} tokens leaves the pool and comes back, or is computed again. For OPT-13B the "
        "cost model gives the time over PCIe; on this machine llama-160m computes it, and the blocks are moved between "
        "the worker's two pools. Served: ShareGPT at the rate that is served if requests always wait.\n\n"
        f"{compared(compared_rows, _REASON_19)}\n\n{table(head, rows)}"
    )


_REASON_19 = (
    "The cost model moves blocks at the full speed of PCIe, 26 ms each way, and charges 0.9 us for each piece, so "
    "swaps of all but the smallest blocks are bound by the bytes. The paper copies each block of each layer by a "
    "separate call, which dominates with its small blocks and still matters with larger ones. On this CPU the order is "
    "the same, further apart: memory is near, and arithmetic is slow. Served, the two differ by little in both."
)

FIGURE_19 = Figure("fig19", "Figure 19: recompute and swap", _measure_19, _section_19, _draw_19)
