"""Loads as the simulator serves them: every token is accounted for, and turns and slots are kept in order."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from quire.load import LoadRequest, Poisson, RequestRecord, chat, sharegpt, take, with_arrivals, with_decoding
from quire.load.requests import frozen
from scheduler_svc.core.config import PreemptionMode, SchedulerConfig
from scheduler_svc.core.kv_cache import BlockManager
from scheduler_svc.core.step import StepWork
from simulator.costs import StepSeconds
from simulator.engine import StuckError, simulate
from simulator.load import LoadArrivals
from simulator.memory import Limit, paged_memory
from simulator.replica import Outcome, Replica
from tests.support.core_driver import Driver, make_config, make_request

CONFIG = SchedulerConfig(
    num_blocks=64, block_size=16, max_num_seqs=16, max_num_batched_tokens=256, max_model_len=512, num_host_blocks=32
)


@dataclass(frozen=True)
class LinearSteps:
    """A step takes `fixed` seconds, and more for each token."""

    fixed: float = 0.01

    def seconds(self, work: StepWork) -> StepSeconds:
        return StepSeconds(self.fixed + 1e-4 * work.num_tokens)


REPLICA = Replica(CONFIG, LinearSteps(), vocab_size=1000)


def chats(rate: float, count: int = 16) -> list[LoadRequest]:
    load = take(sharegpt(CONFIG.max_model_len, REPLICA.vocab_size), count, seed=5)
    return with_arrivals(load, Poisson(rate), seed=5)


def plain(
    index: int, prompt: int = 20, output: int | None = 10, turn: int = 0, arrival_s: float | None = None
) -> LoadRequest:
    tokens = frozen(np.arange(10, 10 + prompt))
    return LoadRequest(index, tokens, output, turn=turn, group=0, num_new_tokens=prompt, arrival_s=arrival_s)


def assert_all_tokens(load: Sequence[LoadRequest], records: Sequence[RequestRecord]) -> None:
    assert [record.index for record in records] == [request.index for request in load]
    for request, record in zip(load, records, strict=True):
        assert record.error is None
        assert record.prompt_tokens == len(request.token_ids)
        assert np.bincount(record.chunk_sequences, record.chunk_tokens).tolist() == [request.output_len] * request.n
        assert (np.diff(record.chunk_times_s) >= 0).all()
        assert record.sent_s is not None
        assert record.arrival_s <= record.sent_s < record.chunk_times_s[0] <= record.end_s


@pytest.mark.parametrize(("n", "beam_width"), [(4, None), (2, 4)])
def test_sequences_of_one_request_are_records_of_their_own(n: int, beam_width: int | None) -> None:
    load = with_decoding(chats(1.0, 5), n=n, beam_width=beam_width)
    outcome = Replica(replace(CONFIG, num_blocks=200), LinearSteps(), vocab_size=1000).run(load)
    assert_all_tokens(load, outcome.records)
    assert outcome.counters()["kv_shared_share"] > 0


def test_turns_wait_for_each_other_and_find_their_history_cached() -> None:
    load = with_arrivals(take(chat(CONFIG.max_model_len, 1000, delay_s=0.1), 16, seed=1), Poisson(2.0), seed=1)
    outcome = REPLICA.run(load)
    by_index = {record.index: record for record in outcome.records}
    num_turns = 0
    for before, after in itertools.pairwise(load):
        if after.turn:
            num_turns += 1
            end = by_index[before.index].end_s
            assert by_index[after.index].arrival_s == pytest.approx(end + after.delay_s)
    assert num_turns > 5
    assert sum(record.cached_tokens or 0 for record in outcome.records) > 0


def test_a_closed_loop_counts_from_the_free_slot_and_ends_with_the_duration() -> None:
    dataset = sharegpt(CONFIG.max_model_len, 1000)
    outcome = REPLICA.run(dataset.requests(seed=1), max_concurrency=2, is_closed=True, duration_s=10.0)
    assert all(record.sent_s == record.arrival_s < 10.0 for record in outcome.records)
    assert outcome.records[-1].end_s > 9.0


def test_turns_after_one_that_failed_are_not_sent() -> None:
    load = [plain(0, prompt=600, arrival_s=0.0), plain(1, turn=1), plain(2, turn=2), plain(3, arrival_s=0.5)]
    errors = [record.error for record in REPLICA.run(load).records]
    assert errors == ["NEVER_FITS", "EARLIER_TURN_FAILED", "EARLIER_TURN_FAILED", None]


def test_requests_that_have_no_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="request 1 leaves its end to the model"):
        REPLICA.run([plain(0, output=None)])
    with pytest.raises(ValueError, match="request 1 has a text as its prompt"):
        REPLICA.run([LoadRequest(0, "a text", 10)])


class FixedSteps:
    """Every step takes the same time."""

    def __init__(self, **latency: float) -> None:
        self._seconds = StepSeconds(0.01, **latency)

    def seconds(self, work: StepWork) -> StepSeconds:
        return self._seconds


def run_fixed(load: Sequence[LoadRequest], config: SchedulerConfig = CONFIG, **latency: float) -> Outcome:
    return Replica(config, FixedSteps(**latency), vocab_size=1000).run(load)


def test_each_token_takes_a_step_and_latency_is_hidden_but_where_the_device_idles() -> None:
    outcome = run_fixed([plain(0, output=5, arrival_s=1.0)])
    assert outcome.records[0].chunk_times_s.tolist() == pytest.approx([1.01, 1.02, 1.03, 1.04, 1.05])
    assert [step.work.num_tokens for step in outcome.simulation.steps] == [20, 1, 1, 1, 1]
    (delayed,) = run_fixed([plain(0, output=5, arrival_s=0.0)], launch=0.004, answer=0.002).records
    assert delayed.chunk_times_s.tolist() == pytest.approx([0.016, 0.026, 0.036, 0.046, 0.056])
    # At 0.005 s the first step runs and the second, which is planned already, follows it.
    _, second = run_fixed([plain(0, output=50, arrival_s=0.0), plain(1, output=5, arrival_s=0.005)]).records
    assert second.chunk_times_s[0] == pytest.approx(0.03)


@pytest.mark.parametrize("mode", PreemptionMode)
def test_every_request_gets_all_its_tokens_under_pressure(mode: PreemptionMode) -> None:
    load = [
        replace(plain(index, 10 + 37 * index % 90, 5 + 61 * index % 70, arrival_s=0.02 * index), n=1 + index % 3)
        for index in range(20)
    ]
    outcome = run_fixed(load, replace(CONFIG, num_blocks=24, num_host_blocks=24, preemption_mode=mode))
    assert outcome.simulation.num_preemptions > 0
    assert_all_tokens(load, outcome.records)
    # No slot of the pool is counted twice.
    for memory in (step.memory for step in outcome.simulation.steps):
        assert min(memory.tokens, memory.reserved, memory.wasted, memory.shared, memory.cached) >= 0
        assert memory.tokens + memory.reserved + memory.wasted + memory.cached <= memory.total


def test_the_use_of_a_pool_of_groups_counts_only_blocks_that_are_held() -> None:
    driver = Driver(make_config(num_blocks=100, windowed_groups=2, window=10, max_num_batched_tokens=12))
    for handle, length in enumerate((50, 9, 31)):
        driver.submit(make_request(handle, prompt_len=length, max_tokens=40, prompt=[handle] * length))
    blocks, most = driver.scheduler.batch.blocks, 0
    for _ in range(40):
        driver.run_steps(1)
        memory, tables = paged_memory(driver.scheduler), driver.scheduler.batch.blocks_by_kind()
        assert (memory.shared, memory.total) == (0, 400)
        assert memory.tokens + memory.reserved + memory.wasted == 4 * sum(tables) == 4 * blocks.pool.num_used
        most = max(most, memory.tokens)
    assert most > 4 * 30


def test_states_and_their_checkpoints_are_no_tokens() -> None:
    driver = Driver(make_config(num_blocks=100, state_blocks=3))
    for handle, length in enumerate((21, 9, 31)):
        driver.submit(make_request(handle, prompt_len=length, max_tokens=30, prompt=[handle] * length))
    blocks, most = driver.scheduler.batch.blocks, 0
    for _ in range(25):
        driver.run_steps(1)
        memory, (full, _, states) = paged_memory(driver.scheduler), driver.scheduler.batch.blocks_by_kind()
        assert memory.tokens + memory.reserved + memory.wasted == 4 * full
        assert memory.states >= 4 * states
        assert 4 * full + memory.states == 4 * blocks.pool.num_used
        most = max(most, states)
    assert most == 9


def test_each_step_says_what_limited_it() -> None:
    prompts = [frozen(np.arange(10 + 50 * index, 40 + 50 * index)) for index in range(6)]
    load = [replace(plain(index, 30, 60, arrival_s=0.0), prompt=each) for index, each in enumerate(prompts)]
    cases: list[tuple[dict[str, Any], Limit]] = [
        ({"num_blocks": 12}, Limit.BLOCKS),
        ({"max_num_seqs": 2}, Limit.ROWS),
        ({"max_num_batched_tokens": 32}, Limit.TOKENS),
    ]
    for changes, limit in cases:
        steps = run_fixed(load, replace(CONFIG, watermark=0.0, **changes)).simulation.steps
        assert {step.limit for step in steps} == {limit, Limit.DEMAND}


def test_a_block_manager_that_never_has_room_is_an_error() -> None:
    class NoRoom(BlockManager):
        def has_room(self, num_blocks: int, *, reserve: int, others_run: bool) -> bool:
            return False

    with pytest.raises(StuckError, match="1 requests are left"):
        simulate(LoadArrivals([plain(0, arrival_s=0.0)]), CONFIG, FixedSteps(), make_blocks=NoRoom.of)
