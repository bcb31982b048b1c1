"""A scheduler's links to several ranks: what it takes for one group, and when that is lost."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from scheduler_svc.service.worker_group import StepLink, attach_workers
from scheduler_svc.service.worker_link import WorkerLostError
from tests.support.tiny_causal_lm import TinyCausalLM
from tests.support.worker_server import running_worker
from worker_svc.ranks import Ranks


class AgreeingRanks(Ranks):
    """Ranks of one start of a group, without a group: they agree on the number that they are given."""

    def __init__(self, rank: int, size: int, generation: int) -> None:
        super().__init__(rank, size)
        self._generation = generation

    def smallest(self, *numbers: int) -> tuple[int, ...]:
        return tuple(-self._generation if number < 0 else number for number in numbers)


@contextlib.asynccontextmanager
async def running_rank(directory: Path, rank: int, size: int = 2, generation: int = 5) -> AsyncIterator[str]:
    (directory / str(rank)).mkdir()
    model = TinyCausalLM()
    model.ranks = AgreeingRanks(rank, size, generation)
    async with running_worker(directory / str(rank), model, heartbeat_interval_s=0.05) as address:
        yield address


async def receive_for_ever(link: StepLink) -> None:
    async with asyncio.timeout(10):
        while True:
            await link.receive()


@contextlib.asynccontextmanager
async def attached(*addresses: str) -> AsyncIterator[StepLink]:
    link = await attach_workers(addresses, 1, 5.0)
    try:
        yield link
    finally:
        await link.close()


async def test_ranks_of_one_group_are_attached_as_one(tmp_path: Path) -> None:
    async with (
        running_rank(tmp_path, 0) as first,
        running_rank(tmp_path, 1) as second,
        attached(first, second) as link,
    ):
        assert link.info.worker_generation == 5
        # Nothing was sent, so what comes is a sign of life.
        assert await link.receive() is None


async def test_ranks_in_the_wrong_order_are_refused(tmp_path: Path) -> None:
    async with running_rank(tmp_path, 0) as first, running_rank(tmp_path, 1) as second:
        with pytest.raises(WorkerLostError, match="is rank 1 of 2; --workers names it as rank 0 of 2"):
            await attach_workers((second, first), 1, 5.0)


async def test_a_rank_without_the_others_is_refused(tmp_path: Path) -> None:
    async with running_rank(tmp_path, 0) as first:
        with pytest.raises(WorkerLostError, match="is rank 0 of 2; --workers names it as rank 0 of 1"):
            await attach_workers((first,), 1, 5.0)


async def test_ranks_of_two_starts_are_refused(tmp_path: Path) -> None:
    async with running_rank(tmp_path, 0) as first, running_rank(tmp_path, 1, generation=6) as second:
        with pytest.raises(WorkerLostError, match="it belongs to another start of the group"):
            await attach_workers((first, second), 1, 5.0)


async def test_the_group_is_lost_with_any_of_its_ranks(tmp_path: Path) -> None:
    async with running_rank(tmp_path, 0) as first, contextlib.AsyncExitStack() as stack:
        second = await stack.enter_async_context(running_rank(tmp_path, 1))
        async with attached(first, second) as link:
            await stack.aclose()
            with pytest.raises(WorkerLostError, match=second):
                await receive_for_ever(link)
