"""The worker as a separate process: ready, drained, or refused with one line."""

import asyncio
import signal
import sys
import threading
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from types import ModuleType

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2

from quire.rpc.channel import open_channel
from quire.runtime.settings import ConfigurationError, load_settings
from tests.support.grpc_types import health_stub
from tests.support.worker_client import StepClient, ints, make_assign, make_batch, worker_stub
from worker_svc.app import serve
from worker_svc.protocol.stream import SERVICE_NAME
from worker_svc.settings import WorkerSettings

START_S = 120.0
# Like `python -m worker_svc`, in a process that fails if it imports torch.
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from worker_svc.__main__ import main
sys.exit(main())
"""
# Loads without end, and exits with another status if the interpreter ends.
LOADS_FOREVER = """
import atexit, os, sys, threading, types
from worker_svc import app
from worker_svc.__main__ import main

def build_worker(*_):
    print("loading", flush=True)
    threading.Event().wait()

atexit.register(os._exit, 77)
app._DEVICE_STOP_S = 0.01
sys.modules["worker_svc.startup"] = types.SimpleNamespace(build_worker=build_worker)
sys.exit(main())
"""
SMALL = ("--num-gpu-blocks", "64", "--num-threads", "1", "--device", "cpu")


async def start(*flags: str) -> Process:
    return await asyncio.create_subprocess_exec(sys.executable, "-m", "worker_svc", *flags, stdout=PIPE, stderr=PIPE)


async def refusal(*flags: str) -> str:
    """The message of a worker that cannot start, without loading torch; it must exit with status 2."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WITHOUT_TORCH, *flags, stdout=PIPE, stderr=PIPE
    )
    async with asyncio.timeout(START_S):
        _, stderr = await process.communicate()
    assert process.returncode == 2, stderr.decode()
    return stderr.decode().splitlines()[-1]


async def until_serving(address: str, process: Process) -> None:
    async with asyncio.timeout(START_S), open_channel(address) as channel:
        stub = health_stub(channel)
        call = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME), wait_for_ready=True)
        async for response in call:
            assert process.returncode is None
            if response.status == health_pb2.HealthCheckResponse.SERVING:
                return


async def test_the_embedded_model_is_served_until_a_signal(tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 'worker'}"
    process = await start("--listen", address, *SMALL)
    try:
        await until_serving(address, process)
        async with worker_stub(address) as stub:
            client = StepClient(stub)
            await client.attach(1)
            result = await client.run(
                assign=[make_assign(0, [5, 6, 7], [1], logprobs=2)], batch=make_batch([0], [3], [0])
            )
            assert len(ints(result.token_ids)) == 1
            assert result.timings.model_us > 0
            client.cancel()
    finally:
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(START_S):
            _, stderr = await process.communicate()
    assert process.returncode == 0
    assert b"Traceback" not in stderr


async def test_a_worker_that_is_stopped_in_a_long_load_leaves_its_thread_alone(tmp_path: Path) -> None:
    """Ending the interpreter under a thread that runs native code crashed one of forty workers."""
    address = tmp_path / "worker"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", LOADS_FOREVER, "--listen", f"unix:{address}", stdout=PIPE, stderr=PIPE
    )
    assert process.stdout is not None
    async with asyncio.timeout(START_S):
        assert await process.stdout.readline() == b"loading\n"
        process.send_signal(signal.SIGTERM)
        _, stderr = await process.communicate()
    assert process.returncode == 0
    assert stderr.decode().splitlines()[-1].endswith("the device did not finish within 0 s")
    assert not address.exists()


@pytest.mark.parametrize("case", ["model", "port"])
async def test_a_worker_that_cannot_start_says_why_in_one_line_before_it_imports_torch(
    case: str, tmp_path: Path
) -> None:
    if case == "model":
        line = await refusal("--listen", f"unix:{tmp_path / 'worker'}", "--model", str(tmp_path / "absent"))
        assert "absent does not exist" in line
    else:
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        line = await refusal("--listen", f"127.0.0.1:{port}")
        await server.stop(0)
        assert str(port) in line
    assert line.startswith("quire worker: error: ")


async def test_a_worker_that_cannot_load_its_model_leaves_the_port_and_tells_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs in this process: the tests above show how a worker process reports a ConfigurationError."""
    monkeypatch.setattr("worker_svc.app.configure_logging", lambda *_: None)
    path = tmp_path / "worker"
    flags = ["--listen", f"unix:{path}", "--device", "cpu", "--kv-cache-memory", "10"]
    settings = load_settings(WorkerSettings, flags, {}, program="quire worker")
    with pytest.raises(ConfigurationError, match="raise --kv-cache-memory"):
        await serve(settings)
    assert not path.exists()


async def test_health_checks_are_answered_while_torch_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_imported = threading.Event()

    def build_worker(*_: object) -> None:
        raise ConfigurationError("imported")

    def import_for_long(name: str) -> object:
        if name != "build_worker":
            raise AttributeError(name)
        assert is_imported.wait(START_S)
        return build_worker

    startup = ModuleType("worker_svc.startup")
    startup.__dict__["__getattr__"] = import_for_long
    monkeypatch.setitem(sys.modules, "worker_svc.startup", startup)
    monkeypatch.setattr("worker_svc.app.configure_logging", lambda *_: None)
    address = f"unix:{tmp_path / 'worker'}"
    serving = asyncio.create_task(serve(load_settings(WorkerSettings, ["--listen", address], {}, program="worker")))
    async with open_channel(address) as channel:
        check = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
        answer = await health_stub(channel).Check(check, wait_for_ready=True, timeout=START_S / 2)
    assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
    is_imported.set()
    with pytest.raises(ConfigurationError, match="imported"):
        await serving
