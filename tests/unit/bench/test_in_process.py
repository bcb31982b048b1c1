"""The engine in one process runs as a worker does, so that what the two differ by is the split alone."""

import json
import os
import subprocess
import sys

import pytest

from worker_svc.parallel.ranks import ALONE
from worker_svc.startup import processors_for

# In a process of its own: bound threads stay bound. Prints the processors of the thread that computes.
_RUN = """
import json, os, sys
from bench.in_process import InProcessEngine
from quire.load import fixed, take
from worker_svc.settings import WorkerSettings

engine = InProcessEngine(
    WorkerSettings(
        device="cpu", num_threads=int(sys.argv[1]), thread_binding=sys.argv[2], num_gpu_blocks=20, swap_space=0
    )
)
engine.run(take(fixed(3, 3, 1000), 1, seed=0))
print(json.dumps(sorted(os.sched_getaffinity(0))))
"""


@pytest.mark.parametrize("binding", ["auto", pytest.param("off", marks=pytest.mark.extended)])
def test_its_threads_are_bound_as_those_of_a_worker(binding: str) -> None:
    available = sorted(os.sched_getaffinity(0))
    process = subprocess.run(
        [sys.executable, "-c", _RUN, str(len(available)), binding],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    bound = processors_for(ALONE, len(available), available) if binding == "auto" else ()
    assert json.loads(process.stdout) == ([bound[0]] if bound else available)
