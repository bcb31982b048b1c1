"""The multiplexed stream to one scheduler."""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol, TypeVar

import grpc
import grpc.aio

from gateway.requests.live_request import LiveRequest
from gateway.requests.sequence_stream import TokenGapError
from gateway.schedulers.backoff import Backoff
from gateway.schedulers.scheduler_convert import (
    abort_message,
    credit_message,
    detach_message,
    end_unread_message,
    event_batch_from,
    hello_message,
    resume_message,
    submit_message,
    welcome_from,
)
from gateway.schedulers.scheduler_events import EventBatch, Welcome
from gateway.turns import Turns
from quire.compatibility import UNKNOWN_MODEL, ModelFingerprint
from quire.rpc.channel import open_channel
from quire.rpc.errors import FailedPrecondition, QuireError, Unavailable, from_rpc_error
from quire.rpc.tls import TlsIdentity
from quire.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from quire.settings import ConfigurationError

_CONNECT = "/quire.scheduler.v1.SchedulerService/Connect"
_WELCOME_TIMEOUT_S = 10.0
_CLOSE_TIMEOUT_S = 1.0
# A stream that breaks sooner does not reset the backoff.
_STABLE_AFTER_S = 1.0
# Credit is given for several messages at once: for each alone it would be a message up for every message down.
_MESSAGES_OF_CREDIT = 2
# Those that are being handed out, and those on their way meanwhile.
_MESSAGES_AHEAD = 2 * _MESSAGES_OF_CREDIT
_TURNS_OF_A_READER = 2
# These are detokenized in a few milliseconds. A durable output that is read again comes in messages of many more.
_TOKENS_AT_ONCE = 256
Answer = TypeVar("Answer")
_logger = logging.getLogger(__name__)


class SchedulerListener(Protocol):
    """Hears what happens on a stream. Synchronous: the stream is not read while a method runs."""

    def check_welcome(self, welcome: Welcome) -> None:
        """Raises SchedulerRefusedError when this scheduler cannot be used."""
        ...

    def on_connected(self, client: "SchedulerClient") -> None:
        """The stream is open."""
        ...

    def on_readiness(self, client: "SchedulerClient") -> None:
        """The scheduler of an open stream lost its worker, or has one again, or drains."""
        ...

    def on_events(self, client: "SchedulerClient", batch: EventBatch) -> None:
        """Gets what happened, a limited number of tokens at a time. Raises TokenGapError when events are missing; the
        stream is opened anew."""
        ...

    def on_not_sent(self, live: LiveRequest, error: Exception) -> None:
        """No message could be made of a request."""
        ...

    def on_disconnected(self, client: "SchedulerClient") -> None:
        """An open stream broke."""
        ...


class SchedulerRefusedError(Exception):
    """The scheduler is not one that this gateway can use; it is asked again later."""


class SchedulerClient:
    """Keeps one stream to one scheduler open for as long as `run` runs, and reconnects with backoff.

    Nothing is ever sent to a scheduler that is not connected: in `on_connected` the listener submits again whatever
    should run there, and the scheduler then ends what else it has of this gateway.

    Attributes:
        address: Where the scheduler listens.
        welcome: What the scheduler said last, None before the first time.
        is_connected: Whether a stream is open.
        is_ready: Whether the scheduler runs steps, too: it has its worker.
        problem: Why no stream is open; None before the first attempt, and while one is.
    """

    def __init__(
        self,
        address: str,
        *,
        gateway_id: str,
        grace_period_ms: int,
        model: ModelFingerprint,
        listener: SchedulerListener,
        tls: TlsIdentity | None = None,
    ) -> None:
        self.address = address
        self._tls = tls
        self.welcome: Welcome | None = None
        self.is_connected = False
        self.is_ready = False
        self.problem: str | None = None
        # For unary calls, which end when the stream does; None while none is open.
        self._stub: scheduler_pb2_grpc.SchedulerServiceStub | None = None
        self._hello = hello_message(gateway_id, grace_period_ms, model)
        self._listener = listener
        # A request stands for its submission, which is made when it is written: after a reconnect there are many.
        self._outbox: deque[scheduler_pb2.ConnectRequest | LiveRequest] = deque()
        self._has_mail = asyncio.Event()
        self._outbox_is_empty = asyncio.Event()

    @property
    def model(self) -> ModelFingerprint:
        """What the scheduler said last of its model."""
        return UNKNOWN_MODEL if self.welcome is None else self.welcome.model

    def submit(self, live: LiveRequest) -> None:
        """Sends a request, with the tokens that it has already, soon."""
        self._send(live)

    def abort(self, handle: int, sequence_index: int | None = None, *, wants_usage: bool = False) -> None:
        """Asks to end a request, or one sequence of it, soon, and to say what it has cost. Without a stream there is
        nothing to end."""
        if self.is_connected:
            self._send(abort_message(handle, sequence_index, wants_usage=wants_usage))

    def resume(self, live: LiveRequest) -> None:
        """Takes a durable request over, soon. Its stream must be open."""
        self._send(resume_message(live))

    def detach(self, handle: int) -> None:
        """Leaves a durable request to whoever resumes it, soon. Without a stream it is so already."""
        if self.is_connected:
            self._send(detach_message(handle))

    async def ask(self, call: Callable[[scheduler_pb2_grpc.SchedulerServiceStub], Awaitable[Answer]]) -> Answer:
        """What a unary call answers.

        Raises:
            QuireError: what the scheduler said, or Unavailable where it is not connected (any more).
        """
        unconnected = Unavailable(f"scheduler {self.address} is not connected", reason="NO_SCHEDULER")
        if self._stub is None:
            raise unconnected
        try:
            return await call(self._stub)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        except asyncio.CancelledError:
            # gRPC raises it also in a call whose channel closes, which is no cancellation of ours.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise unconnected from None

    async def flush(self) -> None:
        """Waits until everything that was sent before is written, or the stream is gone, or a second passed."""
        if not self.is_connected:
            return
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._outbox_is_empty.wait()
        except TimeoutError:
            _logger.warning("scheduler %s does not take what is sent to it", self.address)

    async def run(self) -> None:
        """Connects, reads, reconnects; ends only by cancellation."""
        backoff = Backoff()
        last_problem = None
        clock = asyncio.get_running_loop().time
        while True:
            started_at = clock()
            is_refused = False
            try:
                await self._run_stream()
                problem = "the scheduler ended the stream"
            except (QuireError, SchedulerRefusedError, TokenGapError, ConfigurationError) as error:
                problem = str(error)
                is_refused = isinstance(error, FailedPrecondition | SchedulerRefusedError)
            except Exception as error:
                # Whatever it is, it is no reason to end the other streams; another stream may be served.
                problem = f"{type(error).__name__}: {error}"
                if problem != last_problem:
                    _logger.exception("the stream to scheduler %s failed unexpectedly", self.address)
            finally:
                was_connected = self.is_connected
                if was_connected:
                    self._disconnect()
            if was_connected or problem != last_problem:
                # Before the first connection it is no news that a scheduler is not there yet.
                level = logging.INFO if self.welcome is None and not is_refused else logging.WARNING
                _logger.log(level, "scheduler %s: %s; connecting again", self.address, problem)
            self.problem = last_problem = problem
            if was_connected and clock() - started_at >= _STABLE_AFTER_S:
                backoff.reset()
            await asyncio.sleep(backoff.next_delay_s())

    async def _run_stream(self) -> None:
        """One stream from Hello to its end. Raises QuireError when it breaks."""
        async with open_channel(self.address, tls=self._tls) as channel:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            # What is written is serialized here: gRPC itself would send nothing for a message that cannot be, and wait.
            call = channel.stream_stream(_CONNECT, response_deserializer=scheduler_pb2.ConnectResponse.FromString)()
            try:
                responses = aiter(call)
                welcome = await self._greet(call, responses)
                self._connect(welcome)
                self._stub = stub
                await self._serve(call, responses)
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from error
            finally:
                # Before the channel closes: nothing can be called on it then.
                self._stub = None
                call.cancel()

    async def _greet(self, call: Any, responses: AsyncIterator[scheduler_pb2.ConnectResponse]) -> Welcome:
        # In a task of its own: a gRPC call that is cancelled while it starts swallows the cancellation of its caller.
        exchange = asyncio.create_task(_exchange_hello(call, self._hello, responses))
        try:
            await asyncio.wait([exchange], timeout=_WELCOME_TIMEOUT_S)
            if not exchange.done():
                raise SchedulerRefusedError(f"no welcome within {_WELCOME_TIMEOUT_S:g} s")
            return exchange.result()
        finally:
            if not exchange.done():
                call.cancel()
                # A write that waits for the connection is not woken by the call's end.
                exchange.cancel()
                await asyncio.wait([exchange])

    def _connect(self, welcome: Welcome) -> None:
        # Whatever its epoch is: a stream is opened when the one before is over, so this one is of the newer scheduler,
        # even where the clock that epochs are made from went back.
        self._listener.check_welcome(welcome)
        self._outbox.clear()
        self._has_mail.clear()
        self._outbox_is_empty.set()
        self.is_connected = True
        self.is_ready = True
        self.problem = None
        self.welcome = welcome
        self._send(credit_message(_MESSAGES_AHEAD, 0))
        self._listener.on_connected(self)
        self._send(end_unread_message())

    def _disconnect(self) -> None:
        self.is_connected = False
        self.is_ready = False
        self._outbox.clear()
        self._outbox_is_empty.set()
        self._listener.on_disconnected(self)

    async def _serve(self, call: Any, responses: AsyncIterator[scheduler_pb2.ConnectResponse]) -> None:
        """Reads and writes until the stream ends. When one of both fails, so does the other: a stream that is only
        read, or only written to, serves nobody."""
        reader = asyncio.create_task(self._read(responses))
        writer = asyncio.create_task(self._write_outbox(call))
        try:
            await asyncio.wait([reader, writer], return_when=asyncio.FIRST_COMPLETED)
            if not reader.done() and writer.exception() is None:
                # The stream broke. What is read last says why.
                await asyncio.wait([reader], timeout=_CLOSE_TIMEOUT_S)
            for task in (reader, writer):
                if task.done() and not task.cancelled():
                    task.result()
            if not reader.done() or reader.cancelled():
                raise Unavailable("the stream broke", reason="NO_SCHEDULER")
        finally:
            reader.cancel()
            writer.cancel()
            await asyncio.wait([reader, writer])

    async def _read(self, responses: AsyncIterator[scheduler_pb2.ConnectResponse]) -> None:
        num_taken = 0
        async for message in responses:
            match message.WhichOneof("message"):
                case "events":
                    turns = Turns()
                    for part in event_batch_from(message.events).parts(_TOKENS_AT_ONCE):
                        await turns.pause()
                        self._listener.on_events(self, part)
                        await _let_readers_run()
                    num_taken += 1
                    if num_taken % _MESSAGES_OF_CREDIT == 0:
                        self._send(credit_message(_MESSAGES_OF_CREDIT, num_taken))
                case "state":
                    self._change_readiness(message.state.ready)

    def _change_readiness(self, is_ready: bool) -> None:
        if is_ready != self.is_ready:
            self.is_ready = is_ready
            self._listener.on_readiness(self)

    async def _write_outbox(self, call: Any) -> None:
        """Writes until the stream breaks; the reader then learns why. Whatever else goes wrong is raised."""
        try:
            while True:
                await self._has_mail.wait()
                turns = Turns()
                while self._outbox:
                    if (data := self._serialized(self._outbox.popleft())) is not None:
                        await call.write(data)
                    await turns.pause()
                self._has_mail.clear()
                self._outbox_is_empty.set()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return

    def _serialized(self, mail: scheduler_pb2.ConnectRequest | LiveRequest) -> bytes | None:
        """What is written; None for a request that cannot be, which the listener hears."""
        if not isinstance(mail, LiveRequest):
            return mail.SerializeToString()
        try:
            return submit_message(mail).SerializeToString()
        except Exception as error:
            self._listener.on_not_sent(mail, error)
            return None

    def _send(self, message: scheduler_pb2.ConnectRequest | LiveRequest) -> None:
        self._outbox.append(message)
        self._outbox_is_empty.clear()
        self._has_mail.set()


async def _let_readers_run() -> None:
    """Gives every stream that has news its turn before more news are asked for. A gateway that cannot keep up gets
    fewer messages then, each of more tokens, and no queue of old ones."""
    for _ in range(_TURNS_OF_A_READER):
        await asyncio.sleep(0)


async def _exchange_hello(
    call: Any, hello: scheduler_pb2.ConnectRequest, responses: AsyncIterator[scheduler_pb2.ConnectResponse]
) -> Welcome:
    # A write to a call that failed already says nothing of the cause; the read does.
    with contextlib.suppress(asyncio.InvalidStateError):
        await call.write(hello.SerializeToString())
    answer = await anext(responses, None)
    if answer is None or answer.WhichOneof("message") != "welcome":
        raise SchedulerRefusedError("the first message is not a welcome")
    return welcome_from(answer.welcome)
