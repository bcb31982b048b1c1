"""Admission to the batch and its order, how prompts share a step, and how many requests are looked at for it."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from scheduler_svc.core import admission, kv_cache, planner, prefix_index
from scheduler_svc.core.config import PolicyKind
from scheduler_svc.core.kv_cache import BlockManager, VictimTables
from scheduler_svc.core.policy import FairPolicy
from scheduler_svc.core.prefix_index import PrefixIndex
from scheduler_svc.core.running_batch import Batch
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step import StepPlan, StepResult
from tests.support.core_driver import Driver, continued, make_config, make_request


def make_driver(max_in_flight: int = 1, **config) -> Driver:
    defaults = {"num_blocks": 700, "block_size": 4, "max_num_seqs": 32, "max_num_batched_tokens": 32}
    return Driver(make_config(**(defaults | {"max_model_len": 1500} | config)), max_in_flight)


def plan(driver: Driver) -> StepPlan:
    step = driver.plan()
    assert step is not None
    driver.deliver()
    return step


def chunks(driver: Driver, step: StepPlan) -> dict[int, int]:
    """Tokens that each running request computes in the step."""
    sequences = [driver.scheduler.batch.rows.sequences[row] for row in step.rows.tolist()]
    tokens = zip(sequences, step.num_new_tokens.tolist(), strict=True)
    return {sequence.request.key.handle: count for sequence, count in tokens if sequence is not None}


def steps_to_first_token(driver: Driver, handle: int) -> int:
    for count in range(1, 200):
        plan(driver)
        if driver.outputs[handle]:
            return count
    raise AssertionError("no first token")


@pytest.mark.parametrize(("share", "steps"), [(0.5, 1), (0.9, 2), (1.0, 39)])
def test_a_short_prompt_behind_a_long_one_has_its_first_token_soon(share, steps):
    driver = make_driver(max_prefill_share=share)
    driver.submit(make_request(1, prompt_len=1_250, max_tokens=2))
    plan(driver)
    driver.submit(make_request(2, prompt_len=5, max_tokens=2))
    assert steps_to_first_token(driver, 2) == steps


def test_a_step_that_also_decodes_computes_few_tokens_of_prompts():
    driver = make_driver(max_mixed_prefill_tokens=8)
    driver.submit(make_request(1, prompt_len=40, max_tokens=4))
    steps = [plan(driver).num_tokens for _ in range(2)]
    driver.submit(make_request(2, prompt_len=30, max_tokens=1))
    steps += [plan(driver).num_tokens for _ in range(4)]
    # A step has up to 32 tokens. The first request ends, and the last step only has what is left of the second.
    assert steps == [32, 8, 1 + 8, 1 + 8, 1 + 8, 6]


def test_steps_are_full_while_more_requests_wait_than_run():
    driver = make_driver(max_mixed_prefill_tokens=8)
    driver.submit(make_request(1, prompt_len=4, max_tokens=9))
    plan(driver)
    for handle in range(2, 7):
        driver.submit(make_request(handle, prompt_len=15, max_tokens=9))
    # One stream and five prompts: two of these are computed. Then there are three of each, and four and two.
    assert [plan(driver).num_tokens for _ in range(4)] == [32, 3 + 8, 3 + 8, 4 + 8]


def test_steps_are_as_full_as_without_a_bound():
    num_steps = []
    for share in (0.3, 0.5, 1.0):
        driver = make_driver(max_prefill_share=share)
        for handle in range(1, 22):
            driver.submit(make_request(handle, prompt_len=200 if handle % 10 == 1 else 5, max_tokens=1))
        tokens = []
        while (step := driver.plan()) is not None:
            tokens.append(step.num_tokens)
            driver.deliver()
        # The last step only seals blocks.
        assert set(tokens[:-2]) == {32}
        num_steps.append(len(tokens))
    assert len(set(num_steps)) == 1


def test_prompts_of_the_same_length_come_one_after_the_other():
    driver = make_driver()
    for handle in (1, 2):
        driver.submit(make_request(handle, prompt_len=120, max_tokens=2))
    assert [chunks(driver, plan(driver)) for _ in range(3)] == [{1: 32}, {1: 32}, {1: 32}]
    # Likewise if both have begun and have equally many tokens left.
    driver = make_driver()
    for handle, prompt_len in ((1, 116), (2, 5), (3, 111)):
        driver.submit(make_request(handle, prompt_len=prompt_len, max_tokens=3))
    assert [chunks(driver, plan(driver)) for _ in range(2)] == [{1: 16, 2: 5, 3: 11}, {1: 31, 2: 1}]


def test_a_long_prompt_goes_on_however_small_its_share():
    driver = make_driver(max_num_seqs=2, max_num_batched_tokens=2, max_prefill_share=0.3)
    for handle, prompt_len in ((1, 40), (2, 5)):
        driver.submit(make_request(handle, prompt_len=prompt_len))
    assert chunks(driver, plan(driver)) == {1: 1, 2: 1}


def test_what_is_cached_does_not_count_as_length():
    driver = make_driver()
    prompt = [7 + index % 40 for index in range(800)]
    driver.submit(make_request(1, prompt=prompt, max_tokens=1))
    driver.run_until_idle()
    driver.submit(make_request(2, prompt_len=400, max_tokens=1))
    plan(driver)
    driver.submit(make_request(3, prompt=[*prompt, 1, 2, 3], max_tokens=1))
    assert steps_to_first_token(driver, 3) == 1


@pytest.mark.parametrize(
    ("name", "least", "most", "too_little", "too_much"),
    [
        *[(name, 1, 1, 0, None) for name in ("num_blocks", "block_size", "max_num_seqs", "max_model_len")],
        ("max_num_batched_tokens", 8, 8, 7, None),
        ("num_host_blocks", 0, 0, -1, None),
        ("watermark", 0, 0.99, -0.01, 1),
        *[(name, 0, 1, -0.01, 1.01) for name in ("pin_quota", "max_pinned", "tenant_overflow")],
        ("max_prefill_share", 0.01, 1, 0, 1.01),
        ("max_mixed_prefill_tokens", 3, None, 2, None),
    ],
)
def test_limits_have_bounds(name, least, most, too_little, too_much):
    for taken in (least, most):
        assert getattr(make_config(**{name: taken}), name) == taken
    for refused in (too_little, too_much):
        if refused is not None:
            with pytest.raises(ValueError, match=f"{name} is {refused}"):
                make_config(**{name: refused})


def test_a_group_that_would_be_preempted_by_its_next_step_waits():
    driver = Driver(make_config(num_blocks=5), max_in_flight=1)
    driver.submit(make_request(1, prompt_len=8, max_tokens=8))
    driver.submit(make_request(2, prompt_len=8, max_tokens=8))
    driver.plan()
    # With two blocks each, one block is left, and both would need another for their ninth token.
    assert [group.request.key.handle for group in driver.scheduler.running] == [1]
    driver.run_until_idle()
    assert driver.finished == {1, 2}
    assert driver.scheduler.num_preemptions == 0


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_who_needs_no_further_block_is_admitted_into_the_last_ones(max_tokens):
    driver = Driver(make_config(num_blocks=4), max_in_flight=1)
    for handle in (1, 2):
        driver.submit(make_request(handle, prompt_len=9 - max_tokens, max_tokens=max_tokens))
    driver.plan()
    assert len(driver.scheduler.running) == 2
    driver.run_until_idle()
    assert driver.scheduler.num_preemptions == 0


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Records calls of a function from now on: an entry for each, or a value made of its result and arguments."""

    def count(owner: Any, name: str, entries: Callable[..., Iterable[Any]] = lambda *_: [None]) -> list[Any]:
        noted: list[Any] = []
        original = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            result = original(*arguments, **options)
            noted.extend(entries(result, *arguments))
            return result

        monkeypatch.setattr(owner, name, call)
        return noted

    return count


def make_driver_with_priorities(num_blocks: int) -> Driver:
    sizes = {"block_size": 16, "max_num_seqs": 64, "max_num_batched_tokens": 1024, "max_model_len": 1000}
    return Driver(make_config(num_blocks=num_blocks, policy=PolicyKind.PRIORITY, **sizes))


def make_full_driver(*priorities: int) -> Driver:
    """Requests of these priorities fill the pool except for two blocks, and end within their three blocks each."""
    driver = make_driver_with_priorities(3 * len(priorities) + 2)
    for handle, priority in enumerate(priorities):
        driver.submit(make_request(handle, prompt_len=33, max_tokens=15, priority=priority))
    driver.run_steps(2)
    assert driver.scheduler.batch.blocks.pool.num_free == 2
    return driver


def test_displacing_looks_at_those_who_leave_and_at_nobody_else(counted):
    driver = make_full_driver(*[0] * 20)
    looks = counted(VictimTables, "free")
    driver.submit(make_request(99, prompt_len=80, max_tokens=8, priority=1))
    driver.plan()
    assert driver.scheduler.num_preemptions == len(looks) == 2
    assert make_request(99).key in driver.scheduler.running
    driver.run_until_idle()


def test_displacing_in_vain_looks_at_nobody(counted):
    driver = make_full_driver(*[0, 100] * 10)
    looks, growths = counted(VictimTables, "free"), counted(Batch, "blocks_to_grow")
    driver.submit(make_request(99, prompt_len=640, max_tokens=8, priority=1))
    driver.run_steps(6)
    assert driver.scheduler.num_preemptions == len(looks) == 0
    assert len(growths) <= 2 * 6
    driver.run_until_idle()
    assert driver.finished == {*range(20), 99}


def test_those_who_share_too_much_to_make_room_are_looked_at_once_until_somebody_leaves(counted):
    driver = make_driver_with_priorities(25)
    driver.submit(make_request(0, prompt=[3] * 33, max_tokens=15, priority=100))
    driver.run_steps(2)
    for handle in range(1, 21):
        driver.submit(make_request(handle, prompt=[3] * 33, max_tokens=15))
    driver.run_steps(2)
    assert driver.scheduler.batch.blocks.pool.num_free == 2
    looks = counted(VictimTables, "free")
    # The blocks that are free or held by only one of the twenty.
    driver.submit(make_request(99, prompt_len=22 * 16, max_tokens=8, priority=1))
    driver.run_steps(4)
    assert driver.scheduler.num_preemptions == 0
    assert len(looks) == 20
    assert driver.scheduler.abort(make_request(5).key)
    driver.run_steps(4)
    assert len(looks) == 20 + 19
    driver.run_until_idle()
    assert driver.finished == {*range(21), 99} - {5}


def test_groups_that_make_room_leave_some_at_a_time_and_nobody_takes_their_place(monkeypatch):
    monkeypatch.setattr(planner, "_MAX_DISPLACED", 3)
    driver = make_full_driver(*[0] * 20)
    driver.submit(make_request(98, max_tokens=8))
    driver.submit(make_request(99, prompt_len=24 * 16, max_tokens=8, priority=1))
    for num_displaced in (3, 6, 8):
        driver.plan()
        assert driver.scheduler.num_preemptions == num_displaced
        driver.deliver()
    assert make_request(99).key in driver.scheduler.running
    assert make_request(98).key in driver.scheduler.waiting
    driver.run_until_idle()
    assert driver.finished == {*range(20), 98, 99}


def test_many_arrivals_are_admitted_some_a_step_with_one_look_at_those_who_run(counted, monkeypatch):
    monkeypatch.setattr(planner, "_MAX_ADMISSIONS", 10)
    driver = Driver(make_config(num_blocks=200, max_num_seqs=40, max_num_batched_tokens=400))
    for handle in range(25):
        driver.submit(make_request(handle, max_tokens=30))
    looks = counted(Batch, "blocks_to_grow")
    for num_running in (10, 20, 25):
        driver.run_steps(1)
        assert len(driver.scheduler.running) == num_running
    assert len(looks) == 3
    driver.run_until_idle()


def test_requests_that_wait_for_the_blocks_of_another_one_are_looked_at_some_a_step(counted, monkeypatch):
    monkeypatch.setattr(planner, "_MAX_BLOCKS_LOOKED_UP", 24)
    driver = Driver(make_config(num_blocks=400, max_num_seqs=40, max_num_batched_tokens=64, max_model_len=200))
    for handle in range(10):
        driver.submit(make_request(handle, prompt=[5] * 128, max_tokens=4))
    driver.plan()
    looks = counted(BlockManager, "next_hashes")
    # Each may share 31 blocks. 2 of them are looked up, and every 4 compared ones count as one more.
    driver.plan()
    assert len(looks) == 3
    driver.run_until_idle()
    assert driver.finished == {*range(10)}


def test_who_waits_for_a_long_prompt_is_looked_at_once_and_holds_up_nobody(counted, monkeypatch):
    monkeypatch.setattr(planner, "_MAX_BLOCKS_LOOKED_UP", 512)
    driver = make_driver(num_blocks=2000)
    long = [7 + index % 40 for index in range(1200)]
    driver.submit(make_request(0, prompt=long, max_tokens=2))
    plan(driver)
    looks = counted(BlockManager, "next_hashes", lambda _, blocks, sequence, count: [sequence.request.key.handle])
    for handle in range(1, 9):
        driver.submit(make_request(handle, prompt=[*long, handle], max_tokens=2))
    plan(driver)
    plan(driver)
    handle, num_steps = 100, []
    while not driver.outputs[0]:
        driver.submit(make_request(handle, prompt_len=5, max_tokens=2))
        num_steps.append(steps_to_first_token(driver, handle))
        handle += 1
    # The last short prompt comes after the followers, and a step admits two followers.
    assert num_steps[-1] <= 5
    assert set(num_steps[:-1]) == {1}
    # Once at the start, and again when it is admitted.
    assert all(looks.count(follower) <= 3 for follower in range(1, 9))
    driver.run_until_idle()
    assert driver.finished == {*range(9), *range(100, handle)}
    assert {driver.usage[follower].cached_tokens for follower in range(1, 9)} == {1200}


def test_cached_prompts_are_admitted_some_a_step(monkeypatch):
    driver = Driver(make_config(num_blocks=400, max_num_seqs=40, max_num_batched_tokens=64, max_model_len=200))
    driver.submit(make_request(0, prompt=[5] * 128, max_tokens=2))
    driver.run_until_idle()
    monkeypatch.setattr(planner, "_MAX_BLOCKS_LOOKED_UP", 64)
    for handle in range(1, 8):
        driver.submit(make_request(handle, prompt=[5] * 128, max_tokens=30))
    for num_running in (3, 6, 7):
        driver.run_steps(1)
        assert len(driver.scheduler.running) == num_running
    driver.run_until_idle()


def test_an_admission_looks_at_few_tenants_however_many_wait(counted):
    config = make_config(policy=PolicyKind.FAIR, num_blocks=100, max_num_seqs=20, max_waiting_requests=400)
    driver = Driver(config)
    for handle in range(100):
        driver.submit(make_request(handle, max_tokens=2, tenant=f"tenant-{handle}"))
    looks = counted(FairPolicy, "_counter")
    driver.run_until_idle()
    # Some for each step, some for each admission and one for each token.
    assert len(looks) < 100 * 12


def test_waiting_prompts_are_looked_up_once_a_step_however_many_longer_ones_are_computed(counted):
    config = make_config(num_blocks=1200, max_num_seqs=3, max_num_batched_tokens=64, max_model_len=2000)
    driver = Driver(config)
    driver.submit(make_request(99, prompt=[5] * 1000, max_tokens=2))
    driver.run_until_idle()
    for handle in range(3):
        driver.submit(make_request(handle, prompt_len=300, max_tokens=2))
    # Both are longer, except for the cached prefix of the second.
    driver.submit(make_request(3, prompt=[5] * 1000 + [6] * 500, max_tokens=2))
    driver.submit(make_request(4, prompt=[5] * 1000 + [7] * 5, max_tokens=2))
    driver.run_steps(2)
    assert len(driver.scheduler.running) == 3
    looks = counted(admission, "num_cached")
    driver.plan()
    assert len(looks) == 2
    driver.deliver()
    driver.run_until_idle()


def test_blocks_of_many_that_end_at_once_are_freed_over_some_calls_before_anybody_is_preempted(monkeypatch):
    monkeypatch.setattr(kv_cache, "_MAX_RECLAIMED", 3)
    driver = Driver(make_config(num_blocks=20, max_num_seqs=10, max_num_batched_tokens=60), max_in_flight=1)
    pool, rows = driver.scheduler.batch.blocks.pool, driver.scheduler.batch.rows
    for handle in range(9):
        driver.submit(make_request(handle, prompt_len=4, max_tokens=2))
    driver.submit(make_request(9, prompt_len=4, max_tokens=5))
    driver.run_steps(1)
    driver.submit(make_request(10, prompt_len=52, max_tokens=8))
    driver.run_steps(1)
    assert driver.finished == {*range(9)}
    assert (rows.num_free, pool.num_used) == (9, 20 - 6)
    driver.run_steps(1)
    # The next request takes more blocks than are free now.
    assert (len(driver.scheduler.running), pool.num_used) == (1, 20 - 12)
    driver.plan()
    assert len(driver.scheduler.running) == 2
    driver.run_until_idle()
    assert driver.finished == {*range(11)}
    assert driver.scheduler.num_preemptions == pool.num_used == 0


def make_scheduler() -> Scheduler:
    """Has no driver, whose checks would hash all sealed blocks."""
    return Scheduler(make_config(num_blocks=600, max_model_len=2000, max_num_batched_tokens=2000))


def run_steps(scheduler: Scheduler, count: int) -> None:
    for _ in range(count):
        plan = scheduler.schedule(0.0)
        assert plan is not None
        scheduler.apply(StepResult(plan.step_id, np.zeros(len(plan.samples), np.int64)), 0.0)


@pytest.mark.parametrize("policy", PolicyKind)
@pytest.mark.parametrize("num_sequences", [1, 2])
def test_a_prompt_that_does_not_fit_is_looked_up_once_while_nothing_of_it_changes(policy, num_sequences, counted):
    config = make_config(num_blocks=600, max_model_len=3000, max_num_batched_tokens=2000, policy=policy)
    scheduler = Scheduler(config)
    # From here on steps evict blocks of the first of these.
    for handle, length in ((0, 700), (1, 1600)):
        scheduler.submit(make_request(handle, prompt=[5 + handle] * length, max_tokens=2), 0.0)
        run_steps(scheduler, 2)
    scheduler.submit(make_request(2, prompt_len=300, max_tokens=200), 0.0)
    run_steps(scheduler, 2)
    large = make_request(3, prompt=[6] * 1600 + [7] * 570, max_tokens=60, num_sequences=num_sequences)
    scheduler.submit(continued(large, [1] * num_sequences), 0.0)
    run_steps(scheduler, 2)
    looks = [counted(PrefixIndex, name, lambda _, pool, blocks: blocks) for name in ("hits", "num_free_of")]
    free = scheduler.batch.blocks.pool.sealed_hashes()
    run_steps(scheduler, 40)
    assert set(free) - set(scheduler.batch.blocks.pool.sealed_hashes()), "nothing was evicted"
    assert large.key in scheduler.waiting
    # Looks at all 400 cached blocks in each step would be 16,000.
    assert sum(map(len, looks)) <= 40 * 64


def test_a_prompt_is_hashed_no_further_than_it_may_be_cached_before_it_is_computed(counted):
    scheduler = make_scheduler()
    hashes = counted(prefix_index, "hash_chain", lambda hashes, *_: hashes)
    scheduler.submit(make_request(0, prompt_len=1600, max_tokens=2), 0.0)
    assert scheduler.schedule(0.0) is not None
    assert len(hashes) <= 16


@pytest.mark.parametrize(("most_at_arrival", "num_at_arrival"), [(None, 399), (100, 100)])
def test_a_cached_prompt_is_hashed_when_it_comes_and_what_is_too_long_for_that_when_it_is_admitted(
    counted, monkeypatch, most_at_arrival, num_at_arrival
):
    if most_at_arrival is not None:
        monkeypatch.setattr(kv_cache, "_MAX_HASHES_AT_ARRIVAL", most_at_arrival)
    scheduler = make_scheduler()
    scheduler.submit(make_request(0, prompt=[5] * 1600, max_tokens=2), 0.0)
    run_steps(scheduler, 2)
    hashes = counted(prefix_index, "hash_chain", lambda hashes, *_: hashes)
    scheduler.submit(make_request(1, prompt=[5] * 1600, max_tokens=2), 0.0)
    assert len(hashes) == num_at_arrival
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert (len(hashes), plan.num_tokens) == (399, 4)
