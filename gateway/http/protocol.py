"""HTTP connections, and how much of the gateway each of them, and all of them, may take.

It builds on classes that uvicorn keeps to itself. So pyproject.toml bounds uvicorn's version, and each limit has a test
over a real socket: test_connection_limits.py, test_slow_clients.py, test_http_bodies.py and test_https.py in
tests/service/gateway.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import h11
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from gateway.body_memory import BodyMemory
from gateway.http.bodies import IncomingBody
from gateway.openai.errors import ErrorAnswer

# A chunk takes some microseconds, however short it is, and all of one read are taken in one go. So many may be short.
_MAX_SHORT_CHUNKS = 1 << 13
_MIN_MEAN_CHUNK_BYTES = 256
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Of the connections to one port.

    Attributes:
        max_header_bytes: Of a request.
        max_connections: At once, those that are still in their TLS handshake among them; further ones are closed.
        handshake_timeout_s: For the TLS handshake.
        sender_timeout_s: For the headers of a request, from the connection's begin or their own first byte, and once
            more for its body.
        reader_timeout_s: For a client to take something while output waits for it.
    """

    max_header_bytes: int
    max_connections: int
    handshake_timeout_s: float
    sender_timeout_s: float
    reader_timeout_s: float


class Places:
    """Counts the connections to one port, of which each takes a place from its first moment to its last."""

    def __init__(self, max_connections: int, on_refusal: Callable[[], None]) -> None:
        """`on_refusal` is called for each connection that finds no place."""
        self._max_connections = max_connections
        self._on_refusal = on_refusal
        self._holders: set[object] = set()

    def take(self, holder: object) -> bool:
        """Whether there was a place."""
        if len(self._holders) >= self._max_connections:
            self._on_refusal()
            return False
        self._holders.add(holder)
        return True

    def give_back(self, holder: object) -> None:
        """Idempotent."""
        self._holders.discard(holder)


class _Connection(h11.Connection):
    """The state of one connection. A body in very many chunks is refused when they are short on average."""

    def __init__(self, max_incomplete_event_size: int) -> None:
        super().__init__(h11.SERVER, max_incomplete_event_size)
        self._num_chunks = 0
        self._num_bytes = 0

    def next_event(self) -> Any:
        """Raises RemoteProtocolError where the other side does not speak HTTP as it should."""
        event = super().next_event()
        if isinstance(event, h11.Data):
            self._num_chunks += event.chunk_start
            self._num_bytes += len(event.data)
            if self._num_chunks > max(_MAX_SHORT_CHUNKS, self._num_bytes // _MIN_MEAN_CHUNK_BYTES):
                raise h11.RemoteProtocolError("the chunks of a body are too short")
        elif isinstance(event, h11.Request):
            self._num_chunks = self._num_bytes = 0
        return event


class LimitedProtocol(H11Protocol):
    """The protocol of one HTTP connection within limits."""

    def __init__(
        self,
        *args: Any,
        limits: HttpLimits,
        places: Places,
        bodies: BodyMemory,
        handshake: object | None = None,
        **kwargs: Any,
    ) -> None:
        """Takes all that uvicorn's protocol takes. `handshake` holds the place that this connection has already."""
        super().__init__(*args, **kwargs)
        self.conn = _Connection(limits.max_header_bytes)
        self._limits = limits
        self._places = places
        self._handshake = handshake
        self._bodies = bodies
        # What uvicorn calls for each request.
        self._application = self.app
        self.app = self._answer
        # Runs while more waits to be sent than is to be kept.
        self._writing: asyncio.TimerHandle | None = None
        # Runs while headers of a request are due.
        self._reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._places.give_back(self._handshake)
        if self._places.take(self):
            self._reading = self._cut_later(self._limits.sender_timeout_s, "sent no request in time")
        else:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._reading = _stopped(self._reading)
        elif self._reading is None:
            self._reading = self._cut_later(self._limits.sender_timeout_s, "did not end its headers in time")

    def send_400_response(self, msg: str) -> None:
        """Behind an answer that has begun there is no other one."""
        if self.conn.our_state is h11.SEND_RESPONSE:
            super().send_400_response(msg)
        else:
            self._cut("sent what is not HTTP")

    def pause_writing(self) -> None:
        super().pause_writing()
        _stopped(self._writing)
        self._watch_reader()

    def resume_writing(self) -> None:
        self._writing = _stopped(self._writing)
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._writing = _stopped(self._writing)
        self._reading = _stopped(self._reading)
        self._places.give_back(self)
        super().connection_lost(exc)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the application for one request. Where the server stops before it has answered, the client is told."""
        has_started = False

        async def send_and_note(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        timeout_s = self._limits.sender_timeout_s
        body = IncomingBody(receive, send_and_note, self._bodies, timeout_s, self._has_whole_body)
        try:
            await self._application(scope, body.receive, body.send)
        except asyncio.CancelledError:
            # Only a server that stops cancels requests.
            if has_started:
                self.transport.abort()
            else:
                await _send_unavailable(send)
        finally:
            body.release()

    def _has_whole_body(self) -> bool:
        return self.conn.their_state is not h11.SEND_BODY

    def _watch_reader(self) -> None:
        """The connection is cut where no less waits to be sent after the time for a client to take something."""
        num_waiting = self.transport.get_write_buffer_size()
        self._writing = self.loop.call_later(self._limits.reader_timeout_s, self._look_at_reader, num_waiting)

    def _look_at_reader(self, num_waited: int) -> None:
        if self.transport.get_write_buffer_size() < num_waited:
            self._watch_reader()
        else:
            self._cut("took nothing in time")

    def _cut_later(self, delay_s: float, why: str) -> asyncio.TimerHandle:
        return self.loop.call_later(delay_s, self._cut, why)

    def _cut(self, why: str) -> None:
        _logger.info("an HTTP client %s; its connection is cut", why)
        self.transport.abort()


async def _send_unavailable(send: Send) -> None:
    answer = ErrorAnswer(503, "this gateway stopped before the request was answered; try again", "draining")
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(answer.body)).encode()),
        (b"retry-after", b"1"),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body})


def _stopped(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
