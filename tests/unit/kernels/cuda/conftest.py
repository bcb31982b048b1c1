"""Triton is published only for some platforms; elsewhere these kernels do not exist."""

import importlib.util
from collections.abc import Iterator

import pytest
import torch

from tests.support.triton_devices import Gpu, Interpreter, KernelDevice

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_*.py"]


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    interpreter = Interpreter()
    yield interpreter
    interpreter.close()


@pytest.fixture(params=["interpreter", "cuda"] if torch.cuda.is_available() else ["interpreter"])
def device(request: pytest.FixtureRequest) -> KernelDevice:
    return Gpu() if request.param == "cuda" else request.getfixturevalue("interpreter")
