"""kill -9 of the scheduler while no client reads: what a gateway holds of a durable request is enough to go on."""

import asyncio
import itertools

import grpc.aio
import pytest

from quire.common.v1 import common_pb2
from quire.gateway.v1 import generation_pb2, generation_pb2_grpc
from quire.rpc.channel import open_channel
from tests.support.killing import kill
from tests.support.serving import Served

pytestmark = pytest.mark.extended

NUM_STREAMS = 12
_numbers = itertools.count()


def request_of(index: int) -> generation_pb2.GenerateStreamRequest:
    """Greedy and seeded sampling, with log probabilities and without."""
    return generation_pb2.GenerateStreamRequest(
        text=f"Once upon a time, story {index}",
        request_id=f"unread-{next(_numbers)}",
        durable=True,
        sampling=common_pb2.SamplingParameters(temperature=float(index % 2), seed=index),
        stopping=common_pb2.StoppingParameters(max_tokens=250, ignore_eos=True),
        output=common_pb2.OutputOptions(logprobs=2) if index % 3 == 0 else None,
    )


class Client:
    """Reads one stream by calls of its own, and asks nobody to compute anything twice."""

    def __init__(self, stub: generation_pb2_grpc.GenerationServiceStub, index: int) -> None:
        self._stub = stub
        self._request = request_of(index)
        self.token_ids: list[int] = []
        self.text = ""
        self.logprobs: list[float] = []
        self.is_completed = False

    async def read(self, call, num_tokens: int) -> None:
        """Until it has so many tokens, or all."""
        async for response in call:
            if response.WhichOneof("event") == "completed":
                self.is_completed = True
            elif response.WhichOneof("event") == "chunk":
                assert response.chunk.offset == len(self.token_ids)
                self.token_ids += response.chunk.token_ids
                self.text += response.chunk.text
                self.logprobs += [each.chosen.logprob for each in response.chunk.logprobs]
                if len(self.token_ids) >= num_tokens:
                    return

    async def begin(self, num_tokens: int) -> None:
        call = self._stub.GenerateStream(self._request)
        await self.read(call, num_tokens)
        call.cancel()

    async def resume(self) -> None:
        """Comes back until there is a server."""
        while not self.is_completed:
            again = generation_pb2.ResumeStreamRequest(request_id=self._request.request_id)
            again.offsets.add(offset=len(self.token_ids), num_characters=len(self.text))
            try:
                await self.read(self._stub.ResumeStream(again), 1_000)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                await asyncio.sleep(0.05)


@pytest.mark.parametrize("clients_are_back", ["at once", "once the server is ready again"])
async def test_durable_streams_survive_the_loss_of_the_scheduler_while_their_clients_are_away(
    clients_are_back: str, served: Served
) -> None:
    async with open_channel(served.server.grpc_address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        undisturbed = [Client(stub, index) for index in range(NUM_STREAMS)]
        clients = [Client(stub, index) for index in range(NUM_STREAMS)]
        async with asyncio.timeout(100):
            await asyncio.gather(*(client.begin(1_000) for client in undisturbed))
            await asyncio.gather(*(client.begin(20) for client in clients))
        await kill(served, "scheduler")
        if clients_are_back == "once the server is ready again":
            await served.server.wait_ready()
        async with asyncio.timeout(100):
            await asyncio.gather(*(client.resume() for client in clients))
    for client, expected in zip(clients, undisturbed, strict=True):
        assert (client.token_ids, client.text) == (expected.token_ids, expected.text)
        assert client.logprobs == pytest.approx(expected.logprobs, abs=1e-3)
