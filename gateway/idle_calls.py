"""Calls that wait for their client to say something, and end when the gateway stops."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio

from quire.rpc.errors import Unavailable
from quire.rpc.interceptors import Behavior, is_generator, remake


class IdleCalls(grpc.aio.ServerInterceptor):
    """Knows the gRPC calls that wait for the next message of their client. Nothing is lost when they end, but a server
    that stops would wait for them."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Task[Any]] = set()
        self._has_ended = False

    def end(self) -> None:
        """Ends those that wait with UNAVAILABLE, and all others as soon as they wait."""
        self._has_ended = True
        for task in self._waiting:
            task.cancel()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or not handler.request_streaming:
            return handler
        return remake(handler, self._watched, request_deserializer=handler.request_deserializer)

    def _watched(self, behavior: Behavior) -> Behavior:
        if is_generator(behavior):

            async def generator(requests: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
                async with aclosing(behavior(self._read(requests), context)) as responses:
                    async for response in responses:
                        yield response

            return generator

        async def coroutine(requests: Any, context: grpc.aio.ServicerContext) -> Any:
            return await behavior(self._read(requests), context)

        return coroutine

    async def _read(self, requests: Any) -> AsyncIterator[Any]:
        """The requests as they come. Raises Unavailable once the calls that wait are ended."""
        task = asyncio.current_task()
        assert task is not None, "a call is read in a task"
        iterator = aiter(requests)
        while True:
            if self._has_ended:
                raise _stopping()
            self._waiting.add(task)
            try:
                request = await anext(iterator)
            except StopAsyncIteration:
                return
            except asyncio.CancelledError:
                # By `end`, unless somebody else cancelled it as well.
                if self._has_ended and task.uncancel() == 0:
                    raise _stopping() from None
                raise
            finally:
                self._waiting.discard(task)
            yield request


def _stopping() -> Unavailable:
    return Unavailable("this gateway stops; call another one", reason="DRAINING")
