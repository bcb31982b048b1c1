"""The paper's figures 6, 7, 8 and 9, block by block. Blocks are numbered here as this allocator hands them out."""

from scheduler_svc.core.beam_search import BeamParameters, Candidates
from scheduler_svc.core.block_pool import BlockId
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.step import StepPlan, StepWork
from tests.support.core_driver import Driver, make_config, make_request


def tables(driver: Driver) -> list[list[int]]:
    """Block tables of the running sequences; those of a beam search in the order of its beams."""
    found: list[Sequence] = []
    for group in driver.scheduler.running:
        found += group.unfinished if group.beams is None else group.beams.beams
    return [list(sequence.block_table) for sequence in found]


def ref_counts(driver: Driver) -> dict[int, int]:
    """Of the blocks that anybody holds."""
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
    # Step 1: the prompt of 7 tokens takes two blocks, of the second of which one slot is left for the first new token.
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
    # Of the prompts each token attends to itself and those before it: 7 * 8 / 2 + 6 * 7 / 2 pairs.
    assert StepWork.of(run_step(driver)) == StepWork(13, 2, 13, 2, context_tokens=13, attended_pairs=28 + 21)
    assert tables(driver) == [[0, 1], [2, 3]]
    # The first token of each fits its last block, and so does the second of B; A takes the next free block, which
    # lies behind those of B.
    assert StepWork.of(run_step(driver)) == StepWork(2, 2, 0, 0, context_tokens=8 + 7, attended_pairs=8 + 7)
    assert run_step(driver).block_table_deltas.tolist() == [[0, 2, 4]]
    assert tables(driver) == [[0, 1, 4], [2, 3]]
    # Then B goes on in a block behind A's: neighbours in a sequence need not be neighbours in memory.
    assert run_step(driver).block_table_deltas.tolist() == [[1, 2, 5]]
    assert tables(driver) == [[0, 1, 4], [2, 3, 5]]
    assert set(ref_counts(driver).values()) == {1}


def test_figure_8_two_samples_share_the_prompt_and_copy_one_block_on_write():
    driver = Driver(make_config(block_size=4), max_in_flight=1)
    driver.submit(make_request(1, prompt_len=7, max_tokens=4, num_sequences=2))
    prompt_step = run_step(driver)
    assert prompt_step.rows.tolist() == [0]
    assert prompt_step.forks.tolist() == [[0, 1]]
    assert prompt_step.samples.tolist() == [[0, 0], [1, 0]]
    assert tables(driver) == [[0, 1], [0, 1]]
    assert ref_counts(driver) == {0: 2, 1: 2}
    first_write = run_step(driver)
    # The first sample copies the last block, the second is its last holder then and writes in place.
    assert first_write.copies.tolist() == [[1, 2]]
    assert first_write.block_table_deltas.tolist() == [[0, 1, 2]]
    assert tables(driver) == [[0, 2], [0, 1]]
    assert ref_counts(driver) == {0: 2, 1: 1, 2: 1}


PROMPT = [1, 2]
WIDTH = 4
NUM_STEPS_BEFORE_THE_FORK = 6

_SPLITS = {
    # After the prompt four beams begin; the first of them splits in three at its fifth token, and the second and third
    # of those in two at their seventh.
    (1, 2): [(10, -1.0), (20, -2.0), (30, -3.0), (40, -4.0)],
    (1, 2, 10, 10, 10, 10): [(14, -0.1), (15, -0.2), (16, -0.3)],
    (1, 2, 10, 10, 10, 10, 15, 15): [(17, -0.1), (18, -0.2)],
    (1, 2, 10, 10, 10, 10, 16, 16): [(17, -0.1), (18, -0.2)],
    # What is dropped there has nothing likely left.
    (1, 2, 30, 30, 30, 30): [(30, -50.0)],
    (1, 2, 40, 40, 40, 40): [(40, -50.0)],
    (1, 2, 10, 10, 10, 10, 14, 14): [(14, -50.0)],
    (1, 2, 20, 20, 20, 20, 20, 20): [(20, -50.0)],
}


def most_likely(tokens: list[int], count: int) -> list[tuple[int, float]]:
    """Tokens that follow these and their log probabilities, best first. Where the table says nothing, a beam repeats
    its newest token."""
    chosen = _SPLITS.get(tuple(tokens), [(tokens[-1], -0.1)])
    return [*chosen, *((token_id, -100.0 - token_id) for token_id in range(count - len(chosen)))]


def make_figure_9(**config) -> Driver:
    driver = Driver(make_config(**config), max_in_flight=1)
    driver.device.candidates = lambda tokens, count: Candidates(*zip(*most_likely(tokens, count), strict=True))
    beam = BeamParameters(WIDTH)
    driver.submit(make_request(1, prompt=PROMPT, max_tokens=12, num_sequences=WIDTH, num_returned=1, beam=beam))
    return driver


def test_figure_9_beams_share_what_they_have_in_common_and_dropped_ones_free_the_rest():
    driver = make_figure_9(num_blocks=32, block_size=2)
    copies = []
    for _ in range(NUM_STEPS_BEFORE_THE_FORK):
        copies += run_step(driver).copies.tolist()
    # All share the prompt, the first three two blocks more; the fourth parted from them after the prompt.
    assert tables(driver) == [[0, 1, 5, 6], [0, 1, 5, 7], [0, 1, 5, 9], [0, 4, 8, 10]]
    assert ref_counts(driver) == {0: 4, 1: 3, 5: 3, 4: 1, 6: 1, 7: 1, 8: 1, 9: 1, 10: 1}
    # The best four continuations come of the second and the third beam: the first and the fourth free 4, 6, 8 and 10.
    copies += run_step(driver).copies.tolist()
    assert tables(driver) == [[0, 1, 5, 7], [0, 1, 5, 7], [0, 1, 5, 9], [0, 1, 5, 9]]
    assert ref_counts(driver) == {0: 4, 1: 4, 5: 4, 7: 2, 9: 2}
    # Each goes on in a block of its own.
    copies += run_step(driver).copies.tolist()
    assert tables(driver) == [[0, 1, 5, 7, 6], [0, 1, 5, 7, 12], [0, 1, 5, 9, 11], [0, 1, 5, 9, 10]]
    assert ref_counts(driver) == {0: 4, 1: 4, 5: 4, 7: 2, 9: 2, 6: 1, 10: 1, 11: 1, 12: 1}
    assert copies == []


def test_figure_9_a_beam_that_forks_within_a_block_copies_that_block_alone():
    driver = make_figure_9(num_blocks=64, block_size=16, max_num_seqs=4)
    assert run_step(driver).copies.tolist() == []
    assert tables(driver) == [[0], [0], [0], [0]]
    # Four beams of one prompt: three copy its block, the last holder writes in place.
    assert len(run_step(driver).copies) == 3
    assert sorted(ref_counts(driver).values()) == [1, 1, 1, 1]
    copies = [len(run_step(driver).copies) for _ in range(3)]
    assert copies == [0, 0, 0]
    # The first splits in three, two others are dropped: two copies.
    assert len(run_step(driver).copies) == 2
    assert len(ref_counts(driver)) == 4
