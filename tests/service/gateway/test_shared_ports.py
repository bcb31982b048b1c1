"""Several gateways behind the same ports, and ways to find one of them."""

import asyncio
import contextlib
import select
import socket
import ssl
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest

from gateway.app import Gateway, serve
from gateway.settings import GatewaySettings
from quire.gateway.v1 import model_pb2, model_pb2_grpc
from quire.rpc.address import AddressInUse
from quire.rpc.listeners import listen
from quire.testing import free_port
from tests.support.certificates import make_certificates
from tests.support.gateway_process import running_gateway
from tests.support.processes import until_true
from tests.support.scheduler_process import until


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory with a short path, since unix sockets lie in it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        yield Path(path)


@contextlib.asynccontextmanager
async def stub_of(address: str) -> AsyncIterator[model_pb2_grpc.ModelServiceStub]:
    # Without it, channels of one process share connections.
    async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield model_pb2_grpc.ModelServiceStub(channel)


async def id_behind(address: str) -> str:
    async with stub_of(address) as stub:
        return (await stub.GetServerInfo(model_pb2.GetServerInfoRequest(), timeout=30)).gateway_id


def count_gateways() -> int:
    """The number of gateways in this event loop."""
    return sum(task.get_name() == "readiness" for task in asyncio.all_tasks())


def ports_of(gateway: Gateway) -> dict[str, Any]:
    addresses = {"grpc_port": gateway.grpc_address, "http_port": gateway.http_address}
    return {name: int(address.rpartition(":")[2]) for name, address in addresses.items()}


async def test_gateways_that_ask_for_it_share_both_ports(scheduler, directory: Path):
    sockets = [directory / "1.sock", directory / "2.sock"]
    async with running_gateway(scheduler, reuse_port=True, local_socket=sockets[0]) as first:
        ports = ports_of(first.gateway)
        async with running_gateway(scheduler, reuse_port=True, local_socket=sockets[1], **ports) as second:
            assert ports_of(second.gateway) == ports
            expected = {await id_behind(f"unix:{each}") for each in sockets}
            assert len(expected) == 2
            seen: set[str] = set()
            async with asyncio.timeout(30):
                while seen != expected:
                    seen.add(await id_behind(first.gateway.grpc_address))


@pytest.mark.parametrize("has_tls", [False, True])
async def test_a_connection_to_an_inherited_socket_waits_for_the_next_gateway(
    scheduler, directory: Path, has_tls: bool
):
    verify: ssl.SSLContext | bool = True
    settings: dict[str, Any] = {"grpc_port": 0, "schedulers": (scheduler.address,)}
    if has_tls:
        make_certificates(directory)
        settings["tls_dir"] = directory
        verify = ssl.create_default_context(cafile=directory / "ca.pem")
    with listen("127.0.0.1", 0) as held:
        port = held.getsockname()[1]
        url = f"http{'s' * has_tls}://127.0.0.1:{port}/live"
        for _ in range(2):
            async with httpx.AsyncClient(timeout=60, verify=verify) as client:
                waiting = asyncio.create_task(client.get(url))
                await until_true(lambda: select.select([held], [], [], 0)[0])
                gateway = await Gateway.start(GatewaySettings(**settings), listener=held.dup())
                assert gateway.http_address == f"127.0.0.1:{port}"
                assert (await waiting).status_code == 200
            await gateway.stop(0)
    assert not _listens(port)


async def test_a_local_socket_that_is_served_is_in_use_and_leaves_nothing_behind(scheduler, directory: Path):
    path, others = directory / "g.sock", count_gateways()
    async with running_gateway(scheduler, local_socket=path):
        before = count_gateways()
        with pytest.raises(AddressInUse, match=f"unix:{path}: the socket is in use"):
            await Gateway.start(GatewaySettings(grpc_port=0, http_port=0, local_socket=path))
        assert count_gateways() == before == others + 1
        assert await id_behind(f"unix:{path}")


async def test_the_metrics_of_one_gateway_have_a_port_of_their_own(scheduler):
    port = free_port()
    settings = GatewaySettings(
        grpc_port=0, http_port=0, schedulers=(scheduler.address,), metrics_port=port, drain_timeout=0.0
    )
    serving = asyncio.create_task(serve(settings))
    await scheduler.until(lambda: scheduler.connections)
    async with httpx.AsyncClient(timeout=60) as client:

        async def is_counted() -> bool:
            # The scheduler's welcome may still be on its way.
            answer = await client.get(f"http://127.0.0.1:{port}/metrics")
            return 'quire_gateway_connected_schedulers{model="quire-tiny"} 1.0' in answer.text

        assert await until(is_counted)
    serving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.wait_for(serving, 30)
    await until_true(lambda: not _listens(port))


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
