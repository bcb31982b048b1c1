"""What gRPC lets a caller say about a call, through all services: deadlines, compression."""

import grpc.aio
import pytest

from quire.client import GenerationOptions
from quire.gateway.v1 import generation_pb2, generation_pb2_grpc
from quire.rpc.channel import open_channel
from quire.rpc.errors import DeadlineExceeded
from tests.support.serving import Served

pytestmark = pytest.mark.extended

LONG = GenerationOptions(temperature=0.0, max_tokens=1000, ignore_eos=True, n=8)
TIMEOUT_S = 0.3


async def read_stream(served: Served) -> None:
    async with served.client.generate_stream("hello", LONG, timeout_s=TIMEOUT_S) as stream:
        async for _ in stream:
            pass


async def expire(served: Served, *, streams: bool) -> None:
    """A call whose deadline passes before its tokens are made."""
    with pytest.raises(DeadlineExceeded):
        await (read_stream(served) if streams else served.client.generate("hello", LONG, timeout_s=TIMEOUT_S))


@pytest.mark.parametrize("streams", [False, True], ids=["unary", "streaming"])
async def test_a_passed_deadline_ends_the_request_and_frees_its_blocks(served: Served, streams: bool) -> None:
    async with served.aborting():
        await expire(served, streams=streams)
    answer = await served.client.generate("hello", GenerationOptions(max_tokens=3, ignore_eos=True))
    assert len(answer.sequences[0].token_ids) == 3


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_compressed_requests_are_answered_like_others(served: Served, compression: grpc.Compression) -> None:
    text = "Once upon a time " * 20
    request = generation_pb2.GenerateRequest(text=text, stopping={"max_tokens": 4}, sampling={"temperature": 0})
    stream_request = generation_pb2.GenerateStreamRequest(
        text=text, stopping={"max_tokens": 4}, sampling={"temperature": 0}
    )
    async with open_channel(served.server.grpc_address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        plain = await stub.Generate(request, timeout=30)
        packed = await stub.Generate(request, timeout=30, compression=compression)
        assert packed.sequences[0].token_ids == plain.sequences[0].token_ids
        call = stub.GenerateStream(stream_request, timeout=30, compression=compression)
        chunks = [response.chunk async for response in call if response.HasField("chunk")]
        assert [token for chunk in chunks for token in chunk.token_ids] == list(plain.sequences[0].token_ids)
