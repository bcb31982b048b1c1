"""All links encrypted: processes on TCP ports under mutual TLS, and `quire serve` with certificates."""

import asyncio
import contextlib
import ssl
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import openai
import pytest

from quire.client import AsyncClient, ClientTls, GenerationOptions
from quire.rpc.channel import open_channel
from quire.rpc.errors import PermissionDenied, Unavailable, from_rpc_error
from quire.rpc.tls import Role, TlsIdentity
from quire.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from quire.worker.v1 import worker_pb2_grpc
from quire_cli.supervisor.commands import Programs, child_environ
from tests.support.certificates import make_certificates
from tests.support.killing import kill
from tests.support.ports import free_port
from tests.support.serving import serving
from tests.support.worker_client import attach_request

GREEDY = GenerationOptions(temperature=0.0, max_tokens=8, ignore_eos=True)
QUESTION = "What is 2+2?"


def tls_of(directory: Path, role: Role | None = None) -> ClientTls:
    """A client that believes the authority, with the certificate of a role or with none."""
    if role is None:
        return ClientTls(directory / "ca.pem")
    return ClientTls(directory / "ca.pem", directory / f"{role}.pem", directory / f"{role}.key")


@contextlib.asynccontextmanager
async def process(module: str, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """One service, until the block ends."""
    running = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *arguments, stdout=asyncio.subprocess.PIPE, env=child_environ({})
    )
    try:
        yield running
    finally:
        running.terminate()
        async with asyncio.timeout(60):
            await running.communicate()


async def listening(gateway: asyncio.subprocess.Process) -> dict[str, str]:
    """The addresses that a gateway says it has."""
    assert gateway.stdout is not None
    async with asyncio.timeout(200):
        line = (await gateway.stdout.readline()).decode()
    return dict(word.split("=") for word in line.split()[2:])


@pytest.mark.extended
async def test_processes_on_tcp_ports_serve_and_refuse_who_has_no_business_there(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    tls = f"--tls-dir={tmp_path}"
    worker, scheduler = (f"127.0.0.1:{free_port()}" for _ in range(2))
    async with (
        process("worker_svc", tls, f"--listen={worker}", "--num-gpu-blocks=64", "--num-threads=1"),
        process("scheduler_svc", tls, f"--listen={scheduler}", f"--workers={worker}"),
        process("gateway", tls, f"--schedulers={scheduler}", "--grpc-port=0", "--http-port=0") as gateway,
    ):
        addresses = await listening(gateway)
        async with AsyncClient(addresses["grpc"], tls=tls_of(tmp_path)) as client:
            await generated(client)
        # A gateway has no business with a worker, nor a worker with a scheduler; an operator may look on.
        async with open_channel(worker, tls=TlsIdentity.of(tmp_path, Role.GATEWAY)) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await worker_pb2_grpc.WorkerServiceStub(channel).Run([attach_request(1)], timeout=30).read()
            assert isinstance(from_rpc_error(caught.value), PermissionDenied)
        state = scheduler_pb2.GetStateRequest()
        async with open_channel(scheduler, tls=TlsIdentity.of(tmp_path, Role.WORKER)) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await scheduler_pb2_grpc.SchedulerServiceStub(channel).GetState(state, timeout=30)
            assert isinstance(from_rpc_error(caught.value), PermissionDenied)
        async with open_channel(scheduler, tls=TlsIdentity.of(tmp_path, Role.OPERATOR)) as channel:
            answer = await scheduler_pb2_grpc.SchedulerServiceStub(channel).GetState(state, timeout=30)
            assert answer.workers[0].attached


async def generated(client: AsyncClient) -> str:
    """An answer, as soon as there is somebody to give it: services that are no forks import everything before."""
    async with asyncio.timeout(200):
        while True:
            try:
                return (await client.generate(QUESTION, GREEDY)).sequences[0].text
            except Unavailable:
                await asyncio.sleep(0.1)


async def test_serve_with_certificates_answers_grpc_and_https_and_survives_its_worker(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    # The commands of `quire serve`, as a user's are: the servers of most other tests are forks.
    async with serving(programs=Programs(), tls_dir=tmp_path, client_tls=tls_of(tmp_path), num_gpu_blocks=64) as served:
        said = await generated(served.client)
        port = served.server.http_address.rpartition(":")[2]
        http = httpx.AsyncClient(verify=ssl.create_default_context(cafile=tmp_path / "ca.pem"), timeout=60)
        async with openai.AsyncOpenAI(
            base_url=f"https://localhost:{port}/v1",
            api_key="x",
            http_client=http,  # pyright: ignore[reportArgumentType]
        ) as client:
            completion = await client.completions.create(
                model="quire-tiny", prompt=QUESTION, max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
            )
            assert completion.choices[0].text == said
        async with httpx.AsyncClient(timeout=60) as stranger:
            with pytest.raises(httpx.ConnectError):
                await stranger.get(f"https://localhost:{port}/health")
        with pytest.raises(Unavailable):
            async with AsyncClient(served.server.grpc_address) as plain:
                await plain.generate(QUESTION, GREEDY)
        await kill(served, "worker")
        assert await generated(served.client) == said


@pytest.mark.extended
async def test_serve_shows_clients_a_public_certificate_and_operators_its_metrics(tmp_path: Path) -> None:
    inner, public = tmp_path / "inner", tmp_path / "public"
    make_certificates(inner)
    make_certificates(public)
    ports = {name: free_port() for name in ("gateway", "scheduler", "worker")}
    settings: dict[str, Any] = {f"{name}_metrics_port": port for name, port in ports.items()}
    settings |= {"public_cert": public / "gateway.pem", "public_key": public / "gateway.key"}
    async with serving(tls_dir=inner, client_tls=tls_of(public), num_gpu_blocks=64, **settings) as served:
        assert await generated(served.client)
        with pytest.raises(Unavailable):
            async with AsyncClient(served.server.grpc_address, tls=tls_of(inner)) as deceived:
                await deceived.generate(QUESTION, GREEDY)
        operator = ssl.create_default_context(cafile=inner / "ca.pem")
        operator.load_cert_chain(inner / "operator.pem", inner / "operator.key")
        async with httpx.AsyncClient(verify=operator, timeout=60) as http:
            for name, port in ports.items():
                answer = await http.get(f"https://localhost:{port}/metrics")
                assert f"quire_{name}_" in answer.text
