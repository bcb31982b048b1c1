"""Accepts connections and encrypts them, within the limits that hold for all connections."""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable

from gateway.http.protocol import HttpLimits, Places

_PAUSE_S = 0.5
_logger = logging.getLogger(__name__)


class TlsListener:
    """Stands in for the server that `loop.create_server` makes, which says nothing of a connection before its handshake
    is over, and never of one whose handshake fails. Here a connection takes its place as it is accepted.
    """

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        make_protocol: Callable[[object], asyncio.Protocol],
        limits: HttpLimits,
        places: Places,
    ) -> None:
        """`make_protocol` makes what serves a connection, from what holds its place during the handshake."""
        self._listener = listener
        self._context = context
        self._make_protocol = make_protocol
        self._limits = limits
        self._places = places
        self._handshakes: set[asyncio.Task[None]] = set()
        self._listener.setblocking(False)
        self._accepting = asyncio.get_running_loop().create_task(self._accept_all(), name="HTTPS")
        # Not before the event loop has let go of it.
        self._accepting.add_done_callback(lambda _: listener.close())

    def close(self) -> None:
        """Accepts nothing more, and closes the port soon. Handshakes go on. Idempotent."""
        self._accepting.cancel()

    async def wait_closed(self) -> None:
        """Ends the handshakes that still run, of a listener that is closed."""
        for each in self._handshakes:
            each.cancel()
        await asyncio.gather(self._accepting, *self._handshakes, return_exceptions=True)

    async def _accept_all(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:  # too many open files, no memory, or the client left
                _logger.warning("cannot accept an HTTPS connection: %s", error)
                await asyncio.sleep(_PAUSE_S)
                continue
            holder = object()
            if not self._places.take(holder):
                connection.close()
                continue
            handshake = loop.create_task(self._shake_hands(connection, holder))
            self._handshakes.add(handshake)
            handshake.add_done_callback(self._handshakes.discard)

    async def _shake_hands(self, connection: socket.socket, holder: object) -> None:
        try:
            connection.setblocking(False)
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._make_protocol(holder),
                connection,
                ssl=self._context,
                ssl_handshake_timeout=self._limits.handshake_timeout_s,
            )
        except OSError as error:  # of which ssl.SSLError and broken connections are some
            _logger.debug("a TLS handshake failed: %s", error)
        finally:
            self._places.give_back(holder)
