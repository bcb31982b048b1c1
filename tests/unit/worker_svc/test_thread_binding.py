"""Threads of the CPU stay on processors of their own, where there is one for each."""

import json
import os
import subprocess
import sys

import pytest

from worker_svc.parallel.ranks import Ranks
from worker_svc.thread_binding import processors_for

# In a process of its own: bound threads stay bound. Prints the processors of each thread of the team.
_BIND = """
import json, os, sys, threading
import torch
from worker_svc.parallel.ranks import Ranks
from worker_svc.thread_binding import bind_threads

torch.set_num_threads(int(sys.argv[1]))
before = set(os.listdir("/proc/self/task"))
torch.ones(1 << 20).add_(1)  # the team starts with the first operation that is worth it
team = {str(threading.get_native_id()), *set(os.listdir("/proc/self/task")) - before}
bind_threads(Ranks())
print(json.dumps(sorted(sorted(os.sched_getaffinity(int(thread))) for thread in team)))
"""


def _bound(num_threads: int, **environ: str) -> list[list[int]]:
    process = subprocess.run(
        [sys.executable, "-c", _BIND, str(num_threads)],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | environ,
        check=True,
    )
    return json.loads(process.stdout)


def test_as_many_threads_as_processors_take_one_each() -> None:
    assert list(processors_for(Ranks(), 3, [1, 4, 5])) == [1, 4, 5]


def test_ranks_of_one_machine_take_processors_of_their_own() -> None:
    assert list(processors_for(Ranks(0, 2), 2, [0, 1, 2, 3])) == [0, 1]
    assert list(processors_for(Ranks(1, 2), 2, [0, 1, 2, 3])) == [2, 3]


@pytest.mark.parametrize("num_threads", [1, 3])
def test_fewer_or_more_threads_than_processors_stay_unbound(num_threads: int) -> None:
    assert list(processors_for(Ranks(), num_threads, [0, 1])) == []


def test_a_single_processor_needs_no_binding() -> None:
    assert list(processors_for(Ranks(), 1, [0])) == []


def test_each_thread_of_the_team_is_bound_to_its_processor() -> None:
    available = sorted(os.sched_getaffinity(0))
    expected = [[processor] for processor in available] if len(available) > 1 else [available]
    assert _bound(len(available)) == expected


def test_a_user_who_binds_threads_is_left_to_it() -> None:
    available = sorted(os.sched_getaffinity(0))
    assert all(len(processors) == len(available) for processors in _bound(len(available), OMP_PLACES="{0:1024}"))
