"""The paper's figures 6, 7 and 8, block by block. Blocks are numbered here as this allocator hands them out."""

from scheduler_svc.core.paging.block_pool import BlockId
from scheduler_svc.core.step import StepPlan, StepWork
from tests.support.core_driver import Driver, make_config, make_request


def tables(driver: Driver) -> list[list[int]]:
    """Block tables of the running sequences."""
    return [list(sequence.block_table) for group in driver.scheduler.running for sequence in group.unfinished]


def ref_counts(driver: Driver) -> dict[int, int]:
    """Reference counts of the blocks in use."""
    pool = driver.scheduler.batch.blocks.pool
    free = set(pool.free_blocks())
    return {block: pool.ref_count(block) for block in map(BlockId, range(pool.num_blocks)) if block not in free}


def run_step(driver: Driver) -> StepPlan:
    plan = driver.next_plan()
    driver.deliver()
    return plan


def test_figure_6_a_block_is_opened_only_when_the_last_is_full():
    driver = Driver(make_config(block_size=4), max_in_flight=1)
    driver.submit(make_request(1, prompt_len=7, max_tokens=5))
    # Step 1: the prompt of 7 tokens takes two blocks; the second has one slot left for the first new token.
    plan = run_step(driver)
    assert (plan.rows.tolist(), plan.num_new_tokens.tolist()) == ([0], [7])
    assert tables(driver) == [[0, 1]]
    # Step 2: the first new token fills it.
    assert run_step(driver).block_table_deltas.tolist() == []
    assert tables(driver) == [[0, 1]]
    # Step 3: the second new token needs a third block.
    assert run_step(driver).block_table_deltas.tolist() == [[0, 2, 2]]
    assert tables(driver) == [[0, 1, 2]]
    assert ref_counts(driver) == {0: 1, 1: 1, 2: 1}


def test_figure_7_two_requests_interleave_in_one_pool():
    driver = Driver(make_config(num_blocks=9, block_size=4), max_in_flight=1)
    driver.submit(make_request(1, prompt_len=7, max_tokens=8))
    driver.submit(make_request(2, prompt_len=6, max_tokens=8))
    # Each token of a prompt attends to itself and all tokens before it: 7 * 8 / 2 + 6 * 7 / 2 pairs.
    assert StepWork.of(run_step(driver)) == StepWork(13, 2, 13, 2, context_tokens=13, attended_pairs=28 + 21)
    assert tables(driver) == [[0, 1], [2, 3]]
    # The first token of each fits its last block, and so does the second of B; A takes the next free block, which
    # lies behind B's blocks.
    assert StepWork.of(run_step(driver)) == StepWork(2, 2, 0, 0, context_tokens=8 + 7, attended_pairs=8 + 7)
    assert run_step(driver).block_table_deltas.tolist() == [[0, 2, 4]]
    assert tables(driver) == [[0, 1, 4], [2, 3]]
    # Then B continues in a block behind A's: neighbours in a sequence need not be neighbours in memory.
    assert run_step(driver).block_table_deltas.tolist() == [[1, 2, 5]]
    assert tables(driver) == [[0, 1, 4], [2, 3, 5]]
    assert set(ref_counts(driver).values()) == {1}


def test_figure_8_two_samples_share_the_prompt_and_copy_one_block_on_write():
    driver = Driver(make_config(block_size=4), max_in_flight=1)
    driver.submit(make_request(1, prompt_len=7, max_tokens=4, num_sequences=2))
    prompt_step = run_step(driver)
    assert prompt_step.rows.tolist() == [0]
    assert prompt_step.fork.tolist() == [[0, 1]]
    assert prompt_step.samples.tolist() == [[0, 0], [1, 0]]
    assert tables(driver) == [[0, 1], [0, 1]]
    assert ref_counts(driver) == {0: 2, 1: 2}
    first_write = run_step(driver)
    # The first sample copies the last block, the second is its last holder then and writes in place.
    assert first_write.copy.tolist() == [[1, 2]]
    assert first_write.block_table_deltas.tolist() == [[0, 1, 2]]
    assert tables(driver) == [[0, 2], [0, 1]]
    assert ref_counts(driver) == {0: 2, 1: 1, 2: 1}
