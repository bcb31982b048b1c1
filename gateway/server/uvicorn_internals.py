"""The parts of uvicorn and h11 that are not their public API. No other module uses such a part (ADR 79).

pyproject.toml bounds the versions of both. Each override is tested over a real socket: test_connection_limits.py,
test_slow_clients.py, test_http_bodies.py, test_https.py and test_stop.py in tests/service/gateway.
"""

import asyncio
import contextlib
import socket
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sized
from typing import Any

import h11
import uvicorn
from h11._receivebuffer import ReceiveBuffer
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

_GRACE_S = 2
# When the server stops, a request may still be in transit.
_LAST_REQUESTS_S = 0.1


class Server(uvicorn.Server):
    """uvicorn's server for the running event loop: the process handles signals, and `stop` needs no polling."""

    def __init__(self, app: ASGIApp, protocol: type[asyncio.Protocol], keep_alive_s: int) -> None:
        """`keep_alive_s` is the time after which an idle connection is closed."""
        # Warnings are about requests: any client could fill the log with them.
        logs: Any = {"log_config": None, "log_level": "error", "access_log": False}
        super().__init__(
            uvicorn.Config(app, http=protocol, lifespan="off", ws="none", timeout_keep_alive=keep_alive_s, **logs)
        )
        self._stopping = asyncio.Event()

    @abstractmethod
    async def _listen(self, listener: socket.socket) -> Any:
        """Accepts connections; returns an object with `close` and `wait_closed`."""

    def hand_over(self) -> None:
        """Closes the port, which other gateways share. Open connections continue."""
        for server in self.servers:
            server.close()

    def stop(self) -> None:
        """Makes `serve` return soon."""
        self._stopping.set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.servers = [await self._listen(each) for each in sockets or []]
        self.started = True

    async def main_loop(self) -> None:
        """Waits for `stop`, and updates the date header; uvicorn polls ten times a second."""
        while not self._stopping.is_set():
            await self.on_tick(0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await self._stopping.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends the connections; uvicorn waits a tenth of a second even without open connections."""
        self.hand_over()
        if self.server_state.connections:
            # A request that a client has just sent over an idle connection is still answered.
            await asyncio.sleep(_LAST_REQUESTS_S)
        for connection in list(self.server_state.connections):
            connection.shutdown()
        # Idle connections close in the next iteration of the event loop.
        await asyncio.sleep(0)
        try:
            async with asyncio.timeout(_GRACE_S):
                await self._wait_tasks_to_complete()
        except TimeoutError:
            for task in self.server_state.tasks:
                task.cancel("the server stops")

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Lines(ReceiveBuffer):
    """h11's receive buffer. Two functions see lines before h11 parses them, and raise h11.RemoteProtocolError: each
    line of a chunked body, and all lines of headers or trailers."""

    def __init__(self, check_line: Callable[[bytearray], None], check_lines: Callable[[Sized], None]) -> None:
        super().__init__()
        self._check_line = check_line
        self._check_lines = check_lines

    def maybe_extract_next_line(self) -> bytearray | None:
        if (line := super().maybe_extract_next_line()) is not None:
            self._check_line(line)
        return line

    def maybe_extract_lines(self) -> list[bytearray] | None:
        if (lines := super().maybe_extract_lines()) is not None:
            self._check_lines(lines)
        return lines


class ConnectionState(h11.Connection):
    """h11's state of one connection of a server, with another receive buffer."""

    def __init__(self, max_incomplete_bytes: int, buffer: Lines) -> None:
        super().__init__(h11.SERVER, max_incomplete_bytes)
        self._receive_buffer = buffer


class Protocol(H11Protocol):
    """uvicorn's protocol of one HTTP connection, with `conn` as h11's state."""

    def __init__(self, server: Server, conn: ConnectionState, answer: ASGIApp, refuse: Callable[[], None]) -> None:
        """`answer` answers a request in place of the server's application, `refuse` bytes that are not HTTP."""
        super().__init__(config=server.config, server_state=server.server_state, app_state={})
        self.conn = conn
        self._application, self.app = self.app, answer
        self._refuse = refuse

    def send_400_response(self, msg: str) -> None:
        self._refuse()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        # After a reset by the client uvicorn does not stop its timer, which holds the connection's memory.
        self._unset_keepalive_if_required()
