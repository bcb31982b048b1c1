"""The paper's figures 6 to 9, copy-on-write and preemption, with `scheduler_svc.core.paging` only."""

import subprocess
import sys
from pathlib import Path

import numpy as np

from scheduler_svc.core import paging
from scheduler_svc.core.paging.batch import StepPlan
from scheduler_svc.core.paging.block_pool import BlockId, BlockPool
from scheduler_svc.core.paging.block_tables import BlockTableLayout, BlockTables, HostBlocks
from scheduler_svc.core.paging.scheduler import Scheduler
from scheduler_svc.core.paging.sequence import Sequence, SequenceGroup, SequenceStatus

Group = SequenceGroup[Sequence]

_MAX_LINES = 1000
"""Lines of the package, with docstrings and comments."""


DENSE = BlockTableLayout(block_size=4)


def make_scheduler(
    num_blocks: int = 16, num_host_blocks: int = 0, swaps_from: int = 2, layout: BlockTableLayout = DENSE
) -> Scheduler:
    blocks = BlockTables[Sequence](BlockPool(num_blocks), HostBlocks(BlockPool(num_host_blocks)), layout, watermark=0.0)
    return Scheduler(blocks, max_num_seqs=8, token_budget=32, swaps_from=swaps_from)


def add_request(
    scheduler: Scheduler,
    order: int,
    num_tokens: int,
    max_tokens: int,
    num_sequences: int = 1,
    *,
    are_beams: bool = False,
) -> Group:
    sequences = [
        Sequence(
            key=order,
            index=index,
            token_ids=list(range(num_tokens)),
            num_prompt_tokens=num_tokens,
            max_len=num_tokens + max_tokens,
            is_dependent=are_beams,
        )
        for index in range(num_sequences)
    ]
    group = Group(key=order, order=order, sequences=sequences)
    scheduler.waiting.add(group)
    return group


def ref_counts(scheduler: Scheduler, *blocks: int) -> list[int]:
    return [scheduler.batch.blocks.pool.ref_count(BlockId(block)) for block in blocks]


def run_step(scheduler: Scheduler, token_id: int = 7) -> tuple[StepPlan, list[Group]]:
    plan = scheduler.schedule()
    assert plan is not None
    return plan, scheduler.apply(plan.step_id, np.full(len(plan.samples), token_id))


def run_to_end(scheduler: Scheduler) -> list[Group]:
    ended: list[Group] = []
    while (plan := scheduler.schedule()) is not None:
        ended += scheduler.apply(plan.step_id, np.full(len(plan.samples), 7))
    blocks = scheduler.batch.blocks
    assert all(pool.num_free == pool.num_blocks for pool in (blocks.pool, blocks.host.pool))
    return ended


def tables(group: Group) -> list[list[int]]:
    return [list(sequence.block_table) for sequence in group.sequences]


def test_figure_6_a_block_is_opened_only_when_the_last_is_full():
    scheduler = make_scheduler()
    group = add_request(scheduler, 1, 7, 5)
    plan, _ = run_step(scheduler)
    assert (plan.rows.tolist(), plan.num_new_tokens.tolist(), tables(group)) == ([0], [7], [[0, 1]])
    plan, _ = run_step(scheduler)
    assert plan.block_table_deltas.tolist() == []
    plan, _ = run_step(scheduler)
    assert (plan.block_table_deltas.tolist(), tables(group)) == ([[0, 2, 2]], [[0, 1, 2]])
    assert run_to_end(scheduler) == [group]
    assert group.sequences[0].token_ids == [*range(7), 7, 7, 7, 7, 7]


def test_figure_7_two_requests_interleave_in_one_pool():
    scheduler = make_scheduler(num_blocks=9)
    first, second = add_request(scheduler, 1, 7, 8), add_request(scheduler, 2, 6, 8)
    for _ in range(4):
        run_step(scheduler)
    assert (tables(first), tables(second)) == ([[0, 1, 4]], [[2, 3, 5]])
    assert run_to_end(scheduler) == [first, second]


def test_figure_8_two_samples_share_the_prompt_and_copy_one_block_on_write():
    scheduler = make_scheduler()
    group = add_request(scheduler, 1, 7, 4, num_sequences=2)
    plan, _ = run_step(scheduler)
    assert (plan.fork.tolist(), plan.samples.tolist()) == ([[0, 1]], [[0, 0], [1, 0]])
    assert (tables(group), ref_counts(scheduler, 0, 1)) == (
        [[0, 1]] * 2,
        [2, 2],
    )
    # The first sample copies the last block; the second is its last holder then, and writes in place.
    plan, _ = run_step(scheduler)
    assert (plan.copy.tolist(), plan.block_table_deltas.tolist()) == ([[1, 2]], [[0, 1, 2]])
    assert tables(group) == [[0, 2], [0, 1]]
    assert run_to_end(scheduler) == [group]


def test_figure_9_beams_fork_from_the_beam_that_continues_and_share_its_blocks():
    scheduler = make_scheduler()
    group = add_request(scheduler, 1, 8, 8, num_sequences=2, are_beams=True)
    left, right = group.sequences
    for _ in range(3):
        run_step(scheduler)
        scheduler.batch.append_chosen(left, 1)
        scheduler.batch.append_chosen(right, 2)
    run_step(scheduler)
    assert tables(group) == [[0, 1, 2], [0, 1, 3]]
    # The right beam is dropped: its own block is free again, and both candidates continue from the left beam.
    scheduler.batch.blocks.free(right)
    assert ref_counts(scheduler, 0, 2, 3) == [1, 1, 0]
    right.token_ids = list(left.token_ids)
    scheduler.batch.fork(left, right)
    assert tables(group) == [[0, 1, 2], [0, 1, 2]]
    scheduler.batch.append_chosen(left, 3)
    scheduler.batch.append_chosen(right, 4)
    # One of them copies the block that both write to; full blocks stay shared.
    plan, _ = run_step(scheduler)
    assert (plan.fork.tolist(), plan.set_tokens.tolist()) == ([[0, 1]], [[0, 11, 3], [1, 11, 4]])
    assert (plan.copy.tolist(), tables(group)) == ([[2, 3]], [[0, 1, 3], [0, 1, 2]])
    assert [each.token_ids[8:] for each in group.sequences] == [[1, 1, 1, 3], [1, 1, 1, 4]]


def test_swap_preempts_a_group_and_brings_its_shared_blocks_back():
    scheduler = make_scheduler(num_blocks=7, num_host_blocks=8, swaps_from=1)
    groups = [add_request(scheduler, order, 8, 9, num_sequences=2) for order in (1, 2)]
    swaps = np.zeros(2, np.int64)
    ended: list[Group] = []
    while (plan := scheduler.schedule()) is not None:
        swaps += len(plan.swap_out), len(plan.swap_in)
        ended += scheduler.apply(plan.step_id, np.full(len(plan.samples), 7))
    assert ended == groups
    assert (groups[0].preemptions, groups[1].preemptions > 0) == (0, True)
    assert swaps[0] == swaps[1] > 0
    assert [each.token_ids for each in groups[1].sequences] == [[*range(8), *[7] * 9]] * 2


def test_recompute_preempts_the_newest_and_computes_its_output_as_a_prompt():
    scheduler = make_scheduler(num_blocks=5, swaps_from=9)
    first, second = add_request(scheduler, 1, 8, 8), add_request(scheduler, 2, 7, 8)
    assert run_to_end(scheduler) == [first, second]
    assert (first.preemptions, second.preemptions > 0) == (0, True)
    assert second.sequences[0].token_ids == [*range(7), *[7] * 8]


def test_a_result_of_a_row_that_was_released_is_dropped():
    scheduler = make_scheduler()
    group = add_request(scheduler, 1, 4, 8)
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.preempt(group, 0.0)
    assert scheduler.apply(plan.step_id, np.array([9])) == []
    assert (group.sequences[0].status, group.sequences[0].num_output_tokens) == (SequenceStatus.WAITING, 0)


def test_a_hit_is_as_long_as_all_groups_of_layers_can_serve():
    layout = BlockTableLayout(4, num_full=1, num_windowed=2, window=8)
    assert (layout.num_groups, layout.table_length(18)) == (3, 15)
    # Token 18 reads the tokens 11 to 18 of the window: blocks 0 and 1 are not read any more.
    assert [layout.first_block_read(position) for position in (0, 7, 10, 11, 18)] == [0, 0, 0, 1, 2]
    # The full group has four blocks. Token 16 reads tokens 9 to 15, so blocks 2 and 3.
    assert layout.hit_length(4, {2, 3}.__contains__) == 4
    # Without block 3 the next token is 12, which reads tokens 5 to 11, so blocks 1 and 2.
    assert layout.hit_length(4, {1, 2}.__contains__) == 3
    assert layout.hit_length(4, {0, 2}.__contains__) == 1
    assert DENSE.hit_length(4, set[int]().__contains__) == 4


def test_a_table_has_a_block_of_each_group_and_a_fork_copies_the_tail_of_each():
    scheduler = make_scheduler(layout=BlockTableLayout(4, num_full=2))
    group = add_request(scheduler, 1, 7, 4, num_sequences=2)
    run_step(scheduler)
    assert tables(group) == [[0, 1, 2, 3]] * 2
    plan, _ = run_step(scheduler)
    assert plan.copy.tolist() == [[2, 4], [3, 5]]
    assert plan.block_table_deltas.tolist() == [[0, 2, 4], [0, 3, 5]]
    assert run_to_end(scheduler) == [group]


def test_swap_and_decodes_with_two_groups():
    scheduler = make_scheduler(num_blocks=14, num_host_blocks=16, swaps_from=1, layout=BlockTableLayout(4, num_full=2))
    groups = [add_request(scheduler, order, 8, 9, num_sequences=2) for order in (1, 2)]
    assert run_to_end(scheduler) == groups
    assert groups[1].preemptions > 0
    assert [each.token_ids for each in groups[1].sequences] == [[*range(8), *[7] * 9]] * 2


def test_block_tables_take_cached_blocks():
    class Cached(BlockTables[Sequence]):
        def cached(self, sequence: Sequence) -> list[BlockId]:
            return [BlockId(5), BlockId(6)]

    blocks = Cached(BlockPool(8), HostBlocks(BlockPool(0)), DENSE, 0.0)
    blocks.pool.allocate(7)
    sequence = Sequence(key="a", index=0, token_ids=list(range(10)), num_prompt_tokens=10, max_len=12)
    assert blocks.allocate_slots([sequence]) == [(8, 2)]
    assert sequence.block_table == [5, 6, 7]


_RUN_ALL = """
import runpy, sys
for name, test in runpy.run_path(sys.argv[1]).items():
    if name.startswith("test_") and name != sys.argv[2]:
        test()
packages = {"quire", "gateway", "scheduler_svc", "simulator", "tests"}
ours = {name for name in sys.modules if name.split(".")[0] in packages} - {"scheduler_svc", "scheduler_svc.core"}
print(*sorted(name for name in ours if not name.startswith("scheduler_svc.core.paging")))
"""


def test_these_tests_run_with_seven_small_files_and_nothing_else_of_ours():
    this_test = "test_these_tests_run_with_seven_small_files_and_nothing_else_of_ours"
    run = subprocess.run(
        [sys.executable, "-c", _RUN_ALL, __file__, this_test], capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == []
    files = list(Path(paging.__file__).parent.glob("*.py"))
    assert len(files) <= 7
    assert sum(len(file.read_text().splitlines()) for file in files) <= _MAX_LINES
