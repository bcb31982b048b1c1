"""The cost of the scheduler's core without services: schedule and apply of one step, in milliseconds; rare or long
calls; memory of waiting requests.

Two batches: `steady`, where all sequences decode, and `turning`, where chats come and go. Two steps are in flight, as
in service. The split by part is measured in a run of its own, since measuring it takes time too.
"""

import argparse
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass

import numpy as np

from bench.core_calls import BOUND_MS, CallTimes, measure_calls
from bench.core_load import Load, constant_tokens, steady_load, turning_load
from bench.core_logprobs import NUMBERS_OF_TOP, time_logprob_steps
from bench.parts import PartTimes, core_parts
from bench.report import Series, write_results
from bench.waiting_memory import WaitingMemory, measure_waiting
from scheduler_svc.core.step import StepResult

_MEDIAN_BOUND_MS, _P99_BOUND_MS, _BOUND_AT = 1.0, 3.0, 256
"""Bounds for schedule and apply together, for a step of 256 sequences."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sequences", type=int, nargs="+", default=[64, 256, 1024], help="running sequences")
    parser.add_argument("--steps", type=int, default=600, help="steps to time")
    parser.add_argument("--warm-up", type=int, default=300, help="earlier steps of the batch that turns over")
    parser.add_argument("--waiting", type=int, default=10_000, help="waiting requests to measure; 0: none")
    parser.add_argument("--runs", type=int, default=5, help="runs of each rare call; 0: none")


def main(arguments: argparse.Namespace) -> None:
    loads: dict[str, Callable[[int], StepTimes]] = {
        "steady": lambda count: _steady(count, arguments.steps),
        "turning": lambda count: _turning(count, arguments.warm_up, arguments.steps),
    }
    series: list[Series] = []
    splits: dict[str, dict[str, float]] = {}
    for name, measure in loads.items():
        times = {count: measure(count) for count in arguments.sequences}
        splits |= {f"{name}, {count}": each.parts for count, each in times.items()}
        series += [each for count, run in times.items() for each in run.series(f"{name}, {count}")]
        _print(name, times)
    for count in arguments.sequences:
        figures = {num_top: time_logprob_steps(count, num_top, arguments.steps) for num_top in NUMBERS_OF_TOP}
        series += [Series(f"{count}, {name}", "ms", tuple(each)) for name, each in _logprob_figures(figures)]
        _print_logprobs(count, figures)
    if arguments.runs:
        for count in arguments.sequences:
            calls = measure_calls(count, arguments.runs)
            series += [Series(f"{count}, {each.name}", "ms", each.values) for each in calls]
            _print_calls(count, calls)
    waiting = measure_waiting(arguments.waiting) if arguments.waiting else None
    if waiting is not None:
        _print_waiting(waiting)
    facts = {"parts_ms": splits, "waiting": waiting and asdict(waiting)}
    write_results(arguments.out, "the cost of the scheduler's core", series, **facts)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Milliseconds of each step, float64[steps], and of an average step by part, measured in another run."""

    schedule: np.ndarray
    apply: np.ndarray
    parts: dict[str, float]

    @property
    def both(self) -> np.ndarray:
        return self.schedule + self.apply

    def series(self, name: str) -> list[Series]:
        """Median and 99th percentile of both halves and of the step."""
        halves = {"schedule": self.schedule, "apply": self.apply, "both": self.both}
        return [
            Series(f"{name}, {half}, {figure}", "ms", (value,))
            for half, values in halves.items()
            for figure, value in zip(("median", "p99"), _median_p99(values), strict=True)
        ]


def _steady(num_sequences: int, num_steps: int) -> StepTimes:
    num_planned = num_steps + 10
    return _measure(lambda: steady_load(num_sequences, num_planned), 8, num_steps)


def _turning(num_sequences: int, warm_up: int, num_steps: int) -> StepTimes:
    # Each row ends a request within a few hundred steps.
    num_requests = num_sequences * (2 + (warm_up + num_steps) // 50)
    return _measure(lambda: turning_load(num_sequences, num_requests), warm_up, num_steps)


def _measure(make_load: Callable[[], Load], warm_up: int, num_steps: int) -> StepTimes:
    schedule, apply, _ = time_steps(make_load(), warm_up, num_steps, None)
    part_times = PartTimes()
    *_, parts = time_steps(make_load(), warm_up, num_steps, part_times)
    return StepTimes(schedule, apply, parts)


def time_steps(
    load: Load, warm_up: int, num_steps: int, part_times: PartTimes | None
) -> tuple[np.ndarray, np.ndarray, dict[str, float]]:
    """Milliseconds of `schedule` and of `apply` of each step after the warm-up, and of an average step by part if
    `part_times` is given. Raises ValueError if the warm-up is too short, or the load too small."""
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


def _print(name: str, times: dict[int, StepTimes]) -> None:
    print(f"{name:<9} {'schedule p50':>13} {'p99':>7} {'apply p50':>10} {'p99':>7} {'both p50':>9} {'p99':>7}  ms")
    for count, run in times.items():
        columns = [figure for values in (run.schedule, run.apply, run.both) for figure in _median_p99(values)]
        print(
            f"{count:>9} " + "{:13.3f} {:7.3f} {:10.3f} {:7.3f} {:9.3f} {:7.3f}".format(*columns) + _verdict(count, run)
        )
    fewest, most = min(times), max(times)
    growth = float(np.median(times[most].both) / np.median(times[fewest].both))
    print(f"from {fewest} to {most} sequences the median of both grows {growth:.1f} times")
    for count, run in times.items():
        print(f"{count:>9}  " + ", ".join(f"{part} {value:.3f}" for part, value in run.parts.items()))
    print()


def _logprob_figures(figures: Mapping[int | None, np.ndarray]) -> Iterator[tuple[str, Sequence[float]]]:
    """Median and 99th percentile of a step by number of log probabilities."""
    for num_top, times in figures.items():
        kind = "without log probabilities" if num_top is None else f"log probabilities, {num_top}"
        yield f"{kind}, median and p99", _median_p99(times)


def _print_logprobs(count: int, figures: Mapping[int | None, np.ndarray]) -> None:
    print(f"steps of {count} with both messages, ms")
    for name, (median, p99) in _logprob_figures(figures):
        print(f"{median:9.3f} {p99:7.3f}  {name}")
    print()


def _print_calls(count: int, calls: Sequence[CallTimes]) -> None:
    print(f"{count} rows, the slowest call of each kind: ms of processor time, median of the runs")
    for each in calls:
        median = float(np.median(each.values))
        print(f"{median:9.3f}  {each.name}" + ("" if median < BOUND_MS else f"   NOT below {BOUND_MS:.0f} ms"))
    print()


def _verdict(count: int, run: StepTimes) -> str:
    if count != _BOUND_AT:
        return ""
    median, p99 = _median_p99(run.both)
    is_within = median < _MEDIAN_BOUND_MS and p99 < _P99_BOUND_MS
    bound = f"median < {_MEDIAN_BOUND_MS} and p99 < {_P99_BOUND_MS}"
    return f"   within {bound}" if is_within else f"   NOT within {bound}"


def _median_p99(values: np.ndarray) -> Sequence[float]:
    return float(np.median(values)), float(np.percentile(values, 99))


def _print_waiting(waiting: WaitingMemory) -> None:
    print(f"{waiting.count} requests of {waiting.prompt_len} prompt tokens wait: {waiting.bytes_each:.0f} bytes each")
    for made_in, size in waiting.by_file.items():
        print(f"{size:>9.0f}  made in {made_in}")
