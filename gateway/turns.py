"""Fair use of the event loop, which all requests share."""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar, TypeVarTuple
from weakref import WeakKeyDictionary

from quire.runtime import clock

LONG_BYTES = 64 * 1024
"""The size above which an input counts as long: a parser needs up to a millisecond for 64 KiB."""
_TURN_S = 0.005
TOKENS_PER_TURN = 50
"""Tokens to detokenize between two pauses. A token takes some ten microseconds, more with stop strings."""

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


class _Line:
    """Tasks with long work that wait for their next turn. Each iteration of the event loop resumes one task, so that it
    takes as long as one turn for any number of tasks."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._moves = False

    async def wait(self) -> None:
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self._waiting.append(turn)
        if not self._moves:
            self._moves = True
            loop.call_soon(self._move, loop)
        await turn

    def _move(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                loop.call_soon(self._move, loop)
                return
        self._moves = False


_lines: WeakKeyDictionary[asyncio.AbstractEventLoop, _Line] = WeakKeyDictionary()


class Turns:
    """Lets other tasks run during long work without I/O, such as the validation of a thousand prompts."""

    def __init__(self) -> None:
        self._began_at = clock.monotonic()

    async def pause(self) -> None:
        """Lets other tasks run if this task has used up its turn, and waits for its next turn. Must be called every few
        milliseconds."""
        if clock.monotonic() - self._began_at >= _TURN_S:
            await _lines.setdefault(asyncio.get_running_loop(), _Line()).wait()
            self._began_at = clock.monotonic()


class TenantQueue:
    """Places for calls. While calls wait for a place, tenants alternate independent of their number of calls."""

    def __init__(self, num_places: int = 1) -> None:
        self._num_free = num_places
        # In the order of the tenants' turns.
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @property
    def num_waiting(self) -> Counter[str]:
        """The number of waiting calls of each tenant."""
        return Counter({tenant: sum(not each.done() for each in calls) for tenant, calls in self._waiting.items()})

    @asynccontextmanager
    async def place(self, tenant: str) -> AsyncGenerator[None]:
        """Waits for a place, which the call has during the context."""
        if self._num_free:
            self._num_free -= 1
        else:
            await self._wait(tenant)
        try:
            yield
        finally:
            self._pass_on(tenant)

    async def _wait(self, tenant: str) -> None:
        given = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(given)
        try:
            await given
        except asyncio.CancelledError:
            if not given.cancelled():
                self._pass_on(tenant)
            raise

    def _pass_on(self, tenant: str) -> None:
        """Gives the place of a tenant to the next waiting call, or frees it."""
        if tenant in self._waiting:
            self._waiting.move_to_end(tenant)
        while self._waiting:
            other, calls = next(iter(self._waiting.items()))
            given = calls.popleft()
            if not calls:
                del self._waiting[other]
            if not given.done():
                given.set_result(None)
                return
        self._num_free += 1


class TenantTurns(TenantQueue):
    """Turns of long work that many calls may do at once. Only one call has a turn at a time, and the work takes at most
    half of the event loop's time. With `Turns`, in contrast, calls take turns instead of tenants, and use all remaining
    time."""

    async def do(self, tenant: str, work: Callable[[], bool]) -> None:
        """Calls `work`, which takes at most a millisecond, until it returns True."""
        is_done = False
        while not is_done:
            async with self.place(tenant):
                began_at = clock.monotonic()
                while not (is_done := work()) and clock.monotonic() - began_at < _TURN_S:
                    pass
                # Equal time for other tasks: a token needs several iterations of the loop on its way to a client.
                await asyncio.sleep(clock.monotonic() - began_at)

    async def call(self, tenant: str, function: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
        """Runs a long function that cannot pause, such as a parser, in its own turn; returns the result."""
        async with self.place(tenant):
            began_at = clock.monotonic()
            try:
                return function(*arguments)
            finally:
                await asyncio.sleep(clock.monotonic() - began_at)
