"""Histograms that take many observations at once, and the common part of all services' metrics.

A step has a value for each of its tokens. `prometheus_client.Histogram` takes them one by one, and walks over its
buckets for each; here they are counted in one call a step.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Self

import numpy as np
from numpy.typing import ArrayLike
from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

SHORT_SECONDS = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2),
    *(0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
"""Bounds for the time between two tokens. Dashboards made for vLLM offer goals between 0.025 and 0.5, and read the
bucket with that bound; likewise between 0.1 and 10 in SECONDS."""

SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0),
    *(7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 3600.0),
)
"""Bounds for the times of a request."""

COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000)
"""Bounds for numbers of tokens."""

SMALL_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Bounds for numbers of sequences."""

_FEW = 8
"""Values that are added faster one by one."""

OTHER_TENANTS = "(other)"
"""The label of tenants without a label of their own. No tenant has this name."""


class Distribution:
    """The number of observations in each bucket, and their sum.

    One thread adds, others may read meanwhile: their result may lack the newest observations, or their sum.

    Attributes:
        bounds: The upper bounds of the buckets, rising; one more bucket has the values above all of them.
        sum: The sum of all observations.
    """

    __slots__ = ("_counts", "_edges", "bounds", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.sum = 0.0
        self._edges = np.asarray(bounds, np.float64)
        self._counts = np.zeros(len(bounds) + 1, np.int64)

    def add(self, value: float, times: int = 1) -> None:
        """Observes a value, as often as `times`."""
        self._counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def add_all(self, values: ArrayLike, times: ArrayLike | None = None) -> None:
        """Observes values, [n], each as often as `times`, [n], says; None is once each."""
        if times is None and isinstance(values, list) and len(values) <= _FEW:
            for value in values:
                self.add(value)  # pyrefly: ignore[bad-argument-type]
            return
        observed = np.asarray(values, np.float64)
        weights = None if times is None else np.asarray(times, np.float64)
        buckets = np.searchsorted(self._edges, observed)
        self._counts += np.bincount(buckets, weights, len(self._counts)).astype(np.int64)
        self.sum += float(observed.sum() if weights is None else observed @ weights)

    @property
    def count(self) -> int:
        return int(self._counts.sum())

    @property
    def counts(self) -> list[int]:
        """The observations in each bucket, one more than `bounds`."""
        return self._counts.tolist()

    @classmethod
    def of(cls, bounds: Sequence[float], counts: Sequence[int], sum_: float) -> Self:
        """The distribution counted by another process. Raises ValueError unless there is one count more than bounds."""
        if len(counts) != len(bounds) + 1:
            raise ValueError(f"{len(bounds)} bounds have {len(counts)} counts")
        distribution = cls(bounds)
        distribution._counts[:] = counts
        distribution.sum = sum_
        return distribution

    @classmethod
    def total(cls, bounds: Sequence[float], parts: Iterable[Self]) -> Self:
        """All observations of several distributions that have these bounds."""
        total = cls(bounds)
        for part in parts:
            total._counts = total._counts + part._counts
            total.sum += part.sum
        return total

    def put_into(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """Adds its series, with the values of the family's labels."""
        cumulative = np.cumsum(self._counts).tolist()
        bounds = [*map(floatToGoString, self.bounds), "+Inf"]
        family.add_metric(labels, list(zip(bounds, cumulative, strict=True)), self.sum)


def histogram_family(
    name: str, help_text: str, labels: Sequence[str], series: Iterable[tuple[Sequence[str], Distribution]]
) -> Metric:
    """A family with a series for each distribution, which has these values of the labels."""
    family = HistogramMetricFamily(name, help_text, labels=labels)
    for values, distribution in series:
        distribution.put_into(family, values)
    return family


class Histograms(Collector):
    """Histograms of one service, by name."""

    def __init__(self, prefix: str, registry: CollectorRegistry) -> None:
        """`prefix` begins all names."""
        self._prefix = prefix
        self._families: dict[str, tuple[str, Distribution]] = {}
        registry.register(self)

    def add(self, name: str, help_text: str, bounds: Sequence[float]) -> Distribution:
        """A new histogram, to which observations are added."""
        distribution = Distribution(bounds)
        self._families[self._prefix + name] = help_text, distribution
        return distribution

    def collect(self) -> Iterable[Metric]:
        for name, (help_text, distribution) in self._families.items():
            yield histogram_family(name, help_text, (), [((), distribution)])


class TenantLabels:
    """The label of each tenant in metrics: its name for the first ones that come, one label for all others.

    So the number of series is bounded for any number of tenants.
    """

    def __init__(self, max_tenants: int) -> None:
        self._max_tenants = max_tenants
        self._known: set[str] = set()

    def of(self, tenant: str) -> str:
        if tenant not in self._known:
            if len(self._known) >= self._max_tenants:
                return OTHER_TENANTS
            self._known.add(tenant)
        return tenant
