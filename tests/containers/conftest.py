"""Builds the images with the unchanged Dockerfile. `make test-containers` sets the variable; without it no test here is
collected, since a build takes minutes and a Docker engine."""

import os

import pytest

from tests.containers.base_image import base_image
from tests.support.containers import docker, engine_problem

collect_ignore_glob = [] if os.environ.get("QUIRE_CONTAINERS") else ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def images() -> None:
    """Builds the three images for CPUs, or takes what an earlier build left in the cache."""
    if (problem := engine_problem()) is not None:
        pytest.skip(problem)
    docker("compose", "build", "worker", "scheduler", "gateway", PYTHON_IMAGE=base_image())
