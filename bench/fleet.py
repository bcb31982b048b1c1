"""Prefill and decode together and apart on several simulated GPUs, in virtual time: first tokens, and the time between
tokens.

Each GPU is a replica, as `simulator.fleet` has it; blocks go over the devices' links. Loads are the paper's: ShareGPT's
lengths with Poisson arrivals, of which `--long-share` have a prompt of `--long-prompt` tokens instead.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np

from bench.report import Series, write_results
from quire.load import arriving_at, make_arrivals, sharegpt, take
from scheduler_svc.core.config import SchedulerConfig
from simulator.fleet import Fleet
from simulator.hardware import Hardware
from simulator.models import MODELS
from simulator.replica import Replica
from simulator.roofline import Roofline

_BLOCK_SIZE = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hardware", default="a100-40gb", help="of each replica, as of `quire simulate`")
    parser.add_argument("--model", default="opt-13b", help="as of `quire simulate`")
    parser.add_argument("--efficiency", type=float, default=1.0, help="as of `quire simulate`")
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--prefill", default="0,1,2", help="replicas for prefill, several numbers: a row each")
    parser.add_argument("--rate", type=float, default=8.0, help="requests a second, over all replicas")
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--long-share", type=float, default=0.0, help="share of the prompts that are long")
    parser.add_argument("--long-prompt", type=int, default=1500, help="tokens of a long prompt")
    parser.add_argument("--move-latency", type=float, default=0.005, help="seconds of a move beside its bytes")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")


def replica_of(arguments: argparse.Namespace, num_prefill: int) -> Replica:
    """What is simulated, with so many replicas for prefill."""
    model, hardware = MODELS[arguments.model], Hardware.named(arguments.hardware)
    config = SchedulerConfig(
        num_blocks=hardware.num_blocks(model, _BLOCK_SIZE, 0.9),
        block_size=_BLOCK_SIZE,
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        max_model_len=model.max_model_len,
        max_waiting_requests=1 << 20,
        max_waiting_tokens=1 << 40,
    )
    block_s = model.slot_bytes * _BLOCK_SIZE / hardware.link_bandwidth
    fleet = Fleet(arguments.replicas, num_prefill, block_s, arguments.move_latency)
    costs = Roofline(model, hardware, _BLOCK_SIZE, arguments.efficiency)
    return Replica(config, costs, model.vocab_size, fleet=fleet)


def main(arguments: argparse.Namespace) -> None:
    model = MODELS[arguments.model]
    load = take(sharegpt(model.max_model_len, model.vocab_size), arguments.requests, seed=0)
    rng = np.random.default_rng(1)
    long_ones = rng.random(len(load)) < arguments.long_share
    room = model.max_model_len - arguments.long_prompt
    for index in np.flatnonzero(long_ones).tolist():
        prompt = rng.integers(0, model.vocab_size, arguments.long_prompt).astype(np.int32)
        load[index] = replace(load[index], prompt=prompt, output_len=min(load[index].output_len or 1, room))
    load = arriving_at(load, make_arrivals(arguments.rate).times(len(load), 0))
    print(
        "| replicas | first token, p50 / p99 | time between tokens, p50 / p99 / p99.9 | moved | pause of a move, p99 |"
    )
    print("|---|---|---|---|---|")
    series: list[Series] = []
    for num_prefill in map(int, arguments.prefill.split(",")):
        simulation = replica_of(arguments, num_prefill).run(load).simulation
        times = [each.token_times[0] for each in simulation.lives]
        first = np.array([each[0] - life.arrived for each, life in zip(times, simulation.lives, strict=True)])
        gaps = np.concatenate([np.diff(each) for each in times])
        pauses = simulation.pauses
        name = (
            f"{num_prefill} + {arguments.replicas - num_prefill}" if num_prefill else f"{arguments.replicas} together"
        )
        first_ms, gap_ms = 1e3 * np.percentile(first, (50, 99)), 1e3 * np.percentile(gaps, (50, 99, 99.9))
        pause_ms = 1e3 * float(np.percentile(pauses, 99)) if pauses else 0.0
        shown = [f"{a:,.0f} / {b:,.0f} ms" for a, b in [first_ms]] + [
            " / ".join(f"{each:.0f}" for each in gap_ms) + " ms"
        ]
        print(f"| {name} | {shown[0]} | {shown[1]} | {len(pauses)} | {f'{pause_ms:.0f} ms' if pauses else ''} |")
        for what, value in zip(("p50", "p99"), first_ms.tolist(), strict=True):
            series.append(Series(f"{name}: first token, {what}", "ms", (value,)))
        for what, value in zip(("p50", "p99", "p99.9"), gap_ms.tolist(), strict=True):
            series.append(Series(f"{name}: time between tokens, {what}", "ms", (value,)))
    if arguments.out is not None:
        flags = {name: value for name, value in vars(arguments).items() if name != "out"}
        write_results(arguments.out, "Prefill and decode apart, simulated", series, **flags)
