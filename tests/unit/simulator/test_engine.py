"""The loop in virtual time: every request ends with all its tokens, times follow from the costs, results repeat."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from scheduler_svc.core.beam_search import BeamParameters
from scheduler_svc.core.config import PreemptionMode, SchedulerConfig
from scheduler_svc.core.kv_cache import BlockManager
from scheduler_svc.core.request import Request, RowSampling
from scheduler_svc.core.step import StepWork
from simulator.costs import StepSeconds
from simulator.engine import Simulation, StuckError, key_of, simulate
from simulator.memory import Limit


class FixedSteps:
    """Every step takes the same time."""

    def __init__(self, seconds: float = 0.01) -> None:
        self._seconds = StepSeconds(seconds)

    def seconds(self, work: StepWork) -> StepSeconds:
        return self._seconds


class Listed:
    """Requests with their times."""

    def __init__(self, timed: list[tuple[float, Request]]) -> None:
        self._timed = timed
        self._next = 0
        self.ends: list[int] = []

    def next_at(self) -> float | None:
        return self._timed[self._next][0] if self._next < len(self._timed) else None

    def take(self) -> Request:
        self._next += 1
        return self._timed[self._next - 1][1]

    def ended(self, index: int, now: float, *, failed: bool) -> None:
        self.ends.append(index)


def make_config(**changes: Any) -> SchedulerConfig:
    config = SchedulerConfig(
        num_blocks=64, block_size=16, max_num_seqs=16, max_num_batched_tokens=256, max_model_len=512, watermark=0.0
    )
    return replace(config, **changes)


def make_request(index: int, prompt: int, output: int, n: int = 1, beam: int | None = None) -> Request:
    tokens = np.random.default_rng(index).integers(10, 1000, prompt).tolist()
    width = beam or n
    return Request(
        key_of(index),
        str(index),
        tokens,
        RowSampling(index),
        output,
        num_sequences=width,
        num_returned=n,
        beam=None if beam is None else BeamParameters(beam),
    )


def run(requests: list[tuple[float, Request]], seconds: float = 0.01, **changes: Any) -> Simulation:
    return simulate(Listed(requests), make_config(**changes), FixedSteps(seconds))


def test_each_token_takes_a_step_and_the_prompt_one() -> None:
    simulation = run([(1.0, make_request(0, 20, 5))])
    (life,) = simulation.lives
    assert life.token_times == [pytest.approx([1.01, 1.02, 1.03, 1.04, 1.05])]
    assert life.ended == pytest.approx(1.05)
    assert [step.work.num_tokens for step in simulation.steps] == [20, 1, 1, 1, 1]


def test_a_request_waits_for_the_step_that_is_planned_already() -> None:
    simulation = run([(0.0, make_request(0, 20, 50)), (0.005, make_request(1, 20, 5))])
    # At 0.005 s the first step runs and the second, which is planned already, follows it.
    assert simulation.lives[1].token_times[0][0] == pytest.approx(0.03)


def test_latency_of_launch_and_answer_is_hidden_but_where_the_device_idles() -> None:
    class Delayed:
        def seconds(self, work: StepWork) -> StepSeconds:
            return StepSeconds(0.01, launch=0.004, answer=0.002)

    simulation = simulate(Listed([(0.0, make_request(0, 20, 5))]), make_config(), Delayed())
    assert simulation.lives[0].token_times[0] == pytest.approx([0.016, 0.026, 0.036, 0.046, 0.056])


MIXED = [
    (0.02 * index, make_request(index, 10 + 37 * index % 90, 5 + 61 * index % 70, n=1 + index % 3))
    for index in range(20)
]


@pytest.mark.parametrize("mode", PreemptionMode)
def test_every_request_gets_all_its_tokens_under_pressure(mode: PreemptionMode) -> None:
    simulation = run(MIXED, num_blocks=24, num_host_blocks=24, preemption_mode=mode)
    assert simulation.num_preemptions > 0
    for life, (arrived, request) in zip(simulation.lives, MIXED, strict=True):
        assert life.arrived == arrived
        assert life.error is None
        assert [len(times) for times in life.token_times] == [request.max_tokens] * request.num_returned
        assert all(times == sorted(times) for times in life.token_times)
    # No slot of the pool is counted twice.
    for memory in (step.memory for step in simulation.steps):
        assert min(memory.tokens, memory.reserved, memory.wasted, memory.shared, memory.cached) >= 0
        assert memory.tokens + memory.reserved + memory.wasted + memory.cached <= memory.total


def test_each_step_says_what_limited_it() -> None:
    requests = [(0.0, make_request(index, 30, 60)) for index in range(6)]
    assert {step.limit for step in run(requests, num_blocks=12).steps} == {Limit.BLOCKS, Limit.DEMAND}
    assert {step.limit for step in run(requests, max_num_seqs=2).steps} == {Limit.ROWS, Limit.DEMAND}
    assert {step.limit for step in run(requests, max_num_batched_tokens=32).steps} == {Limit.TOKENS, Limit.DEMAND}


def test_a_block_manager_that_never_has_room_is_an_error() -> None:
    class NoRoom(BlockManager):
        def has_room(self, num_blocks: int, *, reserve: int = 0, alone: bool = False) -> bool:
            return False

    with pytest.raises(StuckError, match="1 requests are left"):
        simulate(Listed([(0.0, make_request(0, 30, 10))]), make_config(), FixedSteps(), make_blocks=NoRoom.of)
