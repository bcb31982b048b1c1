import numpy as np
import pytest
from prometheus_client import CollectorRegistry, Histogram

from quire.service.histograms import OTHER_TENANTS, Distribution, TenantLabels, histogram_family


def samples_of(distribution: Distribution) -> dict[tuple[str, str | None], float]:
    family = histogram_family("x", "X.", (), [((), distribution)])
    return {(sample.name, sample.labels.get("le")): sample.value for sample in family.samples}


def test_a_distribution_is_the_histogram_of_prometheus_client():
    bounds, values = (0.1, 0.5, 2.0), [0.05, 0.1, 0.100001, 0.5, 1.9, 2.0, 2.1, 700.0]
    registry = CollectorRegistry()
    histogram, distribution = Histogram("x", "X.", buckets=bounds, registry=registry), Distribution(bounds)
    for value in values:
        histogram.observe(value)
    distribution.add(values[0])
    distribution.add_all(values[1:])
    distribution.add_all(np.array([]))
    # A value may stand for several observations.
    for value, times in ((0.3, 3), (5.0, 2)):
        for _ in range(times):
            histogram.observe(value)
    distribution.add(0.3, times=3)
    distribution.add_all([5.0], [2])
    (family,) = registry.collect()
    theirs = {
        (sample.name, sample.labels.get("le")): sample.value
        for sample in family.samples
        if not sample.name.endswith("_created")
    }
    assert samples_of(distribution) == pytest.approx(theirs)
    assert distribution.count == len(values) + 5


def test_distributions_add_up_and_stay_as_they_are():
    one, two = Distribution((1.0, 2.0)), Distribution((1.0, 2.0))
    one.add(0.5)
    two.add(1.5)
    total = Distribution.total((1.0, 2.0), [one, two])
    assert (total.count, total.sum, one.count) == (2, 2.0, 1)


def test_a_distribution_of_another_process_has_a_count_more_than_bounds():
    one = Distribution((1.0, 2.0))
    one.add_all([0.5, 1.5, 1.5, 9.0])
    copy = Distribution.of(one.bounds, one.counts, one.sum)
    assert samples_of(copy) == samples_of(one)
    with pytest.raises(ValueError, match="2 bounds have 2 counts"):
        Distribution.of((1.0, 2.0), [1, 2], 3.0)


def test_tenants_beyond_the_first_ones_share_a_label():
    labels = TenantLabels(2)
    assert [labels.of(tenant) for tenant in ("a", "b", "c", "a", "d")] == ["a", "b", OTHER_TENANTS, "a", OTHER_TENANTS]
