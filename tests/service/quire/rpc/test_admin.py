"""Operators change the log level of a running process, by the operators' port and by `quire log-level`."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest

from quire.common.v1 import admin_pb2, admin_pb2_grpc
from quire.rpc.channel import open_channel
from quire.rpc.server import RpcServer
from quire.rpc.tls import Role, ServerTls, TlsIdentity
from quire.runtime.logs import configure_logging
from quire_cli.main import main
from tests.support.certificates import make_certificates
from tests.support.processes import until_true


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[logging.Logger]:
    """The root logger, configured as in a service, and reset at the end."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    configure_logging("worker", "warning")
    yield root
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
async def admin() -> AsyncIterator[str]:
    server = await RpcServer.start("127.0.0.1:0", lambda _: None, [], admin_port=0)
    assert server.admin is not None
    yield server.admin.address
    await server.stop(0)


async def called(*words: str) -> int:
    """Runs `quire log-level` while the event loop serves."""
    return await asyncio.to_thread(main, ["log-level", *words])


async def test_the_command_changes_the_level_and_sets_it_back(
    admin: str, root_logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await called("debug", "--admin", admin) == 0
    assert root_logger.level == logging.DEBUG
    assert await called("configured", "--admin", admin) == 0
    assert root_logger.level == logging.WARNING
    assert capsys.readouterr().out == f"{admin}: debug\n{admin}: warning\n"


async def test_after_its_time_the_level_is_as_configured_and_a_later_call_ends_the_time(
    admin: str, root_logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await called("debug", "--admin", admin, "--seconds", "3600") == 0
    assert capsys.readouterr().out == f"{admin}: debug for 3600 s, then warning\n"
    assert await called("info", "--admin", admin, "--seconds", "0.001") == 0
    await until_true(lambda: root_logger.level == logging.WARNING)


async def test_what_cannot_be_set_is_refused_by_field(admin: str, root_logger: logging.Logger) -> None:
    async with grpc.aio.insecure_channel(admin) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        for request, field in (
            (admin_pb2.SetLogLevelRequest(level=9), "level is 9"),  # pyrefly: ignore
            (admin_pb2.SetLogLevelRequest(duration_ms=86_400_001), "duration_ms is 86400001; at most 86400000, a day"),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match=field) as caught:
                await stub.SetLogLevel(request, timeout=30)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert root_logger.level == logging.WARNING


async def test_with_tls_it_is_for_operators_alone(
    tmp_path: Path, root_logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    make_certificates(tmp_path)
    tls = ServerTls.for_operators(TlsIdentity.of(tmp_path, Role.SCHEDULER))
    server = await RpcServer.start("127.0.0.1:0", lambda _: None, [], admin_port=0, admin_tls=tls)
    assert server.admin is not None
    address = server.admin.address
    assert await called("debug", "--admin", address) == 1
    assert f"quire log-level: error: {address}: " in capsys.readouterr().err
    assert root_logger.level == logging.WARNING
    assert await called("debug", "--admin", address, "--tls-dir", str(tmp_path)) == 0
    assert root_logger.level == logging.DEBUG
    async with open_channel(address, tls=TlsIdentity.of(tmp_path, Role.SCHEDULER)) as channel:
        call = admin_pb2_grpc.AdminServiceStub(channel).SetLogLevel(admin_pb2.SetLogLevelRequest(), timeout=30)
        assert await call.code() is grpc.StatusCode.PERMISSION_DENIED
    await server.stop(0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give a level: debug, info, warning, error, configured"),
        (["debug"], "give --admin HOST:PORT"),
        (["loud", "--admin", "127.0.0.1:1"], "loud"),
    ],
)
def test_wrong_calls_are_told(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["log-level", *words]) == 2
    assert message in capsys.readouterr().err
