"""A worker that dies of a step and is started again, as a supervisor does it, within this process."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator

from tests.support.fake_worker import FakeWorker, FakeWorkerConfig


class MortalWorker:
    """Fake workers at one address, one after the other: when a step is deadly, its worker drops all streams without a
    word, the step unanswered, and the next one is started."""

    def __init__(self, address: str, config: FakeWorkerConfig) -> None:
        self.num_deaths = 0
        self._address = address
        self._config = config

    async def live(self, started: asyncio.Event) -> None:
        """Until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            worker, dying, gone = FakeWorker(self._config), asyncio.Event(), threading.Event()

            def die(dying: asyncio.Event = dying, gone: threading.Event = gone) -> None:
                loop.call_soon_threadsafe(dying.set)
                gone.wait()

            worker.on_deadly(die)
            await worker.start(self._address)
            started.set()
            try:
                await dying.wait()
            finally:
                await worker.leave()
                gone.set()
                await worker.stop()
            self.num_deaths += 1


@contextlib.asynccontextmanager
async def mortal_worker(address: str, config: FakeWorkerConfig) -> AsyncIterator[MortalWorker]:
    """Serves at the address until the block ends, with the pauses between a death and the next start."""
    worker, started = MortalWorker(address, config), asyncio.Event()
    living = asyncio.create_task(worker.live(started))
    await started.wait()
    try:
        yield worker
    finally:
        living.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await living
