"""kill -9 of each process of a server that drafts tokens: streams get what a server that drafts none gives them."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from quire.client import GenerationOptions
from quire.scheduler.v1 import scheduler_pb2
from tests.support.killing import Outputs, Streams, story_options, until_hit
from tests.support.serving import Served, serving

SETTINGS: dict[str, Any] = {"num_gpu_blocks": 256, "dtype": "float32"}
KINDS: dict[str, dict[str, Any]] = {"one rank": {}, "two ranks": {"tensor_parallel_size": 2}}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def plain(request: pytest.FixtureRequest) -> Outputs:
    """What the streams get without drafts."""
    async with serving(**SETTINGS, **KINDS[request.param]) as running:
        return await Streams(8).read(running.client)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def survivor(request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    async with serving(**SETTINGS, **KINDS[request.param], speculate=("auto",)) as running:
        yield running


@pytest.mark.parametrize(
    ("plain", "survivor", "victims"),
    [
        ("one rank", "one rank", ["worker", "scheduler", "gateway"]),
        pytest.param("two ranks", "two ranks", ["worker-1", "scheduler"], marks=pytest.mark.extended),
    ],
    indirect=["plain", "survivor"],
)
async def test_streams_are_those_without_drafts(plain: Outputs, served: Served, victims: list[str]) -> None:
    # So that drafts pay, and are right.
    predictions = [texts[0] for _, texts in plain]

    def make_streams(*, durable: bool = False) -> Streams:
        def options_of(index: int) -> GenerationOptions:
            return replace(story_options(index), prediction=predictions[index])

        return Streams(8, durable=durable, options_of=options_of)

    assert await make_streams().read(served.client) == plain
    state = await served.scheduler.GetState(scheduler_pb2.GetStateRequest(gateway_id="none"))
    assert sum(state.drafts.accepted_at) > 0
    for victim in victims:

        async def disturbed(victim: str = victim) -> Outputs:
            streams = make_streams(durable=victim == "gateway")
            async with streams.reading(served) as reading:
                await streams.advance()
                await streams.kill(served, victim)
                return await reading

        assert await until_hit(disturbed) == plain, victim
