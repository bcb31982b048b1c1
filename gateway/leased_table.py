"""A table of work that outlives a gateway: a lease says which gateway runs a row.

A row is one piece of work, such as a batch. A gateway renews the leases of the rows that it runs. If the gateway is
lost, its leases expire, and another gateway that shares the file takes the rows and continues their work. Each write of
a run checks the owner, and is rejected if the row has another owner or has ended. So a lost gateway that writes late
changes nothing.
"""

from abc import abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from gateway.sqlite import Store
from quire.runtime import clock

LEASE_S = 5.0
# Maximum rows without a lease that are considered at once.
_MAX_DUE = 10_000


class LeasedRow(Protocol):
    """A row as a gateway runs it."""

    @property
    def id(self) -> str: ...


Row = TypeVar("Row", bound=LeasedRow)


class NotOwnerError(Exception):
    """This run must not write: another gateway runs the row, or its state has changed."""


class LeasedTable(Store, Generic[Row]):
    """A store with a table of leased rows; see the module. A row has an id, a tenant and a status.

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
