"""State of both ends of a simulated stream: unread messages, the flow-control window, and a status."""

import asyncio
from collections import deque
from dataclasses import dataclass

import grpc

Metadata = tuple[tuple[str, str | bytes], ...]


@dataclass(frozen=True, slots=True)
class Status:
    """How a call ended. It has the surface of cygrpc's AioRpcStatus."""

    grpc_code: grpc.StatusCode
    text: str
    trailing: Metadata = ()

    def code(self) -> int:
        return self.grpc_code.value[0]

    def details(self) -> str:
        return self.text

    def trailing_metadata(self) -> Metadata:
        return self.trailing

    def debug_error_string(self) -> str:
        return f"simulated: {self.grpc_code.name}: {self.text}"


class Stream:
    """Messages of one direction that have arrived and are unread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._unread: deque[bytes] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._has_ended = False
        self._num_uncredited = 0

    @property
    def is_empty(self) -> bool:
        return not self._unread

    def put(self, message: bytes) -> None:
        if not self._has_ended:
            self._unread.append(message)
            self._wake()

    def end(self, *, drop_unread: bool) -> None:
        """No more messages arrive."""
        self._has_ended = True
        if drop_unread:
            self._unread.clear()
        self._wake()

    async def take(self) -> bytes | None:
        """The next message; None at the end."""
        while not self._unread:
            if self._has_ended:
                return None
            self._reader = self._loop.create_future()
            await self._reader
        return self._unread.popleft()

    def credit(self, num_bytes: int, window_bytes: int) -> int:
        """Additional bytes that the sender may send now, if they are worth a message; else 0."""
        self._num_uncredited += num_bytes
        if self._num_uncredited < window_bytes // 4:
            return 0
        num_bytes, self._num_uncredited = self._num_uncredited, 0
        return num_bytes

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class Window:
    """Number of bytes that may be sent before the other end has read some. A message may exceed the rest."""

    def __init__(self, loop: asyncio.AbstractEventLoop, num_bytes: int) -> None:
        self._loop = loop
        self._left = num_bytes
        self._is_closed = False
        self._waiters: deque[asyncio.Future[None]] = deque()

    def take(self, num_bytes: int) -> None:
        self._left -= num_bytes

    def give(self, num_bytes: int) -> None:
        self._left += num_bytes
        self._wake()

    def close(self) -> None:
        self._is_closed = True
        self._wake()

    async def is_open(self) -> bool:
        """Waits until the sent bytes fit the window; False if the stream has ended before."""
        while self._left < 0 and not self._is_closed:
            waiter = self._loop.create_future()
            self._waiters.append(waiter)
            await waiter
        return not self._is_closed or self._left >= 0

    def _wake(self) -> None:
        if self._left >= 0 or self._is_closed:
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_result(None)
            self._waiters.clear()
