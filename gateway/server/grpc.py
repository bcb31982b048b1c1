"""The gRPC server: registration of services, and interceptors of every method.

Interceptors authenticate callers, limit slow clients, end idle calls when the gateway stops, and read trace headers.
`quire.rpc` has the rest: connection limits, error mapping, health and reflection.
"""

import asyncio
import functools
import inspect
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, aclosing, contextmanager
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2

from gateway.auth.caller import current_tenant, set_caller
from gateway.auth.keys import Authenticator
from gateway.request.body_memory import BodyMemory, HeldBody, message_memory
from gateway.request.counting import CountedMessage, EntryLimits
from gateway.request.spans import set_incoming_context
from gateway.turns import LONG_BYTES, TenantTurns
from quire.rpc.errors import DeadlineExceeded, InvalidArgument, PermissionDenied, QuireError, Unavailable
from quire.rpc.health import REFLECTION_SERVICES
from quire.rpc.interceptors import Behavior, Continuation, around, decoder, remake
from quire.rpc.patience import PatientTimer

_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]
_KSERVE_HEALTH = frozenset(f"/inference.GRPCInferenceService/{name}" for name in ("ServerLive", "ServerReady"))
OPEN_METHODS = _KSERVE_HEALTH | {f"/{_HEALTH.full_name}/{method.name}" for method in _HEALTH.methods}
"""Methods without authentication: load balancers and supervisors call them, and have no keys."""
# Memory of a call that has begun, measured with 4,000 calls; the factor for its metadata; and the maximum share of all
# body memory that one call is charged.
_CALL_BYTES = 32 << 10
_METADATA_FACTOR = 1.35
_CALL_SHARE = 1 / 64
# Overhead of a metadata entry in addition to its name and value, as HTTP/2 counts it.
_ENTRY_BYTES = 32
_Begun = Callable[[], AbstractContextManager[HeldBody]]
_logger = logging.getLogger(__name__)


def add_service(server: grpc.aio.Server, service: ServiceDescriptor, servicer: object, limits: EntryLimits) -> None:
    """Registers the methods of a servicer under the names of the service's methods. The entries of a request are
    counted before it is parsed."""

    def handler(method: MethodDescriptor) -> grpc.RpcMethodHandler:
        of, to = ("stream" if each else "unary" for each in (method.client_streaming, method.server_streaming))
        return getattr(grpc, f"{of}_{to}_rpc_method_handler")(
            getattr(servicer, method.name),
            request_deserializer=CountedMessage(GetMessageClass(method.input_type), limits).parse,
            response_serializer=GetMessageClass(method.output_type).SerializeToString,
        )

    handlers = {method.name: handler(method) for method in service.methods}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Rejects calls without a valid key before any of their messages is read, and sets the caller of all others.

    Methods of unlisted services are rejected even with a valid key: a new service must be listed.
    """

    def __init__(
        self, authenticator: Authenticator, service_names: Collection[str], on_refusal: Callable[[str], None]
    ) -> None:
        """Keys allow `service_names` and reflection. `on_refusal` is called with the reason of each rejection."""
        self._authenticator = authenticator
        self._service_names = {*service_names, *REFLECTION_SERVICES}
        self._on_refusal = on_refusal

    async def intercept_service(self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails) -> Any:
        method: str = handler_call_details.method
        if method in OPEN_METHODS:
            return await continuation(handler_call_details)
        shown = [value for name, value in handler_call_details.invocation_metadata or () if name == "authorization"]
        try:
            caller = self._authenticator.authenticate(shown)
            handler = await continuation(handler_call_details)
            # gRPC answers unknown methods; some clients try several.
            if handler is not None and method.rpartition("/")[0].removeprefix("/") not in self._service_names:
                raise PermissionDenied(f"no API key allows {method}", reason="METHOD_NOT_ALLOWED")
        except QuireError as error:
            self._on_refusal(error.reason)
            # A stream handler can answer calls of any kind, and does not read a message first.
            return grpc.stream_stream_rpc_method_handler(functools.partial(_refuse, error))
        # The interceptors and the handler of a call run in one task, which belongs to that call.
        set_caller(caller)
        return handler


async def _refuse(error: QuireError, messages: object, context: grpc.aio.ServicerContext) -> NoReturn:
    raise error


class TraceInterceptor(grpc.aio.ServerInterceptor):
    """Reads the trace context in the metadata of calls."""

    async def intercept_service(self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails) -> Any:
        metadata = handler_call_details.invocation_metadata or ()
        set_incoming_context((name, value) for name, value in metadata if isinstance(value, str))
        return await continuation(handler_call_details)


class IdleCalls(grpc.aio.ServerInterceptor):
    """Tracks calls that wait for the next message of their client. A stopping server would wait for them, although
    ending them loses nothing."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Task[Any], None] = {}
        self._has_ended = False

    def end(self) -> None:
        """Ends waiting calls with UNAVAILABLE, and all other calls as soon as they wait."""
        self._has_ended = True
        for task in self._waiting:
            task.cancel()

    async def intercept_service(self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or not handler.request_streaming:
            return handler
        watch = functools.partial(around, prepare=self._watched)
        return remake(handler, watch, request_deserializer=handler.request_deserializer)

    async def _watched(self, requests: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        return self._read(requests)

    async def _read(self, requests: Any) -> AsyncIterator[Any]:
        """Yields the requests. Raises Unavailable after waiting calls were ended."""
        task = asyncio.current_task()
        assert task is not None, "a call is read in a task"
        iterator = aiter(requests)
        while True:
            if self._has_ended:
                raise _stopping()
            self._waiting[task] = None
            try:
                request = await anext(iterator)
            except StopAsyncIteration:
                return
            except asyncio.CancelledError:
                # Cancelled by `end`, unless another caller cancelled the task as well.
                if self._has_ended and task.uncancel() == 0:
                    raise _stopping() from None
                raise
            finally:
                self._waiting.pop(task, None)
            yield request


def _stopping() -> Unavailable:
    return Unavailable("this gateway stops; call another one", reason="DRAINING")


class SlowClientInterceptor(grpc.aio.ServerInterceptor):
    """Ends calls of slow clients, which do not send their only request, or do not read the next response, in time.

    If a client does not read, gRPC and the connection buffer some tens of kilobytes; then a write blocks, and further
    tokens are held once, as ids. `HttpConnection` does the same for HTTP.

    Clients of methods with a request stream may send requests at any time. Each call is charged memory in `bodies` for
    itself and its metadata until it ends. If other calls need that memory, the oldest calls without a request end, and
    the oldest calls of methods without authentication, which any client can open. Handlers with a response stream are
    async generator functions, or write by themselves without a time limit.
    """

    def __init__(
        self, bodies: BodyMemory, turns: TenantTurns, *, sender_timeout_s: float, reader_timeout_s: float
    ) -> None:
        """A request is charged in `bodies` until its call is over; a long one is parsed in one of `turns`."""
        self._bodies = bodies
        self._turns = turns
        self._sender_timeout_s = sender_timeout_s
        self._reader_timeout_s = reader_timeout_s

    async def intercept_service(self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Replaces handlers by handlers that read and write with time limits, since gRPC has none."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        is_open = handler_call_details.method in OPEN_METHODS
        decode, serializer = decoder(handler.request_deserializer), handler.response_serializer
        begun = functools.partial(self._begun, _metadata_bytes(handler_call_details.invocation_metadata or ()))
        if not handler.response_streaming:
            if handler.request_streaming:
                return handler
            behavior = self._reading(handler.unary_unary, decode, begun, is_open=is_open)
            return grpc.stream_unary_rpc_method_handler(behavior, response_serializer=serializer)
        behavior = handler.stream_stream if handler.request_streaming else handler.unary_stream
        if inspect.isasyncgenfunction(behavior):
            behavior = self._writing(behavior)
        if handler.request_streaming:
            behavior = self._reading_each(behavior, decode, begun)
        else:
            behavior = self._reading(behavior, decode, begun, is_open=is_open)
        return grpc.stream_stream_rpc_method_handler(behavior, None, serializer)

    def _reading(self, behavior: Behavior, decode: Callable[[bytes], Any], begun: _Begun, *, is_open: bool) -> Behavior:
        """A handler that reads the only request from the request stream, and decodes it."""

        async def handle(requests: Any, context: grpc.aio.ServicerContext) -> Any:
            with begun() as call:
                data = await self._first(requests)
                if not is_open:
                    # The message has arrived whole, so the call is not ended to free memory.
                    call.complete()
                call.add(len(data))
                message_memory.set(call)
                return await behavior(await self._decoded(decode, data), context)

        return handle

    async def _first(self, requests: Any) -> bytes:
        """The first request. Raises DeadlineExceeded or InvalidArgument if there is none."""
        try:
            async with asyncio.timeout(None) as limit:
                timer = PatientTimer(self._sender_timeout_s, _expire, limit)
                try:
                    data: bytes | None = await anext(aiter(requests), None)
                finally:
                    timer.cancel()
        except TimeoutError:
            message = f"the request did not come within {self._sender_timeout_s:g} s"
            raise DeadlineExceeded(message, reason="SLOW_SENDER") from None
        if data is None:
            raise InvalidArgument("the call has no request", reason="MALFORMED_MESSAGE")
        return data

    def _reading_each(self, behavior: Behavior, decode: Callable[[bytes], Any], begun: _Begun) -> Behavior:
        """A handler that decodes each request of a stream."""

        async def handle(requests: Any, context: grpc.aio.ServicerContext) -> None:
            with begun() as call:
                async with aclosing(self._decoded_each(decode, requests, call)) as decoded:
                    await behavior(decoded, context)

        return handle

    @contextmanager
    def _begun(self, num_metadata_bytes: int) -> Iterator[HeldBody]:
        """Charges the memory of a call. Until it is complete, other calls may end it with ResourceExhausted."""
        task, is_given_up = asyncio.current_task(), False
        assert task is not None, "a call runs in a task"

        def give_up() -> None:
            nonlocal is_given_up
            is_given_up = True
            task.cancel()

        begun = self._bodies.begin(give_up)
        try:
            begun.add(min(_CALL_BYTES + num_metadata_bytes, int(self._bodies.max_bytes * _CALL_SHARE)))
            yield begun
        except asyncio.CancelledError:
            if is_given_up and task.uncancel() == 0:
                raise self._bodies.refusal() from None
            raise
        finally:
            begun.release()

    async def _decoded_each(
        self, decode: Callable[[bytes], Any], requests: Any, begun: HeldBody
    ) -> AsyncGenerator[Any]:
        """Yields the decoded requests. Each is charged as body memory until the next one is read, or while it is kept
        (`keep_memory`). The first one completes `begun`."""
        async for data in requests:
            begun.complete()
            held = self._bodies.begin(lambda: None)
            held.complete()
            try:
                held.add(len(data))
                message_memory.set(held)
                yield await self._decoded(decode, data)
            finally:
                if not held.is_kept:
                    held.release()

    async def _decoded(self, decode: Callable[[bytes], Any], data: bytes) -> Any:
        return decode(data) if len(data) <= LONG_BYTES else await self._turns.call(current_tenant(), decode, data)

    def _writing(self, behavior: Behavior) -> Behavior:
        """A handler that writes the responses of a generator, each within the time limit. A single timer checks when
        the current write began; a timer for each write would cost far more."""

        async def handle(request: Any, context: grpc.aio.ServicerContext) -> None:
            loop, limit = asyncio.get_running_loop(), asyncio.timeout(None)
            began_at, num_written = None, 0

            def check() -> None:
                nonlocal timer
                now = loop.time()
                due_at = (now if began_at is None else began_at) + self._reader_timeout_s
                if now < due_at:
                    timer = PatientTimer(due_at - now, check)
                else:
                    _expire(limit)

            try:
                async with limit:
                    timer = PatientTimer(self._reader_timeout_s, check)
                    try:
                        async with aclosing(behavior(request, context)) as responses:
                            async for response in responses:
                                began_at = loop.time()
                                await context.write(response)
                                began_at = None
                                num_written += 1
                    finally:
                        timer.cancel()
                return
            except TimeoutError:
                if not limit.expired():
                    raise
            # The request is already aborted. The status waits behind the data that the client does not read.
            _logger.info("a client read nothing for %g s; its call is ended", self._reader_timeout_s)
            if num_written == 0:
                # gRPC still tries to send the headers, and would send them twice.
                raise asyncio.CancelledError
            message = f"nothing was read for {self._reader_timeout_s:g} s while output waited"
            raise DeadlineExceeded(message, reason="SLOW_READER")

        return handle


def _metadata_bytes(metadata: Iterable[tuple[str, str | bytes]]) -> int:
    """The memory of metadata, in bytes."""
    return int(_METADATA_FACTOR * sum(len(name) + len(value) + _ENTRY_BYTES for name, value in metadata))


def _expire(limit: asyncio.Timeout) -> None:
    limit.reschedule(asyncio.get_running_loop().time())
