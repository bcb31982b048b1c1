"""LocalServer with stand-ins: programs that wait for SIGTERM, and a fake gateway."""

import asyncio
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from quire.client import AsyncClient
from quire.gateway.v1 import model_pb2, model_pb2_grpc
from quire.rpc.address import AddressInUse
from quire.runtime.settings import ConfigurationError
from quire.service.model_flag import ModelFlag
from quire_cli.supervisor import LocalServer, ServeSettings, server
from quire_cli.supervisor.commands import Programs
from tests.support.forks import forked
from tests.support.processes import is_alive, until_true

WAITS = (sys.executable, "-S", "-c", "import signal; signal.pause()")
GATEWAY = forked("tests.support.fake_gateway", "tests.support.fake_gateway")
NAMES = ("gateway", "gateway-1", "gateway-2")
STAND_INS = Programs(worker=WAITS, scheduler=WAITS, gateway=GATEWAY)


@pytest.fixture(autouse=True)
def temporary_directory(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A separate place for the server's temporary directories, which must be empty at the end."""
    tmp_path_factory.getbasetemp()  # Makes pytest's own directory now, which must not be made there.
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        monkeypatch.setattr(tempfile, "tempdir", directory)
        yield
        assert list(Path(directory).iterdir()) == []


def make_server(
    model_directory: Path, programs: Programs = STAND_INS, *, report: list[str] | None = None, **settings
) -> LocalServer:
    models = (ModelFlag(None, str(model_directory)),)
    values: dict[str, Any] = {"grpc_port": 0, "http_port": 0, "models": models, "drain_timeout": 1.0} | settings
    lines = [] if report is None else report
    return LocalServer(ServeSettings(**values), programs=programs, report=lines.append)


async def test_a_failed_canary_is_told_and_nothing_is_left_behind(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(AsyncClient, "generate", refuse)
    server = make_server(model_directory)
    with pytest.raises(RuntimeError, match="does not listen yet"):
        _ = server.grpc_address

    async def serve() -> None:
        async with server:
            await server.wait_ready()

    with pytest.raises(ZeroDivisionError):
        await serve()


async def test_what_cannot_be_served_is_one_line(model_directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"^model directory {tmp_path}/nothing does not exist; --model takes"):
        await make_server(tmp_path / "nothing").__aenter__()
    with pytest.raises(ConfigurationError, match="--grpc-port and --http-port"):
        await make_server(model_directory, grpc_port=9, http_port=9).__aenter__()
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        for flag in ("grpc_port", "http_port"):
            said = (
                f"cannot listen on 127.0.0.1:{port}: the port is in use; --{flag.replace('_', '-')} takes another one"
            )
            with pytest.raises(AddressInUse, match=f"^{said}, or 0 for a free one$"):
                await make_server(model_directory, **{flag: port}).__aenter__()
    (model_directory / "tokenizer.json").unlink()
    with pytest.raises(ConfigurationError, match=r"has no tokenizer\.json"):
        await make_server(model_directory).__aenter__()
    (model_directory / "model.safetensors").unlink()
    with pytest.raises(ConfigurationError, match="safetensors"):
        await make_server(model_directory).__aenter__()


async def test_a_package_that_is_not_installed_is_one_line(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "find_spec", lambda name: None if name in ("torch", "uvicorn") else object())
    with pytest.raises(ConfigurationError, match=r"^not installed: torch, uvicorn; install quire-llm\[all\]$"):
        await make_server(model_directory).__aenter__()


# Several gateways that share their ports.


async def id_behind(address: str) -> str:
    """The gateway that a new connection to the address reaches; the stand-ins' ids are their process groups."""
    # Without it, channels of one process share connections.
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        stub = model_pb2_grpc.ModelServiceStub(channel)
        answer = await stub.GetServerInfo(model_pb2.GetServerInfoRequest(), wait_for_ready=True, timeout=30)
    return answer.gateway_id


async def test_the_loss_of_one_leaves_connections_to_the_others_and_the_ports_alone(model_directory: Path) -> None:
    async with make_server(model_directory, gateways=2) as server, AsyncClient(server.grpc_address) as client:
        addresses = (server.grpc_address, server.http_address)
        held_by = (await client.server_info()).gateway_id
        names = {str(server.process(name).pid): name for name in NAMES[:2]}
        (lost,) = (name for gateway_id, name in names.items() if gateway_id != held_by)
        async with client.generate_stream("endless") as stream:
            await anext(stream)
            reading = asyncio.create_task(anext(stream))
            os.killpg(server.process(lost).pid, signal.SIGKILL)
            await until_true(lambda: server.process(lost).starts == 2)
            assert {await id_behind(server.grpc_address) for _ in range(5)} <= {held_by, str(server.process(lost).pid)}
            await asyncio.wait_for(server.wait_ready(), 30)
            assert (await client.server_info()).gateway_id == held_by
            assert not reading.done()
            reading.cancel()
        assert (server.grpc_address, server.http_address) == addresses


async def outcome_of(address: str) -> type[BaseException] | None:
    """None if a gateway answers a new connection, which the stand-ins do by closing it; else the error."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(60):
            reader, writer = await asyncio.open_connection(host, int(port))
            assert await reader.read() == b""
    except (ConnectionRefusedError, ConnectionResetError) as error:
        return type(error)
    writer.close()
    return None


@pytest.mark.parametrize("gateways", [1, 2])
async def test_connections_wait_while_gateways_restart_but_not_for_one_that_does_not_come(
    model_directory: Path, tmp_path: Path, gateways: int
) -> None:
    wrong = tmp_path / "wrong"
    programs = Programs(worker=WAITS, scheduler=WAITS, gateway=(*GATEWAY, f"--refuse-if={wrong}"))
    async with make_server(model_directory, programs, gateways=gateways) as server:
        listener = server.process("gateway")._spec.listener
        assert listener is not None

        async def kill_all(*, then_refuse: bool = False) -> None:
            await until_true(lambda: len(listener._accepting) == gateways)
            if then_refuse:
                wrong.touch()
            pids = [server.process(name).pid for name in NAMES[:gateways]]
            for pid in pids:
                os.killpg(pid, signal.SIGKILL)
            await until_true(lambda: not any(map(is_alive, pids)))

        for _ in range(2):
            await kill_all()
            assert await outcome_of(server.http_address) is None
        await kill_all(then_refuse=True)
        assert await outcome_of(server.http_address) is not None
        wrong.unlink()
        async with asyncio.timeout(60):
            while await outcome_of(server.http_address) is not None:
                pass
        await kill_all()
        waiting = asyncio.create_task(outcome_of(server.http_address))
        await asyncio.sleep(0)
    assert await waiting is not None
    assert await outcome_of(server.http_address) is ConnectionRefusedError


@pytest.mark.parametrize("refusing", ["gateway-1", "worker"])
async def test_one_that_refuses_what_worked_before_is_started_again_until_it_is_mended(
    model_directory: Path, tmp_path: Path, refusing: str
) -> None:
    wrong = tmp_path / "wrong"
    waits = (*WAITS[:-1], f"import os, signal; os.path.exists({str(wrong)!r}) and os._exit(2); signal.pause()")
    programs = Programs(worker=waits, scheduler=WAITS, gateway=(*GATEWAY, f"--refuse-if={wrong}"))
    report: list[str] = []
    async with make_server(model_directory, programs, gateways=2, report=report) as server:
        await asyncio.wait_for(server.wait_ready(), 30)
        wrong.touch()
        os.killpg(server.process(refusing).pid, signal.SIGKILL)
        await until_true(lambda: any(f"{refusing} ended with status 2" in line for line in report))
        left = {"gateway", "gateway-1"} - {refusing}
        assert await id_behind(server.grpc_address) in {str(server.process(name).pid) for name in left}
        wrong.unlink()
        await asyncio.wait_for(server.wait_ready(), 30)
