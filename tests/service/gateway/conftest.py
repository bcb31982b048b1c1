"""A gateway with one fake scheduler, over loopback."""

from collections.abc import AsyncIterator

import pytest

from tests.support.fake_scheduler import FakeScheduler
from tests.support.gateway_process import RunningGateway, running_gateway


@pytest.fixture
async def scheduler() -> AsyncIterator[FakeScheduler]:
    fake = FakeScheduler()
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
async def gateway(scheduler: FakeScheduler) -> AsyncIterator[RunningGateway]:
    async with running_gateway(scheduler) as running:
        yield running
