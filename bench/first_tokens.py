"""How long short prompts wait for their first token beside long ones, by `--max-prefill-share`: the core alone.

Counted in steps and in tokens that were computed meanwhile, so the figures are the same on every machine. Two steps
are in flight, as in service.
"""

import argparse
from collections import deque
from dataclasses import dataclass

import numpy as np

from bench.core_load import constant_tokens
from bench.rule_source import key_of
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.request import Request, RowSampling
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step import StepResult

_SHORT, _LONG = (20, 32), (20_000, 64)
"""Prompt and output tokens."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shares", type=float, nargs="+", default=[1.0, 0.75, 0.5, 0.25], help="shares to compare")
    parser.add_argument("--budget", type=int, default=512, help="tokens of a step")
    parser.add_argument("--requests", type=int, default=2000, help="requests in all")
    parser.add_argument("--every", type=int, default=50, help="each so many requests there is a long prompt")
    parser.add_argument(
        "--load", type=float, default=0.9, help="tokens that arrive in a step, as a share of its budget"
    )


def main(arguments: argparse.Namespace) -> None:
    print(f"{'share':>6} {'steps':>7} {'tokens':>9}   first token after steps / tokens computed meanwhile")
    for share in arguments.shares:
        run = drive(share, arguments.budget, arguments.requests, arguments.every, arguments.load)
        columns = [
            f"{name} p50 {np.percentile(waits[:, 0], 50):.0f} / {np.percentile(waits[:, 1], 50):.0f}, "
            f"p99 {np.percentile(waits[:, 0], 99):.0f} / {np.percentile(waits[:, 1], 99):.0f}"
            for name, waits in (("short", run.short), ("long", run.long))
        ]
        print(f"{share:>6} {run.num_steps:>7} {run.num_tokens:>9}   {'; '.join(columns)}")


@dataclass(frozen=True, slots=True)
class Run:
    """What a load cost, and of each short and long request the steps and tokens until its first token, int64[n, 2]."""

    num_steps: int
    num_tokens: int
    short: np.ndarray
    long: np.ndarray


def drive(share: float, budget: int, num_requests: int, every: int, load: float) -> Run:
    """All requests from their arrivals to their ends."""
    scheduler = Scheduler(_config(share, budget, num_requests))
    sizes = [_LONG if index % every == every // 2 else _SHORT for index in range(num_requests)]
    # They come one by one at a steady rate, by the tokens that they bring.
    arrivals = np.cumsum([sum(size) for size in sizes]) / (load * budget)
    waits: dict[int, tuple[int, int]] = {}
    came: dict[int, tuple[int, int]] = {}
    results: deque[StepResult] = deque()
    num_steps = num_tokens = next_request = 0
    while len(waits) < num_requests or scheduler.num_live:
        while next_request < num_requests and arrivals[next_request] <= num_steps:
            prompt_len, output = sizes[next_request]
            prompt = [next_request] * prompt_len
            request = Request(key_of(next_request), str(next_request), prompt, RowSampling(next_request), output)
            scheduler.submit(request, 0.0)
            came[next_request] = num_steps, num_tokens
            next_request += 1
        plan = scheduler.schedule(0.0)
        num_steps += 1
        if plan is not None:
            num_tokens += plan.num_tokens
            results.append(constant_tokens(plan))
        if results and (len(results) == 2 or plan is None):
            for events in scheduler.apply(results.popleft(), 0.0).values():
                for handle, offset in zip(events.handles, events.offsets, strict=True):
                    if offset == 0:
                        waits[int(handle)] = num_steps - came[handle][0], num_tokens - came[handle][1]
    is_long = np.array([size is _LONG for size in sizes])
    spent = np.array([waits[index] for index in range(num_requests)])
    return Run(num_steps, num_tokens, spent[~is_long], spent[is_long])


def _config(share: float, budget: int, num_requests: int) -> SchedulerConfig:
    return SchedulerConfig(
        num_blocks=200_000,
        block_size=16,
        max_num_seqs=256,
        max_num_batched_tokens=budget,
        max_model_len=sum(_LONG),
        max_waiting_requests=num_requests,
        max_waiting_tokens=num_requests * sum(_LONG),
        max_prefill_share=share,
    )
