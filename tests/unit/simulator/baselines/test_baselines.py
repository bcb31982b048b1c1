"""Orca and FasterTransformer as block managers of the real scheduler."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.core.beam_search import BeamParameters
from scheduler_svc.core.config import PolicyKind, SchedulerConfig
from scheduler_svc.core.request import ClientId, Handle, Request, RequestKey, RowSampling
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step import StepPlan
from simulator.baselines.buddy import BuddyAllocator
from simulator.baselines.contiguous import (
    ContiguousBlocks,
    OrcaMax,
    OrcaOracle,
    OrcaPow2,
    RequestLevelBatches,
    Reservation,
)
from simulator.tokens import fake_tokens

BLOCK_SIZE = 4
MAX_LEN = 64
ORCAS = (OrcaMax, OrcaPow2, OrcaOracle)


def make_config(num_slots: int = 256) -> SchedulerConfig:
    return SchedulerConfig(num_slots // BLOCK_SIZE, BLOCK_SIZE, 32, 512, MAX_LEN)


def make_request(
    index: int, prompt_len: int, output_len: int, width: int = 1, beam: BeamParameters | None = None
) -> Request:
    key, returned = RequestKey(ClientId(0), Handle(index)), width if beam is None else 1
    prompt, sampling = [7] * prompt_len, RowSampling(index)
    return Request(key, str(index), prompt, sampling, output_len, num_sequences=width, num_returned=returned, beam=beam)


def run(
    make_blocks: type[ContiguousBlocks],
    requests: Sequence[Request],
    look: Callable[[Scheduler], None] = lambda scheduler: None,
    num_slots: int = 256,
) -> list[list[int]]:
    """Runs all requests, which come at once. `look` sees the scheduler after each plan. Returns the handles that ended
    with each step."""
    scheduler = Scheduler(make_config(num_slots), make_blocks.of)
    for request in requests:
        scheduler.submit(request, 0.0)
    ended: list[list[int]] = []
    while (plan := scheduler.schedule(0.0)) is not None:
        look(scheduler)
        check_plan(plan)
        events = scheduler.apply(fake_tokens(plan, scheduler.batch.rows), 0.0)
        ended.append([end.handle for each in events.values() for end in each.completed])
    assert not scheduler.num_live
    blocks = blocks_of(scheduler)
    # All pieces have been merged.
    assert blocks.pool.num_free == blocks.pool.num_blocks
    assert blocks.pool.allocate(blocks.pool.num_blocks) == list(range(blocks.pool.num_blocks))
    assert blocks.num_reserved_slots == blocks.num_needed_slots == 0
    assert scheduler.num_preemptions == 0
    return ended


def check_plan(plan: StepPlan) -> None:
    assert not len(plan.block_table_deltas), "a sequence grew beyond its region"
    assert not len(plan.copy)


def blocks_of(scheduler: Scheduler) -> ContiguousBlocks:
    blocks = scheduler.batch.blocks
    assert isinstance(blocks, ContiguousBlocks)
    return blocks


def check_regions(scheduler: Scheduler) -> None:
    """Each running sequence has a long enough region of consecutive blocks, and no regions overlap."""
    held: set[int] = set()
    for group in scheduler.running:
        for sequence in group.unfinished:
            table = sequence.block_table
            if not table:
                continue
            assert table == list(range(table[0], table[0] + len(table)))
            assert len(table) * BLOCK_SIZE >= group.request.max_len
            assert not held & set(table)
            held |= set(table)
    blocks = blocks_of(scheduler)
    assert len(held) <= blocks.pool.num_used
    assert blocks.num_needed_slots <= blocks.num_reserved_slots
    assert (scheduler.batch.rows.num_computed[scheduler.batch.rows.active] <= MAX_LEN).all()


lengths = st.tuples(st.integers(1, 24), st.integers(1, 24), st.integers(1, 3), st.booleans())


@settings(max_examples=settings().max_examples // 2)
@given(st.sampled_from(ORCAS), st.lists(lengths, min_size=1, max_size=20))
def test_regions_never_overlap_and_hold_all_tokens(
    make_blocks: type[ContiguousBlocks], drawn: list[tuple[int, int, int, bool]]
) -> None:
    requests = [
        make_request(index, prompt, output, width, BeamParameters(width) if is_beam else None)
        for index, (prompt, output, width, is_beam) in enumerate(drawn)
    ]
    ended = run(make_blocks, requests, check_regions)
    assert sorted(handle for step in ended for handle in step) == list(range(len(drawn)))


def test_a_power_of_two_is_reserved_for_the_output() -> None:
    assert Reservation.POW2.slots(10, 25, 2048) == 10 + 32
    assert Reservation.POW2.slots(1000, 600, 1700) == 1700


def test_what_cannot_be_served_is_refused() -> None:
    with pytest.raises(ValueError, match="3 regions of 64 slots do not fit into a pool of 128 slots"):
        run(OrcaMax, [make_request(0, 3, 2, width=3)], num_slots=128)
    with pytest.raises(ValueError, match="policy is priority; contiguous regions take fcfs only"):
        OrcaMax.of(SchedulerConfig(8, 4, 4, 16, 32, policy=PolicyKind.PRIORITY))
    with pytest.raises(ValueError, match="a request has 2 sequences"):
        run(RequestLevelBatches, [make_request(0, 4, 3, width=2)])
    with pytest.raises(ValueError, match="at least 1 slot, got 0"):
        BuddyAllocator(0)


def test_a_batch_runs_to_its_end_before_the_next_one() -> None:
    # Four regions of 64 slots; the first batch lasts as long as its longest.
    requests = [make_request(index, 4, output) for index, output in enumerate([2, 9, 2, 2, 3, 1])]
    scheduler = Scheduler(make_config(), RequestLevelBatches.of)
    for request in requests:
        scheduler.submit(request, 0.0)
    running: list[int] = []
    while (plan := scheduler.schedule(0.0)) is not None:
        running.append(len(plan.rows))
        scheduler.apply(fake_tokens(plan, scheduler.batch.rows), 0.0)
    assert running == [4, 4, *[1] * 7, 2, 1, 1]
    blocks = scheduler.batch.blocks
    assert isinstance(blocks, RequestLevelBatches)
    assert [[key.handle for key in batch] for batch in blocks.batches] == [[0, 1, 2, 3], [4, 5]]
    assert blocks.pool.num_free == blocks.pool.num_blocks
