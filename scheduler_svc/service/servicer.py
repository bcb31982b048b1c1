"""SchedulerService over gRPC: thin, every decision is elsewhere."""

import asyncio
import dataclasses
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable

import grpc.aio

from quire import compatibility
from quire.arrays import decode_int32
from quire.compatibility import ModelFingerprint, ProtocolVersions, check_model, check_protocol
from quire.rpc.errors import (
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    QuireError,
    Unavailable,
    invalid_field,
)
from quire.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from scheduler_svc.core.request import Handle, Request
from scheduler_svc.service.connections import Connections
from scheduler_svc.service.gateway_convert import gateway_messages, handle_from, request_from_submit, welcome_message
from scheduler_svc.service.history import Held
from scheduler_svc.service.outbox import Outgoing
from scheduler_svc.service.pinning import PinFailedError
from scheduler_svc.service.readiness import Readiness
from scheduler_svc.service.refusals import refusals
from scheduler_svc.service.request_spans import RequestSpans
from scheduler_svc.service.requests import Connection, OwnedRequest, Reader, Requests
from scheduler_svc.service.state_convert import blocks_message, state_message
from scheduler_svc.service.step_loop import StepLoop
from scheduler_svc.service.trace_convert import trace_context_of
from scheduler_svc.service.usage_so_far import usage_so_far

_logger = logging.getLogger(__name__)
_MAX_GRACE_PERIOD_MS = 600_000
_MAX_TIME_TO_LIVE_MS = 86_400_000
_MAX_KEPT_REFUSALS = 64


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    """One instance serves all gateways."""

    def __init__(
        self,
        loop: StepLoop,
        connections: Connections,
        requests: Requests,
        readiness: Readiness,
        clock: Callable[[], float],
        spans: RequestSpans,
    ) -> None:
        self._loop = loop
        self._connections = connections
        self._requests = requests
        self._readiness = readiness
        self._clock = clock
        self._spans = spans
        # What was logged about gateways that do not fit, the latest last.
        self._refusals: deque[str] = deque(maxlen=_MAX_KEPT_REFUSALS)

    async def Connect(
        self, request_iterator: AsyncIterator[scheduler_pb2.ConnectRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[scheduler_pb2.ConnectResponse]:
        hello = await self._hello(request_iterator)
        connection = self._connections.open(hello.gateway_id, hello.grace_period_ms / 1e3)
        reader = asyncio.create_task(self._read(request_iterator, connection))
        reader.add_done_callback(lambda _: connection.outbox.close())
        version = self._loop.version
        try:
            yield self._welcome()
            if not self._readiness.is_ready:
                connection.outbox.put_readiness(False)
            while (outgoing := await connection.outbox.take()) is not None:
                started = self._clock()
                for message in self._messages(outgoing, connection):
                    yield message
                if not connection.outbox.has_credit:
                    self._requests.taken(connection, connection.outbox.num_sent)
                if outgoing.batches:
                    self._loop.trace.emitted(outgoing.step_id, started, self._clock())
                if self._is_outdated(version):
                    break
            # Else the gateway has opened another stream, and this one may be of a link that is broken.
            if reader.done():
                await reader
        finally:
            reader.cancel()
            self._connections.close(connection)

    def _messages(self, outgoing: Outgoing, connection: Connection) -> list[scheduler_pb2.ConnectResponse]:
        try:
            return list(gateway_messages(outgoing))
        except Exception:
            # Kept for the next stream it would end that one, too. As it is, what was in it is computed again.
            self._requests.taken(connection, connection.outbox.num_sent)
            raise

    async def GetState(
        self, request: scheduler_pb2.GetStateRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.GetStateResponse:
        return await state_message(
            self._loop,
            include_sequences=request.include_sequences,
            draining=self._readiness.is_draining,
            num_gateways=len(self._connections),
        )

    async def InspectBlocks(
        self, request: scheduler_pb2.InspectBlocksRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.InspectBlocksResponse:
        return await blocks_message(self._loop, request.request_id if request.HasField("request_id") else None)

    async def PinPrefix(
        self, request: scheduler_pb2.PinPrefixRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.PinPrefixResponse:
        self._check_available()
        replica = self._loop.replica
        assert replica is not None
        if not 0 < request.time_to_live_ms <= _MAX_TIME_TO_LIVE_MS:
            raise invalid_field(
                "time_to_live_ms", f"is {request.time_to_live_ms}; it must be in [1, {_MAX_TIME_TO_LIVE_MS}]"
            )
        token_ids = decode_int32(request.token_ids, "token_ids", minimum=0, below=replica.vocab_size).tolist()
        try:
            with refusals(self._loop.retry, self._clock()):
                pin = await self._loop.pin(request.tenant, token_ids, request.time_to_live_ms / 1e3)
        except PinFailedError as error:
            raise Unavailable(str(error), reason="PIN_LOST") from error
        return scheduler_pb2.PinPrefixResponse(
            pin_id=pin.pin_id, pinned_tokens=len(pin.token_ids), pinned_blocks=len(pin.hashes)
        )

    async def UnpinPrefix(
        self, request: scheduler_pb2.UnpinPrefixRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.UnpinPrefixResponse:
        if not self._loop.unpin(request.tenant, request.pin_id):
            raise NotFound(f'pin_id "{request.pin_id}" names no pin', reason="PIN_NOT_FOUND")
        return scheduler_pb2.UnpinPrefixResponse()

    async def FindDurable(
        self, request: scheduler_pb2.FindDurableRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.FindDurableResponse:
        owned = self._requests.find(request.tenant, request.request_id)
        assert owned.durable is not None
        return scheduler_pb2.FindDurableResponse(
            submit=scheduler_pb2.Submit.FromString(owned.durable.description),
            is_over=owned.is_over,
            generated_tokens=owned.history.num_tokens,
        )

    async def Cancel(
        self, request: scheduler_pb2.CancelRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.CancelResponse:
        if not self._requests.cancel(request.tenant, request.request_id):
            raise NotFound(f'request_id "{request.request_id[:128]}" names no request', reason="REQUEST_NOT_FOUND")
        return scheduler_pb2.CancelResponse()

    async def Drain(
        self, request: scheduler_pb2.DrainRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.DrainResponse:
        timeout_s = request.timeout_ms / 1e3 if request.HasField("timeout_ms") else None
        return scheduler_pb2.DrainResponse(remaining_requests=await self.drain(timeout_s))

    async def drain(self, timeout_s: float | None) -> int:
        """Stops admitting, tells the gateways so, waits for the live requests, and returns how many are left when the
        time is over."""
        self._readiness.drain()
        try:
            async with asyncio.timeout(timeout_s):
                await self._loop.wait_idle()
        except TimeoutError:
            _logger.warning("%d requests still live after draining for %s s", self._loop.num_live(), timeout_s)
        return self._loop.num_live()

    async def _hello(self, messages: AsyncIterator[scheduler_pb2.ConnectRequest]) -> scheduler_pb2.Hello:
        self._check_available()
        first = await anext(messages, None)
        if first is None or first.WhichOneof("message") != "hello":
            raise FailedPrecondition("the first message of a stream must be hello")
        if not first.hello.gateway_id:
            raise invalid_field("hello.gateway_id", "must not be empty")
        if first.hello.grace_period_ms > _MAX_GRACE_PERIOD_MS:
            raise invalid_field(
                "hello.grace_period_ms", f"is {first.hello.grace_period_ms}; at most {_MAX_GRACE_PERIOD_MS}"
            )
        self._check_fits(first.hello)
        return first.hello

    def _check_fits(self, hello: scheduler_pb2.Hello) -> None:
        """Raises FailedPrecondition where a gateway speaks other versions, or has another model than the workers."""
        replica = self._loop.replica
        assert replica is not None
        us, them = "the scheduler", f"gateway {hello.gateway_id[:128]}"
        theirs = ProtocolVersions.of(hello.protocol)
        try:
            check_protocol("quire.scheduler.v1", compatibility.SCHEDULER_PROTOCOL, theirs, us=us, them=them)
            check_model(replica.fingerprint, ModelFingerprint.of(hello.model), us=f"the worker of {us}", them=them)
        except FailedPrecondition as error:
            # It comes again, several times a second, and there may be several of them.
            if str(error) not in self._refusals:
                self._refusals.append(str(error))
                _logger.warning("refused: %s", error)
            raise

    def _check_available(self) -> None:
        self._check_not_draining()
        if self._loop.scheduler is None:
            raise Unavailable("no worker is attached yet", reason="NO_WORKER", retry_after_ms=100)

    def _check_not_draining(self) -> None:
        if self._readiness.is_draining:
            raise Unavailable("the scheduler drains", reason="DRAINING")

    def _is_outdated(self, version: int) -> bool:
        """Whether a stream whose Welcome was of this version ends, so that its gateway connects again and learns what
        the replica is now. While the scheduler drains, it could not."""
        return self._loop.version != version and not self._readiness.is_draining

    def _welcome(self) -> scheduler_pb2.ConnectResponse:
        scheduler, replica = self._loop.scheduler, self._loop.replica
        assert scheduler is not None
        assert replica is not None
        return welcome_message(self._loop.epoch, replica, scheduler, self._requests.durable_grace_s)

    async def _read(self, messages: AsyncIterator[scheduler_pb2.ConnectRequest], connection: Connection) -> None:
        async for message in messages:
            if connection.outbox.is_closed:
                return
            match message.WhichOneof("message"):
                case "submit":
                    self._submit(message.submit, Reader(connection, Handle(message.submit.handle)))
                case "abort":
                    self._abort(message.abort, Reader(connection, Handle(message.abort.handle)))
                case "resume":
                    self._resume(message.resume, Reader(connection, Handle(message.resume.handle)))
                case "detach":
                    self._detach(Reader(connection, Handle(message.detach.handle)))
                case "end_unread":
                    self._requests.end_unread(connection.gateway_id)
                case "credit":
                    self._take_credit(message.credit, connection)
                case other:
                    raise InvalidArgument(f"{other or 'an empty message'} cannot follow hello")

    def _take_credit(self, credit: scheduler_pb2.Credit, connection: Connection) -> None:
        if not credit.messages:
            raise invalid_field("credit.messages", "is 0; it must be at least 1")
        try:
            self._requests.taken(connection, credit.taken)
        except ValueError as error:
            raise invalid_field("credit.taken", f"is {credit.taken}: {error}") from error
        connection.outbox.add_credit(credit.messages)

    def _submit(self, submit: scheduler_pb2.Submit, reader: Reader) -> None:
        try:
            self._accept(submit, reader)
        except QuireError as error:
            reader.connection.outbox.put_refusal(reader.handle, error)
        except Exception as error:
            # The gateway would submit it again over its next stream, and lose that one, too.
            _logger.error("request %s could not be taken", submit.request_id, exc_info=error)
            refusal = Internal("an unexpected error; the scheduler's log has more", reason="UNEXPECTED")
            reader.connection.outbox.put_refusal(reader.handle, refusal)

    def _accept(self, submit: scheduler_pb2.Submit, reader: Reader) -> None:
        """Queues the request, unless it is one that is known. Raises what the gateway is told."""
        replica, scheduler = self._loop.replica, self._loop.scheduler
        assert replica is not None
        assert scheduler is not None
        request = request_from_submit(submit, vocab_size=replica.vocab_size, max_num_seqs=scheduler.config.max_num_seqs)
        if submit.resubmitted and self._goes_on(request, submit, reader):
            return
        self._check_not_draining()
        description = submit.SerializeToString() if _can_be_replayed(submit) else None
        owned, request = self._requests.admit(request, submit.nonce, reader, description)
        try:
            self._queue(request, submit)
        except Exception:
            self._requests.forget(owned)
            raise

    def _goes_on(self, request: Request, submit: scheduler_pb2.Submit, reader: Reader) -> bool:
        """Hands a request that is submitted again to its gateway, where it is known. Returns whether it is."""
        held = Held.of(request, submit.num_prompt_logprobs)
        owned = self._requests.resubmitted(request, submit.nonce, reader.connection.gateway_id, held)
        if owned is None:
            return False
        self._requests.attach(owned, reader, held)
        for index in held.ended:
            # A stop string ended it, and the Abort that said so may be lost.
            self._abort(scheduler_pb2.Abort(handle=reader.handle, sequence_index=index, wants_usage=True), reader)
        return True

    def _queue(self, request: Request, submit: scheduler_pb2.Submit) -> None:
        """Hands a request to the core. Raises what the gateway is told."""
        span = self._spans.start(request, trace_context_of(submit))
        if span is None:
            self._submit_to_core(request)
            return
        try:
            self._submit_to_core(dataclasses.replace(request, traceparent=span.context.traceparent))
        except QuireError as error:
            self._spans.refused(span, error)
            raise
        assert self._loop.scheduler is not None
        self._spans.queued(span, self._loop.scheduler.waiting.get(request.key))

    def _submit_to_core(self, request: Request) -> None:
        with refusals(self._loop.retry, self._clock()):
            self._loop.submit(request)

    def _resume(self, resume: scheduler_pb2.Resume, reader: Reader) -> None:
        try:
            handle_from(resume.handle)
            self._requests.attach(self._requests.find(resume.tenant, resume.request_id), reader, Held())
        except QuireError as error:
            reader.connection.outbox.put_refusal(reader.handle, error)

    def _detach(self, reader: Reader) -> None:
        owned = self._requests.read_by(reader)
        if owned is not None and owned.durable is not None:
            self._requests.detach(owned)
        else:
            self._abort(scheduler_pb2.Abort(handle=reader.handle), reader)

    def _abort(self, abort: scheduler_pb2.Abort, reader: Reader) -> None:
        owned = self._requests.read_by(reader)
        usage = None if owned is None else usage_so_far(self._loop.scheduler, owned.key, self._clock())
        if abort.HasField("sequence_index") and not (
            owned is not None and usage is not None and self._abort_last_sequence(owned, abort.sequence_index)
        ):
            return
        if owned is not None and owned.durable is not None and (abort.wants_usage or owned.is_over):
            self._requests.end(owned, usage)
        elif owned is not None:
            self._requests.forget(owned)
        if abort.wants_usage:
            reader.connection.outbox.put_aborted(reader.handle, usage)

    def _abort_last_sequence(self, owned: OwnedRequest, index: int) -> bool:
        """Ends one sequence of a live request. Returns whether that ended the request."""
        self._loop.abort_sequence(owned.key, index)
        self._spans.sequence_aborted(owned.key)
        return usage_so_far(self._loop.scheduler, owned.key, self._clock()) is None


def _can_be_replayed(submit: scheduler_pb2.Submit) -> bool:
    """Whether it is durable and all that was ever said of it will be known here. Log probabilities that an earlier
    scheduler reported are not."""
    has_logprobs = submit.output.HasField("logprobs") or submit.output.HasField("prompt_logprobs")
    return submit.durable and not (has_logprobs and submit.emitted)
