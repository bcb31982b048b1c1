"""Clients that do not send what they began, or do not take what they asked for, do not hold anything for long.

Where a client does not read, gRPC and the connection buffer some tens of kilobytes; then writing blocks, and what comes
meanwhile is kept once, as tokens. This module limits for how long, over gRPC; gateway/http/protocol.py does over HTTP.
"""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio

from gateway.body_memory import BodyMemory
from quire.rpc.errors import DeadlineExceeded, InvalidArgument

_logger = logging.getLogger(__name__)

_Behavior = Callable[[Any, grpc.aio.ServicerContext], Any]


class SlowClientInterceptor(grpc.aio.ServerInterceptor):
    """Ends calls whose only request does not come, or whose next response is not taken, within a time.

    Calls that take a stream of requests may send them when they like. Handlers that answer a stream are async
    generator functions, or write by themselves and as slowly as they like.
    """

    def __init__(self, bodies: BodyMemory, *, sender_timeout_s: float, reader_timeout_s: float) -> None:
        """The one request of a call counts in `bodies` until the call is over."""
        self._bodies = bodies
        self._sender_timeout_s = sender_timeout_s
        self._reader_timeout_s = reader_timeout_s

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Gives gRPC handlers that read and write by themselves, since it limits neither."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        codec = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        if not handler.response_streaming:
            if handler.request_streaming:
                return handler
            return grpc.stream_unary_rpc_method_handler(self._reading(handler.unary_unary), **codec)
        behavior = handler.stream_stream if handler.request_streaming else handler.unary_stream
        if inspect.isasyncgenfunction(behavior):
            behavior = self._writing(behavior)
        if not handler.request_streaming:
            behavior = self._reading(behavior)
        return grpc.stream_stream_rpc_method_handler(behavior, **codec)

    def _reading(self, behavior: _Behavior) -> _Behavior:
        """Takes the one request out of a stream of them."""

        async def handle(requests: Any, context: grpc.aio.ServicerContext) -> Any:
            try:
                async with asyncio.timeout(self._sender_timeout_s):
                    request = await anext(aiter(requests), None)
            except TimeoutError:
                message = f"the request did not come within {self._sender_timeout_s:g} s"
                raise DeadlineExceeded(message, reason="SLOW_SENDER") from None
            if request is None:
                raise InvalidArgument("the call has no request", reason="MALFORMED_MESSAGE")
            held = self._bodies.begin(_do_nothing)
            try:
                held.add(len(request) if isinstance(request, bytes) else request.ByteSize())
                held.complete()
                return await behavior(request, context)
            finally:
                held.release()

        return handle

    def _writing(self, behavior: _Behavior) -> _Behavior:
        """Writes what a generator gives."""

        async def handle(request: Any, context: grpc.aio.ServicerContext) -> None:
            watch = _WriteWatch(self._reader_timeout_s)
            try:
                async with aclosing(behavior(request, context)) as responses:
                    async for response in responses:
                        watch.begin()
                        await context.write(response)
                        watch.end()
                return
            except asyncio.CancelledError:
                if not watch.has_expired:
                    raise
            finally:
                watch.stop()
            # The request is given up by now. The status waits behind what the client does not read.
            _logger.info("a client took nothing for %g s; its call is over", self._reader_timeout_s)
            if watch.num_written == 0:
                # gRPC would send the headers again, which it is still trying to send.
                raise asyncio.CancelledError
            message = f"nothing was read for {self._reader_timeout_s:g} s while output waited"
            raise DeadlineExceeded(message, reason="SLOW_READER")

        return handle


def _do_nothing() -> None:
    """A message comes whole, so it is never given up for another one."""


class _WriteWatch:
    """Cancels the task that made it once one write takes too long. Far cheaper than a timer a write: it has one in all,
    which looks when the write began that runs when it fires.

    Attributes:
        has_expired: Whether it has cancelled the task.
        num_written: Writes that have ended.
    """

    def __init__(self, timeout_s: float) -> None:
        task = asyncio.current_task()
        assert task is not None, "a call runs in a task"
        self.has_expired = False
        self.num_written = 0
        self._timeout_s = timeout_s
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._began_at: float | None = None
        self._timer = self._loop.call_later(timeout_s, self._look)

    def begin(self) -> None:
        """A write begins."""
        self._began_at = self._loop.time()

    def end(self) -> None:
        """It has ended."""
        self._began_at = None
        self.num_written += 1

    def stop(self) -> None:
        """Nothing is cancelled any more, and what was cancelled by this watch counts as never cancelled."""
        self._timer.cancel()
        if self.has_expired:
            self._task.uncancel()

    def _look(self) -> None:
        now = self._loop.time()
        due_at = (now if self._began_at is None else self._began_at) + self._timeout_s
        if now < due_at:
            self._timer = self._loop.call_at(due_at, self._look)
        else:
            self.has_expired = True
            self._task.cancel()
