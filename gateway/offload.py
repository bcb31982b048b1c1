"""Runs long work of callers in threads, fairly by tenant: tokenization, chat templates, and similar work."""

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar, TypeVarTuple

from gateway.turns import LONG_BYTES
from quire.model_files.progress import shown_bytes
from quire.rpc.errors import ResourceExhausted

MAX_WAITING_BYTES = 64 << 20
"""The default maximum of bytes that wait for a thread, for all tenants together; a tenant may have half of it."""
# The cost of a job in addition to its bytes, so that many tiny jobs are not free.
_OVERHEAD_BYTES = 1024
# An estimate: the end of the preceding work is not known.
_RETRY_AFTER_MS = 1000

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


@dataclass(slots=True)
class _Flow:
    """The waiting short jobs, or the waiting long jobs, of one tenant, in the order of their arrival.

    Attributes:
        served: The virtual time up to which the flow has been served, in bytes.
        jobs: The cost of each job, by the future that starts it.
    """

    served: int
    jobs: dict[asyncio.Future[None], int] = field(default_factory=dict["asyncio.Future[None]", int])

    @property
    def finish(self) -> int:
        """The virtual time up to which the flow is served after its next job."""
        return self.served + next(iter(self.jobs.values()))


class FairExecutor:
    """Threads that tenants share by bytes of work: while several tenants wait, each gets the same bytes per second.

    The order is self-clocked fair queueing (Golestani 1994). Each tenant has two queues, for short jobs and for long
    jobs, which have more than LONG_BYTES. Long jobs never use the last thread, so that short jobs wait only for short
    jobs. A single thread serves both queues in turn.

    All methods are called on one event loop; the functions that it runs must be thread-safe.
    """

    def __init__(self, num_threads: int, *, max_waiting_bytes: int = MAX_WAITING_BYTES) -> None:
        """A tenant may queue half of `max_waiting_bytes`, and always one job."""
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="offload")
        self._num_free = num_threads
        self._num_free_for_long = max(1, num_threads - 1)
        self._max_waiting_bytes = max_waiting_bytes
        self._flows: dict[tuple[str, bool], _Flow] = {}
        self._virtual_time = 0
        self._waiting_bytes: Counter[str] = Counter()

    async def run(
        self, tenant: str, num_bytes: int, function: Callable[[*Arguments], Result], *arguments: *Arguments
    ) -> Result:
        """Runs a function in a thread, at its tenant's turn, and returns the result. Its duration should be
        proportional to `num_bytes`. A cancelled call gives up its turn; a running function is not interrupted.

        Raises:
            ResourceExhausted: too many bytes are waiting.
        """
        is_long = num_bytes > LONG_BYTES
        await self._turn(tenant, num_bytes + _OVERHEAD_BYTES, is_long)
        # Shielded: the thread is in use until the function returns, even if the caller is cancelled.
        running = asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)
        running.add_done_callback(lambda _: self._leave(is_long))
        return await asyncio.shield(running)

    def shutdown(self) -> None:
        """Starts no more functions, and does not wait for running ones."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _turn(self, tenant: str, cost: int, is_long: bool) -> None:
        """Waits for a thread for this job, and takes it."""
        if self._is_free(is_long):
            # No waiting job could use the thread: `_leave` starts every job that can run.
            self._take(is_long)
            return
        self._check_room(tenant, cost)
        flow = self._flows.setdefault((tenant, is_long), _Flow(self._virtual_time))
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        flow.jobs[turn] = cost
        self._waiting_bytes[tenant] += cost
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                # The turn came at the same time as the cancellation.
                self._leave(is_long)
            else:
                self._remove((tenant, is_long), turn)
            raise

    def _check_room(self, tenant: str, cost: int) -> None:
        own, total = self._waiting_bytes[tenant], self._waiting_bytes.total()
        if not own:
            return
        if own + cost > self._max_waiting_bytes // 2:
            fact, limit = f"{shown_bytes(own)} of this tenant's requests wait", self._max_waiting_bytes // 2
        elif total + cost > self._max_waiting_bytes:
            fact, limit = f"{shown_bytes(total)} of requests wait", self._max_waiting_bytes
        else:
            return
        raise ResourceExhausted(
            f"{fact} to be processed, and {shown_bytes(cost)} more would exceed {shown_bytes(limit)}; try again, and "
            "send fewer long ones at once",
            reason="WORK_QUEUE_FULL",
            retry_after_ms=_RETRY_AFTER_MS,
        )

    def _is_free(self, is_long: bool) -> bool:
        return self._num_free > 0 and (not is_long or self._num_free_for_long > 0)

    def _take(self, is_long: bool) -> None:
        self._num_free -= 1
        self._num_free_for_long -= is_long

    def _leave(self, is_long: bool) -> None:
        """Frees the thread of a job, and starts the jobs whose turn it is."""
        self._num_free += 1
        self._num_free_for_long += is_long
        while startable := [(flow.finish, key) for key, flow in self._flows.items() if self._is_free(key[1])]:
            finish, key = min(startable)
            flow = self._flows[key]
            turn = next(iter(flow.jobs))
            if turn.cancelled():
                # Its caller was cancelled, but has not run since.
                self._remove(key, turn)
                continue
            flow.served = finish
            self._virtual_time = max(self._virtual_time, finish)
            self._remove(key, turn)
            self._take(key[1])
            turn.set_result(None)

    def _remove(self, key: tuple[str, bool], turn: asyncio.Future[None]) -> None:
        """Removes a waiting job. A flow without jobs is removed; a new flow starts at the virtual time."""
        tenant, flow = key[0], self._flows.get(key)
        if flow is None or turn not in flow.jobs:
            return
        self._waiting_bytes[tenant] -= flow.jobs.pop(turn)
        if not flow.jobs:
            del self._flows[key]
        if not self._waiting_bytes[tenant]:
            del self._waiting_bytes[tenant]
