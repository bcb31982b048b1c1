"""Who needs what at run time, beyond what import-linter sees: imports with torch out of reach, and generated code."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("quire", "gateway", "scheduler_svc", "worker_svc", "kernels", "simulator")

# Stands in for an install without the extra `worker`: each of these packages fails to import.
WITHOUT_WORKER_EXTRA = """
import importlib, sys
sys.modules.update(dict.fromkeys(("torch", "triton", "safetensors", "transformers")))
importlib.import_module(sys.argv[1])
"""


@pytest.mark.parametrize(
    "module", ["quire.client", "quire.cli.main", "gateway.__main__", "scheduler_svc.__main__", "simulator.engine"]
)
def test_module_imports_without_torch(module: str) -> None:
    command = [sys.executable, "-c", WITHOUT_WORKER_EXTRA, module]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_kernels_imports_neither_torch_nor_triton() -> None:
    command = [sys.executable, "-c", WITHOUT_WORKER_EXTRA, "kernels"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


# Parameters keep this form from the front ends to the sampler. The scheduler's core sees none of it (.importlinter).
PARAMETERS = "quire.common.v1.common_pb2"


def test_only_converters_servicers_and_clients_see_other_generated_code_than_parameters() -> None:
    offenders = sorted(
        f"{file.relative_to(ROOT)} imports {name}"
        for package in PACKAGES
        for file in (ROOT / package).rglob("*.py")
        if not may_see_generated_code(file)
        for name in imported_names(file)
        if name.startswith("quire.") and name.endswith(("_pb2", "_pb2_grpc")) and name != PARAMETERS
    )
    assert offenders == []


VIEWERS = {
    "gateway/replicas/calls.py",
    "gateway/replicas/events.py",
    "gateway/replicas/link.py",
    "worker_svc/protocol/stream.py",
    "worker_svc/sampling/sampling_table.py",
}


def may_see_generated_code(file: Path) -> bool:
    return (
        file.stem.endswith(("_pb2", "_pb2_grpc", "convert", "messages", "servicer", "client"))
        or file.is_relative_to(ROOT / "quire" / "client")
        or file.is_relative_to(ROOT / "gateway" / "api" / "grpc")
        or file.is_relative_to(ROOT / "gateway" / "api" / "kserve")
        or file.relative_to(ROOT).as_posix() in VIEWERS
        or file.stem in {"app", "compatibility", "connections", "outbox", "worker_link", "__main__"}
    )


def imported_names(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
