"""The search for the highest rate: it brackets, bisects, and names the limit."""

import pytest

from quire.load import Poisson, Slo, fixed, take, with_arrivals
from scheduler_svc.core.config import SchedulerConfig
from simulator.replica import Outcome, Replica
from simulator.sweep import combinations, highest_rate, parse_sweep
from tests.unit.simulator.test_load import FixedSteps

STEP_S = 0.01
NUM_OUTPUT = 10


def serve(rate: float, max_num_seqs: int = 2, num_blocks: int = 200) -> Outcome:
    config = SchedulerConfig(num_blocks, 16, max_num_seqs, 256, 512)
    load = with_arrivals(take(fixed(20, NUM_OUTPUT, 1000), 24, seed=0), Poisson(rate), seed=0)
    return Replica(config, FixedSteps(), 1000).run(load)


def test_the_rate_that_is_found_is_kept_and_a_little_more_is_not() -> None:
    slo = Slo(ttft=0.3)
    found = highest_rate(serve, slo, min_share=0.9, lowest_rate=4.0)
    assert found.rate is not None
    # Two rows give one request each 0.1 s.
    assert 14 < found.rate < 30
    assert found.limited_by == "rows"
    assert (found.report.slo_share or 0) >= 0.9
    assert (serve(1.1 * found.rate).report(1.0, slo).slo_share or 0) < 0.9


def test_steps_that_are_too_slow_are_compute() -> None:
    found = highest_rate(serve, Slo(tpot=STEP_S / 2), min_share=0.9, lowest_rate=0.3)
    assert (found.rate, found.limited_by) == (None, "compute")


def test_no_rate_above_the_greatest_is_tried() -> None:
    rates: list[float] = []

    def run(rate: float) -> Outcome:
        rates.append(rate)
        return serve(rate)

    found = highest_rate(run, Slo(e2e=1e6), 0.9, 0.1, greatest_rate=5.0)
    assert (found.rate, found.limited_by) == (4.0, None)
    assert rates == [1.0, 2.0, 4.0]


def test_settings_are_combined_the_last_one_changing_fastest() -> None:
    sweep = parse_sweep("num-gpu-blocks=10:50%,policy")
    assert combinations(sweep) == [
        {"num_gpu_blocks": "10", "policy": "fcfs"},
        {"num_gpu_blocks": "10", "policy": "fair"},
        {"num_gpu_blocks": "50%", "policy": "fcfs"},
        {"num_gpu_blocks": "50%", "policy": "fair"},
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("speed", '"speed" cannot be swept'),
        ("", '"" cannot be swept'),
        ("policy,policy=fair", "policy is there twice"),
        ("max_num_seqs=", "max_num_seqs has an empty value"),
        ("max_num_seqs=1::2", "max_num_seqs has an empty value"),
    ],
)
def test_what_cannot_be_swept_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_sweep(text)
