"""Ports that no other process is given."""

import atexit

from quire.rpc.address import ReservedPort


def free_port() -> int:
    """A port of 127.0.0.1 without a listener. Another process gets it only if it asks for this very number.

    It is kept to the end of this process, so that a server may be stopped and started again.
    """
    lent = ReservedPort.lend()
    atexit.register(lent.release)
    return lent.address.port
