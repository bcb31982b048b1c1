"""The scheduler's end of quire.scheduler.v1 without scheduling: streams, credit and handles; a subclass makes the
tokens.

`tests/contract/test_scheduler_contract.py` checks what gateways rely on. It stores nothing: it knows no durable
request, and a request that is submitted again is new to it.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Self

import grpc
import grpc.aio
from google.rpc import code_pb2

from quire.rpc.errors import FailedPrecondition, InvalidArgument, NotFound, invalid_field
from quire.rpc.server import RpcServer
from quire.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from quire.service.compatibility import (
    SCHEDULER_PROTOCOL,
    ModelFingerprint,
    ProtocolVersions,
    check_model,
    check_protocol,
)

SERVICE = "quire.scheduler.v1.SchedulerService"


class SchedulerStream(scheduler_pb2_grpc.SchedulerServiceServicer):
    """A scheduler that one gateway at a time is connected to.

    Attributes:
        address: Where it listens; with port 0, a free port once it has started.
        protocol: The versions of the contract that it speaks.
        model: The model that it claims to run.
        checks_hello: Refuses gateways of other versions or with another model; otherwise gateways must check.
        heard: Set whenever a message came or a step was made.
    """

    address: str = "127.0.0.1:0"
    protocol: ProtocolVersions = SCHEDULER_PROTOCOL
    model: ModelFingerprint
    checks_hello: bool = True

    def open_stream(self) -> None:
        """Sets up the stream's state; to be called once, in an event loop, before `start`."""
        self.heard = asyncio.Event()
        self._server: RpcServer | None = None
        # Wakes the stream: there may be something to send.
        self._changed = asyncio.Event()
        self._is_broken = False
        self._outgoing: deque[scheduler_pb2.ConnectResponse] = deque()
        # Messages of events that may still be sent; None if the gateway gives no credit.
        self._credit: int | None = None
        self._num_sent = 0

    def welcome(self) -> scheduler_pb2.Welcome:
        """The properties of the replica."""
        raise NotImplementedError

    def check_hello(self, first: scheduler_pb2.ConnectRequest) -> None:
        """Raises QuireError for the first message of a gateway that cannot connect."""
        if first.WhichOneof("message") != "hello":
            raise FailedPrecondition("the first message of a stream must be hello")
        hello = first.hello
        if not hello.gateway_id:
            raise invalid_field("hello.gateway_id", "must not be empty")
        if self.checks_hello:
            us, them = "the scheduler", f"gateway {hello.gateway_id}"
            versions = ProtocolVersions.of(hello.protocol)
            check_protocol("quire.scheduler.v1", self.protocol, versions, us=us, them=them)
            check_model(self.model, ModelFingerprint.of(hello.model), us=us, them=them)

    def on_connect(self, hello: scheduler_pb2.Hello) -> None:
        """A gateway has opened a stream; requests of an earlier stream are gone."""

    def on_submit(self, submit: scheduler_pb2.Submit) -> None:
        """A request came."""
        raise NotImplementedError

    def on_abort(self, abort: scheduler_pb2.Abort) -> None:
        """A request is to end. Unknown handles come, too."""
        raise NotImplementedError

    def step_at(self) -> float | None:
        """When the next step is due, by the loop's clock; None if only a change can bring one."""
        raise NotImplementedError

    def step(self) -> scheduler_pb2.TokenEvents:
        """The events of the step that is due."""
        raise NotImplementedError

    async def start(self) -> None:
        """Listens, at the earlier address if there was one."""

        def register(server: grpc.aio.Server) -> None:
            scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(self, server)

        self._server = await RpcServer.start(self.address, register, [SERVICE])
        self.address = self._server.address

    async def stop(self) -> None:
        """Dies: every stream breaks and the port is closed."""
        assert self._server is not None
        await self._server.stop(0)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def break_streams(self) -> None:
        """The stream ends; the process lives on."""
        self._is_broken = True
        self.wake()

    def wake(self) -> None:
        """Makes the stream look at `step_at` again."""
        self._changed.set()

    def say(self, **message: Any) -> None:
        """Sends a ConnectResponse with this content before the next step."""
        self._outgoing.append(scheduler_pb2.ConnectResponse(**message))
        self.wake()

    def send(self, events: scheduler_pb2.TokenEvents) -> None:
        """Sends events before the next step."""
        self.say(events=events)

    def fail(self, handle: int, **failure: Any) -> None:
        """Sends the failure of one request."""
        failed = scheduler_pb2.RequestFailure(handle=handle, **failure)
        self.send(scheduler_pb2.TokenEvents(failed=[failed]))

    async def Connect(
        self, request_iterator: AsyncIterator[scheduler_pb2.ConnectRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[scheduler_pb2.ConnectResponse]:
        first = await anext(request_iterator)
        self.check_hello(first)
        self._is_broken, self._credit = False, None
        self._num_sent = 0
        self._outgoing.clear()
        self.on_connect(first.hello)
        yield scheduler_pb2.ConnectResponse(welcome=self.welcome())
        reader = asyncio.create_task(self._read(request_iterator))
        reader.add_done_callback(lambda _: self.wake())
        try:
            async for message in self._messages(reader):
                yield message
            if self._is_broken:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the stream was broken by the test")
            await reader
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def GetState(
        self, request: scheduler_pb2.GetStateRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.GetStateResponse:
        return scheduler_pb2.GetStateResponse()

    async def FindDurable(
        self, request: scheduler_pb2.FindDurableRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.FindDurableResponse:
        raise NotFound(f"{request.request_id} is not kept", reason="REQUEST_NOT_FOUND")

    async def Cancel(
        self, request: scheduler_pb2.CancelRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.CancelResponse:
        raise NotFound(f"{request.request_id} is not kept", reason="REQUEST_NOT_FOUND")

    async def _read(self, requests: AsyncIterator[scheduler_pb2.ConnectRequest]) -> None:
        async for message in requests:
            batch = message.batch.messages
            for each in map(scheduler_pb2.ConnectRequest.FromString, batch) if batch else (message,):
                self._handle(each)
            self.wake()
            self.heard.set()

    def _handle(self, message: scheduler_pb2.ConnectRequest) -> None:
        match message.WhichOneof("message"):
            case "submit":
                self.on_submit(message.submit)
            case "abort":
                self.on_abort(message.abort)
            case "credit":
                self._add_credit(message.credit)
            case "resume":
                failure = {"code": code_pb2.NOT_FOUND, "reason": "REQUEST_NOT_FOUND", "message": "it is not kept"}
                self.fail(message.resume.handle, **failure)
            case "detach":
                self.on_abort(scheduler_pb2.Abort(handle=message.detach.handle))
            case "end_unread":
                pass
            case other:
                raise InvalidArgument(f"{other or 'an empty message'} cannot follow hello")

    def _add_credit(self, credit: scheduler_pb2.Credit) -> None:
        if not credit.messages:
            raise invalid_field("credit.messages", "is 0; it must be at least 1")
        if credit.taken > self._num_sent:
            raise invalid_field("credit.taken", f"is {credit.taken}; {self._num_sent} were sent")
        self._credit = (self._credit or 0) + credit.messages

    async def _messages(self, reader: asyncio.Task[None]) -> AsyncIterator[scheduler_pb2.ConnectResponse]:
        """Messages until the stream is broken, or the gateway has ended it."""
        clock = asyncio.get_running_loop().time
        while not self._is_broken and not reader.done():
            self._changed.clear()
            message = self._next_outgoing()
            step_at = None if self._credit == 0 else self.step_at()
            if message is None and step_at is not None and clock() >= step_at:
                self.heard.set()
                message = scheduler_pb2.ConnectResponse(events=self.step())
            if message is None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(step_at):
                        await self._changed.wait()
                continue
            if message.HasField("events"):
                self._num_sent += 1
                if self._credit is not None:
                    self._credit -= 1
            yield message
            # As fast as the stream takes them; the pause lets the gateway's messages in.
            await asyncio.sleep(0)

    def _next_outgoing(self) -> scheduler_pb2.ConnectResponse | None:
        """The next message that is not a step's. Readiness needs no credit."""
        for message in self._outgoing:
            if self._credit != 0 or not message.HasField("events"):
                self._outgoing.remove(message)
                return message
        return None
