"""Runs a command that dies with its parent.

usage: python -I -S launch.py PARENT_PID NICENESS SOCKET COMMAND ARGUMENT...

The command inherits the listening socket with the descriptor SOCKET by the protocol of systemd, sd_listen_fds(3); "-"
is no socket.

A supervisor that is killed by SIGKILL cannot stop its children, so the kernel does it. This is a separate program, not
a function between fork and exec, because the supervisor has threads. Only Linux has such a signal; elsewhere a killed
supervisor leaves its children behind.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_FIRST_INHERITED = 3


def main() -> None:
    parent_pid, niceness, listener, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:]
    os.nice(niceness)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before prctl was called
        sys.exit(1)
    if listener != "-":
        _pass_on(int(listener))
    # Until the service handles them, they must not end it.
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    os.execv(command[0], command)


def _pass_on(listener: int) -> None:
    if listener != _FIRST_INHERITED:
        os.dup2(listener, _FIRST_INHERITED)
        os.close(listener)
    os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"}


if __name__ == "__main__":
    main()
