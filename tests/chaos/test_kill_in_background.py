"""kill -9 under responses that run in the background: they go on, and readers come back to the exact event."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio
from openai import AsyncOpenAI, NotFoundError

from tests.support.killing import TooLateError, kill, until_hit
from tests.support.scheduler_process import until
from tests.support.serving import Served, serving

NUM_RESPONSES = 3


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """Two gateways that share a file; float32, so that what is computed again is the same."""
    path = tmp_path_factory.mktemp("store") / "kept.db"
    async with serving(num_gpu_blocks=512, dtype="float32", gateways=2, response_store=f"sqlite:{path}") as running:
        yield running


class Reader:
    """Reads the events of a response, and comes back where its connection ends."""

    def __init__(self, client: AsyncOpenAI, response_id: str) -> None:
        self._client = client
        self.response_id = response_id
        self.events: list[Any] = []
        self.num_connections = 0

    async def read(self) -> list[Any]:
        async with asyncio.timeout(120):
            while not (self.events and self.events[-1].type in ("response.completed", "response.incomplete")):
                try:
                    await self._read_on()
                except NotFoundError:
                    raise
                except Exception:  # Whatever its library raises for a connection that is cut.
                    await asyncio.sleep(0.1)
        return self.events

    async def _read_on(self) -> None:
        after = {"starting_after": self.events[-1].sequence_number} if self.events else {}
        self.num_connections += 1
        async for event in await self._client.responses.retrieve(self.response_id, stream=True, **after):
            self.events.append(event)


async def _begin(client: AsyncOpenAI, index: int) -> Reader:
    begun = await client.responses.create(
        model="quire-tiny",
        input=f"Tell me story {index}.",
        background=True,
        temperature=float(index % 2),
        max_output_tokens=150,
        extra_body={"seed": index, "ignore_eos": True},
    )
    return Reader(client, begun.id)


def _told(events: Sequence[Any]) -> list[tuple[int, str, str]]:
    return [(event.sequence_number, event.type, getattr(event, "delta", "")) for event in events]


@pytest.mark.parametrize("victims", [("gateway", "gateway-1"), ("scheduler",), ("worker", "gateway")])
async def test_responses_in_the_background_survive(shared: Served, victims: tuple[str, ...]) -> None:
    await shared.server.wait_ready()
    url = f"http://{shared.server.http_address}/v1"
    async with AsyncOpenAI(base_url=url, api_key="unused", max_retries=5) as client:
        plain = [await (await _begin(client, index)).read() for index in range(NUM_RESPONSES)]

        async def disturbed() -> list[list[Any]]:
            readers = [await _begin(client, index) for index in range(NUM_RESPONSES)]
            reading = asyncio.gather(*(reader.read() for reader in readers))

            async def have_begun() -> bool:
                return min(len(reader.events) for reader in readers) >= 20

            await until(have_begun)
            if any(reader.events[-1].type == "response.incomplete" for reader in readers):
                raise TooLateError
            for name in victims:
                await kill(shared, name)
            return await reading

        for events, expected in zip(await until_hit(disturbed), plain, strict=True):
            assert _told(events) == _told(expected)
