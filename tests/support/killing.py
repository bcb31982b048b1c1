"""kill -9 of one process of a server that restarts it."""

import os
import signal

from tests.support.scheduler_process import until
from tests.support.serving import Served


async def kill(served: Served, name: str) -> None:
    """Kills "worker", "scheduler" or "gateway" and waits until its successor was started."""
    process = served.server.process(name)
    starts = process.starts
    os.kill(process.pid, signal.SIGKILL)

    async def started_again() -> bool:
        return process.starts > starts

    await until(started_again, timeout_s=30)
