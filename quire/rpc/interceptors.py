"""Server interceptors that every service uses, and helpers for interceptors."""

import asyncio
import functools
import inspect
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import aclosing, contextmanager
from types import AsyncGeneratorType
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from quire.rpc.errors import FieldViolation, Internal, InvalidArgument, QuireError, Unimplemented, to_rpc_status
from quire.rpc.health import HEALTH_SERVICE

_logger = logging.getLogger(__name__)

# A method handler of grpc.aio: (request or request iterator, context) -> awaitable or async generator.
Behavior = Callable[[Any, grpc.aio.ServicerContext], Any]
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]

_DAMAGED = "cannot be parsed: the bytes are damaged, cut off or of another message, or a text is not UTF-8"
_NUM_SILENCE_CHECKS = 20
_SHOWN_CHARACTERS = 200
_HEALTH = f"{HEALTH_SERVICE}/"
OTHER_METHODS = "other"
"""The reported name of calls of methods that a server does not have."""
REQUEST_ID_HEADER = "quire-request-id"
"""The initial metadata of durable streams and of streams that resume them, once the request is accepted or found."""


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns a handler's exception into the call's status.

    A QuireError becomes its own status with details, before or in the middle of a stream. `context.abort` keeps its
    meaning and cancellation passes. A method that the server does not have becomes UNIMPLEMENTED with reason
    "UNKNOWN_METHOD". Anything else becomes INTERNAL with reason "UNEXPECTED": the log gets the
    traceback, the caller gets nothing of it. Bytes that are no such request become INVALID_ARGUMENT with reason
    "MALFORMED_MESSAGE". Handlers must be coroutine functions or async generator functions.
    """

    async def intercept_service(self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            # A stream handler can answer calls of any kind, and does not read a message first.
            unknown = functools.partial(_refuse_unknown, handler_call_details.method)
            return grpc.stream_stream_rpc_method_handler(unknown)
        # Requests are decoded inside the guard: a message that gRPC itself fails to decode ends as UNKNOWN.
        decode_one = decoder(handler.request_deserializer)
        decode = functools.partial(_decode_each, decode_one) if handler.request_streaming else decode_one
        guard = functools.partial(_guarded, method=handler_call_details.method, decode=decode)
        return remake(handler, guard, request_deserializer=None)


async def _refuse_unknown(method: str, messages: object, context: grpc.aio.ServicerContext) -> None:
    error = Unimplemented(f"this server has no method {method[:_SHOWN_CHARACTERS]}", reason="UNKNOWN_METHOD")
    await abort_with(error, context, method)


class Arrivals(grpc.aio.ServerInterceptor):
    """Counts the calls of a server, so that the server can be stopped when no more of them come."""

    def __init__(self) -> None:
        self._count = 0

    async def intercept_service(self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails) -> Any:
        self._count += 1
        return await continuation(handler_call_details)

    async def wait_for_silence(self, silence_s: float) -> None:
        """Returns once no call has come for `silence_s` seconds."""
        # Several turns of the event loop: a single late turn may find its time over before it looks for calls.
        num_silent = 0
        while num_silent < _NUM_SILENCE_CHECKS:
            before = self._count
            await asyncio.sleep(silence_s / _NUM_SILENCE_CHECKS)
            num_silent = num_silent + 1 if self._count == before else 0


class CallEnds(grpc.aio.ServerInterceptor):
    """Reports each call that is over: its method and its status.

    It must be the first interceptor of a server, to report refusals of later ones, too. Besides, gRPC keeps the
    exception of `context.abort` with the call, in a cycle: without the frames of its traceback, which are all behind
    this interceptor, the request is not kept until a garbage collection. A call that its client cancelled is CANCELLED,
    one whose deadline passed DEADLINE_EXCEEDED; if requests are a stream, a handler may take either for the end of
    requests, and the call is OK. Health checks are not reported: supervisors call them all the time.
    """

    def __init__(self, methods: Collection[str], report: Callable[[str, grpc.StatusCode], None]) -> None:
        """`methods`, "package.Service/Method" each, are reported by their names, all others as OTHER_METHODS."""
        self._methods = frozenset(methods)
        self._report = report

    async def intercept_service(self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method.removeprefix("/")
        if method.startswith(_HEALTH):
            return handler
        # All names made up by clients are one, since reports become series of metrics.
        name = method if method in self._methods else OTHER_METHODS
        if handler is None:
            self._report(name, grpc.StatusCode.UNIMPLEMENTED)
            return None
        wrap = functools.partial(self._watched, name=name)
        return remake(handler, wrap, request_deserializer=handler.request_deserializer)

    def _watched(self, behavior: Behavior, *, name: str) -> Behavior:
        if is_generator(behavior):

            async def generator(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
                answering = behavior(request, context)
                del request
                try:
                    with self._reported(name, context):
                        async with aclosing(answering) as responses:
                            async for response in responses:
                                yield response
                except grpc.aio.AbortError as aborted:
                    raise aborted.with_traceback(None) from None

            return generator

        async def coroutine(request: Any, context: grpc.aio.ServicerContext) -> Any:
            answering = behavior(request, context)
            del request
            try:
                with self._reported(name, context):
                    return await answering
            except grpc.aio.AbortError as aborted:
                raise aborted.with_traceback(None) from None

        return coroutine

    @contextmanager
    def _reported(self, name: str, context: grpc.aio.ServicerContext) -> Iterator[None]:
        code = grpc.StatusCode.OK
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            has_expired = context.time_remaining() == 0
            code = grpc.StatusCode.DEADLINE_EXCEEDED if has_expired else grpc.StatusCode.CANCELLED
            raise
        except BaseException:
            # gRPC turns an end without `context.abort` into UNKNOWN.
            code = context.code() or grpc.StatusCode.UNKNOWN
            raise
        finally:
            self._report(name, code)


def remake(
    handler: Any, wrap: Callable[[Behavior], Behavior], *, request_deserializer: Callable[[bytes], Any] | None
) -> Any:
    """A handler of the same kind around `wrap(behavior)`."""
    codec = {"request_deserializer": request_deserializer, "response_serializer": handler.response_serializer}
    kinds = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
    kind = next(each for each in kinds if getattr(handler, each) is not None)
    return getattr(grpc, f"{kind}_rpc_method_handler")(wrap(getattr(handler, kind)), **codec)


def is_generator(behavior: Behavior) -> bool:
    """Whether a handler answers a stream. A wrapper must keep the kind, by which grpc.aio distinguishes handlers."""
    return inspect.isasyncgenfunction(behavior)


def around(behavior: Behavior, prepare: Callable[[Any, grpc.aio.ServicerContext], Awaitable[Any]]) -> Behavior:
    """A handler of the same kind, which passes on its request, or its requests, as changed by `prepare`."""
    if is_generator(behavior):

        async def generator(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            async with aclosing(behavior(await prepare(request, context), context)) as responses:
                async for response in responses:
                    yield response

        return generator

    async def coroutine(request: Any, context: grpc.aio.ServicerContext) -> Any:
        return await behavior(await prepare(request, context), context)

    return coroutine


async def abort_with(error: Exception, context: grpc.aio.ServicerContext, method: str) -> NoReturn:
    """Ends a call: a QuireError becomes its own status, any other error INTERNAL, with its traceback in the log.

    Raises asyncio.CancelledError where the client has left, which gRPC reports as an error of the write.
    """
    if isinstance(error, grpc.aio.InternalError):
        raise _left(error, method) from None
    if not isinstance(error, QuireError):
        _logger.error("%s failed unexpectedly", method, exc_info=error)
        error = Internal("an unexpected error; see the server's log", reason="UNEXPECTED")
    status = to_rpc_status(error)
    # The exception of `abort` would keep the error, and with its traceback the request.
    del error
    try:
        await context.abort(status.code, status.details, tuple(status.trailing_metadata or ()))
    except grpc.aio.AbortError as aborted:
        aborted.__context__ = None
        raise
    except grpc.aio.InternalError as failed:
        raise _left(failed, method) from None
    raise AssertionError("context.abort returned")


def _left(error: grpc.aio.InternalError, method: str) -> asyncio.CancelledError:
    _logger.debug("%s: the client has left: %s", method, error)
    return asyncio.CancelledError()


def _guarded(behavior: Behavior, *, method: str, decode: Callable[[Any], Any]) -> Behavior:
    """`behavior` with its requests decoded and its errors mapped."""
    if is_generator(behavior):

        async def generator(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            decoded = responses = None
            try:
                decoded = decode(request)
                responses = behavior(decoded, context)
                async for response in responses:
                    yield response
            except (asyncio.CancelledError, GeneratorExit, grpc.aio.AbortError):
                raise
            except Exception as error:
                await abort_with(error, context, method)
            finally:
                if responses is not None:
                    await responses.aclose()
                await _close(decoded)

        return generator

    async def coroutine(request: Any, context: grpc.aio.ServicerContext) -> Any:
        decoded = None
        try:
            decoded = decode(request)
            return await behavior(decoded, context)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception as error:
            await abort_with(error, context, method)
        finally:
            await _close(decoded)

    return coroutine


async def _close(requests: Any) -> None:
    """Closes the requests of a stream; one request as such needs nothing. A task that reads them is about to end."""
    if isinstance(requests, AsyncGeneratorType) and not requests.ag_running:
        await requests.aclose()


def decoder(deserialize: Callable[[bytes], Any] | None) -> Callable[[Any], Any]:
    """A deserializer that raises InvalidArgument; the identity where a method has none."""
    if deserialize is None:
        return lambda request: request
    # Generated code passes the FromString method of the message class.
    descriptor = getattr(getattr(deserialize, "__self__", None), "DESCRIPTOR", None)
    name = "request" if descriptor is None else descriptor.full_name

    def decode(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as error:
            raise InvalidArgument(
                f"{name} {_DAMAGED}", reason="MALFORMED_MESSAGE", violations=[FieldViolation(name, _DAMAGED)]
            ) from error

    return decode


async def _decode_each(decode: Callable[[Any], Any], requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """The requests of a stream. It ends where the call is over or the server stopped, which gRPC raises as errors."""
    received = aiter(requests)
    try:
        async for request in received:
            yield decode(request)
    except grpc.aio.BaseError as error:
        _logger.debug("no more requests: %s", error)
    finally:
        # gRPC's generator is in a cycle with its maker, and has the last message until it is closed.
        if isinstance(received, AsyncGenerator):
            await received.aclose()
