"""The paper's figures 6 to 9 as InspectBlocks shows them; step by step they are in the core's tests."""

import asyncio
from collections import Counter

from quire.scheduler.v1 import scheduler_pb2
from tests.support.fake_worker import FakeWorkerConfig
from tests.support.scheduler_process import GatewayStream, make_submit, running_scheduler, wait_attached


async def inspect(stub) -> dict[str, list[list[tuple[int, int, int]]]]:
    """(block, filled slots, ref count) of each sequence's table, by request."""
    answer = await stub.InspectBlocks(scheduler_pb2.InspectBlocksRequest())
    tables: dict[str, list[list[tuple[int, int, int]]]] = {}
    for sequence in answer.sequences:
        table = [(block.block_id, block.filled, block.ref_count) for block in sequence.block_table]
        tables.setdefault(sequence.request_id, []).append(table)
    return tables


async def test_figures_6_and_7_two_requests_fill_their_blocks_in_turn(worker, tmp_path):
    worker.config = FakeWorkerConfig(num_blocks=9, block_size=4)
    async with running_scheduler(str(tmp_path / "s.sock"), worker.address, max_steps_in_flight=1) as stub:
        await wait_attached(stub)
        stream, _ = await GatewayStream.open(stub)
        worker.hang.set()
        await stream.submit(make_submit(1, prompt_len=7, max_tokens=3))
        await stream.submit(make_submit(2, prompt_len=6, max_tokens=3))
        # The first prompt was planned alone. What a step in flight computes counts as filled.
        seen = await inspect(stub)
        assert seen["request-1"] == [[(0, 4, 1), (1, 3, 1)]]
        worker.hang.clear()
        tables = []
        while 1 not in stream.completed or 2 not in stream.completed:
            await stream.read()
            tables.append(await inspect(stub))
        held = [table for snapshot in tables for each in snapshot.values() for table in each if table]
        assert held
        for table in held:
            *full, last = table
            assert all(filled == 4 for _, filled, _ in full)
            assert 1 <= last[1] <= 4
            assert all(ref_count == 1 for _, _, ref_count in table)
        stream.close()


async def test_figure_8_can_be_drawn_from_inspect_blocks(worker, tmp_path):
    worker.config = FakeWorkerConfig(num_blocks=8, block_size=4, step_seconds=0.1)
    async with running_scheduler(str(tmp_path / "s.sock"), worker.address) as stub:
        await wait_attached(stub)
        stream, _ = await GatewayStream.open(stub)
        await stream.submit(make_submit(1, prompt_len=7, max_tokens=5, n=2))
        # The first tokens are there; the step that writes them, which copies the shared block, was planned before.
        await stream.read()
        blocks = await stub.InspectBlocks(scheduler_pb2.InspectBlocksRequest(request_id="request-1"))
        tables = [[(b.block_id, b.ref_count) for b in sequence.block_table] for sequence in blocks.sequences]
        assert [table[:2] for table in tables] == [[(0, 2), (2, 1)], [(0, 2), (1, 1)]]
        nobody = await stub.InspectBlocks(scheduler_pb2.InspectBlocksRequest(request_id="request-2"))
        assert len(nobody.sequences) == 0
        await stream.read_until_over(1)
        blocks = await stub.InspectBlocks(scheduler_pb2.InspectBlocksRequest())
        assert blocks.gpu_pool.used_blocks == 0
        assert {b.block_id for b in blocks.cached} >= {0}
        assert all(len(b.block_hash) == 32 for b in blocks.cached)
        stream.close()


async def test_figure_9_beams_share_all_that_they_have_in_common(worker, tmp_path):
    worker.config = FakeWorkerConfig(num_blocks=64, block_size=2, step_seconds=0.005)
    async with running_scheduler(str(tmp_path / "s.sock"), worker.address) as stub:
        await wait_attached(stub)
        stream, _ = await GatewayStream.open(stub)
        submit = make_submit(1, prompt_len=6, max_tokens=20)
        submit.sampling.n, submit.sampling.best_of, submit.sampling.beam_search.beam_width = 4, 4, 4
        await stream.submit(submit)
        shared, snapshots = Counter(), 0
        reading = asyncio.create_task(stream.read_until_over(1))
        while not reading.done():
            tables = (await inspect(stub)).get("request-1", [])
            holders = Counter(block for table in tables for block, _, _ in table)
            for table in tables:
                assert [ref_count for _, _, ref_count in table] == [holders[block] for block, _, _ in table]
            if tables and all(tables):
                snapshots += 1
                # The prompt's three blocks are one copy for all.
                assert [holders[block] for block, _, _ in tables[0][:3]] == [4, 4, 4]
                shared.update(holders.values())
        await reading
        assert snapshots > 3
        # Beyond the prompt, too, some blocks have two or three holders.
        assert shared[2] + shared[3] > 0
        stream.close()
