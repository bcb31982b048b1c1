"""kill -9 of one of two ranks under load: the other leaves too, they meet anew, and streams see a pause."""

import asyncio

import pytest

from quire.client import GenerationOptions
from tests.support.killing import kill
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
