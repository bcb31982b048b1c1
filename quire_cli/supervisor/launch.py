"""Runs a command that dies with its parent.

usage: python -I -S launch.py PARENT_PID NICENESS COMMAND ARGUMENT...

A supervisor that is killed by SIGKILL cannot stop its children, so the kernel does it. This is a separate program, not
a function between fork and exec, because the supervisor has threads. Only Linux has such a signal; elsewhere a killed
supervisor leaves its children behind.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent_pid, niceness, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    os.nice(niceness)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before prctl was called
        sys.exit(1)
    # Until the service handles them, they must not end it.
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
