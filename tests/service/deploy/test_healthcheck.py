"""The health check of the containers, against a real server."""

import asyncio
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from quire.rpc.server import RpcServer
from quire.rpc.tls import Role, ServerTls, TlsIdentity
from tests.support.certificates import make_certificates

SCRIPT = Path(__file__).resolve().parents[3] / "deploy" / "healthcheck.py"


@pytest.fixture(scope="module")
def healthcheck() -> ModuleType:
    spec = importlib.util.spec_from_file_location("healthcheck", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def test_healthcheck_follows_what_the_server_says_and_alive_is_whoever_answers(
    healthcheck: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    server = await RpcServer.start("127.0.0.1:0", lambda _: None, [])
    assert await asyncio.to_thread(healthcheck.main, [server.address]) == 1
    assert await asyncio.to_thread(healthcheck.main, ["--alive", server.address]) == 0
    server.set_serving(True)
    assert await asyncio.to_thread(healthcheck.main, [server.address]) == 0
    states = [line.removeprefix(f"{server.address}: ") for line in capsys.readouterr().out.splitlines()]
    assert (states[0], states[-1]) == ("NOT_SERVING", "SERVING")
    await server.stop(grace_s=0)
    assert await asyncio.to_thread(healthcheck.main, ["--alive", server.address]) == 1


async def test_healthcheck_of_a_unix_socket_shows_no_certificate(
    healthcheck: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_certificates(tmp_path)
    monkeypatch.setenv("QUIRE_TLS_DIR", str(tmp_path))
    tls = ServerTls(TlsIdentity.of(tmp_path, Role.GATEWAY))
    socket = tmp_path / "gateway.sock"
    server = await RpcServer.start("127.0.0.1:0", lambda _: None, [], local_socket=socket, tls=tls)
    server.set_serving(True)
    assert await asyncio.to_thread(healthcheck.main, [f"unix:{socket}"]) == 0
    await server.stop(grace_s=0)


async def test_healthcheck_says_what_is_wrong_with_an_answer_and_does_not_wait_for_none(
    healthcheck: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {
        b"HTTP/1.1 400 Bad Request\r\n\r\n": "the answer is not HTTP/2",
        b"": "the connection was closed without an answer",
        # The stream ends without a message, as for a refused call.
        bytes((0, 0, 1, 1, 5, 0, 0, 0, 1, 0x88)): "the answer has no health status",
    }
    given: list[bytes | None] = [*answers, None]
    is_over = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(4096)
        if (answer := given.pop(0)) is None:
            await is_over.wait()
        else:
            writer.write(answer)
        writer.close()

    address = f"unix:{tmp_path / 'socket'}"
    async with await asyncio.start_unix_server(serve, tmp_path / "socket"):
        for line in answers.values():
            assert await asyncio.to_thread(healthcheck.main, ["--alive", address]) == 1
            assert capsys.readouterr().out == f"{address}: {line}\n"
        monkeypatch.setattr(healthcheck, "TIMEOUT_S", 0.05)
        assert await asyncio.to_thread(healthcheck.main, ["--alive", address]) == 1
        is_over.set()
        await asyncio.sleep(0.05)
    assert "timed out" in capsys.readouterr().out


def test_healthcheck_needs_no_package(tmp_path: Path) -> None:
    """Each check is a new process, whose imports would be most of its cost."""
    command = [sys.executable, "-IS", SCRIPT, f"unix:{tmp_path / 'nobody'}"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (1, "")
    assert "No such file" in result.stdout


async def test_healthcheck_shows_a_service_its_own_certificate(
    healthcheck: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_certificates(tmp_path)
    role = Role.SCHEDULER
    for other in set(Role) - {role}:
        (tmp_path / f"{other}.key").unlink()
    tls = ServerTls(TlsIdentity.of(tmp_path, role), roles=frozenset({Role.OPERATOR}))
    server = await RpcServer.start("127.0.0.1:0", lambda _: None, [], tls=tls)
    server.set_serving(True)
    assert await asyncio.to_thread(healthcheck.main, [server.address]) == 1
    monkeypatch.setenv("QUIRE_TLS_DIR", str(tmp_path))
    assert await asyncio.to_thread(healthcheck.main, [server.address]) == 0
    await server.stop(grace_s=0)
