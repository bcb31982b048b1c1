"""kill -9 of each process under load: clients see a pause, never a lost, repeated or changed token."""

import asyncio

import pytest

from quire.client import AsyncClient, GenerationOptions, TokenChunk
from quire.rpc.errors import Unavailable
from tests.support.killing import kill
from tests.support.scheduler_process import aborting
from tests.support.serving import Served, serving

NUM_STREAMS = 12


def options_of(index: int) -> GenerationOptions:
    """Greedy and seeded sampling, mixed."""
    return GenerationOptions(temperature=float(index % 2), seed=index, max_tokens=250, ignore_eos=True)


async def read_stream(client: AsyncClient, index: int, started: asyncio.Event) -> list[int]:
    """All token ids of one stream; checks that offsets are consecutive and that exactly one end comes."""
    token_ids: list[int] = []
    async with client.generate_stream(f"Once upon a time, story {index}", options_of(index)) as stream:
        async for event in stream:
            if isinstance(event, TokenChunk):
                assert event.offset == len(token_ids)
                token_ids += event.token_ids
                if len(token_ids) > 20:
                    started.set()
    assert stream.completed is not None
    return token_ids


async def run_streams(served: Served, started: asyncio.Event) -> list[list[int]]:
    return await asyncio.gather(*(read_stream(served.client, index, started) for index in range(NUM_STREAMS)))


@pytest.mark.parametrize("victims", [["worker"], ["scheduler"], ["scheduler", "worker"], ["worker", "worker"]])
async def test_streams_survive_the_loss_of_scheduler_and_worker(victims):
    async with serving(num_gpu_blocks=512, dtype="float32") as served:
        undisturbed = await run_streams(served, asyncio.Event())
        started = asyncio.Event()
        disturbed = asyncio.create_task(run_streams(served, started))
        await started.wait()
        for victim in victims:
            await kill(served, victim)
        assert await asyncio.wait_for(disturbed, timeout=90) == undisturbed


async def test_a_lost_gateway_fails_its_streams_clearly_and_frees_their_blocks():
    async with serving(num_gpu_blocks=512, reconnect_grace=0.0) as served:
        async with aborting(served.scheduler, 250):
            started = asyncio.Event()
            streams = [asyncio.create_task(read_stream(served.client, i, started)) for i in range(NUM_STREAMS)]
            await started.wait()
            await kill(served, "gateway")
        outcomes = await asyncio.gather(*streams, return_exceptions=True)
        assert all(isinstance(outcome, Unavailable) for outcome in outcomes)
        await served.server.wait_ready()
        answer = await served.client.generate("Once upon a time", GenerationOptions(max_tokens=5))
        assert len(answer.sequences[0].token_ids) == 5
