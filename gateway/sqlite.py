"""Shared parts of the gateway's SQLite stores: their threads, and transactions."""

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
    """The thread of a store. Tenants take turns, so that no tenant waits for many calls of another one; the gateway's
    own work, such as the renewal of leases, has turns, too. The calls of one tenant run in order."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)
        self._lock = threading.Lock()
        # Waiting work by tenant, in the order of the turns; None is the gateway itself.
        self._waiting: OrderedDict[str | None, deque[tuple[Future[Any], Callable[[], Any]]]] = OrderedDict()

    def open(self, opened: Callable[[], Found]) -> Found:
        """Runs the first function in the thread and returns its result. Raises the function's error."""
        return self._thread.submit(opened).result()

    async def run(
        self, work: Callable[Arguments, Found], *arguments: Arguments.args, **named: Arguments.kwargs
    ) -> Found:
        """Runs a function at its turn and returns the result; a cancelled call gives up its turn."""
        future: Future[Found] = Future()
        with self._lock:
            self._waiting.setdefault(calling_tenant(), deque()).append((future, partial(work, *arguments, **named)))
        asyncio.get_running_loop().run_in_executor(self._thread, self._do_next)
        return await asyncio.wrap_future(future)

    def close(self, last: Callable[[], object]) -> None:
        """Runs all waiting work, then `last`, and ends the thread."""
        self._thread.submit(last)
        self._thread.shutdown(wait=False)

    def _do_next(self) -> None:
        """Runs the next function. Called once for each call of `run`."""
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
    """A write transaction, which excludes the writes of other gateways."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield database
        database.execute("COMMIT")
    except BaseException:
        # If the disk is full or fails, SQLite has already ended the transaction.
        if database.in_transaction:
            database.execute("ROLLBACK")
        raise
