"""Properties that only a new process shows: a worker's imports, its threads, and the processors that they are bound to.

Bound threads stay bound, and imported modules stay imported. Each of these tests has a process of its own, forked
from one that has imported a worker.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.models import FOREIGN, Family, make_model
from tests.support.serving import forked_worker, running_fork
from worker_svc.thread_binding import OWN_BINDING

TIMEOUT_S = 120
PROCESSORS = sorted(os.sched_getaffinity(0))


def told(*words: str) -> Any:
    """The output of such a process."""
    with running_fork(forked_worker("tests.support.fresh_worker"), *words) as process:
        output, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, errors
    return json.loads(output)


def test_a_worker_imports_no_compiler_no_transformers_and_nothing_of_traces_that_it_does_not_write() -> None:
    compilers = ("torch._dynamo", "torch._inductor", "triton")
    traces = ("opentelemetry.sdk", "opentelemetry.exporter", "opentelemetry.proto")
    assert told("modules", "transformers", *compilers, *traces) == []


def test_a_model_of_our_own_family_does_without_transformers_and_a_refusal_says_how_to_get_it(tmp_path: Path) -> None:
    own, foreign = tmp_path / "own", tmp_path / "foreign"
    for directory, family in ((own, Family("Qwen3", {"head_dim": 16})), (foreign, FOREIGN["phi"])):
        directory.mkdir()
        make_model(directory, family)
    imported, refusal = told("families", str(own), str(foreign))
    assert imported == []
    assert refusal.startswith("PhiForCausalLM runs through transformers 5 or later, which cannot be imported")
    assert refusal.endswith("pip install 'quire-llm[transformers]'")


def test_each_thread_of_the_team_is_bound_to_its_processor() -> None:
    expected = [[processor] for processor in PROCESSORS] if len(PROCESSORS) > 1 else [PROCESSORS]
    assert told("team", str(len(PROCESSORS))) == expected


@pytest.mark.skipif(len(PROCESSORS) < 2, reason="the threads of a single processor are not bound")
def test_threads_that_a_team_ends_and_the_next_one_creates_again_are_bound_as_before() -> None:
    """Without a processor of its own, the new thread would be bound to the processor of its creator."""
    command = (sys.executable, "-m", "tests.support.fresh_team")
    free = {name: value for name, value in os.environ.items() if name not in OWN_BINDING}
    ran = subprocess.run(command, env=free, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert ran.returncode == 0, ran.stderr
    (loading,), *teams = json.loads(ran.stdout)
    assert set(PROCESSORS[:2]) <= set(loading)
    team = [[PROCESSORS[0]], [PROCESSORS[1]], [PROCESSORS[1]]]
    assert teams == [team, team[:2], team]
