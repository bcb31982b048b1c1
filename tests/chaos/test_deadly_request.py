"""A request that the worker dies or hangs of each time: it fails, and all that run beside it get every token."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from quire.client import AsyncClient, GenerationOptions
from quire.rpc.errors import Internal
from quire_cli.supervisor import LocalServer, ServeSettings
from quire_cli.supervisor.commands import Programs
from tests.support.deadly_worker import DEADLY_SEED, HANGING_SEED
from tests.support.processes import until_true
from tests.support.serving import forked, forked_worker

pytestmark = pytest.mark.extended

NUM_STREAMS = 6
DEATHS = range(2, 5)
"""Of the token before the deadly one the worker may have died, too, as long as its answer was not sent."""
PROGRAMS = Programs(
    worker=forked_worker("tests.support.deadly_worker"),
    scheduler=forked("tests.support.impatient_scheduler", "scheduler_svc.service.app", "gateway.app"),
)
SETTINGS = ServeSettings(
    grpc_port=0,
    http_port=0,
    num_threads=1,
    num_gpu_blocks=512,
    dtype="float32",
    log_level="warning",
    drain_timeout=5.0,
    # A step that takes longer is one of a device that hangs, on however busy a machine.
    step_timeout=8.0,
)


async def read(client: AsyncClient, index: int) -> list[int]:
    options = GenerationOptions(temperature=float(index % 2), seed=index, max_tokens=120, ignore_eos=True)
    answer = await client.generate(f"Once upon a time, story {index}", options)
    return list(answer.sequences[0].token_ids)


async def read_all(client: AsyncClient) -> list[list[int]]:
    return await asyncio.gather(*(read(client, index) for index in range(NUM_STREAMS)))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server() -> AsyncIterator[LocalServer]:
    async with LocalServer(SETTINGS, programs=PROGRAMS) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def undisturbed(server: LocalServer) -> list[list[int]]:
    """What the streams get if nothing dies."""
    await server.wait_ready()
    async with AsyncClient(server.grpc_address) as client:
        return await read_all(client)


@pytest_asyncio.fixture(loop_scope="session")
async def client(server: LocalServer, undisturbed: list[list[int]]) -> AsyncIterator[AsyncClient]:
    """Of a server that is ready, whatever died before."""
    assert all(len(token_ids) == 120 for token_ids in undisturbed)
    await server.wait_ready()
    async with AsyncClient(server.grpc_address) as client:
        yield client


async def test_a_request_that_the_worker_dies_of_fails_and_all_others_end_with_their_full_output(
    server: LocalServer, client: AsyncClient, undisturbed: list[list[int]]
) -> None:
    deadly = GenerationOptions(seed=DEADLY_SEED, max_tokens=120, ignore_eos=True)
    worker = server.process("worker")
    starts = worker.starts
    disturbed = asyncio.create_task(read_all(client))
    with pytest.raises(Internal, match="lost 2 times in a row") as caught:
        await client.generate("What is 2+2?", deadly)
    assert caught.value.reason == "WORKER_LOST"
    assert await disturbed == undisturbed
    assert worker.starts - starts in DEATHS
    assert await read_all(client) == undisturbed


async def test_a_worker_whose_device_hangs_ends_by_itself_and_its_successor_serves(
    server: LocalServer, client: AsyncClient, undisturbed: list[list[int]]
) -> None:
    hanging = GenerationOptions(seed=HANGING_SEED, max_tokens=120, ignore_eos=True)
    worker = server.process("worker")
    starts = worker.starts
    waiting = asyncio.create_task(client.generate("What is 2+2?", hanging))
    disturbed = asyncio.create_task(read_all(client))
    await until_true(lambda: worker.starts > starts, timeout_s=100)
    assert not waiting.done()
    waiting.cancel()
    assert await disturbed == undisturbed
