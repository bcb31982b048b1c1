"""Modules needed at run time, beyond the view of import-linter: modules that imports load, and generated code."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("quire", "gateway", "scheduler_svc", "worker_svc", "quire_kernels", "simulator", "quire_cli")

# Imports the modules in turn and prints, for each, all modules that are imported by then.
IMPORT_IN_TURN = """
import importlib, json, sys
print(json.dumps([importlib.import_module(name) and list(sys.modules) for name in sys.argv[1:]]))
"""

# Packages of the extra `worker`: a module that imports none of them runs without it.
WORKER = ("torch", "triton", "safetensors", "transformers")
TRACES = ("opentelemetry.sdk", "opentelemetry.exporter", "opentelemetry.proto")
SERVICES = ("gateway", "worker_svc", "scheduler_svc")

# Each process imports its modules in turn, so none of them may import a module that a later one must not.
PROCESSES: Sequence[Mapping[str, tuple[str, ...]]] = [
    {
        "quire": ("grpc", "numpy"),
        "quire_cli.main": ("numpy", "tokenizers", "starlette", *SERVICES),
        "quire.client": ("numpy", "tokenizers", "starlette", *SERVICES),
        "quire.rpc.server": ("numpy", "tokenizers", "starlette", *SERVICES),
        "quire_cli.serve": ("tokenizers", "starlette"),
        "quire.tracing": TRACES,
        "simulator.engine": (),
        "scheduler_svc.__main__": (),
        "scheduler_svc.service.app": TRACES,
        # The worker's parts that listen and refuse flags.
        "worker_svc.app": TRACES,
        "gateway.__main__": (),
        "gateway.app": TRACES,
    },
    # A worker starts once this is imported, and takes longest.
    {"quire_cli.serve": ("pydantic", "quire.client", "quire.rpc.server")},
    {
        "quire.testing.plugin": ("grpc", "numpy", "yaml"),
        # It starts within a second.
        "quire_cli.scripted_server": (
            "quire_kernels",
            "worker_svc",
            "llguidance",
            "opentelemetry.trace",
            "grpc_channelz",
        ),
    },
    {"quire_kernels": ("numpy",), "quire.model_files.model_source": ("grpc", "tokenizers")},
]


@pytest.mark.parametrize("modules", PROCESSES, ids=lambda modules: next(iter(modules)))
def test_modules_stay_light(modules: Mapping[str, tuple[str, ...]]) -> None:
    command = [sys.executable, "-c", IMPORT_IN_TURN, *modules]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = {
        module: [name for name in names if any(f"{name}.".startswith(f"{each}.") for each in (*WORKER, *forbidden))]
        for (module, forbidden), names in zip(modules.items(), json.loads(done.stdout), strict=True)
    }
    assert {module: names for module, names in found.items() if names} == {}


# Parameters keep this form from the front ends to the sampler. The scheduler's core does not see it (.importlinter).
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
    "gateway/replicas/scheduler_calls.py",
    "gateway/replicas/events.py",
    "gateway/replicas/link.py",
    "quire_cli/drain.py",
    "worker_svc/protocol/stream.py",
    "worker_svc/protocol/transfers.py",
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
    text = file.read_text(encoding="utf-8")
    # Parsing all files takes a second.
    for node in ast.walk(ast.parse(text)) if "_pb2" in text else ():
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
