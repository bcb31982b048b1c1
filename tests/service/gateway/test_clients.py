"""Clients that leave, are cancelled, or read slowly."""

import grpc

from quire.gateway.v1 import generation_pb2_grpc
from tests.support.gateway_process import collect, collected, stream_request
from tests.support.grpc_types import EOF


async def test_slow_client_gets_everything_once_in_larger_chunks(gateway, scheduler):
    scheduler.step_delay_s = 0
    slow_request = stream_request("slow", max_tokens=900)
    # Log probabilities fill the connection's window, which is kept small, so that the gateway's writes have to wait.
    slow_request.output.logprobs = 20
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_535)]
    async with grpc.aio.insecure_channel(gateway.gateway.grpc_address, options) as channel:
        slow = generation_pb2_grpc.GenerationServiceStub(channel).GenerateStream(slow_request)
        responses = [await slow.read()]
        await scheduler.until(lambda: not scheduler.live)
        other = await collect(gateway.generation.GenerateStream(stream_request("other", max_tokens=20)))
        assert len(other.token_ids) == 20
        while (response := await slow.read()) is not EOF:
            responses.append(response)
    stream = collected(responses)
    assert len(stream.token_ids) == 900
    assert sum(len(chunk.logprobs) for chunk in stream.chunks) == 900
    assert 10 < max(len(chunk.token_ids) for chunk in stream.chunks) <= 256
    assert not scheduler.aborted
