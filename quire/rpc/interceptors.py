"""Server interceptors that every service uses, and what interceptors are made of."""

import asyncio
import functools
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from quire.rpc.errors import FieldViolation, Internal, InvalidArgument, QuireError, to_rpc_status

_logger = logging.getLogger(__name__)

# A method handler of grpc.aio: (request or request iterator, context) -> awaitable or async generator.
Behavior = Callable[[Any, grpc.aio.ServicerContext], Any]
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]

_DAMAGED = "cannot be parsed: the bytes are damaged, cut off or of another message, or a text is not UTF-8"
_PAUSE_CHECK_S = 0.001
_NUM_PAUSE_CHECKS = 3


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns what a handler raises into the call's status.

    A QuireError becomes its own status with details, before or in the middle of a stream. `context.abort` keeps its
    meaning and cancellation passes. Anything else becomes INTERNAL with reason "UNEXPECTED": the log gets the
    traceback, the caller gets nothing of it. Bytes that are no such request become INVALID_ARGUMENT with reason
    "MALFORMED_MESSAGE". Handlers must be coroutine functions or async generator functions.
    """

    async def intercept_service(self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        # Requests are decoded inside the guard: a message that gRPC itself fails to decode ends as UNKNOWN.
        decode_one = decoder(handler.request_deserializer)
        decode = functools.partial(_decode_each, decode_one) if handler.request_streaming else decode_one
        guard = functools.partial(_guarded, method=handler_call_details.method, decode=decode)
        return remake(handler, guard, request_deserializer=None)


class Arrivals(grpc.aio.ServerInterceptor):
    """Counts the calls of a server, so that the server can be stopped while none is on its way in.

    gRPC hands calls to asyncio one after the other. When it shuts down it ends the calls that it still holds with
    CANCELLED, after which no client retries.
    """

    def __init__(self) -> None:
        self._count = 0

    async def intercept_service(self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails) -> Any:
        self._count += 1
        return await continuation(handler_call_details)

    async def wait_for_a_pause(self, timeout_s: float) -> bool:
        """Returns True once no call has come for a few milliseconds, when gRPC has none left to hand over; False after
        `timeout_s`."""
        # Several turns of the event loop: a single late turn may find its time over before it looks for calls.
        quiet = 0
        try:
            async with asyncio.timeout(timeout_s):
                while quiet < _NUM_PAUSE_CHECKS:
                    before = self._count
                    await asyncio.sleep(_PAUSE_CHECK_S)
                    quiet = quiet + 1 if self._count == before else 0
        except TimeoutError:
            return False
        return True


def remake(
    handler: Any, wrap: Callable[[Behavior], Behavior], *, request_deserializer: Callable[[bytes], Any] | None
) -> Any:
    """A handler of the same kind around `wrap(behavior)`."""
    codec = {"request_deserializer": request_deserializer, "response_serializer": handler.response_serializer}
    if handler.unary_unary is not None:
        return grpc.unary_unary_rpc_method_handler(wrap(handler.unary_unary), **codec)
    if handler.unary_stream is not None:
        return grpc.unary_stream_rpc_method_handler(wrap(handler.unary_stream), **codec)
    if handler.stream_unary is not None:
        return grpc.stream_unary_rpc_method_handler(wrap(handler.stream_unary), **codec)
    return grpc.stream_stream_rpc_method_handler(wrap(handler.stream_stream), **codec)


def is_generator(behavior: Behavior) -> bool:
    """Whether a handler answers a stream. A wrapper must keep the kind: grpc.aio tells handlers apart by it."""
    return inspect.isasyncgenfunction(behavior)


async def abort_with(error: Exception, context: grpc.aio.ServicerContext, method: str) -> NoReturn:
    """Ends a call: a QuireError becomes its own status, any other error INTERNAL, with its traceback in the log."""
    if not isinstance(error, QuireError):
        _logger.error("%s failed unexpectedly", method, exc_info=error)
        error = Internal("an unexpected error; see the server's log", reason="UNEXPECTED")
    status = to_rpc_status(error)
    await context.abort(status.code, status.details, tuple(status.trailing_metadata or ()))
    raise AssertionError("context.abort returned")


def _guarded(behavior: Behavior, *, method: str, decode: Callable[[Any], Any]) -> Behavior:
    """`behavior` with its requests decoded and its errors mapped."""
    if is_generator(behavior):

        async def generator(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            responses = None
            try:
                responses = behavior(decode(request), context)
                async for response in responses:
                    yield response
            except (asyncio.CancelledError, GeneratorExit, grpc.aio.AbortError):
                raise
            except Exception as error:
                await abort_with(error, context, method)
            finally:
                if responses is not None:
                    await responses.aclose()

        return generator

    async def coroutine(request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            return await behavior(decode(request), context)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception as error:
            await abort_with(error, context, method)

    return coroutine


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
    async for request in requests:
        yield decode(request)
