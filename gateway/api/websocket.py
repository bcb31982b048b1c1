"""WebSockets on the HTTP port (RFC 6455): messages over a connection that a GET request upgrades.

The request passes all checks of HTTP first. The connection stays the server's, with its limits of connections and of
slow readers; `websockets` makes and parses the frames.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol, cast

from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from websockets.datastructures import Headers
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Request
from websockets.protocol import SERVER, State
from websockets.protocol import Protocol as Frames
from websockets.server import ServerProtocol

from gateway.api.answers import ErrorAnswer, error_answer, send_answer
from gateway.request.body_memory import HeldBody, message_memory
from quire.rpc.errors import ResourceExhausted

SWITCH_PROTOCOL = "quire.switch_protocol"
"""The extension of a request's scope that hands over its connection: a function that takes a `Receiver` and returns the
`Wire`. The receiver gets data after an answer with the status 101."""
# Messages that wait to be read; then the client has to wait.
_MAX_UNREAD = 8
_CLOSE_S = 5.0


class Receiver(Protocol):
    """Gets what a client sends after its connection left HTTP."""

    def data_received(self, data: bytes) -> None: ...

    def connection_lost(self) -> None: ...


class Wire(Protocol):
    """A connection that left HTTP."""

    def write(self, data: bytes) -> None: ...

    async def drain(self) -> None:
        """Waits until the client has read enough to write more."""
        ...

    def set_reading(self, *, reads: bool) -> None:
        """Pauses or resumes reading. Idempotent."""
        ...

    def close(self) -> None:
        """Closes the connection after all written data."""
        ...

    def abort(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Message:
    """A whole message, and its memory, which the reader releases."""

    data: bytes
    held: HeldBody


class WebSocket:
    """One open WebSocket.

    Attributes:
        heard_at: Time of the client's last data, by the clock of the event loop.
        begun_at: Time of the first data of a message that is not whole yet; None if there is none.
    """

    wire: Wire

    def __init__(self, max_bytes: int) -> None:
        """A longer message closes the connection with 1009."""
        self._frames = Frames(SERVER, max_size=max_bytes)
        self._messages: asyncio.Queue[Message | None] = asyncio.Queue()
        self._parts: list[bytes] = []
        self._memory = message_memory.get()
        self._held = self._begin_body()
        self.heard_at = asyncio.get_running_loop().time()
        self.begun_at: float | None = None
        self.lost = asyncio.get_running_loop().create_future()

    def hold(self) -> HeldBody:
        """Memory that counts until it is released, like the memory of a message."""
        held = self._memory.another(lambda: None)
        held.complete()
        return held

    def _begin_body(self) -> HeldBody:
        return self._memory.another(lambda: self.close(CloseCode.TRY_AGAIN_LATER, "no memory for this message"))

    def data_received(self, data: bytes) -> None:
        self.heard_at = asyncio.get_running_loop().time()
        try:
            self._held.add(len(data))
        except ResourceExhausted as error:
            self.close(CloseCode.TRY_AGAIN_LATER, error.message)
        self._frames.receive_data(data)
        frames = cast(list[Frame], self._frames.events_received())
        for frame in frames:
            if frame.opcode in (Opcode.PING, Opcode.PONG, Opcode.CLOSE):
                continue
            if frame.opcode is not Opcode.CONT:
                self._parts = []
            self._parts.append(bytes(frame.data))
            if frame.fin:
                self._held.complete()
                self._messages.put_nowait(Message(b"".join(self._parts), self._held))
                self._parts, self._held = [], self._begin_body()
        if frames and not self._parts:
            # Only control frames, or the end of a message, came.
            self._held.release()
            self._held, self.begun_at = self._begin_body(), None
        elif self.begun_at is None:
            self.begun_at = self.heard_at
        self._flush()
        self.wire.set_reading(reads=self._messages.qsize() < _MAX_UNREAD)

    def connection_lost(self) -> None:
        self._frames.receive_eof()
        self._held.release()
        self._messages.put_nowait(None)
        if not self.lost.done():
            self.lost.set_result(None)

    async def messages(self) -> AsyncIterator[Message]:
        """The messages of the client, until the connection ends."""
        while (message := await self._messages.get()) is not None:
            self.wire.set_reading(reads=True)
            yield message

    async def send(self, text: bytes) -> None:
        """Sends a text message, no faster than the client reads. Without effect once the connection closes."""
        if self._frames.state is State.OPEN:
            self._frames.send_text(text)
            self._flush()
            await self.wire.drain()

    def ping(self) -> None:
        if self._frames.state is State.OPEN:
            self._frames.send_ping(b"")
            self._flush()

    def close(self, code: int, reason: str) -> None:
        """Says goodbye, and ends the connection when the client has answered, or after some seconds. Idempotent."""
        if self._frames.state is State.OPEN:
            self._frames.send_close(code, reason.encode()[:120].decode(errors="ignore"))
            self._flush()
            asyncio.get_running_loop().call_later(_CLOSE_S, self.wire.abort)

    def _flush(self) -> None:
        for data in self._frames.data_to_send():
            # Empty data means the end.
            if data:
                self.wire.write(data)
            else:
                self.wire.close()


class WebSocketResponse(Response):
    """Upgrades the connection, and runs `serve` until it returns or the connection ends."""

    def __init__(self, serve: Callable[[WebSocket], Awaitable[None]], max_bytes: int) -> None:
        self.background = None
        self._serve = serve
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        names = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
        accepted = ServerProtocol().accept(Request(scope["path"], Headers(names)))
        switch = scope.get("extensions", {}).get(SWITCH_PROTOCOL)
        if accepted.status_code != HTTPStatus.SWITCHING_PROTOCOLS or switch is None:
            message = "this path takes WebSockets of version 13 over HTTP/1.1, and POST; the request is not an upgrade"
            headers = {"upgrade": "websocket", "connection": "upgrade"}
            await send_answer(send, ErrorAnswer(426, message, "upgrade_required", headers=headers))
            return
        socket = WebSocket(self._max_bytes)
        socket.wire = switch(socket)
        headers = [(name.lower().encode(), value.encode()) for name, value in accepted.headers.raw_items()]
        own = [(name, value) for name, value in headers if name not in (b"date", b"server")]
        await send({"type": "http.response.start", "status": accepted.status_code, "headers": own})
        serving = asyncio.ensure_future(self._serve(socket))
        try:
            await asyncio.wait([serving, socket.lost], return_when=asyncio.FIRST_COMPLETED)
        finally:
            serving.cancel()
            await asyncio.wait([serving])
            if not serving.cancelled() and (error := serving.exception()) is not None:
                # This writes it to the log.
                message = error_answer(cast(Exception, error)).message
                socket.close(CloseCode.INTERNAL_ERROR, message)
            socket.close(CloseCode.SERVICE_RESTART, "this gateway stops; connect again")
        await socket.lost
