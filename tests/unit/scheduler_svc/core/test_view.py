"""Changes that a watcher gets add up to the present state."""

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from scheduler_svc.core import view
from scheduler_svc.core.admission import Obstacle
from scheduler_svc.core.beam_search import BeamParameters, EarlyStopping
from scheduler_svc.core.config import PreemptionMode
from scheduler_svc.core.paging.block_pool import BlockId
from scheduler_svc.core.paging.sequence import SequenceStatus
from scheduler_svc.core.request import RefusedError
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.view import Changes, Picture, View
from tests.support.core_driver import Driver, make_config, make_request


@dataclass
class ViewMirror:
    """The state as a watcher knows it, only from the changes that it got: block tables, states, statuses and progress
    by number of the sequence, names and pins by block."""

    tables: dict[int, list[int]] = field(default_factory=dict)
    states: dict[int, dict[int, int]] = field(default_factory=dict)
    progress: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    names: dict[int, bytes] = field(default_factory=dict)
    pins: dict[int, int] = field(default_factory=dict)

    def see(self, seen: View, scheduler: Scheduler) -> None:
        """Applies the changes of a look, or its whole picture."""
        changes = seen.look(scheduler).changes
        if changes is None:
            self.apply_all(seen.picture())
        else:
            self.apply(changes)

    def apply_all(self, picture: Picture) -> None:
        """Applies the parts of a picture."""
        for part in picture.parts():
            self.apply(part)

    def apply(self, changes: Changes) -> None:
        if changes.is_whole:
            self.__init__()
        for number in changes.gone:
            del self.tables[number], self.progress[number], self.states[number]
        self.tables.update((each.number, []) for each in changes.new)
        self.states.update((each.number, {}) for each in changes.new)
        for number, status, num_tokens, num_computed in rows_of(changes.progress, 4):
            self.progress[number] = (status, num_tokens, num_computed)
        for number, length in rows_of(changes.lengths, 2):
            table = self.tables[number]
            self.tables[number] = [*table[:length], *[-1] * (length - len(table))]
        for number, index, block in rows_of(changes.tables, 3):
            self.tables[number][index] = block
        for number, index, block in rows_of(changes.states, 3):
            self.states[number][index] = block
        for block, name in changes.names:
            self.names[block] = name or b""
        self.pins.update(rows_of(changes.pins, 2))

    def check(self, scheduler: Scheduler) -> None:
        """Checks that it equals the scheduler's state."""
        pool, host = scheduler.batch.blocks.pool, scheduler.batch.blocks.host.pool
        swapped = SequenceStatus.SWAPPED.value
        of_host = [table for number, table in self.tables.items() if self.progress[number][0] == swapped]
        of_gpu = [table for number, table in self.tables.items() if self.progress[number][0] != swapped]
        of_gpu += [[*state.values()] for state in self.states.values()]
        # Checkpoints of steps in flight belong to no sequence.
        of_gpu += [[*each.blocks] for planned in scheduler.batch.checkpoints.values() for each in planned]
        for its, tables, pins in ((pool, of_gpu, self.pins), (host, of_host, {})):
            holders = Counter(block for table in tables for block in table)
            holders.update(pins)
            blocks = range(its.num_blocks)
            assert [holders[block] for block in blocks] == its.ref_counts_of([BlockId(block) for block in blocks])
        names = [self.names.get(block) or None for block in range(pool.num_blocks)]
        assert names == pool.names(0, pool.num_blocks)


def rows_of(flat: list[int], width: int) -> list[Any]:
    """The rows of a flat list."""
    return list(zip(*[iter(flat)] * width, strict=True))


def changes_of(seen: View, driver: Driver) -> view.Changes:
    changes = seen.look(driver.scheduler).changes
    assert changes is not None
    return changes


def busy_driver(seed: int, state_blocks: int = 0) -> Driver:
    """A driver with more work than its pool has room for."""
    mode = PreemptionMode.SWAP if seed % 2 else PreemptionMode.AUTO
    sizes = {"num_blocks": 14 + 6 * state_blocks, "num_host_blocks": 16, "state_blocks": state_blocks}
    return Driver(make_config(**sizes, max_pinned=0.4, pin_quota=0.4, preemption_mode=mode))


def submit_some(driver: Driver, rng: random.Random, handle: int) -> None:
    beam = BeamParameters(3, 1.0, EarlyStopping.FALSE) if handle % 3 == 0 else None
    count = 3 if beam is not None else rng.choice([1, 1, 2])
    prompt = [1] * rng.randrange(12) + [handle] * rng.randrange(1, 8)
    returned = 1 if beam else count
    request = make_request(
        handle, prompt=prompt, max_tokens=rng.randrange(1, 14), num_sequences=count, num_returned=returned, beam=beam
    )
    try:
        driver.submit(request)
    except RefusedError:
        return


@pytest.mark.parametrize("max_entries", [8_192, 7])
@pytest.mark.parametrize("state_blocks", [0, 3])
@pytest.mark.parametrize("seed", range(2))
def test_changes_add_up_to_the_pool_under_any_load(seed, state_blocks, max_entries, monkeypatch):
    monkeypatch.setattr(view, "_MAX_ENTRIES", max_entries)
    monkeypatch.setattr(view, "_NAMES_AT_ONCE", 4)
    rng, driver = random.Random(seed), busy_driver(seed, state_blocks)
    seen, mirror = View(), ViewMirror()
    for turn in range(160):
        match rng.randrange(10):
            case 0 | 1 if turn < 120:
                submit_some(driver, rng, turn)
            case 2 if turn == 60 + seed:
                driver.crash()
            case 3 if not len(driver.scheduler.pins):
                driver.scheduler.pin("", [1] * 8, driver.clock, 20.0)
            case 4:
                driver.deliver()
            case _:
                driver.plan()
        if rng.random() < 0.5:
            mirror.see(seen, driver.scheduler)
            mirror.check(driver.scheduler)
            late = ViewMirror()
            late.apply_all(seen.picture())
            late.check(driver.scheduler)
            assert late.tables == mirror.tables
            assert late.progress == mirror.progress
    driver.run_until_idle()
    mirror.see(seen, driver.scheduler)
    mirror.check(driver.scheduler)
    assert not mirror.tables


@pytest.mark.parametrize("mode", [PreemptionMode.SWAP, PreemptionMode.RECOMPUTE])
def test_a_preemption_is_seen_with_where_its_blocks_went(mode):
    driver, seen = Driver(make_config(num_host_blocks=16, preemption_mode=mode)), View()
    driver.submit(make_request(1))
    driver.run_steps(2)
    seen.look(driver.scheduler)
    driver.preempt(make_request(1))
    look = seen.look(driver.scheduler)
    assert look.preempted == [view.Preempted(1, is_swapped=mode is PreemptionMode.SWAP)]
    assert not look.is_empty
    assert seen.look(driver.scheduler).is_empty


def test_a_decode_changes_progress_and_a_full_block_a_table():
    driver, seen = busy_driver(0), View()
    driver.submit(make_request(1, prompt_len=7, max_tokens=8))
    driver.run_steps(1)
    seen.look(driver.scheduler)
    driver.run_steps(1)
    changes = changes_of(seen, driver)
    assert (changes.new, changes.gone, changes.tables) == ([], [], [])
    assert changes.progress == [1, 2, 9, 8]
    driver.run_steps(1)
    changes = changes_of(seen, driver)
    assert changes.lengths == [1, 3]
    assert changes.tables == [1, 2, 2]


def test_a_picture_of_a_large_pool_comes_in_parts_of_bounded_size_and_stays_as_it_was(monkeypatch):
    monkeypatch.setattr(view, "_MAX_ENTRIES", 40)
    monkeypatch.setattr(view, "_NAMES_AT_ONCE", 16)
    driver, seen = Driver(make_config(num_blocks=600, max_model_len=900, max_num_batched_tokens=900)), View()
    for handle in (1, 2):
        driver.submit(make_request(handle, prompt_len=800, max_tokens=4))
        driver.run_steps(1)
    driver.scheduler.pin("", list(make_request(1, prompt_len=400).prompt), driver.clock, 1000.0)
    seen.look(driver.scheduler)
    early, late = ViewMirror(), ViewMirror()
    parts = seen.picture().parts()
    early.apply(next(parts))
    mirror_at_once = ViewMirror()
    assert all(part.is_full for part in [*seen.picture().parts()][:-1])
    mirror_at_once.apply_all(seen.picture())
    driver.run_until_idle()
    seen.look(driver.scheduler)
    for part in parts:
        assert not part.is_whole
        assert len(part.tables) // 3 + len(part.names) + len(part.pins) // 2 <= 40 + 16
        early.apply(part)
    assert early == mirror_at_once
    late.apply_all(seen.picture())
    late.check(driver.scheduler)


def obstacles(driver: Driver) -> dict[str, Obstacle]:
    return {each.group.request.request_id: each.obstacle for each in view.waiting(driver.scheduler, 8)}


@pytest.mark.parametrize(
    ("config", "prompt_len", "num_requests", "expected"),
    [
        ({"max_num_seqs": 1}, 5, 3, {"request-2": Obstacle.ROWS, "request-3": Obstacle.BEHIND}),
        ({"num_blocks": 5}, 12, 2, {"request-2": Obstacle.BLOCKS}),
        ({"max_num_batched_tokens": 8}, 12, 2, {"request-2": Obstacle.TOKENS}),
    ],
)
def test_who_waits_for_rows_blocks_and_tokens_and_who_is_behind(config, prompt_len, num_requests, expected):
    driver = Driver(make_config(**config))
    for handle in range(1, num_requests + 1):
        driver.submit(make_request(handle, prompt_len=prompt_len))
    behind = [f"request-{handle}" for handle in range(2, num_requests + 1)]
    assert obstacles(driver) == {"request-1": Obstacle.NEXT_STEP} | dict.fromkeys(behind, Obstacle.BEHIND)
    driver.plan()
    assert obstacles(driver) == expected


def test_who_was_swapped_out_waits_for_blocks():
    driver = Driver(make_config(num_blocks=7, num_host_blocks=16, preemption_mode=PreemptionMode.SWAP))
    for handle in range(1, 4):
        driver.submit(make_request(handle, prompt_len=8, max_tokens=20))
    while not driver.scheduler.swapped:
        driver.run_steps(1)
    driver.run_steps(1)
    assert obstacles(driver) == {"request-2": Obstacle.BLOCKS, "request-3": Obstacle.SWAPPED_FIRST}


def test_who_waits_for_a_prefix_that_another_computes():
    driver = Driver(make_config(max_num_batched_tokens=8))
    for handle in (1, 2):
        driver.submit(make_request(handle, prompt=[1] * 24))
    driver.run_steps(2)
    assert obstacles(driver) == {"request-2": Obstacle.SHARED_PREFIX}


def test_owners_of_a_shared_block_have_its_computed_tokens():
    driver = Driver(make_config())
    driver.submit(make_request(1, prompt=[5, 6, 7, 8, 9, 10], num_sequences=2))
    driver.plan()
    first = view.owners(driver.scheduler, BlockId(0), is_host=False)
    assert [(each.sequence.index, each.logical_index) for each in first] == [(0, 0), (1, 0)]
    assert all(list(each.token_ids) == [5, 6, 7, 8] for each in first)
    assert [list(each.token_ids) for each in view.owners(driver.scheduler, BlockId(1), is_host=False)] == [[9, 10]] * 2
    assert not view.owners(driver.scheduler, BlockId(7), is_host=False)
