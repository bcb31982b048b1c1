"""The paper's figure 8, step by step, as InspectBlocks, ReadBlock and Watch show it. What a step in flight computes
counts as filled."""

from collections import Counter

from quire.arrays import decode_int32
from quire.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from tests.support.fake_worker import FakeWorker, FakeWorkerConfig
from tests.support.scheduler_process import (
    GatewayStream,
    make_submit,
    running_scheduler,
    state_of,
    until_state,
    wait_attached,
)


async def tables_of(stub: scheduler_pb2_grpc.SchedulerServiceStub, request_id: str) -> list[list[tuple[int, int]]]:
    """The tables of a request's sequences, as (block, filled slots). Every block counts as many holders as it has."""
    answer = await stub.InspectBlocks(scheduler_pb2.InspectBlocksRequest(request_id=request_id))
    holders = Counter(block.block_id for each in answer.sequences for block in each.block_table)
    for sequence in answer.sequences:
        assert all(block.ref_count == holders[block.block_id] for block in sequence.block_table)
    return [[(block.block_id, block.filled) for block in each.block_table] for each in answer.sequences]


async def test_figure_8_two_samples_share_the_prompt_and_copy_one_block_on_write(worker: FakeWorker, tmp_path) -> None:
    worker.config = FakeWorkerConfig(num_blocks=9, block_size=4)
    async with running_scheduler(str(tmp_path / "s.sock"), worker.address, max_steps_in_flight=1) as stub:

        async def planned(step_id: int) -> None:
            await until_state(stub, lambda state: state.last_step_id >= step_id)

        await wait_attached(stub)
        worker.hang.set()
        watch = stub.Watch(scheduler_pb2.WatchRequest(include_memory=True))
        first = await watch.read()
        assert first.is_whole
        assert (first.numbers.num_blocks, first.numbers.block_size, first.numbers.ready) == (9, 4, True)
        stream, _ = await GatewayStream.open(stub)
        await stream.submit(make_submit(1, prompt_len=7, max_tokens=5, n=2))
        await planned(1)
        assert await tables_of(stub, "request-1") == [[(0, 4), (1, 3)], [(0, 4), (1, 3)]]
        assert await tables_of(stub, "request-2") == []
        shared = await stub.ReadBlock(scheduler_pb2.ReadBlockRequest(block_id=0))
        assert (shared.ref_count, [each.sequence_index for each in shared.owners]) == (2, [0, 1])
        assert decode_int32(shared.owners[0].token_ids, "token_ids").tolist() == [1, 2, 3, 4]
        worker.hang.let_one_pass()
        await planned(2)
        # The first sample has copied the last block, the second writes in place.
        assert await tables_of(stub, "request-1") == [[(0, 4), (2, 4)], [(0, 4), (1, 4)]]
        assert (await state_of(stub)).gpu_pool.used_blocks == 3
        events: list[list[int]] = []
        while [scheduler_pb2.MEMORY_EVENT_COPY, 2, 1, 2] not in events:
            frame = await watch.read()
            events += decode_int32(frame.memory.events, "events", columns=4).tolist()
        watch.cancel()
        stream.close()
        worker.hang.clear()
