"""What the gateway's stores in SQLite share: transactions, and the thread of each."""

import asyncio
import sqlite3
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, ParamSpec, TypeVar

from gateway.auth.caller import calling_tenant

Arguments = ParamSpec("Arguments")
Found = TypeVar("Found")


class StoreThread:
    """The thread of a store. Tenants take turns there, and the gateway with what it does by itself, such as the renewal
    of leases: nobody waits for the many calls of another tenant. The work of each is done in the order of its calls."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)
        self._lock = threading.Lock()
        # What waits, by tenant, in the order of their turns; None is the gateway.
        self._waiting: OrderedDict[str | None, deque[tuple[Future[Any], Callable[[], Any]]]] = OrderedDict()

    def open(self, opened: Callable[[], Found]) -> Found:
        """The result of the first work. Raises what it raises."""
        return self._thread.submit(opened).result()

    async def run(
        self, work: Callable[Arguments, Found], *arguments: Arguments.args, **named: Arguments.kwargs
    ) -> Found:
        """Does some work when it is its turn; a cancelled call gives that up."""
        future: Future[Found] = Future()
        with self._lock:
            self._waiting.setdefault(calling_tenant(), deque()).append((future, partial(work, *arguments, **named)))
        asyncio.get_running_loop().run_in_executor(self._thread, self._do_next)
        return await asyncio.wrap_future(future)

    def close(self, last: Callable[[], object]) -> None:
        """Does what waits, then `last`, and ends."""
        self._thread.submit(last)
        self._thread.shutdown(wait=False)

    def _do_next(self) -> None:
        """Called once for each work that was asked for."""
        with self._lock:
            tenant, queue = self._waiting.popitem(last=False)
            future, work = queue.popleft()
            if queue:
                self._waiting[tenant] = queue
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)


@contextmanager
def changing(database: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """A transaction, which no other gateway's interrupts."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield database
        database.execute("COMMIT")
    except BaseException:
        # Where the disk is full or fails, SQLite has ended it.
        if database.in_transaction:
            database.execute("ROLLBACK")
        raise
