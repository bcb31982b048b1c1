"""kill -9 under responses that run in the background or over WebSockets: readers resume at the exact event."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

import pytest
import pytest_asyncio
from openai import AsyncOpenAI, NotFoundError
from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

from tests.support.killing import TooLateError, until_hit
from tests.support.scheduler_process import until
from tests.support.serving import Served, serving

NUM_RESPONSES = 3


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """Two gateways that share a file; with the parameter "one gateway" the only gateway of a server, with the default
    store. In float32, so that recomputed values are the same."""
    directory = tmp_path_factory.mktemp("store")
    flags: dict[str, Any] = {"gateways": 2, "response_store": f"sqlite:{directory}/kept.db"}
    if getattr(request, "param", None) == "one gateway":
        flags = {}
    async with serving(num_gpu_blocks=512, dtype="float32", batch_dir=directory / "batches", **flags) as running:
        yield running


class Reader:
    """Reads the events of a response, and reconnects if its connection ends."""

    def __init__(self, client: AsyncOpenAI, response_id: str) -> None:
        self._client = client
        self.response_id = response_id
        self.events: list[Any] = []

    async def read(self) -> list[Any]:
        async with asyncio.timeout(120):
            while not (self.events and self.events[-1].type in ("response.completed", "response.incomplete")):
                try:
                    await self._read_on()
                except NotFoundError:
                    raise
                except Exception:  # Any error that the library raises for a broken connection.
                    await asyncio.sleep(0.1)
        return self.events

    async def _read_on(self) -> None:
        after = {"starting_after": self.events[-1].sequence_number} if self.events else {}
        async for event in await self._client.responses.retrieve(self.response_id, stream=True, **after):
            self.events.append(event)


async def _begin(client: AsyncOpenAI, index: int) -> Reader:
    begun = await client.responses.create(
        model="quire-tiny",
        input=f"Tell me story {index}.",
        background=True,
        temperature=float(index % 2),
        max_output_tokens=100,
        extra_body={"seed": index, "ignore_eos": True},
    )
    return Reader(client, begun.id)


def _told(events: Sequence[Any]) -> list[tuple[int, str, str]]:
    return [(event.sequence_number, event.type, getattr(event, "delta", "")) for event in events]


@pytest.mark.parametrize(
    ("shared", "victims"),
    [
        ("one gateway", ("gateway",)),
        pytest.param("two gateways", ("gateway", "gateway-1"), marks=pytest.mark.long),
        pytest.param("two gateways", ("worker", "gateway"), marks=pytest.mark.long),
    ],
    indirect=["shared"],
)
async def test_responses_in_the_background_survive(shared: Served, victims: tuple[str, ...]) -> None:
    await shared.wait_ready()
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
                await shared.kill(name)
            return await reading

        for events, expected in zip(await until_hit(disturbed), plain, strict=True):
            assert _told(events) == _told(expected)


async def _read_stream(url: str, fields: dict[str, Any], events: list[Any]) -> None:
    """Reads a stream of a WebSocket to its end; comes back with the stream's name and the number of the last event."""
    asked = {"type": "response.create", "model": "quire-tiny", **fields}
    async with asyncio.timeout(60):
        while not (events and events[-1]["type"] == "response.incomplete"):
            try:
                async with connect(f"{url}/v1/responses") as socket:
                    await socket.send(json.dumps(asked))
                    async for text in socket:
                        event = json.loads(text)
                        assert event["stream_id"] == fields["stream_id"]
                        if event["type"] == "error":
                            break
                        events.append(event)
                        asked = {"type": "response.resume", "stream_id": fields["stream_id"]}
                        asked["starting_after"] = event["sequence_number"]
                        if event["type"] == "response.incomplete":
                            break
            except (OSError, WebSocketException):
                await asyncio.sleep(0.1)


async def test_streams_of_a_websocket_go_on_at_the_exact_event(shared: Served) -> None:
    await shared.wait_ready()
    url = f"ws://{shared.server.http_address}"

    async def read_all(names: str) -> list[list[Any]]:
        streams: list[list[Any]] = [[] for _ in range(NUM_RESPONSES)]
        reading = asyncio.gather(
            *(
                _read_stream(
                    url,
                    {
                        "stream_id": f"{names}.{index}",
                        "input": f"Tell me story {index}.",
                        "temperature": float(index % 2),
                        "max_output_tokens": 100,
                        "seed": index,
                        "ignore_eos": True,
                        "durable": True,
                    },
                    events,
                )
                for index, events in enumerate(streams)
            )
        )
        if names == "plain":
            await reading
            return streams

        async def have_begun() -> bool:
            return min(map(len, streams)) >= 20

        await until(have_begun)
        if any(events[-1]["type"] == "response.incomplete" for events in streams):
            raise TooLateError
        for name in ("gateway", "gateway-1"):
            await shared.kill(name)
        await reading
        return streams

    plain = await read_all("plain")
    for events, expected in zip(await until_hit(partial(read_all, "killed")), plain, strict=True):
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        told = [[(each["type"], each.get("delta")) for each in one] for one in (events, expected)]
        assert told[0] == told[1]


@pytest.mark.extended
async def test_a_batch_survives_and_answers_each_request_once(shared: Served) -> None:
    await shared.wait_ready()
    body = {"model": "quire-tiny", "prompt": "Once", "temperature": 1, "ignore_eos": True}
    # The first ones end early, and the others not together: the services are killed in between.
    bodies = [body | {"seed": seed, "max_tokens": 10 + 5 * seed} for seed in range(30)]
    lines = [
        {"custom_id": f"r{seed}", "method": "POST", "url": "/v1/completions", "body": each}
        for seed, each in enumerate(bodies)
    ]
    content = "".join(json.dumps(each) + "\n" for each in lines).encode()
    url = f"http://{shared.server.http_address}/v1"
    async with AsyncOpenAI(base_url=url, api_key="unused", max_retries=10) as client:
        file = await client.files.create(file=("in.jsonl", content), purpose="batch")

        async def answers(victims: Sequence[str]) -> list[tuple[str, str]]:
            batch = await client.batches.create(
                input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
            )

            async def has(count: int) -> bool:
                return (await client.batches.retrieve(batch.id)).request_counts.completed >= count

            await until(partial(has, 5))
            if await has(25):
                raise TooLateError
            for name in victims:
                await shared.kill(name)
            await until(partial(has, 30))

            async def is_completed() -> bool:
                return (await client.batches.retrieve(batch.id)).status == "completed"

            await until(is_completed)
            ended = await client.batches.retrieve(batch.id)
            assert ended.error_file_id is None
            results = (await client.files.content(str(ended.output_file_id))).text.splitlines()
            return [
                (each["custom_id"], each["response"]["body"]["choices"][0]["text"]) for each in map(json.loads, results)
            ]

        texts = await asyncio.gather(*(_completion(client, each["body"]) for each in lines))
        expected = [(each["custom_id"], text) for each, text in zip(lines, texts, strict=True)]
        assert await until_hit(partial(answers, ("gateway", "gateway-1", "worker"))) == expected


async def _completion(client: AsyncOpenAI, body: dict[str, Any]) -> str:
    return (await client.completions.create(model=body["model"], prompt="", extra_body=body)).choices[0].text
