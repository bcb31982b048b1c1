"""Watch and ReadBlock over gRPC: the paper's figure 8 as a watcher sees it."""

import grpc
import pytest

from quire.arrays import decode_int32
from quire.rpc.errors import from_rpc_error
from quire.scheduler.v1 import scheduler_pb2
from tests.support.fake_worker import FakeWorkerConfig
from tests.support.scheduler_process import GatewayStream, make_submit
from tests.support.stepped_worker import stepped_scheduler


async def test_figure_8_is_watched_as_it_happens(tmp_path):
    async with stepped_scheduler(tmp_path, FakeWorkerConfig(num_blocks=9, block_size=4)) as scheduler:
        watch = scheduler.stub.Watch(scheduler_pb2.WatchRequest(include_memory=True))
        first = await watch.read()
        assert first.is_whole
        assert (first.numbers.num_blocks, first.numbers.block_size, first.numbers.ready) == (9, 4, True)
        stream, _ = await GatewayStream.open(scheduler.stub)
        await stream.submit(make_submit(1, prompt_len=7, max_tokens=5, n=2))
        await scheduler.wait_planned(1)
        shared = await scheduler.stub.ReadBlock(scheduler_pb2.ReadBlockRequest(block_id=0))
        assert shared.ref_count == 2
        assert [each.sequence_index for each in shared.owners] == [0, 1]
        assert decode_int32(shared.owners[0].token_ids, "token_ids").tolist() == [1, 2, 3, 4]
        await scheduler.advance()
        events: list[list[int]] = []
        while not any(kind == scheduler_pb2.MEMORY_EVENT_COPY for kind, *_ in events):
            frame = await watch.read()
            events += decode_int32(frame.memory.events, "events", columns=4).tolist()
        # The first sample copies the last block, the second then writes in place.
        assert [scheduler_pb2.MEMORY_EVENT_COPY, 2, 1, 2] in events
        watch.cancel()
        stream.close()


async def test_a_block_that_the_pool_has_not_is_refused(scheduler):
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await scheduler.ReadBlock(scheduler_pb2.ReadBlockRequest(block_id=1 << 30))
    assert "the pool has" in from_rpc_error(raised.value).message
