"""A fake worker, and a scheduler service attached to it."""

import pytest

from tests.support.fake_worker import FakeWorker
from tests.support.scheduler_process import running_scheduler, wait_attached, wait_nothing_in_use


@pytest.fixture
async def worker():
    fake = FakeWorker()
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
async def scheduler(worker, tmp_path):
    async with running_scheduler(str(tmp_path / "s.sock"), worker.address) as stub:
        await wait_attached(stub)
        yield stub
        await wait_nothing_in_use(stub)
