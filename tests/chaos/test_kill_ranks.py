"""One of two ranks is killed or stopped: the other leaves too, they meet anew, and streams see a pause."""

import asyncio
import os
import signal

import pytest

from tests.support.killing import Streams
from tests.support.processes import until_true
from tests.support.serving import serving

pytestmark = pytest.mark.extended


@pytest.mark.parametrize("victim", ["worker", "worker-1"])
async def test_streams_survive_the_loss_of_a_rank(victim: str) -> None:
    async with serving(tensor_parallel_size=2, num_threads=1, num_gpu_blocks=256, dtype="float32") as served:
        undisturbed = await Streams(8).read(served.client)
        streams = Streams(8)
        disturbed = asyncio.create_task(streams.read(served.client))
        await streams.advance()
        await streams.kill(served, victim)
        assert await asyncio.wait_for(disturbed, timeout=90) == undisturbed
        starts = {name: served.server.process(name).starts for name in ("worker", "worker-1")}
        assert all(count > 1 for count in starts.values()), starts


async def test_a_rank_that_is_stopped_in_order_takes_the_other_along_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    async with serving(tensor_parallel_size=2, num_threads=1, num_gpu_blocks=256, dtype="float32") as served:
        undisturbed = await Streams(8).read(served.client)
        ranks = [served.server.process(name) for name in ("worker", "worker-1")]
        os.kill(ranks[1].pid, signal.SIGTERM)
        await until_true(lambda: all(rank.starts > 1 for rank in ranks), timeout_s=60)
        assert await asyncio.wait_for(Streams(8).read(served.client), timeout=90) == undisturbed
    said = capfd.readouterr().err
    # Neither the successor nor silence told the other rank, and neither end counts as a crash.
    assert "rank 1 shut down" in said
    assert "was started again" not in said
    assert "silent" not in said
    assert "worker-1 ended with status 0; starting it again in 0.1 s" in said
    assert "worker ended with status 75; starting it again in 0.1 s" in said
