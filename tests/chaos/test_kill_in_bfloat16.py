"""kill -9 under load in bfloat16, where a context that is computed again need not give the same logits to the bit.

A stream may then go on otherwise than it would have, undisturbed. What its client has stays as it is, and nothing of it
is lost or comes twice: not for the client, and not for whoever reads the stream again.
"""

import asyncio

import pytest

from quire.client import AsyncClient, TokenChunk
from quire.gateway.v1 import generation_pb2, generation_pb2_grpc
from quire.rpc.channel import open_channel
from tests.chaos.test_kill import NUM_STREAMS, options_of
from tests.support.killing import kill
from tests.support.serving import Served, serving

NUM_TOKENS = 250


class Stream:
    """A durable stream, and what its client has of it so far."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.text = ""

    async def read(self, client: AsyncClient) -> None:
        """Checks that offsets are consecutive and that the end comes."""
        options, prompt = options_of(self.index), f"Once upon a time, story {self.index}"
        async with client.generate_stream(prompt, options, request_id=f"story-{self.index}", durable=True) as stream:
            async for event in stream:
                if isinstance(event, TokenChunk):
                    assert event.offset == len(self.token_ids)
                    self.token_ids += event.token_ids
                    self.text += event.text
        assert stream.completed is not None

    async def read_again(self, stub: generation_pb2_grpc.GenerationServiceStub) -> tuple[list[int], str]:
        """All of it, from the begin."""
        token_ids: list[int] = []
        text = ""
        async for answer in stub.ResumeStream(generation_pb2.ResumeStreamRequest(request_id=f"story-{self.index}")):
            if answer.WhichOneof("event") == "chunk":
                assert answer.chunk.offset == len(token_ids)
                token_ids += answer.chunk.token_ids
                text += answer.chunk.text
        return token_ids, text


async def read_all(served: Served, streams: list[Stream]) -> None:
    await asyncio.gather(*(stream.read(served.client) for stream in streams))


async def until_all_are_under_way(streams: list[Stream]) -> None:
    async with asyncio.timeout(30):
        while not all(len(stream.token_ids) > 20 for stream in streams):  # noqa: ASYNC110 (readers set no event)
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("victim", ["worker", "scheduler", "gateway"])
async def test_what_clients_have_stays_and_nothing_is_lost_or_comes_twice(victim: str) -> None:
    undisturbed, disturbed = ([Stream(index) for index in range(NUM_STREAMS)] for _ in range(2))
    async with serving(num_gpu_blocks=512, dtype="bfloat16") as served:
        await read_all(served, undisturbed)
        reading = asyncio.create_task(read_all(served, disturbed))
        await until_all_are_under_way(disturbed)
        before = [list(stream.token_ids) for stream in disturbed]
        assert not reading.done()
        await kill(served, victim)
        await asyncio.wait_for(reading, timeout=90)
        for stream, token_ids, other in zip(disturbed, before, undisturbed, strict=True):
            assert len(stream.token_ids) == NUM_TOKENS
            assert stream.token_ids[: len(token_ids)] == token_ids == other.token_ids[: len(token_ids)]
        async with open_channel(served.server.grpc_address) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            for stream in disturbed:
                assert await stream.read_again(stub) == (stream.token_ids, stream.text)
