"""kill -9 while beam searches are live, some of them swapped out: clients get what they get undisturbed."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from quire.client import BeamSearch, EarlyStopping, Generation, GenerationOptions
from tests.support.killing import TooLateError, kill, until_hit
from tests.support.scheduler_process import until
from tests.support.serving import Served, serving
from tests.support.tiers import parametrize_once

WIDTHS = (2, 4, 6)
NUM_REQUESTS = 12
MAX_TOKENS = 80
# Too few blocks for all at once, so that some are swapped; the host pool has as many.
SMALL_POOL = {"num_gpu_blocks": 60, "max_num_seqs": 64, "preemption_mode": "swap", "dtype": "float32"}


def options_of(index: int) -> GenerationOptions:
    """Three beam searches to each request of two samples; all are long enough to be killed in the middle."""
    if index % 4 == 3:
        return GenerationOptions(temperature=1.0, seed=index, n=2, max_tokens=MAX_TOKENS, ignore_eos=True)
    width = WIDTHS[index % len(WIDTHS)]
    search = BeamSearch(width, 1.0, EarlyStopping.NEVER)
    return GenerationOptions(beam_search=search, n=width, max_tokens=MAX_TOKENS, ignore_eos=True)


async def ask(served: Served, index: int) -> Generation:
    return await served.client.generate(f"Once upon a time, story {index}", options_of(index))


async def ask_all(served: Served) -> list[Generation]:
    return await served.together(ask(served, index) for index in range(NUM_REQUESTS))


async def until_some_are_swapped(served: Served, asked: asyncio.Task[list[Generation]]) -> None:
    """TooLateError where all have ended."""

    async def some_are() -> bool:
        state = await served.state()
        return asked.done() or (state.swapped_requests > 0 and state.running_requests > 0)

    await until(some_are)
    if asked.done():
        raise TooLateError


def assert_same(got: list[Generation], expected: list[Generation]) -> None:
    """Tokens and text are the same, and the scores of hypotheses to 1e-4."""
    for one, other in zip(got, expected, strict=True):
        assert [(each.index, each.token_ids, each.text) for each in one.sequences] == [
            (each.index, each.token_ids, each.text) for each in other.sequences
        ]
        scores = [each.cumulative_logprob for each in one.sequences]
        assert scores == pytest.approx([each.cumulative_logprob for each in other.sequences], abs=1e-4)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def survivor() -> AsyncIterator[Served]:
    async with serving(**SMALL_POOL) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def undisturbed(survivor: Served) -> list[Generation]:
    """What the requests get if no process dies."""
    return await ask_all(survivor)


@parametrize_once("victims", [["scheduler"], ["worker", "worker"], ["scheduler", "worker"]], ids="-".join)
async def test_searches_and_swapped_groups_survive_the_loss_of(
    victims: list[str], served: Served, undisturbed: list[Generation]
) -> None:
    async def disturbed() -> list[Generation]:
        await served.server.wait_ready()
        asked = asyncio.create_task(ask_all(served))
        for victim in victims:
            await until_some_are_swapped(served, asked)
            await kill(served, victim)
        return await asked

    assert_same(await until_hit(disturbed), undisturbed)
