"""How a gateway process starts, drains and fails to start."""

import asyncio
import resource
import socket
from typing import Any, cast

import httpx
import pytest

from gateway import app
from gateway.app import Gateway, allow_open_files, serve
from gateway.request import served_model
from gateway.request.constraint_checker import TrialProcess
from gateway.settings import GatewaySettings
from quire.rpc.address import AddressInUse
from quire.runtime.settings import ConfigurationError, load_settings
from quire.service.model_flag import ModelFlag
from tests.support.gateway_process import collect, error_of, running_gateway, stream_request
from tests.support.processes import until_true
from tests.support.tokenizers import byte_level, write_model_directory


async def test_drain_waits_for_a_request_whose_text_is_being_tokenized(scheduler, monkeypatch):
    scheduler.emits.clear()
    async with running_gateway(scheduler) as gateway:
        tokenizer = gateway.gateway._models.default.model.tokenizer
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
        # Calls are still answered, so no connection is cut off.
        assert (await error_of(gateway.generation.GenerateStream(stream_request()))).reason == "DRAINING"
        scheduler.emits.set()
        assert len((await early).token_ids) == 30
        await stopping


@pytest.mark.parametrize("ends", [True, False])
async def test_a_gateway_is_ready_with_the_tables_of_its_vocabulary_or_a_moment_later(scheduler, monkeypatch, ends):
    may_end, asked = asyncio.Event(), asyncio.Event()

    async def verdict(trial: TrialProcess, content: bytes) -> None:
        asked.set()
        await may_end.wait()

    monkeypatch.setattr(served_model, "has_large_tables", lambda _: True)
    monkeypatch.setattr(TrialProcess, "verdict", verdict)
    if ends:
        monkeypatch.setattr(app, "_TABLES_TIMEOUT_S", 300.0)
    async with running_gateway(scheduler) as gateway:
        constraints = gateway.gateway._models.default.model.constraints
        process = cast(TrialProcess, constraints._trial)._process
        assert process is not None
        assert process.poll() is None
        await asyncio.wait_for(asked.wait(), 30)
        if ends:
            answer = await gateway.http.get("/ready")
            assert answer.status_code == 503
            assert answer.json()["reason"] == "the tables for checks of constraints are not ready yet"
            may_end.set()
        await until_true(lambda: not constraints.is_starting)
        assert (await gateway.http.get("/ready")).status_code == 200
    assert process.poll() is not None


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


@pytest.mark.parametrize("port", ["grpc_port", "http_port", "metrics_port"])
async def test_port_in_use_is_one_clear_line(port):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        ports: dict[str, Any] = {"grpc_port": 0, "http_port": 0} | {port: number}
        with pytest.raises(AddressInUse, match=rf"{number}: the port is in use"):
            await serve(GatewaySettings(**ports))


@pytest.mark.parametrize("reuse_port", [False, True])
async def test_all_addresses_of_a_machine_are_those_of_ipv4_too(reuse_port):
    settings: dict[str, Any] = {
        "grpc_host": "::",
        "http_host": "::",
        "reuse_port": reuse_port,
        "schedulers": ("127.0.0.1:1",),
    }
    async with running_gateway(**settings) as gateway, httpx.AsyncClient(timeout=60) as http:
        for address in (gateway.gateway.grpc_address, gateway.gateway.http_address):
            port = int(address.removeprefix("[::]:"))
            for host in ("127.0.0.1", "::1"):
                socket.create_connection((host, port), timeout=60).close()
        for host in ("127.0.0.1", "[::1]"):
            assert (await http.get(f"http://{host}:{port}/live")).status_code == 200
    with socket.create_server(("0.0.0.0", 0)) as taken, pytest.raises(AddressInUse, match="the port is in use"):
        async with running_gateway(**settings | {"http_port": taken.getsockname()[1]}):
            pass


async def test_broken_tokenizer_is_one_clear_line(tmp_path):
    directory = write_model_directory(tmp_path / "broken", byte_level(), tokenizer__json="{}")
    with pytest.raises(ConfigurationError, match=r"tokenizer\.json is not a tokenizer") as caught:
        await serve(GatewaySettings(grpc_port=0, http_port=0, models=(ModelFlag(None, str(directory)),)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("highest", "allowed", "warned"), [(1 << 20, 8704, False), (4096, 4096, True)])
def test_as_many_files_may_be_open_as_connections_need(monkeypatch, caplog, highest, allowed, warned):
    set_to: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, highest))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: set_to.append(limits))
    allow_open_files(4096)
    assert set_to == [(allowed, highest)]
    assert ("at most 4,096 files may be open, and --max-connections 4096 may need 8,704" in caplog.text) == warned
    # If enough files are allowed, nothing changes.
    allow_open_files(100)
    assert len(set_to) == 1


async def test_the_greatest_numbers_that_grpc_takes_are_taken_and_greater_ones_refused_in_one_line():
    flags = {"--max-message-bytes": (1 << 31) - 1, "--max-connection-age": 1_000_000}

    argv = [
        "--grpc-port=0",
        "--http-port=0",
        "--max-total-body-bytes=4GiB",
        *(f"{flag}={flags[flag]}" for flag in flags),
    ]
    settings = load_settings(GatewaySettings, argv, {}, program="quire gateway")
    await (await Gateway.start(settings)).stop(0)
    for flag, value in flags.items():
        with pytest.raises(ConfigurationError, match=f"{flag}: .* the greatest value is {value}"):
            load_settings(GatewaySettings, [f"{flag}={value + 1}"], {}, program="quire gateway")
