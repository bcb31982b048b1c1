"""One of two ranks is killed or stopped: the other one leaves too, both have a new rendezvous, and streams pause."""

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.support.killing import Outputs, Streams, until_hit
from tests.support.serving import Served, serving

SETTINGS = {"tensor_parallel_size": 2, "num_threads": 1, "num_gpu_blocks": 256, "dtype": "float32"}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def survivor() -> AsyncIterator[Served]:
    async with serving(**SETTINGS) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def undisturbed(survivor: Served) -> Outputs:
    """The outputs of the streams if no rank dies."""
    return await Streams(4).read(survivor.client)


async def test_streams_survive_the_loss_of_a_rank(served: Served, undisturbed: Outputs) -> None:
    before = served.server.services

    async def disturbed() -> Outputs:
        streams = Streams(4)
        async with streams.reading(served) as reading:
            await streams.advance()
            await streams.kill(served, "worker-1")
            return await reading

    assert await until_hit(disturbed) == undisturbed
    after = served.server.services
    assert all(after[name] != before[name] for name in ("worker", "worker-1"))
