"""SchedulerService over gRPC: thin, every decision is elsewhere."""

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator, Callable

import grpc.aio

from quire.arrays import decode_int32
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
from scheduler_svc.core.request import Handle, Request, RequestKey
from scheduler_svc.service.connections import Connection, Connections
from scheduler_svc.service.durable import DurableRequests, Reader
from scheduler_svc.service.gateway_convert import gateway_messages, handle_from, request_from_submit, welcome_message
from scheduler_svc.service.pinning import PinFailedError
from scheduler_svc.service.readiness import Readiness
from scheduler_svc.service.refusals import refusals
from scheduler_svc.service.request_spans import RequestSpans
from scheduler_svc.service.sampling_convert import check_sampling
from scheduler_svc.service.state_convert import blocks_message, state_message
from scheduler_svc.service.step_loop import StepLoop
from scheduler_svc.service.trace_convert import trace_context_of
from scheduler_svc.service.usage_so_far import usage_so_far

_logger = logging.getLogger(__name__)
_MAX_GRACE_PERIOD_MS = 600_000
_MAX_TIME_TO_LIVE_MS = 86_400_000


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    """One instance serves all gateways."""

    def __init__(
        self,
        loop: StepLoop,
        connections: Connections,
        durable: DurableRequests,
        readiness: Readiness,
        clock: Callable[[], float],
        spans: RequestSpans,
    ) -> None:
        self._loop = loop
        self._connections = connections
        self._durable = durable
        self._readiness = readiness
        self._clock = clock
        self._spans = spans

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
                for message in gateway_messages(outgoing):
                    yield message
                if outgoing.batches:
                    self._loop.trace.emitted(outgoing.step_id, started, self._clock())
                if self._is_outdated(version):
                    break
            # Else the gateway has opened another stream, and this one may be of a link that is broken.
            if reader.done():
                await reader
        finally:
            reader.cancel()
            self._durable.detach_all(connection)
            self._connections.close(connection)

    async def GetState(
        self, request: scheduler_pb2.GetStateRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.GetStateResponse:
        return state_message(
            self._loop,
            include_sequences=request.include_sequences,
            draining=self._readiness.is_draining,
            num_gateways=len(self._connections),
        )

    async def InspectBlocks(
        self, request: scheduler_pb2.InspectBlocksRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.InspectBlocksResponse:
        return blocks_message(self._loop, request.request_id if request.HasField("request_id") else None)

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
        durable = self._durable.find(request.tenant, request.request_id)
        submit = None if request.state_only else scheduler_pb2.Submit.FromString(durable.description)
        generated = len(durable.events.token_ids)
        return scheduler_pb2.FindDurableResponse(submit=submit, is_over=durable.is_over, generated_tokens=generated)

    async def Cancel(
        self, request: scheduler_pb2.CancelRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.CancelResponse:
        cancelled = [each.cancel(request.tenant, request.request_id) for each in (self._durable, self._connections)]
        if not any(cancelled):
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
        return first.hello

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
        return welcome_message(self._loop.epoch, replica, scheduler)

    async def _read(self, messages: AsyncIterator[scheduler_pb2.ConnectRequest], connection: Connection) -> None:
        async for message in messages:
            if connection.outbox.is_closed:
                return
            match message.WhichOneof("message"):
                case "submit":
                    self._submit(message.submit, connection)
                case "abort":
                    self._abort(message.abort, connection)
                case "resume":
                    self._resume(message.resume, connection)
                case "detach":
                    self._detach(Handle(message.detach.handle), connection)
                case "credit":
                    if not message.credit.messages:
                        raise invalid_field("credit.messages", "is 0; it must be at least 1")
                    connection.outbox.add_credit(message.credit.messages)
                case other:
                    raise InvalidArgument(f"{other or 'an empty message'} cannot follow hello")

    def _submit(self, submit: scheduler_pb2.Submit, connection: Connection) -> None:
        try:
            self._accept(submit, connection)
        except QuireError as error:
            connection.outbox.put_refusal(Handle(submit.handle), error)
        except Exception as error:
            # The gateway would submit it again over its next stream, and lose that one, too.
            _logger.error("request %s could not be taken", submit.request_id, exc_info=error)
            refusal = Internal("an unexpected error; the scheduler's log has more", reason="UNEXPECTED")
            connection.outbox.put_refusal(Handle(submit.handle), refusal)

    def _accept(self, submit: scheduler_pb2.Submit, connection: Connection) -> None:
        """Queues the request. Raises what the gateway is told."""
        self._check_not_draining()
        replica, scheduler = self._loop.replica, self._loop.scheduler
        assert replica is not None
        assert scheduler is not None
        check_sampling(submit, replica.max_logprobs)
        request = request_from_submit(
            submit, connection.client, vocab_size=replica.vocab_size, max_num_seqs=scheduler.config.max_num_seqs
        )
        connection.check_not_cancelled(request.key.handle, request.request_id)
        if submit.durable.resubmitted and self._goes_on(request, submit.durable.nonce, connection):
            return
        if _can_be_replayed(submit):
            self._accept_durable(request, submit, connection)
            return
        self._queue(request, submit)
        connection.live[request.key] = request

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

    def _goes_on(self, request: Request, nonce: int, connection: Connection) -> bool:
        """Hands a durable request that is submitted again to its gateway. Returns whether it was still known."""
        known = self._durable.resubmitted(request, nonce, connection.gateway_id)
        if known is None:
            return False
        self._durable.attach(known, Reader(connection, request.key.handle), replays=True)
        return True

    def _accept_durable(self, request: Request, submit: scheduler_pb2.Submit, connection: Connection) -> None:
        durable = self._durable.admit(request, submit.durable.nonce, submit.SerializeToString())
        try:
            self._queue(dataclasses.replace(request, key=durable.key), submit)
        except QuireError:
            self._durable.forget(durable)
            raise
        self._durable.attach(durable, Reader(connection, request.key.handle), replays=False)

    def _resume(self, resume: scheduler_pb2.Resume, connection: Connection) -> None:
        handle = Handle(resume.handle)
        try:
            handle_from(resume.handle)
            durable = self._durable.find(resume.tenant, resume.request_id)
        except QuireError as error:
            connection.outbox.put_refusal(handle, error)
        else:
            self._durable.attach(durable, Reader(connection, handle), replays=True)

    def _detach(self, handle: Handle, connection: Connection) -> None:
        durable = self._durable.read_by(connection, handle)
        if durable is not None:
            self._durable.detach(durable)
        else:
            self._abort(scheduler_pb2.Abort(handle=handle), connection)

    def _abort(self, abort: scheduler_pb2.Abort, connection: Connection) -> None:
        handle = Handle(abort.handle)
        durable = self._durable.read_by(connection, handle)
        key = RequestKey(connection.client, handle) if durable is None else durable.key
        usage = usage_so_far(self._loop.scheduler, key, self._clock())
        if abort.HasField("sequence_index"):
            self._loop.abort_sequence(key, abort.sequence_index)
            self._spans.sequence_aborted(key)
            if usage is None or usage_so_far(self._loop.scheduler, key, self._clock()) is not None:
                return
        if durable is not None and (abort.wants_usage or durable.is_over):
            self._durable.end(durable, usage)
        elif durable is not None:
            self._durable.forget(durable)
        else:
            connection.live.pop(key, None)
            self._loop.abort(key)
            self._spans.aborted(key)
        if abort.wants_usage:
            connection.outbox.put_aborted(handle, usage)


def _can_be_replayed(submit: scheduler_pb2.Submit) -> bool:
    """Whether it is durable and all that was ever said of it will be known here. Log probabilities that an earlier
    scheduler reported are not."""
    has_logprobs = submit.output.HasField("logprobs") or submit.output.HasField("prompt_logprobs")
    return submit.HasField("durable") and not (has_logprobs and submit.emitted)
