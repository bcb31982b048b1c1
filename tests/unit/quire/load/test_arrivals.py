"""Arrival processes."""

import math

import numpy as np
import pytest

from quire.load import AtOnce, Gamma, Poisson, Trace, make_arrivals
from quire.load.arrivals import first_until


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_rate_and_the_burstiness_asked_for(burstiness: float) -> None:
    gaps = np.diff(make_arrivals(5.0, burstiness).times(50_000, seed=1))
    assert gaps.mean() == pytest.approx(0.2, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)
    assert gaps.min() >= 0


def test_a_trace_keeps_its_gaps_and_begins_at_once() -> None:
    trace = Trace((10.0, 10.5, 12.0))
    assert trace.times(3, seed=0).tolist() == [0.0, 0.5, 2.0]
    assert trace.rate == 1.0
    with pytest.raises(ValueError, match="the trace has 3 times of arrival; 4 requests need as many"):
        trace.times(4, seed=0)


def test_a_duration_takes_the_times_before_its_end() -> None:
    times = first_until(Poisson(10.0), 20.0, seed=0)
    assert times[-1] < 20
    assert np.array_equal(times, Poisson(10.0).times(len(times), seed=0))
    assert Poisson(10.0).times(len(times) + 1, seed=0)[-1] >= 20
    assert first_until(Trace((0.0, 1.0, 5.0)), 5.0, seed=0).tolist() == [0.0, 1.0]
    with pytest.raises(ValueError, match="a duration does not limit requests that all arrive at once"):
        first_until(AtOnce(), 1.0, seed=0)


def test_rates_and_times_that_are_none_are_refused() -> None:
    for rate in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match=r"request rate is .*, must be above 0, or inf"):
            make_arrivals(rate)
    with pytest.raises(ValueError, match="burstiness is 0, must be a number above 0"):
        Gamma(1.0, 0)
    with pytest.raises(ValueError, match="the arrival at 1 s follows one at 2 s"):
        Trace((2, 1))
