"""kill -9 of the gateway under load: durable streams go on through it once it is back, and lose nothing."""

import asyncio

from quire.client import AsyncClient, TokenChunk
from tests.chaos.test_kill import NUM_STREAMS, options_of
from tests.support.killing import kill
from tests.support.serving import serving


async def read_durable(client: AsyncClient, index: int, started: asyncio.Event) -> tuple[list[int], str]:
    """Tokens and text of one stream; checks that offsets are consecutive and that its end comes."""
    token_ids: list[int] = []
    text = ""
    async with client.generate_stream(f"Once upon a time, story {index}", options_of(index), durable=True) as stream:
        async for event in stream:
            if isinstance(event, TokenChunk):
                assert event.offset == len(token_ids)
                token_ids += event.token_ids
                text += event.text
                if len(token_ids) > 20:
                    started.set()
    assert stream.completed is not None
    return token_ids, text


async def read_all(client: AsyncClient, started: asyncio.Event) -> list[tuple[list[int], str]]:
    return await asyncio.gather(*(read_durable(client, index, started) for index in range(NUM_STREAMS)))


async def test_durable_streams_survive_the_loss_of_their_gateway():
    async with serving(num_gpu_blocks=512, dtype="float32") as served:
        undisturbed = await read_all(served.client, asyncio.Event())
        started = asyncio.Event()
        disturbed = asyncio.create_task(read_all(served.client, started))
        await started.wait()
        await kill(served, "gateway")
        assert await asyncio.wait_for(disturbed, timeout=60) == undisturbed
