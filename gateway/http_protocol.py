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


def http_protocol(limits: HttpLimits, on_refusal: Callable[[], None]) -> type[asyncio.Protocol]:
    """The protocol of HTTP connections within limits; `on_refusal` is told of each one that is too many."""

    class LimitedProtocol(H11Protocol):
        _writing: asyncio.TimerHandle | None = None
        """Runs while more waits to be sent than is to be kept."""
        _reading: asyncio.TimerHandle | None = None
        """Runs while headers of a request are due."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > limits.max_connections:
                on_refusal()
                transport.abort()
            else:
                self._reading = self.loop.call_later(limits.sender_timeout_s, self._cut, "sent no request")

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is not h11.IDLE:
                self._reading = _stopped(self._reading)
            elif self._reading is None:
                self._reading = self.loop.call_later(limits.sender_timeout_s, self._cut, "did not end its headers")

        def pause_writing(self) -> None:
            super().pause_writing()
            _stopped(self._writing)
            self._writing = self.loop.call_later(limits.reader_timeout_s, self._cut, "took nothing")

        def resume_writing(self) -> None:
            self._writing = _stopped(self._writing)
            super().resume_writing()

        def connection_lost(self, exc: Exception | None) -> None:
            self._writing = _stopped(self._writing)
            self._reading = _stopped(self._reading)
            super().connection_lost(exc)

        def _cut(self, why: str) -> None:
            _logger.info("an HTTP client %s in time; its connection is cut", why)
            self.transport.abort()

    return LimitedProtocol


def _stopped(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
