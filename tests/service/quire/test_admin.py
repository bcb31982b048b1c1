"""The admin port shows what a server's connections have done."""

import socket
from pathlib import Path

import grpc.aio
import pytest
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire.rpc.address import AddressInUse, TcpAddress, check_bindable, free_port
from quire.rpc.channel import open_channel
from quire.rpc.server import RpcServer
from quire.rpc.tls import Role, ServerTls, TlsIdentity
from tests.support.certificates import make_certificates


async def test_channelz_counts_the_calls_of_the_server() -> None:
    server = await RpcServer.start("127.0.0.1:0", lambda _: None, [], admin_port=0)
    assert server.admin is not None
    async with open_channel(server.address) as channel:
        for _ in range(3):
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        async with grpc.aio.insecure_channel(server.admin.address) as admin:
            stub = channelz_pb2_grpc.ChannelzStub(admin)
            servers = await stub.GetServers(channelz_pb2.GetServersRequest(), timeout=10)
    assert 3 in [each.data.calls_succeeded for each in servers.server]
    await server.stop(0)


async def test_an_admin_port_in_use_leaves_no_server_behind() -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", 0)) as holder:
        taken: int = holder.getsockname()[1]
        with pytest.raises(AddressInUse, match=str(taken)):
            await RpcServer.start(f"127.0.0.1:{port}", lambda _: None, [], admin_port=taken)
    check_bindable(TcpAddress("127.0.0.1", port))
    server = await RpcServer.start(f"127.0.0.1:{port}", lambda _: None, [])
    await server.stop(0)


async def test_without_an_admin_port_there_is_none() -> None:
    server = await RpcServer.start("127.0.0.1:0", lambda _: None, [])
    assert server.admin is None
    await server.stop(0)


async def test_with_tls_it_is_for_operators_alone(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    tls = ServerTls.for_operators(TlsIdentity.of(tmp_path, Role.WORKER))
    server = await RpcServer.start("127.0.0.1:0", lambda _: None, [], admin_port=0, admin_tls=tls)
    assert server.admin is not None
    assert await codes_of_callers(server.admin.address, tmp_path) == {
        None: grpc.StatusCode.UNAVAILABLE,
        Role.OPERATOR: grpc.StatusCode.OK,
        Role.SCHEDULER: grpc.StatusCode.PERMISSION_DENIED,
    }
    make_certificates(tmp_path)
    assert (await codes_of_callers(server.admin.address, tmp_path))[Role.OPERATOR] is grpc.StatusCode.OK
    await server.stop(0)


async def codes_of_callers(address: str, directory: Path) -> dict[Role | None, grpc.StatusCode]:
    """How a call of channelz ends without TLS and by role."""
    codes = {}
    for role in (None, Role.OPERATOR, Role.SCHEDULER):
        tls = None if role is None else TlsIdentity.of(directory, role)
        async with open_channel(address, tls=tls) as channel:
            call = channelz_pb2_grpc.ChannelzStub(channel).GetServers(channelz_pb2.GetServersRequest(), timeout=10)
            codes[role] = await call.code()
    return codes
