"""`quire serve --gateways N` with stand-ins: how gateways share their ports, and what the loss of one means."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import grpc.aio

from quire.client import AsyncClient
from quire.gateway.v1 import model_pb2, model_pb2_grpc
from quire_cli.supervisor import LocalServer, ServeSettings
from quire_cli.supervisor.commands import Programs
from tests.support.processes import is_alive, until_true
from tests.support.serving import forked

WAITS = (sys.executable, "-S", "-c", "import signal; signal.pause()")
NAMES = ("gateway", "gateway-1", "gateway-2")


def make_server(
    model_directory: Path, *gateway_flags: str, gateways: int = 3, report: list[str] | None = None, **settings
) -> LocalServer:
    values = {"grpc_port": 0, "http_port": 0, "model": str(model_directory), "drain_timeout": 1.0} | settings
    gateway = forked("tests.support.fake_gateway", "tests.support.fake_gateway")
    programs = Programs(worker=WAITS, scheduler=WAITS, gateway=(*gateway, *gateway_flags))
    lines = [] if report is None else report
    return LocalServer(ServeSettings(gateways=gateways, **values), programs=programs, report=lines.append)


async def id_behind(address: str) -> str:
    """Which gateway a new connection to the address reaches; the stand-ins call themselves by their process groups."""
    # Channels of one process share connections otherwise.
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        stub = model_pb2_grpc.ModelServiceStub(channel)
        answer = await stub.GetServerInfo(model_pb2.GetServerInfoRequest(), wait_for_ready=True, timeout=30)
    return answer.gateway_id


async def http_id_behind(address: str) -> str:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    text = await reader.read()
    writer.close()
    await writer.wait_closed()
    return text.decode()


def ids_of(server: LocalServer, names: tuple[str, ...] = NAMES) -> set[str]:
    return {str(server.process(name).pid) for name in names}


async def test_connections_to_both_ports_spread_over_all_gateways(model_directory: Path) -> None:
    async with make_server(model_directory) as server:
        await server.wait_ready()
        expected = ids_of(server)
        assert len(expected) == 3
        grpc_ids: set[str] = set()
        http_ids: set[str] = set()
        async with asyncio.timeout(30):
            while grpc_ids != expected or http_ids != expected:
                grpc_ids.add(await id_behind(server.grpc_address))
                http_ids.add(await http_id_behind(server.http_address))
        # Each can be reached alone, too.
        for number, name in enumerate(NAMES):
            assert await id_behind(server.gateway_address(number)) == str(server.process(name).pid)


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


async def test_one_that_refuses_what_worked_before_is_started_again_until_it_is_mended(
    model_directory: Path, tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong"
    report: list[str] = []
    async with make_server(model_directory, f"--refuse-if={wrong}", gateways=2, report=report) as server:
        wrong.touch()
        os.killpg(server.process("gateway-1").pid, signal.SIGKILL)
        await until_true(lambda: any("gateway-1 ended with status 2" in line for line in report))
        assert await id_behind(server.grpc_address) == str(server.process("gateway").pid)
        wrong.unlink()
        await asyncio.wait_for(server.wait_ready(), 30)


async def test_all_end_together_before_the_scheduler_does(model_directory: Path, tmp_path: Path) -> None:
    note = tmp_path / "note"
    async with make_server(model_directory, f"--note={note}") as server:
        pids = [server.process(name).pid for name in (*NAMES, "scheduler", "worker")]
    assert not any(map(is_alive, pids))
    assert note.read_text().splitlines() == ["stopped gateway"] * 3
