"""The cost of the scheduler's core without services: schedule and apply of one step, in milliseconds; rare or long
calls; memory of waiting requests.

Two batches: `steady`, where all sequences decode, and `turning`, where chats come and go. Two steps are in flight, as
in service. The split by part is measured in a run of its own, since measuring it takes time too.
"""

import argparse
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict

import numpy as np

from bench.core_calls import BOUND_MS, measure_calls
from bench.core_load import Load, steady_load, turning_load
from bench.core_logprobs import NUMBERS_OF_TOP, time_logprob_steps
from bench.parts import PartTimes, core_parts
from bench.report import Series, write_results
from bench.rule_source import constant_tokens
from bench.waiting_memory import measure_waiting
from scheduler_svc.core.step import StepResult

_BOUNDS, _BOUND_AT = (1.0, 3.0), 256
"""Milliseconds of schedule and apply together, median and 99th percentile, for a step of 256 sequences."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sequences", type=int, nargs="+", default=[64, 256, 1024], help="running sequences")
    parser.add_argument("--steps", type=int, default=600, help="steps to time")
    parser.add_argument("--warm-up", type=int, default=300, help="earlier steps of the batch that turns over")
    parser.add_argument("--waiting", type=int, default=10_000, help="waiting requests to measure; 0: none")
    parser.add_argument("--runs", type=int, default=5, help="runs of each rare call; 0: none")


def main(arguments: argparse.Namespace) -> None:
    series, splits = list[Series](), dict[str, dict[str, float]]()

    def add(each: Series, bound: float | None = None) -> None:
        print(each, "" if bound is None or each.median < bound else f"NOT below {bound:g}", flush=True)
        series.append(each)

    for count in arguments.sequences:
        for name, measure in (("steady", _steady), ("turning", _turning)):
            schedule, apply, parts = measure(count, arguments.warm_up, arguments.steps)
            halves = {"schedule": schedule, "apply": apply, "both": schedule + apply}
            for half, values in halves.items():
                bounds = _BOUNDS if (half, count) == ("both", _BOUND_AT) else (None, None)
                for figure, value, bound in zip(("median", "p99"), _median_p99(values), bounds, strict=True):
                    add(Series(f"{name}, {count}, {half}, {figure}", "ms", (value,)), bound)
            splits[f"{name}, {count}"] = parts
            print(", ".join(f"{part} {value:.3f}" for part, value in parts.items()))
        for num_top in NUMBERS_OF_TOP:
            kind = "without log probabilities" if num_top is None else f"log probabilities, {num_top}"
            values = _median_p99(time_logprob_steps(count, num_top, arguments.steps))
            add(Series(f"{count}, {kind}, median and p99", "ms", values))
        for each in measure_calls(count, arguments.runs) if arguments.runs else ():
            add(each, BOUND_MS)
    waiting = measure_waiting(arguments.waiting) if arguments.waiting else None
    if waiting is not None:
        print(
            f"{waiting.count} requests of {waiting.prompt_len} prompt tokens wait: {waiting.bytes_each:.0f} bytes each"
        )
        print(*(f"{size:>9.0f}  made in {made_in}" for made_in, size in waiting.by_file.items()), sep="\n")
    facts = {"parts_ms": splits, "waiting": waiting and asdict(waiting)}
    write_results(arguments.out, "the cost of the scheduler's core", series, **facts)


StepTimes = tuple[np.ndarray, np.ndarray, dict[str, float]]
"""Milliseconds of `schedule` and of `apply` of each step, float64[steps] each, and of an average step by part."""


def _steady(num_sequences: int, _: int, num_steps: int) -> StepTimes:
    return _measure(lambda: steady_load(num_sequences, num_steps + 10), 8, num_steps)


def _turning(num_sequences: int, warm_up: int, num_steps: int) -> StepTimes:
    # Each row ends a request within a few hundred steps.
    num_requests = num_sequences * (2 + (warm_up + num_steps) // 50)
    return _measure(lambda: turning_load(num_sequences, num_requests), warm_up, num_steps)


def _measure(make_load: Callable[[], Load], warm_up: int, num_steps: int) -> StepTimes:
    """The parts are measured in another run."""
    schedule, apply, _ = time_steps(make_load(), warm_up, num_steps, None)
    return schedule, apply, time_steps(make_load(), warm_up, num_steps, PartTimes())[2]


def time_steps(load: Load, warm_up: int, num_steps: int, part_times: PartTimes | None) -> StepTimes:
    """Times the steps after the warm-up; without `part_times` no part has a time. Raises ValueError if the warm-up is
    too short, or the load too small."""
    if warm_up < 2:
        raise ValueError(f"warm_up is {warm_up}, must be at least 2: two steps are in flight")
    results: deque[StepResult] = deque()
    times = np.zeros((2, num_steps))
    with part_times.measure(core_parts(load.scheduler)) if part_times is not None else nullcontext():
        for step in range(-warm_up, num_steps):
            if step == 0 and part_times is not None:
                part_times.seconds.clear()
            load.refill()
            started = time.perf_counter()
            plan = load.scheduler.schedule(started)
            planned = time.perf_counter()
            if plan is None:
                raise ValueError(f"step {step}: nothing is left to compute; give more requests")
            results.append(constant_tokens(plan))
            if len(results) < 2:
                continue
            applying = time.perf_counter()
            load.scheduler.apply(results.popleft(), applying)
            if step >= 0:
                times[:, step] = planned - started, time.perf_counter() - applying
    seconds = part_times.seconds if part_times is not None else {}
    return times[0] * 1e3, times[1] * 1e3, {name: value * 1e3 / num_steps for name, value in seconds.items()}


def _median_p99(values: np.ndarray) -> tuple[float, float]:
    return float(np.median(values)), float(np.percentile(values, 99))
