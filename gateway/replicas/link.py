"""The multiplexed stream to one scheduler. It is opened, read and written, and reopened when it breaks."""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from typing import Any, NamedTuple, Protocol, cast

import grpc
import grpc.aio
from google.protobuf.message import Message

from gateway.replicas.cache_messages import CachedBlocks
from gateway.replicas.events import EventBatch, Welcome, event_batch_from, welcome_from
from gateway.replicas.live import LiveRequest
from gateway.replicas.request_messages import submit_message
from gateway.replicas.sequence import TokenGapError
from gateway.turns import Turns
from quire.model_files.progress import LoadProgress
from quire.rpc.channel import open_channel
from quire.rpc.errors import FailedPrecondition, QuireError, Unavailable, from_rpc_error
from quire.rpc.tls import TlsIdentity
from quire.runtime import entropy
from quire.runtime.failpoint import failpoint
from quire.runtime.settings import ConfigurationError
from quire.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from quire.service import compatibility
from quire.service.compatibility import UNKNOWN_MODEL, ModelFingerprint

_CONNECT = "/quire.scheduler.v1.SchedulerService/Connect"
_WELCOME_TIMEOUT_S = 10.0
_CLOSE_TIMEOUT_S = 1.0
_MIN_BACKOFF_S = 0.01
_MAX_BACKOFF_S = 0.25
# A stream that breaks earlier does not reset the backoff.
_STABLE_AFTER_S = 1.0
# Credit is granted for several messages at once: otherwise each message received would need a message sent.
_MESSAGES_OF_CREDIT = 2
# Messages that are being applied, and messages in transit.
_MESSAGES_AHEAD = 2 * _MESSAGES_OF_CREDIT
# A task that waits for an event runs in the next turn of the event loop, and writes in the turn after that.
_TURNS_OF_A_READER = 2
# Detokenizing these takes a few milliseconds. A replayed durable output comes in messages of many more tokens.
_TOKENS_AT_ONCE = 256
# Messages that are sent as one, each of at most this size.
_BATCHED_MESSAGES, _BATCHED_BYTES = 32, 1 << 14
_logger = logging.getLogger(__name__)


class LinkListener(Protocol):
    """Callbacks of a stream. They are synchronous: the stream is not read while a method runs.

    `check_welcome` raises SchedulerRefusedError if this scheduler cannot be used. `on_readiness` is called when the
    scheduler of an open stream loses its worker, has a worker again, or drains. `on_events` gets a limited number of
    tokens at a time; if it raises TokenGapError because events are missing, the stream is reopened. `on_not_sent` gets
    a request that could not be serialized.
    """

    def check_welcome(self, welcome: Welcome) -> None: ...
    def on_connected(self, link: "SchedulerLink") -> None: ...
    def on_readiness(self, link: "SchedulerLink") -> None: ...
    def on_events(self, link: "SchedulerLink", batch: EventBatch) -> None: ...
    def on_not_sent(self, live: LiveRequest, error: Exception) -> None: ...
    def on_disconnected(self, link: "SchedulerLink") -> None: ...


class _Offered(NamedTuple):
    """An offer to this scheduler of a request that another scheduler runs."""

    live: LiveRequest


_Mail = scheduler_pb2.ConnectRequest | LiveRequest | _Offered


class SchedulerRefusedError(Exception):
    """This gateway cannot use the scheduler, and tries again later."""


class SchedulerLink:
    """Keeps one stream to one scheduler open while `run` runs, and reconnects with backoff.

    Nothing is sent to a scheduler that is not connected: in `on_connected` the listener resubmits every request that
    should run there, and the scheduler then ends all other requests of this gateway.

    Attributes:
        address: Where the scheduler listens.
        welcome: The scheduler's last welcome; None before the first one.
        is_connected: Whether a stream is open.
        is_ready: Whether, in addition, the scheduler has its worker and runs steps.
        is_draining: Whether the scheduler exits when its requests have ended or moved to other replicas.
        leave_after_s: While it drains, the time after which requests should move at the latest; 0 if unspecified.
        is_busy: Whether it drains and has requests, of any gateway.
        cached: The contents of the replica's prefix cache; None while they are unknown.
        problem: Why no stream is open; None before the first attempt, and while a stream is open.
        loading: The progress of the scheduler's workers in loading their model; None if not reported.
    """

    def __init__(
        self,
        address: str,
        *,
        gateway_id: str,
        grace_period_ms: int,
        model: ModelFingerprint,
        listener: LinkListener,
        wants_cache_updates: bool = False,
        tls: TlsIdentity | None = None,
        host_name: str | None = None,
    ) -> None:
        """`host_name` is the name that the scheduler's certificate must have, if not the host of `address`."""
        self.address = address
        self._host_name = host_name
        self._tls = tls
        self.welcome: Welcome | None = None
        self.is_connected = False
        self.is_ready = False
        self.is_draining = False
        self.leave_after_s = 0.0
        self.is_busy = False
        self.cached: CachedBlocks | None = None
        self.problem: str | None = None
        self.loading: LoadProgress | None = None
        # The stub for unary calls, which fail when the stream ends; None while no stream is open.
        self._stub: scheduler_pb2_grpc.SchedulerServiceStub | None = None
        hello = scheduler_pb2.Hello(
            gateway_id=gateway_id,
            grace_period_ms=grace_period_ms,
            protocol=compatibility.SCHEDULER_PROTOCOL.message(),
            model=model.message(),
            wants_cache_updates=wants_cache_updates,
        )
        self._hello = scheduler_pb2.ConnectRequest(hello=hello)
        self._listener = listener
        # A request represents its submission, which is serialized only when written: a reconnect submits many.
        self._outbox: deque[_Mail] = deque()
        self._has_mail = asyncio.Event()
        self._outbox_is_empty = asyncio.Event()
        # Messages of events that were taken in, and the ones among them without new credit.
        self._num_taken = self._num_ungranted = 0

    @property
    def model(self) -> ModelFingerprint:
        """The model of the last welcome."""
        return UNKNOWN_MODEL if self.welcome is None else self.welcome.model

    def submit(self, live: LiveRequest) -> None:
        """Queues the submission of a request, with the tokens that it already has."""
        self._send(live)
        if self._num_ungranted:
            # In the same message: a message of its own costs both sides more than its content.
            self._grant(self._num_ungranted)

    def offer(self, live: LiveRequest) -> None:
        """Asks for room for a request that runs on another replica. Replaces an earlier offer of the request."""
        self._send(_Offered(live))

    def abort(self, handle: int, sequence_index: int | None = None, *, wants_usage: bool = False) -> None:
        """Queues an abort of a request, or of one sequence if an index is given; with `wants_usage` the scheduler
        answers with its usage. No effect without a stream."""
        if self.is_connected:
            abort = scheduler_pb2.Abort(handle=handle, sequence_index=sequence_index, wants_usage=wants_usage)
            self._send(scheduler_pb2.ConnectRequest(abort=abort))

    def withdraw(self, live: LiveRequest) -> None:
        """Ends a request. If its first submission still waits here, it is neither sent nor counted, and no abort is
        needed."""
        if live.submissions == 1 and live in self._outbox:
            self._outbox.remove(live)
            live.submissions = 0
        else:
            self.abort(live.handle)

    def resume(self, live: LiveRequest) -> None:
        """Queues the takeover of a durable request. The stream must be open."""
        request = live.request
        resume = scheduler_pb2.Resume(handle=live.handle, tenant=request.tenant, request_id=request.request_id)
        self._send(scheduler_pb2.ConnectRequest(resume=resume))

    def release(self, handle: int) -> None:
        """Queues the release of a request, which is to continue on another scheduler. The stream must be open."""
        self._send(scheduler_pb2.ConnectRequest(release=scheduler_pb2.Release(handle=handle)))

    def detach(self, handle: int) -> None:
        """Notifies the scheduler that a durable request lost its reader. Without a stream the scheduler knows that."""
        if self.is_connected:
            self._send(scheduler_pb2.ConnectRequest(detach=scheduler_pb2.Detach(handle=handle)))

    async def ask(self, method: str, request: Message, timeout_s: float | None) -> Any:
        """Calls a unary method and returns the response.

        Raises:
            QuireError: the scheduler's error, or Unavailable if it is not connected or disconnects.
        """
        with self._calling() as stub:
            return await getattr(stub, method)(request, timeout=timeout_s)

    async def watch(self, *, wants_memory: bool) -> AsyncGenerator[scheduler_pb2.WatchResponse, None]:
        """Frames of the scheduler, optionally with block tables and block names, until its stream breaks.

        Raises:
            QuireError: the scheduler's error, or Unavailable if it is not connected or disconnects.
        """
        with self._calling() as stub:
            call: Any = stub.Watch(scheduler_pb2.WatchRequest(include_memory=wants_memory))
            try:
                async for frame in call:
                    yield frame
            finally:
                call.cancel()

    @contextlib.contextmanager
    def _calling(self) -> Generator[Any]:
        """The stub for a call; failures of the call are raised as QuireError."""
        unconnected = Unavailable(f"scheduler {self.address} is not connected", reason="NO_SCHEDULER")
        if self._stub is None:
            raise unconnected
        try:
            yield self._stub
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        except asyncio.CancelledError:
            # gRPC also raises this error in a call whose channel closes, which does not cancel this task.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise unconnected from None

    async def flush(self) -> None:
        """Waits until all queued messages are written, the stream breaks, or a second has passed."""
        if not self.is_connected:
            return
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._outbox_is_empty.wait()
        except TimeoutError:
            _logger.warning("scheduler %s does not read its stream", self.address)

    async def run(self) -> None:
        """Connects, serves the stream and reconnects, until cancelled."""
        backoff_s = _MIN_BACKOFF_S
        last_problem = None
        clock = asyncio.get_running_loop().time
        while True:
            started_at = clock()
            is_refused = False
            loading = None
            try:
                await self._run_stream()
                problem = "the scheduler ended the stream"
            except (QuireError, SchedulerRefusedError, TokenGapError, ConfigurationError) as error:
                problem = str(error)
                loading = LoadProgress.of_metadata(error.metadata) if isinstance(error, QuireError) else None
                is_refused = isinstance(error, FailedPrecondition | SchedulerRefusedError)
            except Exception as error:
                # An unexpected error must not end the other streams, and the next stream may work.
                problem = f"{type(error).__name__}: {error}"
                if problem != last_problem:
                    _logger.exception("the stream to scheduler %s failed unexpectedly", self.address)
            finally:
                was_connected = self.is_connected
                if was_connected:
                    self._disconnect()
            # Loading progress is logged once per phase.
            kind = problem if loading is None else loading.phase
            if was_connected or kind != last_problem:
                # Before the first connection a scheduler may not have started yet.
                level = logging.INFO if self.welcome is None and not is_refused else logging.WARNING
                _logger.log(level, "scheduler %s: %s; connecting again", self.address, problem)
            self.problem, self.loading, last_problem = problem, loading, kind
            if was_connected and clock() - started_at >= _STABLE_AFTER_S:
                backoff_s = _MIN_BACKOFF_S
            # Jitter prevents many gateways from reconnecting at once.
            await asyncio.sleep(backoff_s * entropy.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    async def _run_stream(self) -> None:
        """Serves one stream from Hello to its end. Raises QuireError when it breaks."""
        async with open_channel(self.address, tls=self._tls, host_name=self._host_name) as channel:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            # Messages are serialized here: gRPC would hang on a message that cannot be serialized.
            call = cast(Any, channel).stream_stream(
                _CONNECT, response_deserializer=scheduler_pb2.ConnectResponse.FromString
            )()
            try:
                responses = aiter(call)
                welcome = await self._greet(call, responses)
                self._connect(welcome)
                self._stub = stub
                await self._serve(call, responses)
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from error
            finally:
                # Before the channel closes, since no call can use it afterwards.
                self._stub = None
                call.cancel()

    async def _greet(self, call: Any, responses: AsyncIterator[scheduler_pb2.ConnectResponse]) -> Welcome:
        # In its own task: a gRPC call that is cancelled while it starts swallows its caller's cancellation.
        exchange = asyncio.create_task(_exchange_hello(call, self._hello, responses))
        try:
            await asyncio.wait([exchange], timeout=_WELCOME_TIMEOUT_S)
            if not exchange.done():
                raise SchedulerRefusedError(f"no welcome within {_WELCOME_TIMEOUT_S:g} s")
            return exchange.result()
        finally:
            if not exchange.done():
                call.cancel()
                # The end of the call does not wake a write that waits for the connection.
                exchange.cancel()
                await asyncio.gather(exchange, return_exceptions=True)

    def _connect(self, welcome: Welcome) -> None:
        # The epoch is not compared: a stream opens after the previous one has ended, so its scheduler is newer, even if
        # the clock behind the epochs went back.
        self._listener.check_welcome(welcome)
        self._outbox.clear()
        self._has_mail.clear()
        self._outbox_is_empty.set()
        self.is_connected = True
        self.is_ready = True
        self.is_draining = self.is_busy = False
        self.problem = self.loading = None
        self.welcome = welcome
        self._num_taken = self._num_ungranted = 0
        self._grant(_MESSAGES_AHEAD)
        self._listener.on_connected(self)
        self._send(scheduler_pb2.ConnectRequest(end_unread=scheduler_pb2.EndUnread()))

    def _disconnect(self) -> None:
        self.is_connected = False
        self.is_ready = self.is_draining = self.is_busy = False
        self.cached = None
        self._outbox.clear()
        self._outbox_is_empty.set()
        self._listener.on_disconnected(self)

    async def _serve(self, call: Any, responses: AsyncIterator[scheduler_pb2.ConnectResponse]) -> None:
        """Reads and writes until the stream ends. If one of the two fails, the other is ended, too: the stream needs
        both."""
        reader = asyncio.create_task(self._read(responses))
        writer = asyncio.create_task(self._write_outbox(call))
        try:
            await asyncio.wait([reader, writer], return_when=asyncio.FIRST_COMPLETED)
            if not reader.done() and writer.exception() is None:
                # The stream broke, and the reader is about to get the cause.
                await asyncio.wait([reader], timeout=_CLOSE_TIMEOUT_S)
            for task in (reader, writer):
                if task.done() and not task.cancelled():
                    task.result()
            if not reader.done() or reader.cancelled():
                raise Unavailable("the stream broke", reason="NO_SCHEDULER")
        finally:
            reader.cancel()
            writer.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)

    async def _read(self, responses: AsyncIterator[scheduler_pb2.ConnectResponse]) -> None:
        async for message in responses:
            match message.WhichOneof("message"):
                case "events":
                    failpoint("gateway.events.before_apply")
                    turns = Turns()
                    for part in event_batch_from(message.events).parts(_TOKENS_AT_ONCE):
                        await turns.pause()
                        self._listener.on_events(self, part)
                        await _let_readers_run()
                    failpoint("gateway.events.before_credit")
                    self._num_taken += 1
                    self._num_ungranted += 1
                    if self._num_ungranted == _MESSAGES_OF_CREDIT:
                        self._grant(_MESSAGES_OF_CREDIT)
                case "state":
                    state = message.state
                    self.loading = LoadProgress.of(state.loading) if state.HasField("loading") else None
                    before = self.is_ready, self.is_draining, self.leave_after_s
                    self.is_ready, self.is_draining = state.ready, state.draining
                    self.leave_after_s, self.is_busy = state.leave_after_ms / 1e3, state.busy
                    if before != (self.is_ready, self.is_draining, self.leave_after_s):
                        self._listener.on_readiness(self)
                case "cache":
                    if self.cached is None:
                        self.cached = CachedBlocks()
                    self.cached.update(message.cache)
                case _:
                    """A message of a later version, or a second welcome."""

    async def _write_outbox(self, call: Any) -> None:
        """Writes until the stream breaks; the reader raises the cause. Raises all other errors."""
        try:
            while True:
                await self._has_mail.wait()
                turns = Turns()
                while self._outbox:
                    for data in self._next_messages():
                        await call.write(data)
                    await turns.pause()
                self._has_mail.clear()
                self._outbox_is_empty.set()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return

    def _next_messages(self) -> list[bytes]:
        """The messages to write next: a few small ones as one, since each costs both sides more than its content, and
        so that the texts of a call can be computed in one step. A large one follows by itself."""
        takes_batches = self.welcome is not None and self.welcome.takes_batches
        small, large = list[bytes](), list[bytes]()
        while self._outbox and not large and len(small) < (_BATCHED_MESSAGES if takes_batches else 1):
            if (data := self._serialized(self._outbox.popleft())) is not None:
                (small if len(data) <= _BATCHED_BYTES else large).append(data)
        if len(small) > 1:
            small = [scheduler_pb2.ConnectRequest(batch=scheduler_pb2.Batch(messages=small)).SerializeToString()]
        return small + large

    def _serialized(self, mail: "_Mail") -> bytes | None:
        """The bytes to write; None for a request that cannot be serialized, which is reported to the listener."""
        if isinstance(mail, scheduler_pb2.ConnectRequest):
            return mail.SerializeToString()
        is_offer = isinstance(mail, _Offered)
        live = mail.live if is_offer else mail
        try:
            has_drafts = self.welcome is not None and self.welcome.max_drafts > 0
            message = submit_message(live, has_drafts=has_drafts, is_offer=is_offer)
            # By the next submission the blocks will be gone.
            live.kv_source = None
            return message.SerializeToString()
        except Exception as error:
            self._listener.on_not_sent(live, error)
            return None

    def _grant(self, num_messages: int) -> None:
        """Grants credit for `num_messages` more event messages."""
        self._num_ungranted = 0
        credit = scheduler_pb2.Credit(messages=num_messages, taken=self._num_taken)
        self._send(scheduler_pb2.ConnectRequest(credit=credit))

    def _send(self, message: "_Mail") -> None:
        self._outbox.append(message)
        self._outbox_is_empty.clear()
        self._has_mail.set()


async def _let_readers_run() -> None:
    """Lets every client stream with new events write them before more are read. An overloaded gateway then receives
    fewer messages, each with more tokens, in place of a growing queue."""
    for _ in range(_TURNS_OF_A_READER):
        await asyncio.sleep(0)


async def _exchange_hello(
    call: Any, hello: scheduler_pb2.ConnectRequest, responses: AsyncIterator[scheduler_pb2.ConnectResponse]
) -> Welcome:
    # A write to a failed call does not raise the cause; the read below does.
    with contextlib.suppress(asyncio.InvalidStateError):
        await call.write(hello.SerializeToString())
    answer = await anext(responses, None)
    if answer is None or answer.WhichOneof("message") != "welcome":
        raise SchedulerRefusedError("the first message is not a welcome")
    return welcome_from(answer.welcome)
