"""kill -9 under load in bfloat16: what is computed again is rounded as before, so that the text stays the same."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from quire.gateway.v1 import generation_pb2, generation_pb2_grpc
from quire.rpc.channel import open_channel
from tests.support.killing import Outputs, Stream, Streams, until_hit
from tests.support.serving import Served, serving


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def survivor() -> AsyncIterator[Served]:
    async with serving(num_gpu_blocks=512, dtype="bfloat16") as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def undisturbed(survivor: Served) -> Outputs:
    return await Streams(durable=True).read(survivor.client)


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


@pytest.mark.parametrize("victims", [("worker",), pytest.param(("worker", "scheduler"), marks=pytest.mark.extended)])
async def test_text_is_that_of_an_undisturbed_run_and_can_be_read_again(
    victims: tuple[str, ...], served: Served, undisturbed: Outputs
) -> None:
    async def kill_them() -> Streams:
        streams = Streams(durable=True)
        async with streams.reading(served) as reading:
            await streams.advance()
            await streams.kill(served, *victims)
            assert await reading == undisturbed
        return streams

    disturbed = await until_hit(kill_them)
    async with open_channel(served.server.grpc_address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        for stream in disturbed:
            assert await read_again(stub, stream) == (stream.token_ids, stream.texts[0])
