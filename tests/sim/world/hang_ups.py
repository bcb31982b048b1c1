"""Clients that leave just as a wait of their call ends at its server, so that the cancellation and the end of the wait
fall into one turn of the server's event loop. Messages arrive between turns, when no task is about to continue."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar

WaitEnded = Callable[[Callable[[], object]], bool]
"""Called when a wait of a call ends, with a function that cancels the call. Returns True to be called no more."""
ON_WAIT_ENDED: ContextVar[WaitEnded | None] = ContextVar("on_wait_ended", default=None)
"""The callback of calls that begin in this context."""


@asynccontextmanager
async def leaving(after_s: float | None, at_wait: int | None) -> AsyncIterator[None]:
    """Inside the block, a client makes its calls. It leaves by TimeoutError after a time, or when the wait with this
    number ends at a server of its calls."""
    async with asyncio.timeout(after_s) as limit:
        loop, num_left = asyncio.get_running_loop(), at_wait or 0

        def leave() -> None:
            # The block may be over by then.
            with suppress(RuntimeError):
                limit.reschedule(loop.time())

        def wait_ended(cancel: Callable[[], object]) -> bool:
            nonlocal num_left
            num_left -= 1
            if not num_left:
                loop.call_soon(leave)
                cancel()
            return num_left <= 0

        token = ON_WAIT_ENDED.set(None if at_wait is None else wait_ended)
        try:
            yield
        finally:
            ON_WAIT_ENDED.reset(token)
