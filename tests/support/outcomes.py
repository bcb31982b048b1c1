"""How requests ended, as the scheduler counts it: it tells one that was aborted from one that ran to its end."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from tests.support.metrics import read_metrics
from tests.support.scheduler_process import assert_nothing_in_use, until
from tests.support.serving import Served


@dataclass(frozen=True, slots=True)
class Outcomes:
    """How many requests of a scheduler have ended in each of these ways."""

    completed: int
    aborted: int

    @property
    def total(self) -> int:
        return self.completed + self.aborted


async def read_outcomes(served: Served) -> Outcomes:
    metrics = await read_metrics(served.scheduler_metrics_port)

    def count(outcome: str) -> int:
        # A way in which no request has ended yet is not among the metrics.
        return int(metrics.get(f'quire_scheduler_requests_total{{outcome="{outcome}"}}', 0))

    return Outcomes(count("completed"), count("aborted"))


@contextlib.asynccontextmanager
async def aborting(served: Served, num_requests: int) -> AsyncIterator[None]:
    """Checks that the block aborts this many requests, and that their blocks are free as soon as they are over.

    Nothing else may run. That nothing is in use some time later would say little: requests end by themselves, too.
    """
    before = await read_outcomes(served)
    yield

    async def all_are_over() -> bool:
        return (await read_outcomes(served)).total >= before.total + num_requests

    await until(all_are_over)
    await assert_nothing_in_use(served.scheduler)
    assert await read_outcomes(served) == Outcomes(before.completed, before.aborted + num_requests)
