"""Connect without gRPC; the test decides when each side continues."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, cast

import grpc.aio

from quire.scheduler.v1 import scheduler_pb2
from quire.service.compatibility import SCHEDULER_PROTOCOL, WORKER_PROTOCOL
from quire.worker.v1 import worker_pb2
from scheduler_svc.core.block_pool import BlockHash, BlockId
from scheduler_svc.core.cache_log import CacheChanges
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.service.scheduler_servicer import SchedulerServicer
from scheduler_svc.service.worker_messages import replica_info
from tests.support.core_driver import make_config
from tests.support.scheduler_process import make_submit
from tests.support.step_loop import make_step_loop

WORKER = worker_pb2.WorkerInfo(
    protocol=WORKER_PROTOCOL.message(),
    pool=worker_pb2.KvPoolGeometry(block_size=4, num_gpu_blocks=64),
    model=worker_pb2.ModelGeometry(vocab_size=1000, max_model_len=128),
    limits=worker_pb2.WorkerLimits(max_num_rows=8, max_num_batched_tokens=32, max_steps_in_flight=2),
)


async def test_a_stream_takes_requests_though_its_gateway_does_not_read_until_another_one_replaces_it():
    # A scheduler with a worker that sends it no steps.
    loop, requests = make_step_loop(Scheduler(make_config()))
    loop.replica.info, loop.replica.is_attached = replica_info(WORKER), True
    servicer = SchedulerServicer(loop, requests)
    hello = scheduler_pb2.Hello(protocol=SCHEDULER_PROTOCOL.message(), gateway_id="gateway-a")

    async def connect() -> tuple[asyncio.Queue[Any], AsyncGenerator[scheduler_pb2.ConnectResponse, None]]:
        """Queue of the gateway's messages, and the answers, which come when they are taken."""
        said: asyncio.Queue[Any] = asyncio.Queue()
        said.put_nowait(scheduler_pb2.ConnectRequest(hello=hello))

        async def messages() -> AsyncIterator[scheduler_pb2.ConnectRequest]:
            while True:
                message = await said.get()
                said.task_done()
                yield message

        # The context is not used.
        answers = cast(Any, servicer.Connect(messages(), cast(grpc.aio.ServicerContext, None)))
        assert (await anext(answers)).HasField("welcome")
        return said, answers

    async def submit(said: asyncio.Queue[Any], handle: int) -> None:
        """Returns once the message was processed."""
        said.put_nowait(scheduler_pb2.ConnectRequest(submit=make_submit(handle)))
        async with asyncio.timeout(30):
            await said.join()
        await asyncio.sleep(0)

    first, unread = await connect()
    await submit(first, 1)
    assert loop.replica.num_live == 1
    _, answers = await connect()
    await submit(first, 2)
    # The gateway has no grace period, so its first request has ended, and none came after it.
    assert loop.replica.num_live == 0
    assert [answer async for answer in unread] == []
    await answers.aclose()


async def test_who_watches_the_cache_learns_at_once_that_it_was_reset():
    scheduler = Scheduler(make_config())
    loop, requests = make_step_loop(scheduler)
    told: list[CacheChanges] = []
    loop.replica.cache.follow(scheduler)
    loop.replica.cache.watch(lambda changes, config: told.append(changes))
    content = BlockHash(bytes(32))
    scheduler.restore_sealed([(BlockId(1), content)])
    loop.replica.cache.report_changes()
    servicer = SchedulerServicer(loop, requests)
    await servicer.ResetPrefixCache(scheduler_pb2.ResetPrefixCacheRequest(), cast(grpc.aio.ServicerContext, None))
    assert told[-1].removed == [content]
