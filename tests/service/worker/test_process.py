"""The worker as a process of its own: ready, drained, or refused with one line."""

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2

from quire.rpc.channel import open_channel
from tests.support.grpc_types import health_stub
from tests.support.worker_client import StepClient, ints, make_assign, make_batch, worker_stub
from worker_svc.protocol.stream import SERVICE_NAME

START_S = 60.0
SMALL = ("--num-gpu-blocks", "64", "--num-threads", "1", "--device", "cpu")


async def start(*flags: str) -> Process:
    return await asyncio.create_subprocess_exec(sys.executable, "-m", "worker_svc", *flags, stdout=PIPE, stderr=PIPE)


async def refusal(*flags: str) -> str:
    """What a worker that cannot start says; it must leave with status 2."""
    process = await start(*flags)
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


@pytest.mark.parametrize("case", ["model", "device memory", "port"])
async def test_a_worker_that_cannot_start_says_why_in_one_line(case: str, tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 'worker'}"
    if case == "model":
        line = await refusal("--listen", address, "--model", str(tmp_path / "absent"))
        assert "absent does not exist" in line
    elif case == "device memory":
        line = await refusal("--listen", address, "--device", "cpu", "--kv-cache-memory", "10")
        assert "raise --kv-cache-memory" in line
    else:
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        line = await refusal("--listen", f"127.0.0.1:{port}")
        await server.stop(0)
        assert str(port) in line
    assert line.startswith("quire worker: error: ")
