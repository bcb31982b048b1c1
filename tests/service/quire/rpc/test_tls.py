"""Admission to a service with TLS: clients that it accepts, and the errors that the others get."""

import datetime as dt
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc.aio
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from quire.rpc.certificates import Authority
from quire.rpc.channel import open_channel
from quire.rpc.errors import PermissionDenied, QuireError, Unavailable, from_rpc_error
from quire.rpc.server import RpcServer
from quire.rpc.tls import Role, ServerTls, TlsIdentity, warn_if_open
from quire.runtime.settings import ConfigurationError
from quire_cli.certs import LOCAL_HOSTS
from tests.support.certificates import make_certificates
from tests.support.grpc_types import health_stub, reflection_stub

CHECK = health_pb2.HealthCheckRequest()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return make_certificates(tmp_path)


@pytest_asyncio.fixture
async def worker(tmp_path: Path, authority: Authority) -> AsyncIterator[RpcServer]:
    """A service that only schedulers may call."""
    tls = ServerTls(TlsIdentity.of(tmp_path, Role.WORKER), roles=frozenset({Role.SCHEDULER}))
    server = await RpcServer.start("127.0.0.1:0", lambda _: None, [], tls=tls)
    yield server
    await server.stop(0)


async def reflect(channel: grpc.aio.Channel) -> object:
    """Calls a method other than health."""
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    call = reflection_stub(channel).ServerReflectionInfo(iter([request]), timeout=30)
    return await call.read()


async def error_of(channel: grpc.aio.Channel) -> QuireError:
    async with channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await reflect(channel)
    return from_rpc_error(caught.value)


@pytest.mark.parametrize(
    ("certified", "believed", "others"),
    [
        ("replicas.test", "replicas.test", (None, "other.test")),
        # A name for all pods of a service.
        ("*.worker.quire.svc", "worker-1.worker.quire.svc", (None, "worker-1.other.quire.svc")),
    ],
)
async def test_a_service_is_believed_under_the_names_of_its_certificate(
    authority: Authority, tmp_path: Path, certified: str, believed: str, others: tuple[str | None, ...]
) -> None:
    authority.issue(tmp_path, Role.WORKER, [certified], 1, dt.datetime.now(dt.UTC))
    server = await RpcServer.start(
        "127.0.0.1:0", lambda _: None, [], tls=ServerTls(TlsIdentity.of(tmp_path, Role.WORKER))
    )
    tls = TlsIdentity.of(tmp_path, Role.GATEWAY)
    async with open_channel(server.address, tls=tls, host_name=believed) as channel:
        assert await reflect(channel)
    for host_name in others:
        assert isinstance(await error_of(open_channel(server.address, tls=tls, host_name=host_name)), Unavailable)
    await server.stop(0)


@pytest.mark.parametrize("role", [Role.GATEWAY, Role.CLIENT])
async def test_a_caller_of_another_role_is_refused_everything_but_health(
    worker: RpcServer, tmp_path: Path, role: Role
) -> None:
    tls = TlsIdentity.of(tmp_path, role)
    async with open_channel(worker.address, tls=tls) as channel:
        assert await health_stub(channel).Check(CHECK, timeout=30)
    refusal = await error_of(open_channel(worker.address, tls=tls))
    assert isinstance(refusal, PermissionDenied)
    assert refusal.reason == "WRONG_ROLE"
    assert "scheduler" in refusal.message
    assert role in refusal.message


@pytest.mark.parametrize("kind", ["unary_unary", "stream_stream"])
async def test_what_a_caller_of_another_role_sends_is_not_parsed(
    authority: Authority, tmp_path: Path, kind: str
) -> None:
    parsed: list[bytes] = []
    tls = ServerTls(TlsIdentity.of(tmp_path, Role.WORKER), roles=frozenset({Role.SCHEDULER}))
    server = await RpcServer.start(
        "127.0.0.1:0", lambda grpc_server: add_method(grpc_server, kind, parsed.append), [], tls=tls
    )
    refusal = await raw_error(server.address, TlsIdentity.of(tmp_path, Role.GATEWAY), kind)
    assert isinstance(refusal, PermissionDenied)
    assert parsed == []
    assert isinstance(await raw_error(server.address, TlsIdentity.of(tmp_path, Role.SCHEDULER), kind), Unavailable)
    assert parsed == [b"sent"]
    await server.stop(0)


async def test_who_calls_the_local_socket_needs_no_certificate(authority: Authority, tmp_path: Path) -> None:
    tls = ServerTls(TlsIdentity.of(tmp_path, Role.WORKER), roles=frozenset({Role.SCHEDULER}))
    socket = tmp_path / "local"
    server = await RpcServer.start("127.0.0.1:0", lambda _: None, [], tls=tls, local_socket=socket)
    async with open_channel(f"unix:{socket}") as channel:
        assert await reflect(channel)
    await server.stop(0)


async def test_a_method_may_be_for_another_role_than_the_others(authority: Authority, tmp_path: Path) -> None:
    roles = {"/test.Service/Method": frozenset({Role.WORKER})}
    tls = ServerTls(TlsIdentity.of(tmp_path, Role.WORKER), roles=frozenset({Role.SCHEDULER}), roles_of_methods=roles)
    server = await RpcServer.start(
        "127.0.0.1:0", lambda grpc_server: add_method(grpc_server, "unary_unary", lambda _: None), [], tls=tls
    )
    refusal = await raw_error(server.address, TlsIdentity.of(tmp_path, Role.SCHEDULER), "unary_unary")
    assert isinstance(refusal, PermissionDenied)
    allowed = await raw_error(server.address, TlsIdentity.of(tmp_path, Role.WORKER), "unary_unary")
    assert isinstance(allowed, Unavailable)
    await server.stop(0)


def add_method(server: grpc.aio.Server, kind: str, parse: Callable[[bytes], object]) -> None:
    """A method /test.Service/Method that reads one request and fails."""

    async def answer(requests: object, context: object) -> bytes:
        if isinstance(requests, AsyncIterator):
            await anext(requests)
        raise Unavailable("this always fails")

    async def stream(requests: object, context: object) -> AsyncIterator[bytes]:
        yield await answer(requests, context)

    behavior = stream if kind.endswith("stream") else answer
    handler = getattr(grpc, f"{kind}_rpc_method_handler")(behavior, request_deserializer=parse)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", {"Method": handler}),))


async def raw_error(address: str, tls: TlsIdentity, kind: str) -> QuireError:
    """The error that ends a call of that kind of method."""
    async with open_channel(address, tls=tls) as channel:
        sent = iter([b"sent"]) if kind.startswith("stream") else b"sent"
        call = getattr(channel, kind)("/test.Service/Method")(sent, timeout=30)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await (call.read() if kind.endswith("stream") else call)
    return from_rpc_error(caught.value)


async def test_strangers_and_certificates_out_of_their_time_are_not_connected(
    worker: RpcServer, authority: Authority, tmp_path: Path
) -> None:
    make_certificates(tmp_path / "other")
    distrustful = TlsIdentity.of(tmp_path / "other", Role.SCHEDULER)
    make_certificates(tmp_path / "unknown")
    (tmp_path / "unknown" / "ca.pem").write_bytes((tmp_path / "ca.pem").read_bytes())
    unknown = TlsIdentity.of(tmp_path / "unknown", Role.SCHEDULER)
    without = grpc.ssl_channel_credentials((tmp_path / "ca.pem").read_bytes())
    for channel in (
        open_channel(worker.address),
        grpc.aio.secure_channel(worker.address, without),
        open_channel(worker.address, tls=unknown),
        open_channel(worker.address, tls=distrustful),
    ):
        assert isinstance(await error_of(channel), Unavailable)
    for age_days in (30, -30):
        authority.issue(tmp_path, Role.SCHEDULER, LOCAL_HOSTS, 1, dt.datetime.now(dt.UTC) - dt.timedelta(days=age_days))
        tls = TlsIdentity.of(tmp_path, Role.SCHEDULER)
        assert isinstance(await error_of(open_channel(worker.address, tls=tls)), Unavailable)


async def test_new_files_hold_for_new_connections_and_running_ones_go_on(worker: RpcServer, tmp_path: Path) -> None:
    before = TlsIdentity.of(tmp_path, Role.SCHEDULER).read()
    async with open_channel(worker.address, tls=TlsIdentity.of(tmp_path, Role.SCHEDULER)) as running:
        assert await reflect(running)
        make_certificates(tmp_path)
        async with open_channel(worker.address, tls=TlsIdentity.of(tmp_path, Role.SCHEDULER)) as new:
            assert await reflect(new)
        old = grpc.aio.secure_channel(worker.address, before.channel_credentials())
        assert isinstance(await error_of(old), Unavailable)
        assert await reflect(running)
    # Damaged files leave the old certificate in force.
    (tmp_path / "worker.pem").write_text("damaged")
    for _ in range(2):
        async with open_channel(worker.address, tls=TlsIdentity.of(tmp_path, Role.SCHEDULER)) as channel:
            assert await reflect(channel)


async def test_callers_of_both_authorities_get_through_while_one_replaces_the_other(
    worker: RpcServer, tmp_path: Path
) -> None:
    make_certificates(tmp_path / "next")
    both = (tmp_path / "ca.pem").read_bytes() + (tmp_path / "next" / "ca.pem").read_bytes()
    for directory in (tmp_path, tmp_path / "next"):
        (directory / "ca.pem").write_bytes(both)
    for directory in (tmp_path, tmp_path / "next"):
        async with open_channel(worker.address, tls=TlsIdentity.of(directory, Role.SCHEDULER)) as channel:
            assert await reflect(channel)


def test_files_that_cannot_be_used_are_refused_at_start(authority: Authority, tmp_path: Path) -> None:
    for name, wrong in (("worker.pem", "damaged"), ("worker.key", (tmp_path / "gateway.key").read_text())):
        kept = (tmp_path / name).read_text()
        (tmp_path / name).write_text(wrong)
        with pytest.raises(ConfigurationError, match=str(tmp_path / name)):
            TlsIdentity.of(tmp_path, Role.WORKER)
        (tmp_path / name).write_text(kept)
    (tmp_path / "ca.pem").unlink()
    with pytest.raises(ConfigurationError, match=str(tmp_path / "ca.pem")):
        TlsIdentity.of(tmp_path, Role.WORKER)


def test_a_service_that_others_reach_without_certificates_says_so(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tls = ServerTls(TlsIdentity.of(tmp_path, Role.WORKER))
    for address, given in (("0.0.0.0:1", tls), ("127.0.0.1:1", None), ("unix:/run/quire/worker.sock", None)):
        warn_if_open(address, given)
    assert caplog.text == ""
    for address in ("0.0.0.0:1", "[::]:1"):
        caplog.clear()
        warn_if_open(address, None)
        assert "--tls-dir" in caplog.text
