"""The paper's figures 6 to 9, step by step, as InspectBlocks shows them: tables name blocks as (block, filled slots).

What a step in flight computes counts as filled.
"""

from collections import Counter

import numpy as np

from quire.arrays import encode_int32
from quire.scheduler.v1 import scheduler_pb2
from tests.support.fake_worker import FakeWorkerConfig
from tests.support.figure_9 import NUM_STEPS_BEFORE_THE_FORK, PROMPT, WIDTH, most_likely
from tests.support.scheduler_process import GatewayStream, make_submit, state_of, until
from tests.support.stepped_worker import SteppedScheduler, stepped_scheduler

Tables = dict[str, list[list[tuple[int, int]]]]


async def inspect(scheduler: SteppedScheduler) -> Tables:
    """The tables of each request's sequences. Checks that every block counts as many holders as it has."""
    answer = await scheduler.stub.InspectBlocks(scheduler_pb2.InspectBlocksRequest())
    holders = Counter(block.block_id for each in answer.sequences for block in each.block_table)
    assert answer.gpu_pool.used_blocks == len(holders)
    tables: Tables = {}
    for sequence in answer.sequences:
        assert all(block.ref_count == holders[block.block_id] for block in sequence.block_table)
        table = [(block.block_id, block.filled) for block in sequence.block_table]
        tables.setdefault(sequence.request_id, []).append(table)
    return tables


async def blocks_of_beams(scheduler: SteppedScheduler) -> list[list[int]]:
    tables = (await inspect(scheduler))["request-1"]
    return sorted([block for block, _ in table] for table in tables)


async def cached_blocks(scheduler: SteppedScheduler) -> set[int]:
    answer = await scheduler.stub.InspectBlocks(scheduler_pb2.InspectBlocksRequest())
    assert all(len(block.block_hash) == 32 for block in answer.cached)
    return {block.block_id for block in answer.cached}


async def wait_waiting(scheduler: SteppedScheduler) -> None:
    """Returns once a request waits."""

    async def one_waits() -> bool:
        return (await state_of(scheduler.stub)).waiting_requests == 1

    await until(one_waits)


async def test_figure_6_a_block_is_opened_only_when_the_last_is_full(tmp_path):
    async with stepped_scheduler(tmp_path, FakeWorkerConfig(num_blocks=9, block_size=4)) as scheduler:
        stream, _ = await GatewayStream.open(scheduler.stub)
        await stream.submit(make_submit(1, prompt_len=7, max_tokens=8))
        await scheduler.wait_planned(1)
        assert await inspect(scheduler) == {"request-1": [[(0, 4), (1, 3)]]}
        await scheduler.advance()
        assert await inspect(scheduler) == {"request-1": [[(0, 4), (1, 4)]]}
        await scheduler.advance()
        assert await inspect(scheduler) == {"request-1": [[(0, 4), (1, 4), (2, 1)]]}
        stream.close()


async def test_figure_7_two_requests_interleave_in_one_pool(tmp_path):
    async with stepped_scheduler(tmp_path, FakeWorkerConfig(num_blocks=9, block_size=4)) as scheduler:
        stream, _ = await GatewayStream.open(scheduler.stub)
        await stream.submit(make_submit(1, prompt_len=7, max_tokens=12))
        await scheduler.wait_planned(1)
        # The second comes while the first computes its prompt, and enters with the next step.
        await stream.submit(make_submit(2, prompt_len=6, max_tokens=12))
        await wait_waiting(scheduler)
        await scheduler.advance()
        assert await inspect(scheduler) == {"request-1": [[(0, 4), (1, 4)]], "request-2": [[(2, 4), (3, 2)]]}
        await scheduler.advance()
        assert await inspect(scheduler) == {"request-1": [[(0, 4), (1, 4), (4, 1)]], "request-2": [[(2, 4), (3, 3)]]}
        await scheduler.advance()
        await scheduler.advance()
        # Neighbours in a sequence need not be neighbours in memory.
        assert await inspect(scheduler) == {
            "request-1": [[(0, 4), (1, 4), (4, 3)]],
            "request-2": [[(2, 4), (3, 4), (5, 1)]],
        }
        stream.close()


async def test_figure_8_two_samples_share_the_prompt_and_copy_one_block_on_write(tmp_path):
    async with stepped_scheduler(tmp_path, FakeWorkerConfig(num_blocks=9, block_size=4)) as scheduler:
        stream, _ = await GatewayStream.open(scheduler.stub)
        await stream.submit(make_submit(1, prompt_len=7, max_tokens=5, n=2))
        await scheduler.wait_planned(1)
        assert await inspect(scheduler) == {"request-1": [[(0, 4), (1, 3)], [(0, 4), (1, 3)]]}
        await scheduler.advance()
        # The first sample has copied the last block, the second writes in place.
        assert await inspect(scheduler) == {"request-1": [[(0, 4), (2, 4)], [(0, 4), (1, 4)]]}
        one = await scheduler.stub.InspectBlocks(scheduler_pb2.InspectBlocksRequest(request_id="request-1"))
        nobody = await scheduler.stub.InspectBlocks(scheduler_pb2.InspectBlocksRequest(request_id="request-2"))
        assert (len(one.sequences), len(nobody.sequences)) == (2, 0)
        stream.close()


async def test_figure_9_dropped_beams_free_what_they_did_not_share(tmp_path, monkeypatch):
    def candidates(tokens, count, vocab_size):
        token_ids, logprobs = zip(*most_likely(list(tokens), count), strict=True)
        return np.array(token_ids, np.int32), np.array(logprobs, np.float32)

    monkeypatch.setattr("tests.support.fake_runner.candidates_at", candidates)
    async with stepped_scheduler(tmp_path, FakeWorkerConfig(num_blocks=32, block_size=2)) as scheduler:
        stream, _ = await GatewayStream.open(scheduler.stub)
        submit = make_submit(1, max_tokens=12)
        submit.prompt_token_ids = encode_int32(PROMPT)
        submit.sampling.best_of = submit.sampling.beam_search.beam_width = WIDTH
        await stream.submit(submit)
        await scheduler.wait_planned(1)
        for _ in range(NUM_STEPS_BEFORE_THE_FORK):
            await scheduler.advance()
        assert await blocks_of_beams(scheduler) == [[0, 1, 5, 6], [0, 1, 5, 7], [0, 1, 5, 9], [0, 4, 8, 10]]
        await scheduler.advance()
        # The best four come of the second and the third beam: 4, 6, 8 and 10 are free, and two of those are handed out
        # again at once. Full ones can still be hit.
        assert await blocks_of_beams(scheduler) == [
            [0, 1, 5, 7, 6],
            [0, 1, 5, 7, 12],
            [0, 1, 5, 9, 10],
            [0, 1, 5, 9, 11],
        ]
        assert await cached_blocks(scheduler) >= {4, 8}
        stream.close()
