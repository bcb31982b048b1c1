"""How ranks notice at once that another one ended: a TCP connection between rank 0 and each other rank, which closes
with the process, whatever ends it. A rank that ends in order says so before.

Each rank but the first listens where it is seen from the first one's address, and rank 0 connects to it, as Gloo does.
Where no connection can be made, or a machine is gone without closing it, signs of life remain (`meeting.py`).
"""

import logging
import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

_TAKEN = b"+"
_GOODBYE = b"."
_CONNECT_TIMEOUT_S = 5.0
_logger = logging.getLogger(__name__)


class Lifelines:
    """The connections of one rank, each made and read by a daemon thread of its own: one that takes long to come about
    keeps nobody from giving signs of life.

    Args:
        leave: called with the reason when another rank died or ended in order.
    """

    def __init__(self, leave: Callable[[str], object]) -> None:
        self._leave = leave
        self._connections: list[socket.socket] = []

    def offer(self, first_host: str, first_port: int) -> str:
        """Listens for rank 0, which is at this address, in the background. Returns what rank 0 connects by; empty where
        there is no way to listen."""
        token = secrets.token_hex(16)
        try:
            listener = socket.create_server((_own_host(first_host, first_port), 0), family=_family(first_host))
        except OSError as error:
            _logger.info("no lifeline to rank 0: %s", error)
            return ""
        threading.Thread(target=self._accept, args=(listener, token.encode()), name="lifeline 0", daemon=True).start()
        host, port = listener.getsockname()[:2]
        return f"{port} {token} {host}"

    def connect(self, rank: int, offer: str) -> None:
        """Connects rank 0 to what another rank offers, in the background."""
        if offer:
            threading.Thread(target=self._connect, args=(rank, offer), name=f"lifeline {rank}", daemon=True).start()

    def say_goodbye(self) -> None:
        """Tells the other ranks that this process ends in order, before its connections close."""
        for connection in self._connections:
            with suppress(OSError):
                connection.sendall(_GOODBYE)

    def _connect(self, rank: int, offer: str) -> None:
        port, token, host = offer.split(" ", 2)
        try:
            connection = socket.create_connection((host, int(port)), _CONNECT_TIMEOUT_S)
            # Before the token is sent: whoever has taken the connection hears a goodbye by it.
            self._connections.append(connection)
            connection.sendall(token.encode())
            connection.settimeout(None)
            # A rank that ends in order before it takes the connection resets it, and is not dead by that.
            first_word = connection.recv(1)
        except OSError as error:
            _logger.info("no lifeline to rank %d: %s", rank, error)
            return
        if first_word == _GOODBYE:
            self._leave(f"rank {rank} ended in order")
        elif first_word == _TAKEN:
            self._hold(connection, rank)

    def _accept(self, listener: socket.socket, token: bytes) -> None:
        with listener:
            while True:
                connection, _ = listener.accept()
                connection.settimeout(_CONNECT_TIMEOUT_S)
                with suppress(OSError):
                    if secrets.compare_digest(_received(connection, len(token)), token):
                        break
                connection.close()
        self._connections.append(connection)
        with suppress(OSError):
            connection.sendall(_TAKEN)
        self._hold(connection, 0)

    def _hold(self, connection: socket.socket, rank: int) -> None:
        with connection:
            connection.settimeout(None)
            try:
                last_word = connection.recv(1)
            except OSError:
                last_word = b""
        self._leave(f"rank {rank} ended in order" if last_word == _GOODBYE else f"rank {rank} died")


def _received(connection: socket.socket, num_bytes: int) -> bytes:
    """So many bytes, or fewer where the other side ends before."""
    data = b""
    while len(data) < num_bytes and (piece := connection.recv(num_bytes - len(data))):
        data += piece
    return data


def _family(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]


def _own_host(first_host: str, first_port: int) -> str:
    """The address of this machine on the way to rank 0. Nothing is sent."""
    with socket.socket(_family(first_host), socket.SOCK_DGRAM) as probe:
        probe.connect((first_host, first_port))
        return probe.getsockname()[0]
