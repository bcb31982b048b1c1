"""Clients that leave just as a wait of their call ends at its server, so that the cancellation and the end of the wait
come in one turn of the server's event loop. Messages come between turns, where nothing waits that could go on."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class HangUp:
    """A client that leaves as the wait of this number ends, counted over its calls.

    Attributes:
        leave: Has the client leave.
    """

    num_left: int
    leave: Callable[[], object]

    def wait_ended(self, cancel: Callable[[], object]) -> bool:
        """A wait of a call ends. Returns whether the client has left with it, and `cancel` told the server."""
        self.num_left -= 1
        if not self.num_left:
            self.leave()
            cancel()
        return self.num_left <= 0


HANG_UP: ContextVar[HangUp | None] = ContextVar("hang_up", default=None)
"""That of the client whose calls begin here."""


@asynccontextmanager
async def leaving(after_s: float | None, at_wait: int | None) -> AsyncIterator[None]:
    """Inside the block, a client makes its calls. It leaves, by TimeoutError, after a time, or as the wait of this
    number ends at a server of its calls."""
    async with asyncio.timeout(after_s) as limit:
        loop = asyncio.get_running_loop()

        def leave() -> None:
            # It may be over by then.
            with suppress(RuntimeError):
                limit.reschedule(loop.time())

        token = HANG_UP.set(None if at_wait is None else HangUp(at_wait, lambda: loop.call_soon(leave)))
        try:
            yield
        finally:
            HANG_UP.reset(token)
