"""LocalServer with stand-ins: programs that wait for SIGTERM, and a fake gateway."""

import asyncio
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.client import AsyncClient
from quire.rpc.address import AddressInUse
from quire.settings import ConfigurationError
from quire_cli.supervisor import LocalServer, ServeSettings, ServiceRefused, server
from quire_cli.supervisor.commands import Programs
from tests.support.processes import is_alive, until_true

WAITS = (sys.executable, "-S", "-c", "import signal; signal.pause()")
REFUSES = (sys.executable, "-S", "-c", "import sys; sys.exit(2)")
GATEWAY = (sys.executable, "-m", "tests.support.fake_gateway")
STAND_INS = Programs(worker=WAITS, scheduler=WAITS, gateway=GATEWAY)


@pytest.fixture(autouse=True)
def temporary_directory(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The server's temporary directories in a place of their own, which must be empty at the end."""
    tmp_path_factory.getbasetemp()  # pytest's own is made on first use, and must not be made there
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        monkeypatch.setattr(tempfile, "tempdir", directory)
        yield
        assert list(Path(directory).iterdir()) == []


def make_server(model_directory: Path, programs: Programs = STAND_INS, **settings) -> LocalServer:
    values = {"grpc_port": 0, "http_port": 0, "model": str(model_directory), "drain_timeout": 1.0} | settings
    return LocalServer(ServeSettings(**values), programs=programs, report=lambda line: None)


async def test_a_service_that_refuses_its_configuration_ends_all_and_leaves_nothing_behind(
    model_directory: Path,
) -> None:
    programs, pids = Programs(worker=WAITS, scheduler=REFUSES, gateway=GATEWAY), list[int]()

    async def serve() -> None:
        async with make_server(model_directory, programs) as server:
            pids.append(server.process("worker").pid)
            await server.wait_failed()

    with pytest.raises(ServiceRefused, match="scheduler"):
        await asyncio.wait_for(serve(), 30)
    assert not any(map(is_alive, pids))


async def test_services_that_are_killed_come_back_and_the_gateway_at_the_same_ports(model_directory: Path) -> None:
    async with make_server(model_directory) as server:
        addresses = (server.grpc_address, server.http_address)
        for name in ("worker", "gateway"):
            os.kill(server.process(name).pid, signal.SIGKILL)
        await until_true(lambda: server.process("worker").starts == server.process("gateway").starts == 2)
        await asyncio.wait_for(server.wait_ready(), 30)
        assert (server.grpc_address, server.http_address) == addresses


async def test_a_failed_canary_is_told_and_nothing_is_left_behind(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object) -> None:
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
            with pytest.raises(AddressInUse, match=f"^cannot listen on 127.0.0.1:{port}: the port is in use$"):
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
    with pytest.raises(ConfigurationError, match=r"^not installed: torch, uvicorn; install quire\[all\]$"):
        await make_server(model_directory).__aenter__()
