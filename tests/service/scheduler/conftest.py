"""A fake worker, and a scheduler service attached to it."""

import pytest

from tests.support.fake_worker import FakeWorker
from tests.support.scheduler_process import GatewayStream, attached_scheduler, wait_nothing_in_use


@pytest.fixture
async def worker():
    fake = FakeWorker()
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
async def scheduler(worker, tmp_path):
    async with attached_scheduler(tmp_path, worker.address) as stub:
        yield stub
        await wait_nothing_in_use(stub)


@pytest.fixture
async def stream(scheduler):
    """The stream of a gateway without a grace period."""
    opened, _ = await GatewayStream.open(scheduler)
    yield opened
    opened.close()
