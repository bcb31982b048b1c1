"""The process of which the servers of tests are forks (tests.support.forked_services)."""

import os
import signal
import subprocess
from pathlib import Path

from tests.support.processes import is_alive, wait_true
from tests.support.serving import forked

# Any module does that runs as a program.
_COMMAND = forked("timeit", "json")
_LONG = ("-n1", "-r1", "import time; time.sleep(60)")


def fork_and_parent(group: int, asker: int) -> tuple[int, int]:
    """The process that is in a group beside the one that asked for it, and the process that forked it."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid = int(stat.parent.name)
            _, parent, its_group = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(its_group) == group and pid != asker:
            return pid, int(parent)
    return 0, 0


def test_a_fork_and_its_asker_that_end_at_the_same_time_take_no_other_fork_along() -> None:
    asker = subprocess.Popen([*_COMMAND, *_LONG], process_group=0)
    wait_true(lambda: fork_and_parent(asker.pid, asker.pid) != (0, 0))
    fork, parent = fork_and_parent(asker.pid, asker.pid)
    os.kill(parent, signal.SIGSTOP)
    try:
        os.kill(fork, signal.SIGKILL)
        wait_true(lambda: not is_alive(fork))
        asker.kill()
        asker.wait(60)
    finally:
        os.kill(parent, signal.SIGCONT)
    subprocess.run([*_COMMAND, "-n1", "-r1", "pass"], check=True, timeout=60, stdout=subprocess.DEVNULL)
