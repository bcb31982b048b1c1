"""The body of an HTTP request: how long it may take, what it may hold, and what happens when nobody reads it."""

import asyncio
from collections.abc import Callable

from starlette.types import Message, Receive, Send

from gateway.body_memory import BodyMemory
from gateway.openai.errors import ErrorAnswer, HttpError
from quire.rpc.errors import QuireError

_CLOSE = (b"connection", b"close")
# What is read and dropped behind an answer: most clients look for it only when they have sent all.
_MAX_DRAINED_BYTES = 16 * 1024 * 1024
_MAX_DRAIN_S = 2.0


class IncomingBody:
    """Stands between the server and the application while one request runs.

    Reading ends with 408 when the body takes longer than `timeout_s` from the end of the headers, and with 429 when it
    is given up for others (`BodyMemory`). An answer to a body that has not come whole says `connection: close`; what
    still comes is then dropped for a while, since closing at once would take the answer from a client that still sends.
    """

    def __init__(
        self, receive: Receive, send: Send, memory: BodyMemory, timeout_s: float, has_come: Callable[[], bool]
    ) -> None:
        """`has_come` says whether the server has the whole body, read or not."""
        self._receive = receive
        self._send = send
        self._memory = memory
        self._timeout_s = timeout_s
        self._due_at = asyncio.get_running_loop().time() + timeout_s
        self._has_come = has_come
        self._held = memory.begin(self._give_up)
        self._is_given_up = False
        self._is_read = False
        self._drains = False
        self._reading: asyncio.Timeout | None = None

    async def receive(self) -> Message:
        """Raises HttpError or QuireError where the body comes too slowly."""
        if self._is_read:
            return await self._receive()
        if self._is_given_up:
            raise self._memory.refusal()
        try:
            async with asyncio.timeout_at(self._due_at) as self._reading:
                message = await self._receive()
        except TimeoutError:
            raise self._refusal() from None
        finally:
            self._reading = None
        if message["type"] == "http.request":
            self._held.add(len(message.get("body", b"")))
        if not message.get("more_body", False):
            self._is_read = True
            self._held.complete()
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and not self._has_come():
            self._drains = True
            others = [header for header in message.get("headers", ()) if header[0].lower() != _CLOSE[0]]
            message = {**message, "headers": [*others, _CLOSE]}
        if self._drains and message["type"] == "http.response.body" and not message.get("more_body", False):
            await self._send({**message, "more_body": True})
            await self._drain()
            message = {"type": "http.response.body", "body": b""}
        await self._send(message)

    def release(self) -> None:
        """The request is over."""
        self._held.release()

    def _give_up(self) -> None:
        """Called in the middle of another request."""
        self._is_given_up = True
        if self._reading is not None and not self._reading.expired():
            self._reading.reschedule(asyncio.get_running_loop().time())

    def _refusal(self) -> HttpError | QuireError:
        if self._is_given_up:
            return self._memory.refusal()
        return HttpError(ErrorAnswer(408, f"the body did not come within {self._timeout_s:g} s", "slow_sender"))

    async def _drain(self) -> None:
        """Reads and drops until the body ends or the client leaves, or it is too much or takes too long."""
        self._held.release()
        ends_at = min(self._due_at, asyncio.get_running_loop().time() + _MAX_DRAIN_S)
        num_bytes = 0
        try:
            async with asyncio.timeout_at(ends_at):
                while num_bytes <= _MAX_DRAINED_BYTES:
                    message = await self._receive()
                    num_bytes += len(message.get("body", b""))
                    if not message.get("more_body", False):
                        return
        except TimeoutError:
            return
