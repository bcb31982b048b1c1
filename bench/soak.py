"""A million requests of every kind through the scheduler's core: finds leaks of blocks and of memory.

A rule stands in for the model. Blocks run out, prefixes are pinned, requests are aborted and preempted, rows fail and
the worker is lost now and then. The invariants are checked at every line of the report. Exits with 1 if at the end a
block is neither free nor cached, or memory grew by more than the bound.
"""

import argparse
import sys
from dataclasses import asdict

from bench.report import Series, write_results
from bench.soak_run import SHARES, Mark, SoakRun
from scheduler_svc.core.config import PolicyKind, PreemptionMode, SchedulerConfig

_WARM_UP = 0.1
"""Share of the requests before memory should stay constant."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--blocks", type=int, default=400, help="blocks of the pool; few, so that groups are preempted")
    parser.add_argument("--host-blocks", type=int, default=100, help="blocks for swapped groups")
    parser.add_argument("--block-size", type=int, default=8)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--policy", choices=[each.value for each in PolicyKind], default="fcfs")
    parser.add_argument("--preemption-mode", choices=[each.value for each in PreemptionMode], default="auto")
    parser.add_argument("--max-growth-mib", type=float, default=4.0, help="maximum growth of memory after 10%%")
    parser.add_argument("--seed", type=int, default=0)


def main(arguments: argparse.Namespace) -> None:
    run = SoakRun(_config(arguments), arguments.requests, arguments.seed)
    print(Mark.HEADER)
    marks: list[Mark] = []
    for mark in run.marks():
        print(mark, flush=True)
        marks.append(mark)
    warm = next(mark for mark in marks if mark.num_requests >= _WARM_UP * arguments.requests)
    growth = marks[-1].resident_mib - warm.resident_mib
    faults = run.faults()
    if growth > arguments.max_growth_mib:
        faults.append(f"memory grew by {growth:.2f} MiB; the bound is {arguments.max_growth_mib} MiB")
    last = marks[-1]
    print(f"{last.num_requests / last.seconds:.0f} requests/s, {last.num_steps / last.seconds:.0f} steps/s")
    print(f"memory grew by {growth:.2f} MiB from 10% on", *faults, sep="\n")
    series = [
        Series("requests", "1/s", (last.num_requests / last.seconds,)),
        Series("growth of memory from 10% on", "MiB", (growth,)),
    ]
    facts = {"mix": dict(SHARES), "faults": faults, "marks": [asdict(mark) for mark in marks]}
    write_results(arguments.out, "a long run of every kind of request through the core", series, **facts)
    if faults:
        sys.exit(1)


def _config(arguments: argparse.Namespace) -> SchedulerConfig:
    return SchedulerConfig(
        num_blocks=arguments.blocks,
        block_size=arguments.block_size,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=max(1024, arguments.max_num_seqs),
        max_model_len=128,
        max_waiting_requests=64,
        num_host_blocks=arguments.host_blocks,
        policy=PolicyKind(arguments.policy),
        preemption_mode=PreemptionMode(arguments.preemption_mode),
    )
