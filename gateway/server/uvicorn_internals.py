"""The parts of uvicorn and h11 that are not their public API. No other module uses such a part (ADR 79).

pyproject.toml bounds the versions of both. Each override is tested over a real socket: test_connection_limits.py,
test_slow_clients.py, test_http_bodies.py, test_https.py and test_stop.py in tests/service/gateway.
"""

import sys
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import h11
import uvicorn
from h11._receivebuffer import ReceiveBuffer
from h11._state import MIGHT_SWITCH_PROTOCOL
from starlette.types import ASGIApp
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from gateway.api.websocket import Receiver

MAX_HEADER_LINES = 1024


def make_config(app: ASGIApp, keep_alive_s: int) -> uvicorn.Config:
    """The settings of connections; `keep_alive_s` is the time after which an idle connection is closed."""
    # Warnings are about requests: any client could fill the log with them.
    logs: Any = {"log_config": None, "log_level": "error", "access_log": False}
    config = uvicorn.Config(app, http=H11Protocol, lifespan="off", ws="none", timeout_keep_alive=keep_alive_s, **logs)
    config.load()
    return config


class _Lines(ReceiveBuffer):
    """h11's receive buffer. It rejects lines before h11 parses them."""

    def maybe_extract_next_line(self) -> bytearray | None:
        """A line of a chunked body. Another program may parse a carriage return in its extensions as its end."""
        line = super().maybe_extract_next_line()
        if line is not None and b"\r" in line[:-2]:
            raise h11.RemoteProtocolError("a line has a carriage return within it")
        return line

    def maybe_extract_lines(self) -> list[bytearray] | None:
        """The lines of headers or trailers. h11 parses all without a pause, at a microsecond or more per line."""
        lines = super().maybe_extract_lines()
        if lines is not None and len(lines) > MAX_HEADER_LINES:
            raise h11.RemoteProtocolError(
                f"the headers or trailers have more than {MAX_HEADER_LINES:,} lines",
                error_status_hint=HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
            )
        return lines


class ConnectionState(h11.Connection):
    """h11's state of one connection of a server, with limits of lines."""

    def __init__(self, max_incomplete_bytes: int) -> None:
        super().__init__(h11.SERVER, max_incomplete_bytes)
        self._receive_buffer = _Lines()


class SwitchedConnection:
    """A connection that left HTTP; see `gateway.api.websocket.Wire`."""

    def __init__(self, transport: Any, flow: FlowControl) -> None:
        self._transport, self._flow = transport, flow
        self.write, self.close, self.abort = transport.write, transport.close, transport.abort
        self.drain = flow.drain

    def set_reading(self, *, reads: bool) -> None:
        """Pauses or resumes reading. Idempotent."""
        (self._flow.resume_reading if reads else self._flow.pause_reading)()


class Protocol(H11Protocol):
    """uvicorn's protocol of one HTTP connection, with `conn` as h11's state."""

    def __init__(
        self,
        config: uvicorn.Config,
        state: ServerState,
        conn: ConnectionState,
        answer: ASGIApp,
        refuse: Callable[[BaseException | None], None],
    ) -> None:
        """`answer` answers a request in place of the application, `refuse` bytes that are not HTTP, by their error."""
        super().__init__(config, state, app_state={})
        self.conn = conn
        self._application, self.app = self.app, answer
        self._refuse = refuse
        # Gets all data after an answer with the status 101.
        self._receiver: Receiver | None = None

    @property
    def may_switch(self) -> bool:
        """Whether the current request asks for another protocol and has no body."""
        return self.conn.their_state is MIGHT_SWITCH_PROTOCOL

    def hand_over(self, receiver: Receiver) -> SwitchedConnection:
        """Makes `receiver` get what the client sends after `switch_protocol`."""
        self._receiver = receiver
        return SwitchedConnection(self.transport, self.flow)

    def switch_protocol(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Answers the current request with the status 101, after which the connection is not HTTP any more."""
        assert self._receiver is not None, "a receiver is set first"
        start = h11.InformationalResponse(
            status_code=HTTPStatus.SWITCHING_PROTOCOLS,
            headers=[*self.server_state.default_headers, *headers],
            reason=HTTPStatus.SWITCHING_PROTOCOLS.phrase,
        )
        self.transport.write(self.conn.send(start))
        self.flow.resume_reading()
        if early := self.conn.trailing_data[0]:
            self._receiver.data_received(early)

    def data_received(self, data: bytes) -> None:
        if self._receiver is not None and self.conn.our_state is h11.SWITCHED_PROTOCOL:
            self._receiver.data_received(data)
        else:
            super().data_received(data)

    @property
    def takes_parts(self) -> bool:
        """Whether `write_part` may be called: the client does not have to be waited for, and has not left."""
        return not (self.flow.write_paused or self.cycle is None or self.cycle.disconnected)

    def write_part(self, data: bytes) -> None:
        """Writes a part of a streamed answer, of HTTP/1.1 without a length, past h11 and the layers of the application:
        none of them changes such parts."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def send_400_response(self, msg: str) -> None:
        # uvicorn calls this while it handles the error.
        self._refuse(sys.exception())

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._receiver is not None:
            self._receiver.connection_lost()
        # After a reset by the client uvicorn does not stop its timer, which holds the connection's memory.
        self._unset_keepalive_if_required()
