"""Clients that leave, are cancelled, or read slowly."""

import asyncio

import grpc
import pytest

from quire.gateway.v1 import generation_pb2, generation_pb2_grpc
from quire.rpc.errors import Cancelled, NotFound
from tests.support.gateway_process import collect, collected, error_of, stream_request
from tests.support.grpc_types import EOF


async def test_client_that_cancels_frees_its_request(gateway, scheduler):
    scheduler.step_delay_s = 0.01
    call = gateway.generation.GenerateStream(stream_request(max_tokens=500, request_id="gone"))
    await call.read()
    call.cancel()
    await scheduler.until(lambda: scheduler.aborted)
    assert scheduler.aborted == ["gone"]


async def test_client_that_vanishes_frees_its_request(gateway, scheduler):
    scheduler.step_delay_s = 0.01
    async with grpc.aio.insecure_channel(gateway.gateway.grpc_address) as channel:
        method = channel.unary_unary("/quire.gateway.v1.GenerationService/Generate")
        request = generation_pb2.GenerateRequest(text="hello", request_id="gone")
        call = method(request.SerializeToString())
        waiting = asyncio.ensure_future(call.code())
        await scheduler.until(lambda: scheduler.live)
    await scheduler.until(lambda: scheduler.aborted)
    assert await waiting == grpc.StatusCode.CANCELLED


@pytest.mark.parametrize("streaming", [True, False])
async def test_cancel_by_id_ends_the_other_call(gateway, scheduler, streaming):
    scheduler.step_delay_s = 0.01
    if streaming:
        call = gateway.generation.GenerateStream(stream_request(max_tokens=500, request_id="running"))
    else:
        call = gateway.generation.Generate(generation_pb2.GenerateRequest(text="hello", request_id="running"))
    ending = asyncio.create_task(error_of(call))
    await scheduler.until(lambda: scheduler.live)
    await gateway.generation.Cancel(generation_pb2.CancelRequest(request_id="running"))
    error = await ending
    assert isinstance(error, Cancelled)
    assert error.reason == "CANCELLED_BY_ID"
    await scheduler.until(lambda: scheduler.aborted)
    again = await error_of(gateway.generation.Cancel(generation_pb2.CancelRequest(request_id="running")))
    assert isinstance(again, NotFound)


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
