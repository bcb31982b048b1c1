"""HTTP connections, and how much of the gateway each of them, and all of them, may take."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Of the connections to one port.

    Attributes:
        max_connections: At once; further ones are closed.
        sender_timeout_s: For the headers of a request, from the connection's begin or their own first byte.
        reader_timeout_s: For a client to take something while output waits for it.
    """

    max_connections: int
    sender_timeout_s: float
    reader_timeout_s: float


class LimitedProtocol(H11Protocol):
    """The protocol of one HTTP connection within limits; `on_refusal` is told where it is one too many."""

    def __init__(self, *args: Any, limits: HttpLimits, on_refusal: Callable[[], None], **kwargs: Any) -> None:
        """Takes all that uvicorn's protocol takes."""
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._on_refusal = on_refusal
        # Runs while more waits to be sent than is to be kept.
        self._writing: asyncio.TimerHandle | None = None
        # Runs while headers of a request are due.
        self._reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            self._on_refusal()
            transport.abort()
        else:
            self._reading = self._cut_later(self._limits.sender_timeout_s, "sent no request")

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._reading = _stopped(self._reading)
        elif self._reading is None:
            self._reading = self._cut_later(self._limits.sender_timeout_s, "did not end its headers")

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
        super().connection_lost(exc)

    def _watch_reader(self) -> None:
        """The connection is cut where no less waits to be sent after the time for a client to take something."""
        num_waiting = self.transport.get_write_buffer_size()
        self._writing = self.loop.call_later(self._limits.reader_timeout_s, self._look_at_reader, num_waiting)

    def _look_at_reader(self, num_waited: int) -> None:
        if self.transport.get_write_buffer_size() < num_waited:
            self._watch_reader()
        else:
            self._cut("took nothing")

    def _cut_later(self, delay_s: float, why: str) -> asyncio.TimerHandle:
        return self.loop.call_later(delay_s, self._cut, why)

    def _cut(self, why: str) -> None:
        _logger.info("an HTTP client %s in time; its connection is cut", why)
        self.transport.abort()


def _stopped(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
