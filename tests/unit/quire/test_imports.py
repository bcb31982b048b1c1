"""What importing a module pulls in."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("quire", ("grpc", "numpy", "torch")),
        ("quire.client", ("torch", "numpy", "tokenizers", "starlette")),
        ("quire.cli.main", ("torch", "numpy", "tokenizers", "starlette", "gateway", "worker_svc", "scheduler_svc")),
        ("quire.cli.serve", ("torch", "tokenizers", "starlette")),
        ("quire.model_directory", ("torch", "grpc", "transformers", "tokenizers")),
        ("quire.rpc.server", ("torch", "numpy")),
    ],
)
def test_a_module_stays_light(module: str, forbidden: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print(*(name for name in {forbidden!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.split() == []
