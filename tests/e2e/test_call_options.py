"""What gRPC lets a caller say about a call, through all services: compression."""

import grpc.aio
import pytest

from quire.gateway.v1 import generation_pb2, generation_pb2_grpc
from quire.rpc.channel import open_channel
from tests.support.serving import Served

pytestmark = pytest.mark.extended


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
