"""Server interceptors that every service uses."""

import asyncio
import functools
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc
import grpc.aio

from quire.rpc.decoding import decoded, decoder
from quire.rpc.errors import Internal, QuireError, to_rpc_status

_logger = logging.getLogger(__name__)

# A method handler of grpc.aio: (request or request iterator, context) -> awaitable or async generator.
Behavior = Callable[[Any, grpc.aio.ServicerContext], Any]


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns what a handler raises into the call's status.

    A QuireError becomes its own status with details, before or in the middle of a stream. `context.abort` keeps its
    meaning and cancellation passes. Anything else becomes INTERNAL with reason "UNEXPECTED": the traceback goes to the
    log and nothing of it to the caller. Handlers must be coroutine functions or async generator functions.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method: str = handler_call_details.method
        # Requests are decoded inside the guard: what protobuf refuses in gRPC's own decoding ends as UNKNOWN.
        decode_one = decoder(handler.request_deserializer)
        decode_each = functools.partial(decoded, decode_one)
        decode = decode_each if handler.request_streaming else decode_one
        return remake(handler, functools.partial(_guarded, method=method, decode=decode), request_deserializer=None)


def remake(
    handler: Any, wrap: Callable[[Behavior], Behavior], *, request_deserializer: Callable[[bytes], Any] | None
) -> Any:
    """The same kind of handler around what `wrap` makes of its behavior."""
    codec = {"request_deserializer": request_deserializer, "response_serializer": handler.response_serializer}
    if handler.unary_unary is not None:
        return grpc.unary_unary_rpc_method_handler(wrap(handler.unary_unary), **codec)
    if handler.unary_stream is not None:
        return grpc.unary_stream_rpc_method_handler(wrap(handler.unary_stream), **codec)
    if handler.stream_unary is not None:
        return grpc.stream_unary_rpc_method_handler(wrap(handler.stream_unary), **codec)
    return grpc.stream_stream_rpc_method_handler(wrap(handler.stream_stream), **codec)


def is_generator(behavior: Behavior) -> bool:
    """Whether a handler answers a stream. Whoever wraps one keeps its kind, by which grpc.aio tells them apart."""
    return inspect.isasyncgenfunction(behavior)


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


async def abort_with(error: Exception, context: grpc.aio.ServicerContext, method: str) -> NoReturn:
    """Ends a call by an error: a QuireError as its own status, any other as INTERNAL, told to the log alone."""
    if not isinstance(error, QuireError):
        _logger.error("%s failed unexpectedly", method, exc_info=error)
        error = Internal("an unexpected error; the server's log tells more", reason="UNEXPECTED")
    status = to_rpc_status(error)
    await context.abort(status.code, status.details, tuple(status.trailing_metadata or ()))
    raise AssertionError("context.abort returned")
