"""One of two ranks is killed or stopped: the other leaves too, they meet anew, and streams see a pause."""

import os
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.killing import Outputs, Streams, until_hit
from tests.support.processes import until_true
from tests.support.serving import Served, serving

SETTINGS = {"tensor_parallel_size": 2, "num_threads": 1, "num_gpu_blocks": 256, "dtype": "float32"}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def survivor() -> AsyncIterator[Served]:
    async with serving(**SETTINGS) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def undisturbed(survivor: Served) -> Outputs:
    """What the streams get if no rank dies."""
    return await Streams(8).read(survivor.client)


async def test_streams_survive_the_loss_of_a_rank(served: Served, undisturbed: Outputs) -> None:
    ranks = [served.server.process(name) for name in ("worker", "worker-1")]
    before = [rank.starts for rank in ranks]

    async def disturbed() -> Outputs:
        streams = Streams(8)
        async with streams.reading(served) as reading:
            await streams.advance()
            await streams.kill(served, "worker-1")
            return await reading

    assert await until_hit(disturbed) == undisturbed
    assert all(rank.starts > starts for rank, starts in zip(ranks, before, strict=True))


@pytest.mark.extended
async def test_a_rank_that_is_stopped_in_order_takes_the_other_along_at_once(
    capfd: pytest.CaptureFixture[str], undisturbed: Outputs
) -> None:
    # A server of its own, which writes where this test reads.
    async with serving(**SETTINGS) as served:
        ranks = [served.server.process(name) for name in ("worker", "worker-1")]
        os.kill(ranks[1].pid, signal.SIGTERM)
        await until_true(lambda: all(rank.starts > 1 for rank in ranks), timeout_s=60)
        assert await Streams(8).read(served.client) == undisturbed
    said = capfd.readouterr().err
    # Neither the successor nor silence told the other rank, and neither end counts as a crash.
    assert "rank 1 shut down" in said
    assert "was started again" not in said
    assert "silent" not in said
    assert "worker-1 ended with status 0; starting it again in 0.1 s" in said
    # Once: where all are stopped at the end, no rank leaves because of another.
    assert said.count("worker ended with status 75; starting it again in 0.1 s") == 1
