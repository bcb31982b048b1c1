"""Connect without gRPC, where a test says when each side goes on."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import cast

import grpc.aio
import pytest

from quire.compatibility import SCHEDULER_PROTOCOL
from quire.scheduler.v1 import scheduler_pb2
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.service.requests import Requests
from scheduler_svc.service.servicer import SchedulerServicer
from scheduler_svc.service.step_loop import StepLoop
from scheduler_svc.service.worker_messages import ReplicaInfo
from tests.support.core_driver import make_config
from tests.support.scheduler_process import make_submit
from tests.support.step_loop import make_step_loop

REPLICA = ReplicaInfo(
    worker_generation=1,
    block_size=4,
    num_gpu_blocks=64,
    num_host_blocks=0,
    architecture="FakeForCausalLM",
    dtype="float32",
    vocab_size=1000,
    max_model_len=128,
    max_num_rows=8,
    max_num_batched_tokens=32,
    max_steps_in_flight=2,
    max_logprobs=20,
)


@pytest.fixture
def table() -> tuple[StepLoop, Requests]:
    """Of a scheduler that has a worker and sends it no steps."""
    loop, requests = make_step_loop(Scheduler(make_config()))
    loop.replica, loop.is_attached = REPLICA, True
    return loop, requests


@pytest.fixture
def loop(table: tuple[StepLoop, Requests]) -> StepLoop:
    return table[0]


@pytest.fixture
def servicer(table: tuple[StepLoop, Requests]) -> SchedulerServicer:
    return SchedulerServicer(*table)


class Stream:
    """A gateway that says what it is told to, and takes an answer when it is told to."""

    def __init__(self, servicer: SchedulerServicer, gateway_id: str) -> None:
        self._said: asyncio.Queue[scheduler_pb2.ConnectRequest] = asyncio.Queue()
        self.say(hello=scheduler_pb2.Hello(protocol=SCHEDULER_PROTOCOL.message(), gateway_id=gateway_id))
        # The context is not looked at.
        self.answers = cast(
            AsyncGenerator[scheduler_pb2.ConnectResponse, None],
            servicer.Connect(self._messages(), cast(grpc.aio.ServicerContext, None)),
        )

    def say(self, **message) -> None:
        self._said.put_nowait(scheduler_pb2.ConnectRequest(**message))

    async def was_read(self) -> None:
        """Whatever was said has been looked at."""
        async with asyncio.timeout(30):
            await self._said.join()
        await asyncio.sleep(0)

    async def _messages(self) -> AsyncIterator[scheduler_pb2.ConnectRequest]:
        while True:
            message = await self._said.get()
            self._said.task_done()
            yield message


@pytest.fixture
async def streams(servicer):
    """Opens streams, and closes them in the end."""
    async with contextlib.AsyncExitStack() as stack:

        async def connect(gateway_id: str) -> Stream:
            stream = Stream(servicer, gateway_id)
            await stack.enter_async_context(contextlib.aclosing(stream.answers))
            assert (await anext(stream.answers)).HasField("welcome")
            return stream

        yield connect


async def test_a_stream_takes_requests_whether_or_not_its_gateway_reads(loop, streams):
    stream = await streams("gateway-a")
    stream.say(submit=make_submit(1))
    await stream.was_read()
    assert loop.num_live == 1


async def test_a_replaced_stream_takes_nothing_though_it_still_waits_for_its_gateway_to_read(loop, streams):
    first = await streams("gateway-a")
    await streams("gateway-a")
    first.say(submit=make_submit(1))
    await first.was_read()
    assert loop.num_live == 0
    assert [answer async for answer in first.answers] == []
