"""When calls come, so that a server can be stopped while none is on its way in."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

_MOMENT_S = 0.001
_NUM_MOMENTS = 3


class Arrivals(grpc.aio.ServerInterceptor):
    """Counts the calls of a server.

    gRPC hands them to asyncio one after the other. Those that it still has when it is shut down it ends with CANCELLED,
    which no client takes for a reason to call again.
    """

    def __init__(self) -> None:
        self._count = 0

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        self._count += 1
        return await continuation(handler_call_details)

    async def wait_for_a_pause(self, timeout_s: float) -> bool:
        """Returns True as soon as no call has come for a few milliseconds: then gRPC has none left to hand over. False
        where that does not happen in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._pause()
        except TimeoutError:
            return False
        return True

    async def _pause(self) -> None:
        # Several turns of the event loop: one alone may be late, and find its time over before it looks for calls.
        quiet = 0
        while quiet < _NUM_MOMENTS:
            before = self._count
            await asyncio.sleep(_MOMENT_S)
            quiet = quiet + 1 if self._count == before else 0
