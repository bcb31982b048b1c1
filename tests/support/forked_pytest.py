"""A process of pytest-xdist as a fork (tests.support.forked_services): it runs the program that follows `-c`."""

import signal
import sys

if __name__ == "__main__":
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    exec(sys.argv[sys.argv.index("-c") + 1])
