"""Runs the rows of a leased table at this gateway, each in a task."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from gateway.request.models import Models
from gateway.sqlite import LeasedTable, Row
from quire.rpc.errors import QuireError

RENEW_S = 1.0
"""Interval of the renewal of leases, in seconds."""
_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class LeasedRun:
    """A row that runs here."""

    id: str
    task: asyncio.Task[None] | None = field(default=None, init=False)

    def cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()


Run = TypeVar("Run", bound=LeasedRun)


class LeasedRuns(ABC, Generic[Row, Run]):
    """The runs of a table at this gateway, by the ids of their rows."""

    def __init__(self, store: LeasedTable[Row], models: Models, description: str) -> None:
        """`description` names the rows in logs."""
        self._leases = store
        self._models = models
        self._description = description
        self._runs: dict[str, Run] = {}
        self._is_stopping = False

    @abstractmethod
    def _max_taken(self) -> int:
        """The maximum number of rows to take now."""

    @abstractmethod
    def _run_taken(self, row: Row) -> None:
        """Starts the run of a row that was taken from the table."""

    def _renewed(self, run: Run, status: str) -> None:
        """The lease of a run was renewed, and its row has this status."""

    def _start(self, run: Run, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self._runs[run.id] = run
        run.task = asyncio.create_task(work, name=f"{self._description} {run.id}")
        run.task.add_done_callback(lambda _: self._runs.pop(run.id, None))
        return run.task

    async def run(self) -> None:
        """Renews the leases of rows that run here, and takes rows that no gateway runs, until cancelled."""
        while True:
            try:
                await self._look_after()
            except QuireError as error:
                _logger.warning("%s: %s", self._description, error)
            await asyncio.sleep(RENEW_S)

    async def _look_after(self) -> None:
        runs = list(self._runs.values())
        states = await self._leases.run(self._leases.renew, [run.id for run in runs])
        for run in runs:
            if run.id in states:
                self._renewed(run, states[run.id])
            else:
                run.cancel()
        if self._is_stopping or self._models.is_draining or not self._models.has_replica:
            return
        rows = await self._leases.run(self._leases.take, self._max_taken(), frozenset(self._runs))
        if self._is_stopping:
            # The gateway began to stop meanwhile, and `stop_runs` did not see these rows.
            await self._leases.run(self._leases.give_up, [row.id for row in rows])
            return
        for row in rows:
            self._run_taken(row)

    async def stop_runs(self) -> None:
        """Stops all runs, and prevents new ones. Other gateways that share the store, or the next start, continue
        them."""
        self._is_stopping = True
        runs = list(self._runs.values())
        for run in runs:
            run.cancel()
        await asyncio.gather(*(run.task for run in runs if run.task is not None), return_exceptions=True)
        if not runs:
            return
        try:
            await self._leases.run(self._leases.give_up, [run.id for run in runs])
        except QuireError as error:
            _logger.warning("%s: %s", self._description, error)
