"""A listening socket that outlives the processes which accept its connections."""

import socket

from quire.rpc.address import TcpAddress
from quire.rpc.listeners import listen


class SharedListener:
    """The listening socket of a reserved port, which processes inherit and this process holds.

    Connections that come while processes are being started again wait in it. They wait for one start only: if a process
    ends before it accepts connections, and no other one does, the socket is closed, which resets the waiting
    connections and refuses new ones until the next start.
    """

    def __init__(self, address: TcpAddress) -> None:
        self._address = address
        self._socket: socket.socket | None = None
        self._accepting: set[str] = set()
        self._is_closed = False
        self.number = 0
        """The number of the socket that is lent now; the ones before were closed."""

    def lend(self) -> socket.socket | None:
        """A copy of the socket, for a process that is about to start; None after `close`. The caller closes it. Raises
        OSError."""
        if self._is_closed:
            return None
        if self._socket is None:
            self._socket = listen(self._address.host, self._address.port, reuse_port=True)
            # `dup` sets a copy as the socket is set, and copies share the flag with all processes that accept.
            self._socket.setblocking(False)
        return self._socket.dup()

    def begin(self, name: str) -> None:
        """The process with this name accepts connections."""
        self._accepting.add(name)

    def end(self, name: str) -> None:
        """The process with this name has ended, or could not be started."""
        if name in self._accepting:
            self._accepting.remove(name)
        elif not self._accepting:
            self._drop()

    def close(self) -> None:
        """Closes it for good. Connections are refused once the processes that inherited it close it as well."""
        self._is_closed = True
        self._drop()

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            self.number += 1
