"""One of two ranks is killed or stopped under load: the other leaves too, both come back, and streams see a pause."""

import asyncio
import os
import signal

import pytest

from quire.client import GenerationOptions
from tests.support.killing import kill
from tests.support.processes import until_true
from tests.support.serving import Served, serving

NUM_STREAMS = 8


async def read_all(served: Served, started: asyncio.Event) -> list[list[int]]:
    async def read(index: int) -> list[int]:
        options = GenerationOptions(temperature=float(index % 2), seed=index, max_tokens=120, ignore_eos=True)
        token_ids: list[int] = []
        async with served.client.generate_stream(f"Once upon a time, story {index}", options) as stream:
            async for event in stream:
                token_ids += getattr(event, "token_ids", ())
                if len(token_ids) > 20:
                    started.set()
        return token_ids

    return await asyncio.gather(*(read(index) for index in range(NUM_STREAMS)))


@pytest.mark.parametrize("victim", ["worker", "worker-1"])
async def test_streams_survive_the_loss_of_a_rank(victim: str) -> None:
    async with serving(tensor_parallel_size=2, num_threads=1, num_gpu_blocks=256, dtype="float32") as served:
        undisturbed = await read_all(served, asyncio.Event())
        assert all(len(token_ids) == 120 for token_ids in undisturbed)
        started = asyncio.Event()
        disturbed = asyncio.create_task(read_all(served, started))
        await started.wait()
        await kill(served, victim)
        assert await asyncio.wait_for(disturbed, timeout=90) == undisturbed
        starts = {name: served.server.process(name).starts for name in ("worker", "worker-1")}
        assert all(count > 1 for count in starts.values()), starts


async def test_a_rank_that_is_stopped_in_order_takes_the_other_along_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    async with serving(tensor_parallel_size=2, num_threads=1, num_gpu_blocks=256, dtype="float32") as served:
        undisturbed = await read_all(served, asyncio.Event())
        ranks = [served.server.process(name) for name in ("worker", "worker-1")]
        os.kill(ranks[1].pid, signal.SIGTERM)
        await until_true(lambda: all(rank.starts > 1 for rank in ranks), timeout_s=60)
        assert await asyncio.wait_for(read_all(served, asyncio.Event()), timeout=90) == undisturbed
    said = capfd.readouterr().err
    # Neither the successor nor silence told the other rank, and neither end counts as a crash.
    assert "rank 1 ended in order" in said
    assert "was started again" not in said
    assert "silent" not in said
    assert "worker-1 ended with status 0; starting it again in 0.1 s" in said
    assert "worker ended with status 75; starting it again in 0.1 s" in said
