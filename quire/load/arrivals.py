"""Arrival times of requests: seconds since the run began, in order. A longer list of times begins as a shorter one."""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np

_STREAM = 1 << 32
"""Separates the draws from the datasets' draws, which use the same seed."""


class Arrivals(Protocol):
    """An arrival process."""

    @property
    def rate(self) -> float:
        """Requests a second: one by the mean gap. Infinite where all arrive at once."""
        ...

    def times(self, count: int, seed: int) -> np.ndarray:
        """float64[count], never falling."""
        ...


@dataclass(frozen=True, slots=True)
class Poisson:
    """Independent arrivals: exponential gaps."""

    rate: float

    def __post_init__(self) -> None:
        _check_rate(self.rate)

    def times(self, count: int, seed: int) -> np.ndarray:
        return np.cumsum(_generator(seed).exponential(1 / self.rate, count))


@dataclass(frozen=True, slots=True)
class Gamma:
    """Gaps with a gamma distribution whose shape is `burstiness`: 1 is Poisson, below it come in bursts, above it
    evenly."""

    rate: float
    burstiness: float

    def __post_init__(self) -> None:
        _check_rate(self.rate)
        if not (math.isfinite(self.burstiness) and self.burstiness > 0):
            raise ValueError(f"burstiness is {self.burstiness}, must be a number above 0")

    def times(self, count: int, seed: int) -> np.ndarray:
        return np.cumsum(_generator(seed).gamma(self.burstiness, 1 / (self.rate * self.burstiness), count))


@dataclass(frozen=True, slots=True)
class AtOnce:
    """Everything arrives at the beginning. With a limit on concurrency this is a closed loop."""

    @property
    def rate(self) -> float:
        return math.inf

    def times(self, count: int, seed: int) -> np.ndarray:
        del seed
        return np.zeros(count)


@dataclass(frozen=True, slots=True)
class Trace:
    """Recorded times, moved so that the first is 0."""

    recorded: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.recorded:
            raise ValueError("a trace needs at least one time of arrival")
        for earlier, later in pairwise(self.recorded):
            if not earlier <= later:
                raise ValueError(f"the arrival at {later} s follows one at {earlier} s; a trace is in order of time")

    @property
    def rate(self) -> float:
        length = self.recorded[-1] - self.recorded[0]
        return (len(self.recorded) - 1) / length if length else math.inf

    def times(self, count: int, seed: int) -> np.ndarray:
        """ValueError where the trace has fewer times."""
        del seed
        if count > len(self.recorded):
            raise ValueError(f"the trace has {len(self.recorded)} times of arrival; {count} requests need as many")
        return np.asarray(self.recorded[:count]) - self.recorded[0]


def make_arrivals(rate: float, burstiness: float = 1.0) -> Poisson | Gamma | AtOnce:
    """The process with this rate; an infinite one sends everything at once."""
    if rate == math.inf:
        return AtOnce()
    return Poisson(rate) if burstiness == 1.0 else Gamma(rate, burstiness)


def first_until(arrivals: Arrivals, duration_s: float, seed: int) -> np.ndarray:
    """The times before `duration_s`; of a trace, all that it has. ValueError if all arrive at once."""
    if isinstance(arrivals, Trace):
        times = arrivals.times(len(arrivals.recorded), seed)
        return times[times < duration_s]
    if math.isinf(arrivals.rate):
        raise ValueError("a duration does not limit requests that all arrive at once")
    count = 16 + math.ceil(arrivals.rate * duration_s)
    while (times := arrivals.times(count, seed))[-1] < duration_s:
        count *= 2
    return times[times < duration_s]


def _check_rate(rate: float) -> None:
    if not (math.isfinite(rate) and rate > 0):
        raise ValueError(f"request rate is {rate}, must be above 0, or inf")


def _generator(seed: int) -> np.random.Generator:
    return np.random.default_rng((seed, _STREAM))
