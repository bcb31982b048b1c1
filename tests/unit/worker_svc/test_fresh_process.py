"""What only a process shows that has just been started: what a worker imports, its threads, and where they are bound.

Bound threads stay bound, and what a process has imported stays so. Each of these tests has a process of its own, forked
from one that has imported a worker.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked import Nursery, nursery_of
from tests.support.more_models import FOREIGN, Family, make_family
from worker_svc.parallel.ranks import ALONE
from worker_svc.startup import processors_for

TIMEOUT_S = 120
PROCESSORS = sorted(os.sched_getaffinity(0))


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with nursery_of("tests.support.fresh_worker") as nursery:
        yield nursery


def told(nursery: Nursery, *words: str) -> Any:
    """What such a process prints."""
    with nursery.running(*words) as process:
        output, errors = process.communicate("", timeout=TIMEOUT_S)
    assert process.returncode == 0, errors
    return json.loads(output)


def test_a_worker_imports_no_compiler_no_transformers_and_nothing_of_traces_that_it_does_not_write(
    nursery: Nursery,
) -> None:
    compilers = ("torch._dynamo", "torch._inductor", "triton")
    traces = ("opentelemetry.sdk", "opentelemetry.exporter", "opentelemetry.proto")
    assert told(nursery, "modules", "transformers", *compilers, *traces) == []


def test_a_model_of_our_own_family_does_without_transformers_and_a_refusal_says_how_to_get_it(
    nursery: Nursery, tmp_path: Path
) -> None:
    own, foreign = tmp_path / "own", tmp_path / "foreign"
    for directory, family in ((own, Family("Qwen3", {"head_dim": 16})), (foreign, FOREIGN["phi"])):
        directory.mkdir()
        make_family(directory, family)
    imported, refusal = told(nursery, "families", str(own), str(foreign))
    assert imported == []
    assert refusal.startswith("PhiForCausalLM runs through transformers 5 or later, which cannot be imported")
    assert refusal.endswith("pip install 'quire[transformers]'")


def test_the_threads_of_the_kernels_are_those_of_torch(nursery: Nursery) -> None:
    implementation, added, runtimes, runtime = told(nursery, "pools")
    assert implementation == "CpuKernels"
    assert added == [], "a pool of threads beside torch's"
    assert runtimes == [runtime]


def test_each_thread_of_the_team_is_bound_to_its_processor(nursery: Nursery) -> None:
    expected = [[processor] for processor in PROCESSORS] if len(PROCESSORS) > 1 else [PROCESSORS]
    assert told(nursery, "team", str(len(PROCESSORS))) == expected


def test_a_user_who_binds_threads_is_left_to_it(nursery: Nursery) -> None:
    own = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
    assert told(nursery, "team", str(len(PROCESSORS)), *own) == [PROCESSORS] * len(PROCESSORS)


@pytest.mark.parametrize("binding", ["auto", "off"])
def test_the_engine_in_one_process_is_bound_as_a_worker_is(nursery: Nursery, binding: str) -> None:
    """So that what the two differ by is the split alone."""
    bound = processors_for(ALONE, len(PROCESSORS), PROCESSORS) if binding == "auto" else ()
    assert told(nursery, "engine", str(len(PROCESSORS)), binding) == ([bound[0]] if bound else PROCESSORS)
