"""Latency against rate, and ratios of the rates of two systems at the same latency."""

import math
import os
import resource
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from simulator.paper.systems import QUIRE, Job, Load, Point, Setup, run

_FRACTIONS = (0.5, 0.85, 1.0, 1.2, 1.6)
"""The rates of a curve, as multiples of the rate that the system serves if requests always wait."""

_STEP_DOWN, _STEP_UP, _MAX_STEPS = 0.6, 1.35, 2
"""A curve that does not span the levels is extended by these factors, at most this number of times at each end."""

LEVELS = (1.5, 2.5, 4.0)
"""Where curves are compared: multiples of the lowest latency that Quire has in the same picture."""


class Runner:
    """Simulates jobs in separate processes, one for each processor."""

    def __init__(self, num_processes: int | None = None, scale: float = 1.0) -> None:
        """A `scale` below 1 shortens loads to this share."""
        self._scale = scale
        self._jobs_cpu_s = 0.0
        # Ctrl-C, which reaches all processes of a terminal, ends them at once and silently.
        self._executor = ProcessPoolExecutor(
            num_processes or len(os.sched_getaffinity(0)),
            initializer=signal.signal,
            initargs=(signal.SIGINT, signal.SIG_DFL),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.shutdown(cancel_futures=True)

    def run(self, jobs: Iterable[Job]) -> list[Point]:
        """The points of the jobs, in their order."""
        scaled = [replace(job, load=job.load.scaled(self._scale)) for job in jobs]
        points: list[Point] = []
        for point, cpu_s in self._executor.map(_timed_run, scaled):
            self._jobs_cpu_s += cpu_s
            points.append(point)
        return points

    @property
    def cpu_s(self) -> float:
        """Processor time so far of all jobs, of this process, and of its finished child processes."""
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return self._jobs_cpu_s + time.process_time() + children.ru_utime + children.ru_stime


def _timed_run(job: Job) -> tuple[Point, float]:
    before = time.process_time()
    point = run(job)
    return point, time.process_time() - before


@dataclass(frozen=True, slots=True)
class Curve:
    """One system's point at which requests always wait, and its points by rising rate."""

    system: str
    saturated: Point
    points: list[Point]

    def rate_at(self, normalized_s: float) -> float | None:
        """The highest rate at which the latency is no more than this, between two points on a straight line through
        the logarithms of their latencies. None if even the lowest rate has more, or the highest has less."""
        for low, high in reversed(list(zip(self.points, self.points[1:], strict=False))):
            if low.normalized_s <= normalized_s <= high.normalized_s:
                logs = np.log([low.normalized_s, high.normalized_s])
                return float(np.interp(math.log(normalized_s), logs, [low.rate, high.rate]))
        return None

    def missing(self, lowest_s: float, highest_s: float) -> list[float]:
        """The next rates to simulate, beyond the ends that do not reach these latencies."""
        first, last = self.points[0], self.points[-1]
        below = [first.rate * _STEP_DOWN] if first.normalized_s > lowest_s else []
        return below + ([last.rate * _STEP_UP] if last.normalized_s < highest_s else [])


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture of a figure: the systems that are compared under one load, on one model."""

    title: str
    setup: Setup
    load: Load
    systems: Sequence[str]


def sweep(runner: Runner, panels: Sequence[Panel]) -> list[dict[str, Curve]]:
    """The curves of each panel by system. All panels are simulated together, to keep all processors busy."""
    pairs = [(panel, system) for panel in panels for system in panel.systems]
    saturated = runner.run(Job(system, panel.setup, panel.load, math.inf) for panel, system in pairs)
    curves: list[dict[str, Curve]] = [{} for _ in panels]
    indices = [index for index, panel in enumerate(panels) for _ in panel.systems]
    for index, (_, system), probe in zip(indices, pairs, saturated, strict=True):
        curves[index][system] = Curve(system, probe, [])
    _extend(runner, panels, curves, lambda curve: [curve.saturated.served_rate * each for each in _FRACTIONS])
    for _ in range(_MAX_STEPS):
        lowest = [min(point.normalized_s for point in each[QUIRE].points) for each in curves]
        levels = {
            id(curve): (LEVELS[0] * low, LEVELS[-1] * low)
            for each, low in zip(curves, lowest, strict=True)
            for curve in each.values()
        }
        _extend(runner, panels, curves, lambda curve: curve.missing(*levels[id(curve)]))  # noqa: B023
    return curves


def _extend(
    runner: Runner,
    panels: Sequence[Panel],
    curves: Sequence[Mapping[str, Curve]],
    rates_of: Callable[[Curve], list[float]],
) -> None:
    """Simulates each curve at further rates."""
    pairs = [(panel, curve) for panel, each in zip(panels, curves, strict=True) for curve in each.values()]
    chosen = [(panel, curve, rate) for panel, curve in pairs for rate in rates_of(curve)]
    jobs = [Job(curve.system, panel.setup, panel.load, rate) for panel, curve, rate in chosen]
    for (_, curve, _), point in zip(chosen, runner.run(jobs), strict=True):
        curve.points.append(point)
        curve.points.sort(key=lambda each: each.rate)


@dataclass(frozen=True, slots=True)
class Ratio:
    """Quire's rate divided by another system's: at each of LEVELS, None if a curve does not reach it, and in the state
    in which requests always wait."""

    at_levels: list[float | None]
    saturated: float

    @property
    def range(self) -> tuple[float, float] | None:
        """The lowest and the highest over the levels."""
        known = [each for each in self.at_levels if each is not None]
        return (min(known), max(known)) if known else None


def ratios(curves: Mapping[str, Curve]) -> dict[str, Ratio]:
    """The ratios of Quire's rates to each other system's in a panel."""
    quire = curves[QUIRE]
    lowest = min(point.normalized_s for point in quire.points)
    found: dict[str, Ratio] = {}
    for system, curve in curves.items():
        if system == QUIRE:
            continue
        pairs = [(quire.rate_at(level * lowest), curve.rate_at(level * lowest)) for level in LEVELS]
        found[system] = Ratio(
            [None if own is None or other is None else own / other for own, other in pairs],
            quire.saturated.served_rate / curve.saturated.served_rate,
        )
    return found
