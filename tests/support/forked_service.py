"""`python -I -S forked_service.py SOCKET MODULE FLAG...`: a service that is a fork (tests.support.forked_services).

It requests a fork, passes its signals on to it, and ends as it does. It imports little, since each start pays for it.
"""

import json
import os
import signal
import socket
import sys

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
_MAX_NUMBER_BYTES = 20
# The socket that a service inherits by systemd's protocol, if it inherits one.
_LISTENER = 3


def main(address: str, *words: str) -> None:
    """Requests a fork that runs the words."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
        link.connect(address)
        request = [words, dict(os.environ), os.getpgid(0)]
        passed = (_LISTENER,) if os.environ.get("LISTEN_PID") == str(os.getpid()) else ()
        socket.send_fds(link, [json.dumps(request).encode()], (0, 1, 2, *passed))
        for descriptor in passed:
            os.close(descriptor)
        pid = int(link.recv(_MAX_NUMBER_BYTES))

        def forward(number: int, _: object) -> None:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                return

        for number in _FORWARDED:
            signal.signal(number, forward)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
        # It ends without a message if the forking process has ended.
        status = int(link.recv(_MAX_NUMBER_BYTES) or -signal.SIGKILL)
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    main(*sys.argv[1:])
