"""How a gateway process starts, drains and fails to start."""

import asyncio
import contextlib
import os
import re
import signal
import socket
import sys
from typing import Any

import grpc.aio
import pytest

from gateway.app import Gateway
from gateway.settings import GatewaySettings
from quire.gateway.v1 import generation_pb2_grpc
from quire.rpc.address import AddressInUse
from quire.settings import ConfigurationError
from tests.support.gateway_process import collect, error_of, running_gateway, stream_request
from tests.support.grpc_types import EOF
from tests.support.tokenizers import byte_level, write_model_directory


async def test_drain_waits_for_a_request_whose_text_is_being_tokenized(scheduler, monkeypatch):
    scheduler.emits.clear()
    async with running_gateway(scheduler) as gateway:
        tokenizer = gateway.gateway._generator.model.tokenizer
        encode, begun, may_go_on = tokenizer.encode, asyncio.Event(), asyncio.Event()

        async def slow_encode(text, *, add_special_tokens):
            begun.set()
            await may_go_on.wait()
            return await encode(text, add_special_tokens=add_special_tokens)

        monkeypatch.setattr(tokenizer, "encode", slow_encode)
        early = asyncio.create_task(collect(gateway.generation.GenerateStream(stream_request(max_tokens=30))))
        await asyncio.wait_for(begun.wait(), 30)
        stopping = asyncio.create_task(gateway.gateway.stop(60))
        await asyncio.sleep(0)
        may_go_on.set()
        await scheduler.until(lambda: scheduler.live)
        # Calls are still answered, so none is cut off.
        assert (await error_of(gateway.generation.GenerateStream(stream_request()))).reason == "DRAINING"
        scheduler.emits.set()
        assert len((await early).token_ids) == 30
        await stopping


async def test_drain_that_takes_too_long_aborts_the_rest(scheduler):
    scheduler.emits.clear()
    async with running_gateway(scheduler) as gateway:
        request = stream_request(request_id="stuck")
        live = asyncio.create_task(error_of(gateway.generation.GenerateStream(request)))
        await scheduler.until(lambda: scheduler.live)
        await gateway.gateway.stop(0.1)
        await live
        await scheduler.until(lambda: scheduler.aborted)
    assert scheduler.aborted == ["stuck"]


@pytest.mark.parametrize("port", ["grpc_port", "http_port"])
async def test_port_in_use_is_one_clear_line(port):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        ports: dict[str, Any] = {"grpc_port": 0, "http_port": 0} | {port: number}
        with pytest.raises(AddressInUse, match=rf"{number}: the port is in use"):
            await Gateway.start(GatewaySettings(**ports))


async def test_broken_tokenizer_is_one_clear_line(tmp_path):
    directory = write_model_directory(tmp_path / "broken", byte_level(), tokenizer__json="{}")
    with pytest.raises(ConfigurationError, match=r"tokenizer\.json is not a tokenizer") as caught:
        await Gateway.start(GatewaySettings(grpc_port=0, http_port=0, model=str(directory)))
    assert "\n" not in str(caught.value)


@contextlib.asynccontextmanager
async def gateway_process(*flags):
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "gateway",
        *flags,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_process_serves_and_exits_cleanly_on_sigterm(scheduler):
    flags = ("--grpc-port", "0", "--http-port", "0", "--schedulers", scheduler.address)
    async with asyncio.timeout(30), gateway_process(*flags) as process:
        found = None
        while found is None:
            found = re.search(rb"gRPC on (\S+),", await process.stderr.readline())
        async with grpc.aio.insecure_channel(found[1].decode()) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            call = stub.GenerateStream(stream_request(max_tokens=200))
            await call.read()
            process.send_signal(signal.SIGTERM)
            count = 1
            while await call.read() is not EOF:
                count += 1
            assert await call.code() == grpc.StatusCode.OK
            assert count > 2
        await process.communicate()
        assert process.returncode == 0


async def test_process_without_its_model_exits_with_one_line():
    async with asyncio.timeout(30), gateway_process("--model", "/nowhere", "--grpc-port", "0") as process:
        _, errors = await process.communicate()
    assert process.returncode == 2
    (line,) = errors.decode().splitlines()
    assert line.startswith("quire gateway: error: model directory /nowhere does not exist; --model takes")
