"""The paper's evaluation, one point of each: the order of the systems, and the ranges of shares and ratios."""

import math
from dataclasses import replace

import pytest

from quire.load import Lognormal, shared_prefix
from simulator.paper.curves import Curve, ratios
from simulator.paper.systems import (
    FASTER_TRANSFORMER,
    MAX,
    MAX_MODEL_LEN,
    OPT_13B,
    ORACLE,
    POW2,
    QUIRE,
    SYSTEMS,
    Job,
    Load,
    Point,
    Shares,
    alpaca_load,
    run,
    sharegpt_load,
)

FEW = replace(sharegpt_load(OPT_13B), num_saturating=100)
_NUM_REQUESTS = {QUIRE: 100, ORACLE: 60, POW2: 45, MAX: 30, FASTER_TRANSFORMER: 21}
"""Enough requests to fill the pool several times; few if few run at once."""


@pytest.mark.long
def test_pages_hold_more_tokens_run_more_requests_at_once_and_serve_higher_rates() -> None:
    """Each system with chats, while requests always wait."""
    loads = {system: replace(FEW, num_saturating=count) for system, count in _NUM_REQUESTS.items()}
    saturated = {system: run(Job(system, OPT_13B, loads[system], math.inf)) for system in SYSTEMS}
    tokens = {system: point.shares.tokens for system, point in saturated.items()}
    assert tokens[MAX] < tokens[POW2] < tokens[ORACLE] < 0.5 < tokens[QUIRE]
    assert 0.12 < tokens[MAX] < 0.26
    assert tokens[QUIRE] > 0.85
    assert saturated[QUIRE].shares.tokens_of_held > 0.96
    batched = {system: point.batched for system, point in saturated.items()}
    assert batched[MAX] == pytest.approx(7, abs=0.01)
    assert batched[FASTER_TRANSFORMER] < batched[MAX] < batched[POW2] < batched[ORACLE] < batched[QUIRE]
    assert 1.5 < batched[QUIRE] / batched[ORACLE] < 3.5
    served = [saturated[system].served_rate for system in (FASTER_TRANSFORMER, MAX, POW2, ORACLE, QUIRE)]
    assert served == sorted(served)
    assert 1.3 < served[-1] / served[-2] < 3.5
    assert 2.2 < served[-1] / served[1] < 8


def test_a_rate_that_pages_carry_takes_the_reservations_longer() -> None:
    load = replace(alpaca_load(OPT_13B, beam_width=4), duration_s=1.0)
    paged, contiguous = (run(Job(system, OPT_13B, load, 10.0)) for system in (QUIRE, ORACLE))
    assert paged.normalized_s < contiguous.normalized_s
    assert 0.3 < paged.shares.saved < 0.75


def test_a_shared_prefix_is_computed_once() -> None:
    dataset = shared_prefix(341, Lognormal.fit(30, 0.6), Lognormal.fit(40, 0.6), MAX_MODEL_LEN, 32_000)
    load = Load(dataset, 4, 300, shares_prefixes=True).scaled(0.5)
    paged, contiguous = (run(Job(system, OPT_13B, load, math.inf)) for system in (QUIRE, ORACLE))
    assert paged.batched > 1.5 * contiguous.batched


def make_curve(*pairs: tuple[float, float], served: float = 1.0) -> Curve:
    shares = Shares(0, 0, 0, 0, 0)
    points = [Point(rate, seconds, rate, 1.0, shares, 0.0, 0) for rate, seconds in pairs]
    return Curve("", Point(math.inf, 1.0, served, 1.0, shares, 0.0, 0), points)


def test_curves_are_interpolated_and_go_on_at_the_ends_that_do_not_reach_the_levels() -> None:
    curve = make_curve((1, 0.1), (2, 0.1), (4, 0.4))
    assert curve.rate_at(0.2) == pytest.approx(3)
    assert curve.rate_at(0.4) == pytest.approx(4)
    assert curve.rate_at(0.05) is curve.rate_at(0.5) is None
    curve = make_curve((1, 0.1), (4, 0.4))
    assert curve.missing(0.1, 0.4) == []
    assert curve.missing(0.05, 0.4) == [pytest.approx(0.6)]
    assert curve.missing(0.1, 0.5) == [pytest.approx(5.4)]


def test_ratios_are_of_rates_at_equal_latency() -> None:
    found = ratios({QUIRE: make_curve((2, 0.1), (8, 0.8), served=8), MAX: make_curve((1, 0.1), (2, 0.2), served=2)})[
        MAX
    ]
    assert found.at_levels[0] == pytest.approx(
        (2 + 6 * math.log(1.5) / math.log(8)) / (1 + math.log(1.5) / math.log(2))
    )
    assert found.at_levels[2] is None
    assert found.saturated == 4
