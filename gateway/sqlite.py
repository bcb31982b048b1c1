"""SQLite databases, each with a thread of its own, in memory or in a file that all gateways of a machine share; and
tables of work in them, which a gateway leases."""

import asyncio
import sqlite3
import threading
from abc import abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, ParamSpec, Protocol, TypeVar

from gateway.auth.caller import calling_tenant
from quire.rpc.errors import Unavailable
from quire.runtime import clock
from quire.runtime.settings import ConfigurationError

Arguments = ParamSpec("Arguments")
Found = TypeVar("Found")
LOCK_TIMEOUT_S = 5.0
"""Maximum seconds that a statement waits for the lock of another connection."""
_PAUSE_S = 0.02
_VERSION = 1
LEASE_S = 5.0
# Maximum rows without a lease that are considered at once.
_MAX_DUE = 10_000


class Store:
    """An SQLite database: in memory, or in a file, which several gateways of a machine may have open.

    All methods except `run` and `close` must run in the store's thread, in which `run` calls them. Tenants take turns,
    so that no tenant waits for many calls of another one; the gateway's own work, such as the renewal of leases, has
    turns, too. The calls of one tenant run in order.

    Attributes:
        tables: A script that makes the tables and indexes that the file does not have yet.
        description: The name of the store in errors.
    """

    tables: ClassVar[str]
    description: ClassVar[str]

    def __init__(self, path: Path | None, flag: str) -> None:
        """Without a path the store is in memory. Raises ConfigurationError, which names the flag with its value, if the
        file cannot be used."""
        self._path = path
        self._thread = ThreadPoolExecutor(1, type(self).__name__)
        self._lock = threading.Lock()
        # Waiting work by tenant, in the order of the turns; None is the gateway itself.
        self._waiting: OrderedDict[str | None, deque[tuple[Future[Any], Callable[[], Any]]]] = OrderedDict()
        self._is_closed = False
        try:
            self._thread.submit(self._open).result()
        except (OSError, sqlite3.Error) as error:
            raise ConfigurationError(f"{flag} cannot be used: {error}") from error

    def _open(self) -> None:
        if self._path is not None:
            # The file holds conversations.
            self._path.touch(mode=0o600)
            self._path.chmod(0o600)
        name = ":memory:" if self._path is None else self._path
        self._database = sqlite3.connect(name, timeout=LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        try:
            self._prepare()
        except BaseException:
            self._database.close()
            raise

    def _prepare(self) -> None:
        # Two gateways may make the file at the same moment. While another connection writes, SQLite refuses at once to
        # change the kind of journal, whatever the timeout is.
        end = clock.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                self._database.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL;")
                break
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or clock.monotonic() >= end:
                    raise
            threading.Event().wait(_PAUSE_S)
        if self.rows("PRAGMA user_version")[0][0] not in (0, _VERSION):
            raise sqlite3.DatabaseError("it is of another version of Quire")
        self._database.executescript(f"{self.tables} PRAGMA user_version = {_VERSION};")

    async def run(
        self, work: Callable[Arguments, Found], *arguments: Arguments.args, **named: Arguments.kwargs
    ) -> Found:
        """Runs a function at its turn and returns the result; a cancelled call gives up its turn. Raises Unavailable if
        the database or its directory cannot be used."""
        future: Future[Found] = Future()
        with self._lock:
            self._waiting.setdefault(calling_tenant(), deque()).append((future, partial(work, *arguments, **named)))
        asyncio.get_running_loop().run_in_executor(self._thread, self._do_next)
        try:
            return await asyncio.wrap_future(future)
        except (OSError, sqlite3.Error) as error:
            raise self.unusable(error) from error

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

    def unusable(self, error: Exception) -> Unavailable:
        """The error of a caller if the database cannot be used."""
        return Unavailable(f"{self.description} cannot be used: {error}")

    def close(self) -> None:
        """Ends the thread after its waiting work. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._thread.submit(self._database.close)
            self._thread.shutdown(wait=False)

    def rows(self, statement: str, *values: object) -> list[Any]:
        """Runs a statement, and returns all its rows. Nothing of it remains open: no lock and no snapshot."""
        return self._database.execute(statement, values).fetchall()

    def change(self, statement: str, *values: object) -> int:
        """Runs a statement that changes rows, and returns their number."""
        return self._database.execute(statement, values).rowcount

    @contextmanager
    def changing(self) -> Iterator[None]:
        """A write transaction, which excludes the writes of other gateways."""
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._database.execute("COMMIT")
        except BaseException:
            # If the disk is full or fails, SQLite has already ended the transaction.
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            raise


class LeasedRow(Protocol):
    """A row as a gateway runs it."""

    @property
    def id(self) -> str: ...


Row = TypeVar("Row", bound=LeasedRow)


class NotOwnerError(Exception):
    """This run must not write: another gateway runs the row, or its state has changed."""


class LeasedTable(Store, Generic[Row]):
    """A store with a table of work that outlives a gateway: a lease says which gateway runs a row.

    A row is one piece of work, such as a batch. A gateway renews the leases of the rows that it runs. If it is lost,
    its leases expire, and another gateway that shares the file takes the rows and continues their work. Each write of a
    run checks the owner, and is rejected if the row has another owner or has ended. So a lost gateway that writes late
    changes nothing.

    Attributes:
        table: The name of the table. Its columns include id, tenant, created, status, owner and leased_until.
        active: The states in which a gateway runs a row.
        owner: The id of this gateway.
    """

    table: ClassVar[str]
    active: ClassVar[tuple[str, ...]]

    def __init__(self, path: Path | None, flag: str, owner: str) -> None:
        super().__init__(path, flag)
        self.owner = owner

    @abstractmethod
    def select(self, where: str, *values: object) -> list[Row]:
        """The rows for which an SQL condition with these values is true."""

    def choose(self, due: Sequence[tuple[str, str]], running: Collection[str], most: int) -> list[str]:
        """The ids of the rows to take, from the tenants and ids of the rows without a lease, oldest first."""
        return [row_id for _, row_id in due if row_id not in running][:most]

    def take(self, most: int, running: Collection[str] = ()) -> list[Row]:
        """Takes the active rows that `choose` chooses from the rows without a lease. Rows in `running`, which this
        gateway runs already, are not taken: a slow disk or thread may have let their lease expire."""
        now = clock.unix_s()
        due = f"SELECT tenant, id FROM {self.table} WHERE status IN {self.active} AND leased_until < ?"
        if not self.rows(f"{due} LIMIT 1", now):
            return []
        with self.changing():
            taken = self.choose(self.rows(f"{due} ORDER BY created LIMIT {_MAX_DUE}", now), running, most)
            for row_id in taken:
                self.change(
                    f"UPDATE {self.table} SET owner = ?, leased_until = ? WHERE id = ?",
                    *(self.owner, now + LEASE_S, row_id),
                )
            return [row for row_id in taken for row in self.select("id = ?", row_id)]

    def renew(self, ids: Sequence[str]) -> dict[str, str]:
        """Renews the leases of rows; returns the states of the rows that this gateway still runs."""
        with self.changing():
            states = {row_id: self._own_status(row_id) for row_id in ids}
            self.set_lease(ids, clock.unix_s() + LEASE_S)
        return {row_id: status for row_id, status in states.items() if status is not None}

    def give_up(self, ids: Sequence[str]) -> None:
        """Ends the leases of rows, so that another gateway or the next start can run them."""
        with self.changing():
            self.set_lease(ids, 0)

    def set_lease(self, ids: Sequence[str], until: float) -> None:
        """Sets the end of the leases that this gateway has of rows, in seconds since the Unix epoch."""
        for row_id in ids:
            self.change(
                f"UPDATE {self.table} SET leased_until = ? WHERE id = ? AND owner = ?", until, row_id, self.owner
            )

    @contextmanager
    def writing(self, row_id: str) -> Iterator[str]:
        """A transaction in which this gateway writes to a row that it runs. Yields the row's status. Raises
        NotOwnerError if this gateway does not run the row any more."""
        with self.changing():
            status = self._own_status(row_id)
            if status is None:
                raise NotOwnerError
            yield status

    def _own_status(self, row_id: str) -> str | None:
        rows: list[Any] = self.rows(
            f"SELECT status FROM {self.table} WHERE id = ? AND owner = ? AND status IN {self.active}",
            *(row_id, self.owner),
        )
        return rows[0][0] if rows else None
