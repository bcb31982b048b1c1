"""Two ranks, real workers in processes of their own, when a scheduler dies and another one takes its place.

Each test leaves them to the next one, as schedulers of later epochs.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2

from quire.rpc.channel import open_channel
from quire.rpc.errors import FailedPrecondition, Unavailable
from quire.worker.v1 import worker_pb2, worker_pb2_grpc
from tests.support.grpc_types import health_stub
from tests.support.ports import free_port
from tests.support.serving import forked_worker, running_fork
from tests.support.worker_client import StepClient, attach_request, ints, make_assign, make_batch, worker_stub
from worker_svc.protocol.stream import SERVICE_NAME

pytestmark = pytest.mark.extended

START_S = 120.0
PROMPT = [5, 6, 7]

Stubs = list[worker_pb2_grpc.WorkerServiceStub]

BY_MEMORY = pytest.mark.parametrize("stubs", ["memory"], indirect=True)


def address_of(rank: int, directory: Path) -> str:
    return f"unix:{directory / str(rank)}"


async def until_serving(address: str) -> None:
    async with asyncio.timeout(START_S), open_channel(address) as channel:
        stub = health_stub(channel)
        async for response in stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME), wait_for_ready=True):
            if response.status == health_pb2.HealthCheckResponse.SERVING:
                return


@asynccontextmanager
async def running_workers(directory: Path, by: str) -> AsyncIterator[Stubs]:
    """Ranks that serve, in order; each must live to the end."""
    flags = ("--device", "cpu", "--num-threads", "1", "--num-gpu-blocks", "64", "--tensor-parallel-size", "2")
    meeting = f"127.0.0.1:{free_port()}"
    async with AsyncExitStack() as stack:
        processes, stubs = [], []
        for rank in range(2):
            address = address_of(rank, directory)
            place = ("--tensor-parallel-rank", str(rank), "--tensor-parallel-address", meeting)
            words = (by, "--listen", address, *flags, *place)
            processes.append(stack.enter_context(running_fork(forked_worker("tests.support.rank_worker"), *words)))
            stubs.append(await stack.enter_async_context(worker_stub(address)))
        await asyncio.gather(*(until_serving(address_of(rank, directory)) for rank in range(2)))
        yield stubs
        for process in processes:
            assert process.poll() is None, process.communicate()


async def attach_all(stubs: Stubs, epoch: int) -> list[StepClient]:
    clients = [StepClient(stub) for stub in stubs]
    await asyncio.gather(*(client.attach(epoch) for client in clients))
    return clients


def prefill(client: StepClient) -> worker_pb2.StepRequest:
    return client.step(assign=[make_assign(0, PROMPT, [1])], batch=make_batch([0], [len(PROMPT)], [0]))


def leave(clients: list[StepClient]) -> None:
    for client in clients:
        client.cancel()


async def run_on_all(clients: list[StepClient]) -> list[int]:
    """The tokens of a prompt's first step, which is sent to every rank."""
    for client in clients:
        await client.send(prefill(client))
    first, _ = await asyncio.gather(*(client.result() for client in clients))
    return ints(first.token_ids)


async def send_to_rank_0_alone(clients: list[StepClient]) -> None:
    """Returns when rank 0 waits in a step that rank 1 does not have."""
    await clients[0].send(prefill(clients[0]))
    while (await clients[0].heartbeat()).busy_ms == 0:
        pass


@pytest.fixture(scope="module", params=["memory", "messages"])
async def stubs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stubs]:
    """Of ranks that exchange tensors by memory, or by messages."""
    async with running_workers(tmp_path_factory.mktemp(request.param), request.param) as stubs:
        yield stubs


@pytest.fixture(scope="module")
def epochs() -> Iterator[int]:
    return itertools.count(1)


async def test_a_rank_leaves_a_step_that_a_dead_scheduler_sent_to_it_alone(stubs: Stubs, epochs: Iterator[int]) -> None:
    clients = await attach_all(stubs, next(epochs))
    expected = await run_on_all(clients)
    clients = await attach_all(stubs, next(epochs))
    await send_to_rank_0_alone(clients)
    leave(clients)
    generations = [client.info.worker_generation for client in clients]
    clients = await attach_all(stubs, next(epochs))
    assert [client.info.worker_generation for client in clients] == generations
    assert await run_on_all(clients) == expected
    leave(clients)


@BY_MEMORY
async def test_a_scheduler_whose_other_rank_is_taken_over_hears_of_it(stubs: Stubs, epochs: Iterator[int]) -> None:
    first, second = next(epochs), next(epochs)
    clients = await attach_all(stubs, first)
    await send_to_rank_0_alone(clients)
    successors = [StepClient(stub) for stub in stubs]
    attaching = asyncio.create_task(successors[1].attach(second))
    error = await clients[0].error()
    assert isinstance(error, FailedPrecondition)
    assert (error.reason, error.message) == (
        "SUPERSEDED",
        f"epoch {first} ended before step 1: another rank is at epoch {second}",
    )
    await successors[0].attach(second)
    await attaching
    assert len(await run_on_all(successors)) == 1
    leave([*clients, *successors])


@BY_MEMORY
async def test_a_rank_that_is_attached_alone_says_so_and_can_be_attached_with_the_others(
    stubs: Stubs, epochs: Iterator[int]
) -> None:
    for epoch in (next(epochs), next(epochs)):
        alone = StepClient(stubs[0])
        await alone.write(attach_request(epoch))
        error = await alone.error()
        assert isinstance(error, Unavailable)
        assert f"this is rank 0 of 2, and not all were attached under epoch {epoch} within 3 s" in error.message
    clients = await attach_all(stubs, next(epochs))
    assert len(await run_on_all(clients)) == 1
    leave(clients)
