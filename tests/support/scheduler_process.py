"""A whole scheduler service inside the test's event loop, and a gateway's end of its stream."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio

from quire.common.v1 import common_pb2
from quire.messages.arrays import decode_int32, decode_logprobs, encode_int32
from quire.rpc.channel import open_channel
from quire.scheduler.v1 import scheduler_pb2 as pb
from quire.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub
from quire.service.compatibility import SCHEDULER_PROTOCOL
from scheduler_svc.service.app import serve
from scheduler_svc.settings import SchedulerSettings
from tests.support.fake_runner import token_at
from tests.support.logprobs import Line, lines_by_event


@contextlib.asynccontextmanager
async def scheduler_task(
    socket: str, worker: str, **settings
) -> AsyncIterator[tuple[SchedulerServiceStub, asyncio.Task[None]]]:
    """Runs the service on a unix socket, or at `listen`, until the block ends. Yields a connected stub, and the
    service's task, which may end by itself."""
    address = settings.get("listen", f"unix:{socket}")
    values: dict[str, Any] = {"workers": (worker,), "drain_timeout": 0.0, "log_level": "warning"}
    values |= {"listen": address} | settings
    task = asyncio.create_task(serve(SchedulerSettings(**values)))
    channel = open_channel(address)
    stub = SchedulerServiceStub(channel)
    try:
        await state_of(stub)
        yield stub, task
    finally:
        await channel.close()
        task.cancel()
        await asyncio.wait([task])


@contextlib.asynccontextmanager
async def running_scheduler(socket: str, worker: str, **settings) -> AsyncIterator[SchedulerServiceStub]:
    """Same as above, for a service that does not end by itself."""
    async with scheduler_task(socket, worker, **settings) as (stub, task):
        yield stub
    if not task.cancelled():
        task.result()


async def until(condition, timeout_s: float = 60):
    """Awaits `condition()` (a coroutine function) until it returns something true, and returns that. It is asked less
    and less often: to ask costs the time of the processors for which the other side waits."""
    pause_s = 0.005
    async with asyncio.timeout(timeout_s):
        while not (value := await condition()):  # The other side is a process without events.
            await asyncio.sleep(pause_s)
            pause_s = min(1.3 * pause_s, 0.03)
        return value


async def state_of(stub: SchedulerServiceStub, **request) -> pb.GetStateResponse:
    return await stub.GetState(pb.GetStateRequest(**request), wait_for_ready=True, timeout=60)


async def until_state(
    stub: SchedulerServiceStub, condition: Callable[[pb.GetStateResponse], object], timeout_s: float = 60
) -> None:
    """Waits until the scheduler's state has these values."""

    async def holds() -> object:
        return condition(await state_of(stub))

    await until(holds, timeout_s)


def num_live(state: pb.GetStateResponse) -> int:
    """How many requests the scheduler has."""
    return state.running_requests + state.waiting_requests + state.swapped_requests


async def wait_attached(stub: SchedulerServiceStub) -> None:
    await until_state(stub, lambda state: state.workers[0].attached)


@contextlib.asynccontextmanager
async def attached_scheduler(directory: Path, worker: str, **settings) -> AsyncIterator[SchedulerServiceStub]:
    """`running_scheduler` with a socket in the directory, once its worker is attached."""
    async with running_scheduler(str(directory / "s.sock"), worker, **settings) as stub:
        await wait_attached(stub)
        yield stub


async def wait_nothing_in_use(stub: SchedulerServiceStub) -> None:
    """Does not check how the requests ended: they also end by themselves, unless the worker stands still."""

    await until_state(
        stub, lambda state: not (num_live(state) or state.gpu_pool.used_blocks or state.host_pool.used_blocks)
    )


def make_submit(
    handle: int,
    *,
    prompt_len: int = 5,
    max_tokens: int = 8,
    n: int = 1,
    stop: Sequence[int] = (),
    emitted: Sequence[int] = (),
    **extra,
) -> pb.Submit:
    """A submission whose seed is its handle, so that `expected_tokens` knows its output."""
    fields: dict[str, Any] = {
        "request_id": f"request-{handle}",
        "prompt_token_ids": encode_int32([(handle + i) % 100 for i in range(prompt_len)]),
        "sampling": common_pb2.SamplingParameters(temperature=1.0, top_p=1.0, seed=handle, n=n),
        "stopping": common_pb2.StoppingParameters(max_tokens=max_tokens, stop_token_ids=stop),
    }
    submit = pb.Submit(handle=handle, **(fields | extra))
    if emitted:
        submit.emitted.add(sequence_index=0, token_ids=encode_int32(list(emitted)))
    return submit


def resubmit(stream: "GatewayStream", handle: int, **fields) -> pb.Submit:
    """A request of a broken stream, as its gateway submits it again, with all tokens that it has."""
    submit = make_submit(handle, resubmitted=True, num_prompt_logprobs=stream.num_prompt_logprobs[handle], **fields)
    samples = {index: output for (of, index), output in stream.samples.items() if of == handle}
    for index, output in sorted({0: stream.outputs[handle], **samples}.items()):
        if output:
            finished = (handle, index) in stream.ended
            submit.emitted.add(sequence_index=index, token_ids=encode_int32(output), finished=finished)
    return submit


def expected_tokens(handle: int, *, prompt_len: int = 5, max_tokens: int = 8) -> list[int]:
    return [token_at(handle, prompt_len + i) for i in range(max_tokens)]


@dataclass
class GatewayStream:
    """The gateway's end of Connect. Collects events and checks that offsets are consecutive."""

    call: grpc.aio.StreamStreamCall
    outputs: dict[int, list[int]] = field(default_factory=dict)
    """The output of each request's first sequence."""
    samples: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """The output of all other sequences, by handle and index."""
    ends: dict[int, pb.SequenceEnd] = field(default_factory=dict)
    completed: dict[int, pb.RequestEnd] = field(default_factory=dict)
    failed: dict[int, pb.RequestFailure] = field(default_factory=dict)
    logprobs: dict[int, list[Line]] = field(default_factory=dict)
    num_events: int = 0
    """Number of messages with events."""
    readiness: list[bool] = field(default_factory=list)
    busy: list[bool] = field(default_factory=list)
    gives_credit: bool = False
    ended: set[tuple[int, int]] = field(default_factory=set)
    """Handles and indices of the sequences that have ended."""
    num_prompt_logprobs: dict[int, int] = field(default_factory=dict)
    """Positions of each request's prompt that were sent, or that its gateway had before."""

    @classmethod
    async def open(
        cls,
        stub: SchedulerServiceStub,
        gateway_id: str = "gateway-a",
        grace_period_ms: int = 0,
        credit: int | None = None,
    ) -> tuple["GatewayStream", pb.Welcome]:
        """With credit, each message that is read gives credit for one more."""
        stream = cls(stub.Connect(), gives_credit=credit is not None)
        versions = SCHEDULER_PROTOCOL.message()
        hello = pb.Hello(gateway_id=gateway_id, grace_period_ms=grace_period_ms, protocol=versions)
        await stream.call.write(pb.ConnectRequest(hello=hello))
        first = await stream.call.read()
        assert isinstance(first, pb.ConnectResponse), "the stream ended"
        welcome = first.welcome
        if credit:
            await stream.give_credit(credit)
        return stream, welcome

    async def say(self, **message: Any) -> None:
        """Sends a ConnectRequest with this content."""
        await self.call.write(pb.ConnectRequest(**message))

    async def give_credit(self, num_messages: int = 1) -> None:
        await self.say(credit={"messages": num_messages, "taken": self.num_events})

    async def submit(self, submit: pb.Submit) -> None:
        self.outputs[submit.handle] = []
        self.ended -= {end for end in self.ended if end[0] == submit.handle}
        for each in submit.emitted:
            token_ids = decode_int32(each.token_ids, "emitted").tolist()
            if each.sequence_index:
                self.samples[submit.handle, each.sequence_index] = token_ids
            else:
                self.outputs[submit.handle] = token_ids
        self.num_prompt_logprobs[submit.handle] = submit.num_prompt_logprobs
        await self.say(submit=submit)

    async def end_unread(self) -> None:
        await self.say(end_unread={})

    async def abort(self, handle: int, **fields: Any) -> None:
        await self.say(abort={"handle": handle, **fields})

    async def resume(self, handle: int, request_id: str, tenant: str = "") -> None:
        """Reads a durable request from its first token on."""
        self.outputs[handle] = []
        await self.say(resume={"handle": handle, "tenant": tenant, "request_id": request_id})

    async def read(self) -> None:
        """Reads one message and collects its events."""
        message = await self.call.read()
        assert isinstance(message, pb.ConnectResponse), "the stream ended"
        self._take(message)
        if self.gives_credit and message.HasField("events"):
            await self.give_credit()

    async def read_to_end(self, timeout_s: float = 60) -> None:
        """Reads messages until the scheduler ends the stream."""
        async with asyncio.timeout(timeout_s):
            while isinstance(message := await self.call.read(), pb.ConnectResponse):
                self._take(message)

    def _take(self, message: pb.ConnectResponse) -> None:
        if message.HasField("state"):
            self.readiness.append(message.state.ready)
            self.busy.append(message.state.busy)
        events = message.events
        self.num_events += message.HasField("events")
        for entry in events.prompt_logprobs:
            assert entry.handle not in self.completed
            seen = self.num_prompt_logprobs[entry.handle]
            assert entry.first_position == seen + 1, "a position of a prompt was lost or repeated"
            self.num_prompt_logprobs[entry.handle] = seen + len(decode_logprobs(entry))
        handles, offsets = decode_int32(events.handles, "handles"), decode_int32(events.offsets, "offsets")
        indices, token_ids = decode_int32(events.sequence_indices, "indices"), decode_int32(events.token_ids, "ids")
        columns = (column.tolist() for column in (handles, indices, offsets, token_ids))
        for handle, index, offset, token_id in zip(*columns, strict=True):
            output = self.outputs[handle] if index == 0 else self.samples.setdefault((handle, index), [])
            assert offset == len(output), "an event was lost or repeated"
            output.append(token_id)
        for event, line in lines_by_event(events).items():
            self.logprobs.setdefault(int(handles[event]), []).append(line)
        self.ends |= {end.handle: end for end in events.finished}
        for end in events.finished:
            assert (end.handle, end.sequence_index) not in self.ended, "a sequence ended twice"
            self.ended.add((end.handle, end.sequence_index))
        assert not any(end.handle in self.completed for end in events.completed), "a request ended twice"
        self.completed |= {end.handle: end for end in events.completed}
        self.failed |= {failure.handle: failure for failure in events.failed}

    async def read_until_over(self, *handles: int, timeout_s: float = 60) -> None:
        """Reads messages until each of these requests is completed or failed."""
        async with asyncio.timeout(timeout_s):
            while not all(handle in self.completed or handle in self.failed for handle in handles):
                await self.read()

    def close(self) -> None:
        self.call.cancel()
