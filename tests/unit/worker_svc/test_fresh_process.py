"""What only a process shows that has just been started: what a worker imports, its threads, and where they are bound.

Bound threads stay bound, and what a process has imported stays so. Each of these tests has a process of its own, forked
from one that has imported a worker.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.more_models import FOREIGN, Family, make_family
from tests.support.serving import forked_worker, running_fork

TIMEOUT_S = 120
PROCESSORS = sorted(os.sched_getaffinity(0))


def told(*words: str) -> Any:
    """What such a process prints."""
    with running_fork(forked_worker("tests.support.fresh_worker"), *words) as process:
        output, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, errors
    return json.loads(output)


def test_a_worker_imports_no_compiler_no_transformers_and_nothing_of_traces_that_it_does_not_write() -> None:
    compilers = ("torch._dynamo", "torch._inductor", "triton")
    traces = ("opentelemetry.sdk", "opentelemetry.exporter", "opentelemetry.proto")
    assert told("modules", "transformers", *compilers, *traces) == []


def test_a_model_of_our_own_family_does_without_transformers_and_a_refusal_says_how_to_get_it(
    tmp_path: Path,
) -> None:
    own, foreign = tmp_path / "own", tmp_path / "foreign"
    for directory, family in ((own, Family("Qwen3", {"head_dim": 16})), (foreign, FOREIGN["phi"])):
        directory.mkdir()
        make_family(directory, family)
    imported, refusal = told("families", str(own), str(foreign))
    assert imported == []
    assert refusal.startswith("PhiForCausalLM runs through transformers 5 or later, which cannot be imported")
    assert refusal.endswith("pip install 'quire[transformers]'")


def test_the_threads_of_the_kernels_are_those_of_torch() -> None:
    implementation, added, runtimes, runtime = told("pools")
    assert implementation == "CpuKernels"
    assert added == [], "a pool of threads beside torch's"
    assert runtimes == [runtime]


def test_each_thread_of_the_team_is_bound_to_its_processor() -> None:
    expected = [[processor] for processor in PROCESSORS] if len(PROCESSORS) > 1 else [PROCESSORS]
    assert told("team", str(len(PROCESSORS))) == expected


THREADS_AFTER_A_SMALLER_TEAM = """
import ctypes, json, os, threading
processors = json.loads({processors!r})
os.sched_getaffinity = lambda _: processors
from worker_svc.settings import WorkerSettings
from worker_svc.thread_binding import placed_threads
settings = WorkerSettings(device="cpu", num_threads=3)
with placed_threads(settings):
    import worker_svc.startup
assert not [name for name in os.environ if name.startswith("OMP_P")]
import torch
from kernels.cpu.library import find_open_mp
runtime = ctypes.CDLL(str(find_open_mp()))

def masks(num_threads):
    found = [None] * num_threads
    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def look(_):
        with open(f"/proc/self/task/{{threading.get_native_id()}}/status") as status:
            fields = dict(line.split(":", 1) for line in status)
        found[runtime.omp_get_thread_num()] = fields["Cpus_allowed_list"].strip()
    runtime.GOMP_parallel(look, None, num_threads, 0)
    return found

torch.set_num_threads(3)
while_loading = masks(1)
worker_svc.startup.bind_threads(worker_svc.startup.Ranks())
print(json.dumps([while_loading, [masks(number) for number in (3, 2, 3)]]), flush=True)
os._exit(0)
"""


@pytest.mark.skipif(len(PROCESSORS) < 2, reason="threads of one processor are not bound")
def test_threads_that_come_back_after_a_smaller_team_are_bound_as_those_before() -> None:
    """In a process that imports OpenMP as a worker does."""
    first, second = PROCESSORS[:2]
    code = THREADS_AFTER_A_SMALLER_TEAM.format(processors=json.dumps([first, second, second]))
    unset = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "MKL_"))}
    ran = subprocess.run([sys.executable, "-c", code], env=unset, capture_output=True, timeout=TIMEOUT_S, check=False)
    assert ran.returncode == 0, ran.stderr.decode()
    ((while_loading,), teams) = json.loads(ran.stdout)
    assert while_loading != str(first)
    team = [str(first), str(second), str(second)]
    assert teams == [team, team[:2], team]
