"""SchedulerService over gRPC. It checks gateways' messages and turns refusals into errors; decisions are elsewhere."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace

from grpc.aio import ServicerContext

from quire.messages.arrays import decode_int32
from quire.rpc.errors import (
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    QuireError,
    Unavailable,
    invalid_field,
)
from quire.rpc.interceptors import decoder
from quire.runtime import clock
from quire.runtime.failpoint import failpoint
from quire.runtime.logs import REQUEST_ID
from quire.scheduler.v1 import scheduler_pb2 as pb
from quire.scheduler.v1 import scheduler_pb2_grpc
from quire.service import compatibility
from quire.service.compatibility import ModelFingerprint, ProtocolVersions, check_model, check_protocol
from scheduler_svc.core.request import Handle, Request
from scheduler_svc.service.cache_changes import CacheDigest
from scheduler_svc.service.gateway_messages import (
    adapter_from,
    blocks_message,
    gateway_messages,
    handle_from,
    request_from_submit,
    state_message,
    trace_context_of,
    welcome_message,
)
from scheduler_svc.service.history import Held
from scheduler_svc.service.outbox import Outgoing
from scheduler_svc.service.pin_calls import PinFailedError
from scheduler_svc.service.readers import Connection, Reader
from scheduler_svc.service.requests import Requests
from scheduler_svc.service.step_loop import StepLoop
from scheduler_svc.service.watch_messages import block_message

_logger = logging.getLogger(__name__)
_decode = decoder(pb.ConnectRequest.FromString)
_MAX_GRACE_PERIOD_MS = 600_000
_MAX_TIME_TO_LIVE_MS = 86_400_000
_MAX_LOGGED_REFUSALS = 64


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    """One instance serves all gateways."""

    def __init__(self, loop: StepLoop, requests: Requests) -> None:
        self._loop = loop
        self._replica = loop.replica
        self._lifecycle = loop.lifecycle
        self._requests = requests
        self._cache = CacheDigest(loop.replica.cache)
        # The last log line about incompatible gateways.
        self._logged_refusals: deque[str] = deque(maxlen=_MAX_LOGGED_REFUSALS)

    async def Connect(
        self, request_iterator: AsyncIterator[pb.ConnectRequest], context: ServicerContext
    ) -> AsyncIterator[pb.ConnectResponse]:
        hello = await self._hello(request_iterator)
        connection = self._requests.connect(hello.gateway_id, hello.grace_period_ms / 1e3)
        reader = asyncio.create_task(self._read(request_iterator, connection))
        reader.add_done_callback(lambda _: connection.outbox.close())
        version = self._replica.version
        try:
            yield welcome_message(self._replica, self._requests.durable.limits.grace_s)
            if not self._lifecycle.is_ready:
                connection.outbox.put_readiness(self._lifecycle.readiness)
            if hello.wants_cache_updates:
                self._cache.add(connection.outbox)
            while (outgoing := await connection.outbox.next_message()) is not None:
                started = clock.monotonic()
                failpoint("scheduler.events.before_write")
                for message in self._messages(outgoing, connection):
                    yield message
                if not connection.outbox.has_credit:
                    self._requests.acknowledge(connection, connection.outbox.num_sent)
                if outgoing.batches:
                    self._loop.trace.part("emit", outgoing.step_id, started, clock.monotonic())
                if self._is_outdated(version):
                    break
            # Else the gateway has opened another stream, and the link of this one may be broken.
            if reader.done():
                await reader
        finally:
            reader.cancel()
            self._cache.remove(connection.outbox)
            self._requests.close(connection)

    def _messages(self, outgoing: Outgoing, connection: Connection) -> list[pb.ConnectResponse]:
        try:
            return list(gateway_messages(outgoing))
        except Exception:
            # If the content were kept for the gateway's next stream, it would end that one too. It is computed again.
            self._requests.acknowledge(connection, connection.outbox.num_sent)
            raise

    async def GetState(self, request: pb.GetStateRequest, context: ServicerContext) -> pb.GetStateResponse:
        of_gateway = self._requests.are_read_by(request.gateway_id) if request.HasField("gateway_id") else None
        return await state_message(
            self._replica,
            self._lifecycle,
            include_sequences=request.include_sequences,
            num_gateways=self._requests.num_connected,
            is_of_gateway=of_gateway,
        )

    async def InspectBlocks(
        self, request: pb.InspectBlocksRequest, context: ServicerContext
    ) -> pb.InspectBlocksResponse:
        request_id = request.request_id if request.HasField("request_id") else None
        return await blocks_message(self._replica.scheduler, request_id)

    async def PinPrefix(self, request: pb.PinPrefixRequest, context: ServicerContext) -> pb.PinPrefixResponse:
        self._check_available()
        info = self._replica.info
        assert info is not None
        if not 0 < request.time_to_live_ms <= _MAX_TIME_TO_LIVE_MS:
            raise invalid_field(
                "time_to_live_ms", f"is {request.time_to_live_ms}; it must be in [1, {_MAX_TIME_TO_LIVE_MS}]"
            )
        token_ids = decode_int32(request.token_ids, "token_ids", minimum=0, below=info.vocab_size).tolist()
        adapter = adapter_from(request.adapter) if request.HasField("adapter") else None
        try:
            pin = await self._replica.pins.pin(request.tenant, token_ids, request.time_to_live_ms / 1e3, adapter)
        except PinFailedError as error:
            raise Unavailable(str(error), reason="PIN_LOST") from error
        return pb.PinPrefixResponse(
            pin_id=pin.pin_id,
            pinned_tokens=len(pin.token_ids),
            pinned_blocks=len(pin.token_ids) // info.block_size,
        )

    async def UnpinPrefix(self, request: pb.UnpinPrefixRequest, context: ServicerContext) -> pb.UnpinPrefixResponse:
        if not self._replica.pins.unpin(request.tenant, request.pin_id):
            raise NotFound(f'pin_id "{request.pin_id}" names no pin', reason="PIN_NOT_FOUND")
        return pb.UnpinPrefixResponse()

    async def ResetPrefixCache(
        self, request: pb.ResetPrefixCacheRequest, context: ServicerContext
    ) -> pb.ResetPrefixCacheResponse:
        self._check_available()
        return pb.ResetPrefixCacheResponse(forgotten_blocks=self._replica.forget_cached())

    async def Sleep(self, request: pb.SleepRequest, context: ServicerContext) -> pb.SleepResponse:
        await self._lifecycle.sleep(discard_weights=request.discard_weights)
        return pb.SleepResponse()

    async def WakeUp(self, request: pb.WakeUpRequest, context: ServicerContext) -> pb.WakeUpResponse:
        await self._lifecycle.wake_up()
        return pb.WakeUpResponse()

    async def FindDurable(self, request: pb.FindDurableRequest, context: ServicerContext) -> pb.FindDurableResponse:
        owned = self._requests.find_durable(request.tenant, request.request_id)
        assert owned.durable is not None
        return pb.FindDurableResponse(
            submit=pb.Submit.FromString(owned.durable.description),
            is_over=owned.is_over,
            generated_tokens=owned.history.num_tokens,
        )

    async def Cancel(self, request: pb.CancelRequest, context: ServicerContext) -> pb.CancelResponse:
        if not self._requests.cancel(request.tenant, request.request_id):
            raise NotFound(f'request_id "{request.request_id[:128]}" names no request', reason="REQUEST_NOT_FOUND")
        return pb.CancelResponse()

    async def Drain(self, request: pb.DrainRequest, context: ServicerContext) -> pb.DrainResponse:
        timeout_s = request.timeout_ms / 1e3 if request.HasField("timeout_ms") else None
        return pb.DrainResponse(remaining_requests=await self._lifecycle.drain(timeout_s))

    async def Watch(self, request: pb.WatchRequest, context: ServicerContext) -> AsyncIterator[pb.WatchResponse]:
        async with aclosing(self._loop.watchers.frames(wants_memory=request.include_memory)) as frames:
            async for frame in frames:
                yield frame

    async def ReadBlock(self, request: pb.ReadBlockRequest, context: ServicerContext) -> pb.ReadBlockResponse:
        return block_message(self._replica.scheduler, request)

    async def _hello(self, messages: AsyncIterator[pb.ConnectRequest]) -> pb.Hello:
        # A refusal before the message is read could collide with the gateway's write, and grpc would report INTERNAL.
        first = await anext(messages, None)
        is_back = first is not None and self._requests.has_requests_of(first.hello.gateway_id)
        if not is_back:
            self._lifecycle.check_not_draining()
        self._check_attached()
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

    def _check_fits(self, hello: pb.Hello) -> None:
        """Raises FailedPrecondition if a gateway has other protocol versions, or another model than the workers."""
        info = self._replica.info
        assert info is not None
        us, them = "the scheduler", f"gateway {hello.gateway_id[:128]}"
        theirs = ProtocolVersions.of(hello.protocol)
        try:
            check_protocol("quire.scheduler.v1", compatibility.SCHEDULER_PROTOCOL, theirs, us=us, them=them)
            check_model(info.fingerprint, ModelFingerprint.of(hello.model), us=f"the worker of {us}", them=them)
        except FailedPrecondition as error:
            # Such a gateway tries again several times a second, and there may be several of them.
            if str(error) not in self._logged_refusals:
                self._logged_refusals.append(str(error))
                _logger.warning("refused: %s", error)
            raise

    def _check_available(self) -> None:
        self._lifecycle.check_not_draining()
        self._check_attached()

    def _check_attached(self) -> None:
        if self._replica.scheduler is None:
            loading = self._lifecycle.loading
            raise Unavailable(
                "no worker is attached yet" if loading is None else f"the worker is loading its model: {loading}",
                reason="NO_WORKER",
                retry_after_ms=100,
                metadata=None if loading is None else loading.metadata(),
            )

    def _is_outdated(self, version: int) -> bool:
        """Whether a stream whose Welcome had this version ends, so that its gateway connects again and gets the new
        properties of the replica. While the scheduler drains, it could not connect."""
        return self._replica.version != version and not self._lifecycle.is_draining

    async def _read(self, messages: AsyncIterator[pb.ConnectRequest], connection: Connection) -> None:
        async for message in messages:
            is_batch = message.HasField("batch")
            for each in map(_decode, message.batch.messages) if is_batch else (message,):
                if connection.outbox.is_closed:
                    return
                self._handle(each, connection)

    def _handle(self, message: pb.ConnectRequest, connection: Connection) -> None:
        match message.WhichOneof("message"):
            case "submit":
                self._submit(message.submit, Reader(connection, Handle(message.submit.handle)))
            case "abort":
                self._abort(message.abort, Reader(connection, Handle(message.abort.handle)))
            case "resume":
                self._resume(message.resume, Reader(connection, Handle(message.resume.handle)))
            case "release":
                self._requests.move(Reader(connection, Handle(message.release.handle)), self._replica.hand_over)
            case "detach":
                self._detach(Reader(connection, Handle(message.detach.handle)))
            case "end_unread":
                self._requests.forget_unread(connection.gateway_id)
            case "credit":
                self._take_credit(message.credit, connection)
            case other:
                raise InvalidArgument(f"{other or 'an empty message'} cannot follow hello")

    def _take_credit(self, credit: pb.Credit, connection: Connection) -> None:
        if not credit.messages:
            raise invalid_field("credit.messages", "is 0; it must be at least 1")
        try:
            self._requests.acknowledge(connection, credit.taken)
        except ValueError as error:
            raise invalid_field("credit.taken", f"is {credit.taken}: {error}") from error
        connection.outbox.add_credit(credit.messages)

    def _submit(self, submit: pb.Submit, reader: Reader) -> None:
        try:
            self._accept(submit, reader)
        except QuireError as error:
            reader.connection.outbox.put_refusal(reader.handle, error)
        except Exception as error:
            # Raised here, it would end the stream. The gateway would submit the request again, and lose that one, too.
            extra = {REQUEST_ID: submit.request_id}
            _logger.error("request %s could not be taken", submit.request_id, exc_info=error, extra=extra)
            refusal = Internal("an unexpected error; the scheduler's log has more", reason="UNEXPECTED")
            reader.connection.outbox.put_refusal(reader.handle, refusal)

    def _accept(self, submit: pb.Submit, reader: Reader) -> None:
        """Queues a request, or attaches its reader if it is known. Raises the error that the gateway gets."""
        info, scheduler = self._replica.info, self._replica.scheduler
        assert info is not None
        assert scheduler is not None
        request = request_from_submit(
            submit,
            vocab_size=info.vocab_size,
            max_num_seqs=scheduler.config.max_num_seqs,
            kv_source=self._replica.kv_source,
        )
        offer = self._requests.replace_offer(reader)
        try:
            if offer is None and self._resubmit(submit, request, reader):
                return
            if submit.offer or not submit.resubmitted:
                self._lifecycle.check_not_draining()
            self._enter(submit, request if offer is None else replace(request, replaces=offer.key.handle), reader)
        finally:
            if offer is not None:
                # Unless the request has its place by now.
                self._replica.abort(offer.key)

    def _resubmit(self, submit: pb.Submit, request: Request, reader: Reader) -> bool:
        """Attaches the reader of a known request. Returns whether it is known."""
        held = Held.of_resubmission(request, submit.num_prompt_logprobs)
        if submit.offer or not submit.resubmitted or not self._requests.resubmit(request, submit.nonce, reader, held):
            return False
        for index in held.ended:
            # A stop string ended it, and the gateway's Abort may be lost.
            self._abort(pb.Abort(handle=reader.handle, sequence_index=index, wants_usage=True), reader)
        return True

    def _enter(self, submit: pb.Submit, request: Request, reader: Reader) -> None:
        description = submit.SerializeToString() if _can_be_replayed(submit) else None

        def to_core(admitted: Request) -> None:
            failpoint("scheduler.submit.before_queue")
            self._replica.submit(admitted, None if submit.offer else trace_context_of(submit))

        self._requests.admit(request, submit.nonce, reader, to_core, description)
        failpoint("scheduler.submit.accepted")

    def _resume(self, resume: pb.Resume, reader: Reader) -> None:
        try:
            handle_from(resume.handle)
            self._requests.attach(self._requests.find_durable(resume.tenant, resume.request_id), reader, Held())
        except QuireError as error:
            reader.connection.outbox.put_refusal(reader.handle, error)

    def _detach(self, reader: Reader) -> None:
        owned = reader.request
        if owned is not None and owned.durable is not None:
            self._requests.detach(owned)
        else:
            self._abort(pb.Abort(handle=reader.handle), reader)

    def _abort(self, abort: pb.Abort, reader: Reader) -> None:
        owned = reader.request
        usage = None if owned is None else self._replica.usage_so_far(owned.key)
        is_of_sequence = abort.HasField("sequence_index")
        if owned is None and not is_of_sequence:
            # The request is forgotten, but the rest of its replay may be on its way.
            reader.connection.outbox.drop_replay(reader.handle)
        if is_of_sequence:
            if owned is None or usage is None:
                return
            self._replica.abort_sequence(owned.key, abort.sequence_index)
            if self._replica.usage_so_far(owned.key) is not None:
                return
        if owned is not None and owned.durable is not None and (abort.wants_usage or owned.is_over):
            # The reader may lack events of the other sequences; the usage comes with the end.
            if self._requests.end_durable(owned, usage, is_read_on=is_of_sequence):
                return
        elif owned is not None:
            self._requests.forget(owned)
        if abort.wants_usage:
            reader.connection.outbox.put_aborted(reader.handle, usage)


def _can_be_replayed(submit: pb.Submit) -> bool:
    """Whether it is durable, and all of its output will be known here: log probabilities that an earlier scheduler
    reported are not."""
    has_logprobs = submit.output.HasField("logprobs") or submit.output.HasField("prompt_logprobs")
    return submit.durable and not (has_logprobs and submit.emitted)
