"""kill -9 under load in bfloat16, where a context that is computed again need not give the same logits to the bit.

A stream may then go on otherwise than it would have, undisturbed. What its client has stays as it is, and nothing of it
is lost or comes twice: not for the client, and not for whoever reads the stream again.
"""

from collections.abc import AsyncIterator

import pytest_asyncio

from quire.gateway.v1 import generation_pb2, generation_pb2_grpc
from quire.rpc.channel import open_channel
from tests.support.killing import MAX_TOKENS, Stream, Streams, until_hit
from tests.support.serving import Served, serving


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def survivor() -> AsyncIterator[Served]:
    async with serving(num_gpu_blocks=512, dtype="bfloat16") as running:
        yield running


async def read_again(stub: generation_pb2_grpc.GenerationServiceStub, stream: Stream) -> tuple[list[int], str]:
    """The whole stream, from its first token."""
    token_ids: list[int] = []
    text = ""
    async for answer in stub.ResumeStream(generation_pb2.ResumeStreamRequest(request_id=stream.request_id)):
        if answer.WhichOneof("event") == "chunk":
            assert answer.chunk.offset == len(token_ids)
            token_ids += answer.chunk.token_ids
            text += answer.chunk.text
    return token_ids, text


async def test_what_clients_have_stays_and_nothing_is_lost_or_comes_twice(served: Served) -> None:
    async def kill_one() -> tuple[Streams, list[list[int]]]:
        streams = Streams(durable=True)
        async with streams.reading(served) as reading:
            await streams.advance()
            before = [list(stream.token_ids) for stream in streams]
            await streams.kill(served, "worker")
            await reading
        return streams, before

    disturbed, before = await until_hit(kill_one)
    for stream, token_ids in zip(disturbed, before, strict=True):
        assert len(stream.token_ids) == MAX_TOKENS
        assert stream.token_ids[: len(token_ids)] == token_ids
    async with open_channel(served.server.grpc_address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        for stream in disturbed:
            assert await read_again(stub, stream) == (stream.token_ids, stream.texts[0])
