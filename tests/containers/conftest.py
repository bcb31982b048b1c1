"""Tests of the images and the compose files. `make test-containers` builds the images and sets the variable; without it
no test here is collected, since they need a Docker engine."""

import os

import pytest

from quire.version import VERSION
from tests.support.containers import docker, engine_problem

collect_ignore_glob = [] if os.environ.get("QUIRE_CONTAINERS") else ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def images() -> None:
    """The images are there. Without a Docker engine all tests are skipped."""
    if (problem := engine_problem()) is not None:
        pytest.skip(problem)
    for name in ("worker-cpu", "scheduler", "gateway"):
        image = f"quire-{name}:{VERSION}"
        found = docker("image", "inspect", image, check=False).strip()
        assert found not in ("", "[]"), f"there is no image {image}: `make test-containers` builds it"
