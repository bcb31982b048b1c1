"""Request bodies while they arrive: one bound on the memory of all of them, over HTTP and gRPC, and the time that the
body of one HTTP request may take."""

import asyncio
from collections.abc import Callable

from starlette.types import Message, Receive, Send

from gateway.api.errors import ErrorAnswer, HttpError
from quire.rpc.errors import QuireError, ResourceExhausted

_RETRY_MS = 1000
_CLOSE = (b"connection", b"close")
# Read and dropped behind an answer: most clients read an answer only when they have sent their whole body.
_MAX_DRAINED_BYTES = 16 * 1024 * 1024
_MAX_DRAIN_S = 2.0


class BodyMemory:
    """Counts the bytes of all request bodies that are held, including those that still arrive.

    When they are too many, the body that has been arriving for longest is given up, and not the newest one: a client
    that sends half a body and waits takes memory from nobody, and a body is refused only if it comes more slowly than
    all others together. Complete bodies are kept; where they alone fill the memory, a new one is refused.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        # In order of their beginning.
        self._arriving: dict[HeldBody, None] = {}

    def begin(self, on_refusal: Callable[[], None]) -> "HeldBody":
        """A body of which nothing has arrived. `on_refusal` is called when it is given up for others."""
        body = HeldBody(self, on_refusal)
        self._arriving[body] = None
        return body

    def refusal(self) -> ResourceExhausted:
        """The error of a body for which there is no memory."""
        return ResourceExhausted(
            f"the bodies of all requests may take {self._max_bytes:,} bytes together (--max-total-body-bytes), and "
            "there is no room for this one; try again",
            reason="BODIES_FULL",
            retry_after_ms=_RETRY_MS,
        )

    def _grow(self, body: "HeldBody", num_bytes: int) -> None:
        while self._num_bytes + num_bytes > self._max_bytes:
            longest = next((each for each in self._arriving if each.num_bytes or each is body), body)
            longest.release()
            if longest is body:
                raise self.refusal()
            longest.on_refusal()
        self._num_bytes += num_bytes
        body.num_bytes += num_bytes

    def _complete(self, body: "HeldBody") -> None:
        self._arriving.pop(body, None)

    def _release(self, body: "HeldBody") -> None:
        self._arriving.pop(body, None)
        self._num_bytes -= body.num_bytes
        body.num_bytes = 0


class HeldBody:
    """One body: `add` what arrives, then `complete` it, and `release` it when its request is over."""

    __slots__ = ("_memory", "num_bytes", "on_refusal")

    def __init__(self, memory: BodyMemory, on_refusal: Callable[[], None]) -> None:
        self._memory = memory
        self.num_bytes = 0
        self.on_refusal = on_refusal

    def add(self, num_bytes: int) -> None:
        """Counts bytes that arrived. Raises ResourceExhausted, and releases the body, where there is no room."""
        self._memory._grow(self, num_bytes)

    def complete(self) -> None:
        """It has arrived, and is no longer given up for others."""
        self._memory._complete(self)

    def release(self) -> None:
        """No longer counts it. Idempotent."""
        self._memory._release(self)


class IncomingBody:
    """Stands between the server and the application while one HTTP request runs.

    Reading ends with 408 when the body takes longer than `timeout_s` from the end of the headers, and with 429 when it
    is given up for others. An answer to a body that has not arrived says `connection: close`; the rest is then dropped
    for a while, since closing at once would take the answer from a client that still sends.
    """

    def __init__(
        self, receive: Receive, send: Send, memory: BodyMemory, timeout_s: float, has_come: Callable[[], bool]
    ) -> None:
        """`has_come` returns whether the server has the whole body, read or not."""
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
        """Called while another request runs."""
        self._is_given_up = True
        if self._reading is not None and not self._reading.expired():
            self._reading.reschedule(asyncio.get_running_loop().time())

    def _refusal(self) -> HttpError | QuireError:
        if self._is_given_up:
            return self._memory.refusal()
        return HttpError(ErrorAnswer(408, f"the body did not come within {self._timeout_s:g} s", "slow_sender"))

    async def _drain(self) -> None:
        """Drops what arrives, until the body ends or the client leaves, or it is too much or takes too long."""
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
