"""kill -9 of one of two gateways under load: whoever is at the other one notices nothing, and takes over."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from quire.client import AsyncClient, GenerationOptions, TokenChunk
from quire.rpc.errors import Unavailable
from tests.support.killing import TooLateError, kill, until_hit
from tests.support.scheduler_process import until
from tests.support.serving import Served, serving
from tests.support.shared_port import clients_of_both, gateway_id_of, names_by_id

pytestmark = pytest.mark.extended

NUM_STREAMS = 6
SETTINGS: dict[str, Any] = {"gateways": 2, "num_gpu_blocks": 512, "dtype": "float32"}

Output = tuple[list[int], str]


def options_of(index: int, max_tokens: int) -> GenerationOptions:
    """Greedy and seeded sampling, mixed."""
    return GenerationOptions(temperature=float(index % 2), seed=index, max_tokens=max_tokens, ignore_eos=True)


async def read(
    client: AsyncClient, index: int, started: asyncio.Event, *, max_tokens: int, durable: bool = False
) -> Output:
    """Tokens and text of one stream; checks that offsets are consecutive and that its end comes."""
    token_ids: list[int] = []
    text = ""
    prompt = f"Once upon a time, story {index}"
    async with client.generate_stream(prompt, options_of(index, max_tokens), durable=durable) as stream:
        async for event in stream:
            if isinstance(event, TokenChunk):
                assert event.offset == len(token_ids)
                token_ids += event.token_ids
                text += event.text
                if len(token_ids) > 20:
                    started.set()
    assert stream.completed is not None
    return token_ids, text


class Load:
    """Streams that run through one client; long enough to be in the middle when the kill comes."""

    def __init__(self, client: AsyncClient, *, max_tokens: int = 250, durable: bool = False) -> None:
        self._started = [asyncio.Event() for _ in range(NUM_STREAMS)]
        self._streams = [
            asyncio.create_task(read(client, index, started, max_tokens=max_tokens, durable=durable))
            for index, started in enumerate(self._started)
        ]

    async def wait_started(self) -> None:
        """Until each stream is well under way. TooLateError where all have ended."""
        for started in self._started:
            await started.wait()
        if all(stream.done() for stream in self._streams):
            raise TooLateError

    async def outputs(self) -> list[Output]:
        return await asyncio.gather(*self._streams)

    async def errors(self) -> list[BaseException]:
        """Of streams that fail. TooLateError where none does."""
        outcomes = await asyncio.gather(*self._streams, return_exceptions=True)
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if not errors:
            raise TooLateError
        return errors


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def served() -> AsyncIterator[Served]:
    """Two gateways, and a scheduler that gives up at once what a lost one asked for."""
    async with serving(reconnect_grace=0.0, **SETTINGS) as running:
        yield running


async def test_streams_of_the_other_gateway_are_as_if_nothing_had_happened(served: Served) -> None:
    undisturbed = await Load(served.client).outputs()

    async def kill_one() -> list[BaseException]:
        await served.server.wait_ready()
        async with clients_of_both(served.server) as clients:
            lost, kept = Load(clients["gateway-1"]), Load(clients["gateway"])
            await lost.wait_started()
            await kept.wait_started()
            await kill(served, "gateway-1")
            assert await kept.outputs() == undisturbed
            return await lost.errors()

    assert all(isinstance(error, Unavailable) for error in await until_hit(kill_one))
    assert served.server.process("gateway").starts == 1


async def test_durable_streams_of_the_lost_gateway_go_on_through_the_other():
    async with serving(**SETTINGS) as served:
        undisturbed = await Load(served.client, durable=True).outputs()
        names = await names_by_id(served.server)
        lost_id = await gateway_id_of(served.client)

        async def begun() -> Load:
            load = Load(served.client, durable=True)
            await load.wait_started()
            return load

        disturbed = await until_hit(begun)
        # For good, so that whatever comes now comes from the other one.
        served.server.process(names[lost_id]).kill()
        assert await disturbed.outputs() == undisturbed
        # The port leads to whoever is there; the client was told no other address.
        assert await gateway_id_of(served.client) in names.keys() - {lost_id}


async def test_blocks_of_the_lost_gateway_are_free_while_the_other_serves_on(served: Served) -> None:
    async def both_are_connected() -> bool:
        return (await served.state()).connected_gateways == 2

    async def kill_one() -> None:
        await served.server.wait_ready()
        await until(both_are_connected)
        async with clients_of_both(served.server) as clients:
            lost = Load(clients["gateway-1"], max_tokens=900)
            await lost.wait_started()
            async with served.aborting():
                if await served.num_live() < NUM_STREAMS:
                    raise TooLateError
                assert (await served.state()).gpu_pool.used_blocks > 0
                await kill(served, "gateway-1")
            assert len(await lost.errors()) == NUM_STREAMS
            answer = await clients["gateway"].generate("Once upon a time", GenerationOptions(max_tokens=5))
            assert len(answer.sequences[0].token_ids) == 5

    await until_hit(kill_one)
    await until(both_are_connected)
