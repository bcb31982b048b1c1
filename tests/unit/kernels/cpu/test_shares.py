"""The units of each thread, on simulated machines: 64 threads on two nodes, at any speeds, in virtual time."""

import ctypes
import heapq
import shutil
import subprocess
from collections.abc import Callable, Iterator
from ctypes import POINTER, byref, c_bool, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest

THREADS, NODE = 64, 32
"""Threads of the machine, and of one of its nodes."""
PANELS = 896
"""Panels of the gate and up projections of an 8B model."""


class Units(ctypes.Structure):
    _fields_ = (("begin", c_int64), ("end", c_int64))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no compiler")
    root, path = Path(__file__).parents[4], tmp_path_factory.mktemp("shares") / "shares.so"
    command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{root}/quire_kernels/cpu", "-o", str(path)]
    subprocess.run([*command, f"{root}/tests/emulation/shares.cpp"], check=True)
    library = ctypes.CDLL(str(path))
    library.make_shares.restype, library.make_shares.argtypes = c_void_p, (c_int64, c_int64, c_int64)
    library.free_shares.argtypes = (c_void_p,)
    library.take.restype = c_bool
    library.take.argtypes = (c_void_p, c_int64, POINTER(c_int64), c_int64, POINTER(Units))
    return library


@dataclass(frozen=True, slots=True)
class Step:
    """The work of threads in a step.

    Attributes:
        thread_of: by unit.
        foreign_counters: how often a thread changed a counter on the cache line of another one.
        end: when the last thread was done, where a unit takes 1.
    """

    thread_of: list[int]
    foreign_counters: int
    end: float

    @property
    def from_other_node(self) -> float:
        """The share of units that threads read from the memory of the other node."""
        away = (thread // NODE != owner_of(unit) // NODE for unit, thread in enumerate(self.thread_of))
        return sum(away) / len(self.thread_of)


def owner_of(unit: int, units: int = PANELS, threads: int = THREADS) -> int:
    """The thread that packs a panel, if all are equally fast."""
    return next(thread for thread in range(threads) if unit < units * (thread + 1) // threads)


def run(
    library: ctypes.CDLL,
    *,
    units: int = PANELS,
    grain: int = 1,
    count: int = 3,
    cost: Callable[[int], float] = lambda _: 1.0,
    threads: int = THREADS,
) -> Step:
    """Threads take `count` units whenever they have finished the last ones; cost(thread) is the time for each."""
    shares = library.make_shares(threads, units, grain)
    thread_of, foreign, end = [-1] * units, 0, 0.0
    distances = [c_int64(0) for _ in range(threads)]
    idle, taken = [(0.0, thread) for thread in range(threads)], Units()
    while idle:
        now, thread = heapq.heappop(idle)
        end = max(end, now)
        if not library.take(shares, thread, byref(distances[thread]), count, byref(taken)):
            continue
        foreign += distances[thread].value != 0
        for unit in range(taken.begin, taken.end):
            assert thread_of[unit] == -1, "each unit is done once"
            thread_of[unit] = thread
        heapq.heappush(idle, (now + cost(thread) * (taken.end - taken.begin), thread))
    library.free_shares(shares)
    assert -1 not in thread_of
    return Step(thread_of, foreign, end)


def one_counter(library: ctypes.CDLL, cost: Callable[[int], float]) -> Step:
    """The former scheme: all threads take units from the same counter."""
    return run(library, grain=PANELS, cost=cost)


def jittered(seed: int, low: float = 0.9, high: float = 1.1) -> Callable[[int], float]:
    random = Random(seed)
    return lambda _: random.uniform(low, high)


def test_equally_fast_threads_do_the_same_units_every_time_and_touch_no_cache_line_of_others(
    library: ctypes.CDLL,
) -> None:
    step = run(library)
    assert step.thread_of == [owner_of(unit) for unit in range(PANELS)]
    assert step.foreign_counters == 0


def test_threads_of_varying_speed_stay_with_their_node(library: ctypes.CDLL) -> None:
    steps = [run(library, cost=jittered(seed)) for seed in range(10)]
    before = [one_counter(library, jittered(seed)) for seed in range(10)]
    assert max(step.from_other_node for step in steps) < 0.01
    assert min(step.from_other_node for step in before) > 0.4
    assert max(step.foreign_counters for step in steps) < 0.2 * min(step.foreign_counters for step in before)
    assert sum(step.end for step in steps) < 1.02 * sum(step.end for step in before)


@pytest.mark.parametrize("slow", [0, 31, 63])
def test_a_thread_that_has_lost_its_processor_is_helped_by_threads_of_its_node(library: ctypes.CDLL, slow: int) -> None:
    of_others = jittered(slow)
    step = run(library, cost=lambda thread: 1000.0 if thread == slow else of_others(thread))
    assert step.thread_of.count(slow) == 3, "it does only what it had taken"
    assert step.from_other_node < 0.01


def test_a_node_of_half_the_speed_gets_help_from_the_other(library: ctypes.CDLL) -> None:
    ideal = PANELS / (NODE + NODE / 2)
    assert run(library, cost=lambda thread: 1.0 + thread // NODE).end < 1.25 * ideal


@pytest.fixture(params=[1, 2, 3, 24, 64, 65])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    return request.param


@pytest.mark.parametrize(("grain", "count"), [(1, 1), (1, 5), (6, 6), (6, 7), (1000, 4)])
def test_any_number_of_threads_does_each_unit_once(library: ctypes.CDLL, grain: int, count: int, threads: int) -> None:
    for units in (0, 1, 2, 7, 64, 1000):
        run(library, units=units, grain=grain, count=count, cost=jittered(units, 0.1, 2.0), threads=threads)
