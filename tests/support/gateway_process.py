"""A whole gateway inside the test's event loop, in front of fake schedulers."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import grpc.aio
import httpx
import pytest
from starlette.types import Send

from gateway.api.answers import StreamedResponse
from gateway.app import Gateway
from gateway.replicas.members import Resolver
from gateway.settings import GatewaySettings
from quire.gateway.v1 import generation_pb2, generation_pb2_grpc, model_pb2_grpc, prefix_pb2_grpc
from quire.rpc.errors import InvalidArgument, QuireError, from_rpc_error
from tests.support.fake_scheduler import FakeScheduler
from tests.support.model_flags import with_models

GENERATION = "/quire.gateway.v1.GenerationService/"


@dataclass
class RunningGateway:
    """The gateway, a channel to it and stubs."""

    gateway: Gateway
    channel: grpc.aio.Channel
    generation: generation_pb2_grpc.GenerationServiceStub
    models: model_pb2_grpc.ModelServiceStub
    prefixes: prefix_pb2_grpc.PrefixServiceStub
    http_url: str

    @cached_property
    def http(self) -> httpx.AsyncClient:
        """A client of its HTTP port, which is closed with it."""
        return httpx.AsyncClient(base_url=self.http_url, timeout=60)

    async def raw_unary(self, method: str, data: bytes) -> bytes:
        """Calls a method of GenerationService with bytes that no stub would send."""
        call = self.channel.unary_unary(GENERATION + method)
        return await call(data, timeout=60)


@contextlib.asynccontextmanager
async def running_gateway(
    *schedulers: FakeScheduler, resolver: Resolver | None = None, **settings
) -> AsyncIterator[RunningGateway]:
    """Runs a gateway, connected to its schedulers, until the block ends. `settings` have the addresses of real
    schedulers, to which it may not be connected yet. `resolver` gives addresses of names."""
    addresses = tuple(scheduler.address for scheduler in schedulers)
    values: dict[str, Any] = {
        "grpc_port": 0,
        "http_port": 0,
        "schedulers": addresses,
        "drain_timeout": 0.0,
    } | with_models(settings)
    gateway = await Gateway.start(GatewaySettings(**values), resolver=resolver)
    serving = asyncio.create_task(gateway.run())
    channel = grpc.aio.insecure_channel(gateway.grpc_address)
    running = RunningGateway(
        gateway,
        channel,
        generation_pb2_grpc.GenerationServiceStub(channel),
        model_pb2_grpc.ModelServiceStub(channel),
        prefix_pb2_grpc.PrefixServiceStub(channel),
        f"http://{gateway.http_address}",
    )
    try:
        for scheduler in schedulers:
            await scheduler.until_known()
        yield running
    finally:
        # The client exists only if a test used it.
        if "http" in vars(running):
            await running.http.aclose()
        await channel.close()
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        await gateway.stop(values["drain_timeout"])


def stream_request(text: str | None = "hello", *, max_tokens: int | None = 8, **fields):
    """A GenerateStreamRequest."""
    request = generation_pb2.GenerateStreamRequest(text=text, **fields)
    if max_tokens is not None:
        request.stopping.max_tokens = max_tokens
    return request


@dataclass
class Collected:
    """All parts of a stream."""

    text: str
    token_ids: list[int]
    chunks: list[generation_pb2.TokenChunk]
    finished: generation_pb2.SequenceFinished
    completed: generation_pb2.RequestCompleted


def collected(responses: list) -> Collected:
    """Checks the form of every stream: chunks without gap or repetition, one Finished, Completed last."""
    kinds = [response.WhichOneof("event") for response in responses]
    assert kinds == ["chunk"] * (len(kinds) - 2) + ["finished", "completed"]
    chunks = [response.chunk for response in responses[:-2]]
    token_ids: list[int] = []
    for chunk in chunks:
        assert chunk.offset == len(token_ids)
        token_ids.extend(chunk.token_ids)
    finished = responses[-2].finished
    assert finished.num_tokens == len(token_ids)
    return Collected("".join(chunk.text for chunk in chunks), token_ids, chunks, finished, responses[-1].completed)


async def collect(call) -> Collected:
    """Reads a stream to its end, which must come within a minute."""
    async with asyncio.timeout(60):
        return collected([response async for response in call])


async def error_of(call) -> QuireError:
    """The error that a unary or streaming call ends with."""
    try:
        async with asyncio.timeout(60):
            answer = [response async for response in call] if hasattr(call, "__aiter__") else await call
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)
    raise AssertionError(f"the call succeeded: {answer}")


async def refusal_of(call, field: str, says: str = "") -> InvalidArgument:
    """The error of a call that is refused only for this field, in these words."""
    error = await error_of(call)
    assert isinstance(error, InvalidArgument), error
    assert [violation.field for violation in error.violations] == [field]
    assert says in error.violations[0].description
    return error


def comments_after_each_piece(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Makes streams over HTTP send a keepalive comment after each piece, wherever a silence may be too long. Returns
    a list of the comments that were sent."""
    sent: list[bytes] = []
    write, write_now = StreamedResponse._write, StreamedResponse.write_now

    async def write_comment_too(self: StreamedResponse, send: Send, data: bytes, *, is_last: bool = False) -> None:
        await write(self, send, data, is_last=is_last)
        if data and not is_last:
            sent.append(self._comment)
            await write(self, send, self._comment)

    def write_comment_now_too(self: StreamedResponse, data: bytes) -> None:
        for each in (data, self._comment):
            write_now(self, each)
        sent.append(self._comment)

    monkeypatch.setattr(StreamedResponse, "_write", write_comment_too)
    monkeypatch.setattr(StreamedResponse, "write_now", write_comment_now_too)
    return sent
