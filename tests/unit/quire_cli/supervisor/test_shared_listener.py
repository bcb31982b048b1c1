"""A socket that several processes share."""

import os
from contextlib import closing

from quire.rpc.address import ReservedPort
from quire_cli.supervisor.shared_listener import SharedListener


def test_a_copy_for_another_process_leaves_accepting_without_a_wait() -> None:
    """Where two processes see a connection, one accepts it; the other one must not wait for the next."""
    port = ReservedPort.reserve("127.0.0.1", 0)
    with closing(SharedListener(port.address)) as listener:
        first = listener.lend()
        assert first is not None
        # As event loops do. Copies of a socket share the flag.
        os.set_blocking(first.fileno(), False)
        second = listener.lend()
        assert second is not None
        assert not os.get_blocking(first.fileno())
        first.close()
        second.close()
    port.release()
