"""Methods that every service's server has in addition to its own."""

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_channelz.v1 import channelz_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from quire.rpc.address import AddressInUse, TcpAddress, check_bindable
from quire.rpc.channel import open_channel
from quire.rpc.server import ConnectionLimits, RpcServer
from quire.testing import free_port
from tests.support.grpc_types import channelz_stub, health_stub
from tests.support.processes import until_true
from tests.support.scheduler_process import until

SERVICE = "quire.test.Echo"
SHORT_CONNECTIONS = ConnectionLimits(max_age_s=0.5)
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def pass_through(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
    return request


def register(server: grpc.aio.Server) -> None:
    handlers = {"Pass": grpc.unary_unary_rpc_method_handler(pass_through)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


async def start(address: str = "127.0.0.1:0", **options: Any) -> RpcServer:
    return await RpcServer.start(address, register, [SERVICE], **options)


@pytest.fixture
async def server() -> AsyncIterator[RpcServer]:
    server = await start()
    yield server
    await server.stop(0)


async def health_of(address: str, service: str) -> int:
    async with open_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        response = await health_stub(channel).Check(request, timeout=30)
    return response.status


async def read_not_serving(watch: Any) -> None:
    """Reads until the stream fails. Its status may overtake the last message; either shows that nothing is served."""
    while True:
        assert (await watch.read()).status == NOT_SERVING


async def test_a_health_watcher_sees_each_change_and_does_not_hold_up_stop(server: RpcServer) -> None:
    async with open_channel(server.address) as channel:
        watch = health_stub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert (await watch.read()).status == NOT_SERVING
        server.set_serving(True)
        assert (await watch.read()).status == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health_of(server.address, "nothing")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        async with asyncio.timeout(30):
            await server.stop(60)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read_not_serving(watch)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_of_both_versions_knows_services_methods_and_messages(server: RpcServer, version: str) -> None:
    known = {"grpc.health.v1.Health": True, "grpc.health.v1.HealthCheckRequest": True, "Nothing": False}
    known |= {"grpc.health.v1.Health.Check": True, "grpc.health.v1.Health.Nothing": False}
    requests = [reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol) for symbol in known]
    async with open_channel(server.address) as channel:
        ask = channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        answers = [answer async for answer in ask(iter(requests))]
    assert [answer.HasField("file_descriptor_response") for answer in answers] == list(known.values())


async def test_a_unix_socket_serves_and_is_not_stolen_unless_it_was_left_behind(tmp_path: Path) -> None:
    path = tmp_path / "service.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    server = await start(f"unix:{path}")
    assert server.address == f"unix:{path}"
    assert await health_of(server.address, "") == NOT_SERVING
    with pytest.raises(AddressInUse, match="the socket is in use"):
        await start(server.address)
    await server.stop(0)


def own_connection(address: str) -> grpc.aio.Channel:
    """A channel with its own connection: channels of one process otherwise share connections."""
    return grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])


async def test_the_local_socket_serves_on_when_the_port_is_handed_over(tmp_path: Path) -> None:
    path = tmp_path / "own.sock"
    server = await start(reuse_port=True, local_socket=path)
    await server.hand_over(0)
    assert await health_of(f"unix:{path}", "") == NOT_SERVING
    with pytest.raises(grpc.aio.AioRpcError):
        await health_of(server.address, "")
    await server.stop(0)
    with pytest.raises(grpc.aio.AioRpcError):
        await health_of(f"unix:{path}", "")


async def test_hand_over_waits_until_clients_that_call_all_the_time_have_left_and_loses_no_call() -> None:
    first = await start(reuse_port=True, limits=SHORT_CONNECTIONS)
    second = await start(first.address, reuse_port=True, limits=SHORT_CONNECTIONS)
    is_over = asyncio.Event()
    counts = [0] * 8

    async def call_on(caller: int) -> None:
        async with own_connection(first.address) as channel:
            method = channel.unary_unary(f"/{SERVICE}/Pass")
            while not is_over.is_set():
                assert await method(b"x", timeout=30) == b"x"
                counts[caller] += 1
                await asyncio.sleep(0.02)

    async def call_and_hand_over() -> None:
        # A connection that is made while the port is being closed is reset.
        await until_true(lambda: min(counts) > 0)
        await first.hand_over(0.25)
        await first.stop(60)
        before = list(counts)
        await until_true(lambda: all(now > then for now, then in zip(counts, before, strict=True)))
        is_over.set()

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for caller in range(len(counts)):
            group.create_task(call_on(caller))
        group.create_task(call_and_hand_over())
    await second.stop(0)


START_AND_CANCEL = """
import asyncio, gc, sys
from quire.rpc.process import run_service
from quire.rpc.server import ConnectionLimits, RpcServer

async def start(num_turns):
    address = f"unix:{sys.argv[1]}/{num_turns}"
    starting = asyncio.create_task(RpcServer.start(address, lambda server: None, [], admin_port=0))
    for _ in range(num_turns):
        await asyncio.sleep(0)
    starting.cancel()
    await asyncio.wait([starting])
    if not starting.cancelled():
        await starting.result().stop(0)

for num_turns in range(8):
    run_service(lambda: start(num_turns), program="test")
    gc.collect()
"""


async def test_a_start_that_is_cancelled_ends_the_process_in_order(tmp_path: Path) -> None:
    """As by a signal while a service begins to listen: gRPC then logs tracebacks of its own tasks, or hangs."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", START_AND_CANCEL, str(tmp_path)), stderr=asyncio.subprocess.PIPE
    )
    try:
        _, errors = await asyncio.wait_for(process.communicate(), 60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    assert (process.returncode, errors) == (0, b"")


# The admin port shows what a server's connections have done.


async def test_an_admin_port_in_use_leaves_no_server_behind() -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", 0)) as holder:
        taken: int = holder.getsockname()[1]
        with pytest.raises(AddressInUse, match=str(taken)):
            await RpcServer.start(f"127.0.0.1:{port}", lambda _: None, [], admin_port=taken)
    check_bindable(TcpAddress("127.0.0.1", port))
    server = await RpcServer.start(f"127.0.0.1:{port}", lambda _: None, [])
    assert server.admin is None
    await server.stop(0)


async def test_it_shows_what_the_connections_of_the_server_have_done() -> None:
    """test_admin.py shows that it is only for operators."""
    server = await RpcServer.start("127.0.0.1:0", lambda _: None, [], admin_port=0)
    assert server.admin is not None
    for _ in range(3):
        assert await health_of(server.address, "") == NOT_SERVING
    async with open_channel(server.admin.address) as channel:
        stub = channelz_stub(channel)

        async def has_counted() -> bool:
            """gRPC counts a call when the server has ended it, which may be after its answer has come."""
            servers = (await stub.GetServers(channelz_pb2.GetServersRequest(), timeout=30)).server
            return sum(each.data.calls_succeeded for each in servers) >= 3

        await until(has_counted)
    await server.stop(0)
