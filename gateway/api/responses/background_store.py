"""Responses that run without a reader: their requests, the events that were written of them, and who runs each.

It is a database of SQLite: in the memory of one gateway, or in the file of `--response-store`, where all gateways of a
machine meet. A gateway that runs a response holds it by a lease, which it renews. When a gateway is gone, another one
takes its responses over and goes on behind the tokens whose events are here.

Each write of a run names its owner and is refused if that is another one by now, or if the response has ended. So the
events of a response are one sequence, whoever wrote them and however late.
"""

import sqlite3
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from gateway.sqlite import Arguments, Found, StoreThread, changing
from quire import clock
from quire.arrays import decode_int32, encode_int32
from quire.progress import shown_bytes
from quire.rpc.errors import NotFound, ResourceExhausted, Unavailable
from quire.settings import ConfigurationError

QUEUED, IN_PROGRESS, COMPLETED = "queued", "in_progress", "completed"
FAILED, CANCELLED, INCOMPLETE = "failed", "cancelled", "incomplete"
RUNNING = (QUEUED, IN_PROGRESS)
MAX_RUNNING = 1024
"""How many responses of one tenant may run in the background at once."""
LEASE_S = 5.0
# So many bytes of events are read at once, and the rest of a piece.
_PIECES_BYTES = 1 << 18
_LOCK_TIMEOUT_S = 5.0
_ROW_BYTES = 500
_TABLES = """
CREATE TABLE IF NOT EXISTS background (
    tenant TEXT NOT NULL, id TEXT NOT NULL, created REAL NOT NULL, key_id TEXT NOT NULL, request BLOB NOT NULL,
    seed TEXT NOT NULL, status TEXT NOT NULL, owner TEXT, leased_until REAL NOT NULL, response BLOB NOT NULL,
    bytes INTEGER NOT NULL, PRIMARY KEY (tenant, id)
);
CREATE INDEX IF NOT EXISTS background_by_status ON background (status, leased_until);
CREATE INDEX IF NOT EXISTS background_by_age ON background (created, status, bytes);
CREATE INDEX IF NOT EXISTS background_by_tenant ON background (status, tenant, bytes);
CREATE TABLE IF NOT EXISTS background_events (
    tenant TEXT NOT NULL, id TEXT NOT NULL, first INTEGER NOT NULL, number INTEGER NOT NULL, data BLOB NOT NULL,
    tokens BLOB NOT NULL, PRIMARY KEY (tenant, id, first)
);
"""


class NotOwnerError(Exception):
    """Another gateway runs the response, or it has ended: what this run would write is not wanted any more."""


@dataclass(frozen=True, slots=True)
class Background:
    """A response that runs, or ran, in the background.

    Attributes:
        key_id: The id of the API key that made it; empty where none is needed.
        request: What a gateway needs to run it.
        seed: Of its draws, so that every run makes the same ones.
        response: The response as JSON, as far as it is.
    """

    tenant: str
    id: str
    key_id: str
    request: bytes
    seed: int
    status: str
    response: bytes

    @property
    def is_running(self) -> bool:
        return self.status in RUNNING


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive events, written out, from the number `first` on, and the tokens that they tell of."""

    first: int
    number: int
    data: bytes
    tokens: Sequence[int] = ()


class BackgroundStore:
    """See the module. All methods but `run` belong into the store's own thread, which `run` calls them in.

    Where all rows with their events take more than `max_bytes`, ended responses are forgotten, the oldest first. So
    that some are left, no response begins where those that run would take more than half of it, unless its tenant's
    take less than an equal share of that half.
    """

    def __init__(self, path: Path | None, owner: str, max_bytes: int) -> None:
        """Without a path it is in memory. `owner` names this gateway. Raises ConfigurationError if the file cannot be
        used."""
        self.owner = owner
        self._path = path
        self._max_bytes = max_bytes
        self._is_closed = False
        # What `news` has seen: the file's version, and the newest row of events.
        self._seen_version = self._seen_row = 0
        self._thread = StoreThread("background")
        try:
            self._database = self._thread.open(self._open)
        except (OSError, sqlite3.Error) as error:
            raise ConfigurationError(f"--response-store {path} cannot be used: {error}") from error

    @property
    def is_shared(self) -> bool:
        """Whether other gateways may have the responses, too."""
        return self._path is not None

    def _open(self) -> sqlite3.Connection:
        name = ":memory:" if self._path is None else str(self._path)
        database = sqlite3.connect(name, timeout=_LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        database.executescript(_TABLES)
        return database

    async def run(
        self, work: Callable[Arguments, Found], *arguments: Arguments.args, **named: Arguments.kwargs
    ) -> Found:
        """Does some work in the store's thread. Raises Unavailable where the file cannot be used."""
        try:
            return await self._thread.run(work, *arguments, **named)
        except sqlite3.Error as error:
            raise Unavailable(f"the store of background responses cannot be used: {error}") from error

    def close(self) -> None:
        """Ends the thread when it has done what was asked of it. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._thread.close(self._database.close)

    def add(self, row: Background) -> None:
        """Enters a response, which this gateway runs. Raises ResourceExhausted if the tenant runs too many, or they
        take too much."""
        now, size = clock.unix_s(), _ROW_BYTES + len(row.request) + len(row.response)
        with changing(self._database) as database:
            self._check_running(database, row.tenant, size)
            database.execute(
                "INSERT INTO background VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (row.tenant, row.id, now, row.key_id, row.request, str(row.seed), row.status, self.owner,
                 now + LEASE_S, row.response, size),
            )  # fmt: skip
            self._make_room(database)

    def _check_running(self, database: sqlite3.Connection, tenant: str, size: int) -> None:
        """Whether the tenant may run one more response, of this size. Raises ResourceExhausted."""
        rows = database.execute(
            f"SELECT tenant, count(*), sum(bytes) FROM background WHERE status IN {RUNNING} GROUP BY tenant"
        ).fetchall()
        sizes = {tenant: 0, **{each: num_bytes for each, _, num_bytes in rows}}
        running = next((number for each, number, _ in rows if each == tenant), 0)
        own, total, limit = sizes[tenant], sum(sizes.values()), self._max_bytes // 2
        if running >= MAX_RUNNING:
            problem = f"{running:,} responses of this tenant run in the background, as many as may"
        elif own and total + size > limit and own + size > limit // len(sizes):
            problem = (
                f"the responses that run in the background take {shown_bytes(total)}, {shown_bytes(own)} of them this "
                f"tenant's, and with {shown_bytes(size)} more they exceed half of --max-stored-response-bytes"
            )
        else:
            return
        raise ResourceExhausted(f"{problem}; wait for some", reason="BACKGROUND_LIMIT", retry_after_ms=1000)

    def get(self, tenant: str, response_id: str) -> Background | None:
        found = self._database.execute(
            "SELECT tenant, id, key_id, request, seed, status, response FROM background WHERE tenant = ? AND id = ?",
            (tenant, response_id),
        ).fetchall()
        return _row(found[0]) if found else None

    def write(
        self, tenant: str, response_id: str, piece: Piece, status: str = IN_PROGRESS, response: bytes | None = None
    ) -> None:
        """Appends events to a response that this gateway runs, and changes its state. Raises NotOwnerError."""
        with changing(self._database) as database:
            changed = database.execute(
                "UPDATE background SET status = ?1, response = coalesce(?2, response), leased_until = ?3, "
                "bytes = bytes + ?4 + coalesce(length(?2) - length(response), 0) "
                f"WHERE tenant = ?5 AND id = ?6 AND owner = ?7 AND status IN {RUNNING}",
                (status, response, clock.unix_s() + LEASE_S, len(piece.data), tenant, response_id, self.owner),
            )
            if not changed.rowcount:
                raise NotOwnerError
            if piece.number:
                database.execute(
                    "INSERT INTO background_events VALUES (?, ?, ?, ?, ?, ?)",
                    (tenant, response_id, piece.first, piece.number, piece.data, encode_int32(piece.tokens)),
                )
            if status not in RUNNING:
                self._make_room(database)

    def pieces(self, tenant: str, response_id: str, after: int) -> tuple[str | None, list[Piece]]:
        """The state of a response, None if it is not here, and the next events behind the number `after`; the first
        piece may begin earlier."""
        # The state first: where that is an end, all events are there.
        state = self._database.execute(
            "SELECT status FROM background WHERE tenant = ? AND id = ?", (tenant, response_id)
        ).fetchall()
        rows = self._database.execute(
            "SELECT first, number, data, tokens FROM background_events WHERE tenant = ? AND id = ? AND first + number "
            "> ? ORDER BY first LIMIT 256",
            (tenant, response_id, after + 1),
        )
        pieces, num_bytes = list[Piece](), 0
        # Closed, it holds no snapshot of the file.
        with closing(rows):
            for first, number, data, tokens in rows:
                pieces.append(Piece(first, number, data, _tokens(tokens)))
                if (num_bytes := num_bytes + len(data)) >= _PIECES_BYTES:
                    break
        return state[0][0] if state else None, pieces

    def news(self) -> list[tuple[str, str]]:
        """Responses that got events since the last call from another connection to the file. It costs microseconds
        where the file has not changed. One whose newest events were deleted meanwhile may be missing."""
        (version,) = self._database.execute("PRAGMA data_version").fetchone()
        if version == self._seen_version:
            return []
        seen, self._seen_version = self._seen_row, version
        (self._seen_row,) = self._database.execute("SELECT coalesce(max(rowid), 0) FROM background_events").fetchone()
        return self._database.execute(
            "SELECT DISTINCT tenant, id FROM background_events WHERE rowid > ?", (min(seen, self._seen_row),)
        ).fetchall()

    def last_number(self, tenant: str, response_id: str) -> int:
        """The number of the last event of a response; -1 before the first one."""
        (number,) = self._database.execute(
            "SELECT coalesce(max(first + number) - 1, -1) FROM background_events WHERE tenant = ? AND id = ?",
            (tenant, response_id),
        ).fetchone()
        return number

    def end(
        self,
        tenant: str,
        response_id: str,
        status: str,
        last: Callable[[bytes, int], tuple[bytes, bytes]],
        owner: str | None = None,
    ) -> bool:
        """Ends a running response, whoever runs it, or only where `owner` does; returns whether it ended. `last` takes
        its events, written out, and their number, and returns the response and the last event."""
        name = tenant, response_id
        with changing(self._database) as database:
            changed = database.execute(
                "UPDATE background SET status = ?, owner = NULL WHERE tenant = ? AND id = ? AND coalesce(?, owner) = "
                f"owner AND status IN {RUNNING}",
                (status, *name, owner),
            )
            if not changed.rowcount:
                return False
            rows = database.execute(
                "SELECT number, data FROM background_events WHERE tenant = ? AND id = ? ORDER BY first", name
            ).fetchall()
            number = sum(each for each, _ in rows)
            response, event = last(b"".join(data for _, data in rows), number)
            database.execute(
                "UPDATE background SET response = ?1, bytes = bytes + ?2 + length(?1) - length(response) "
                "WHERE tenant = ?3 AND id = ?4",
                (response, len(event), *name),
            )
            database.execute("INSERT INTO background_events VALUES (?, ?, ?, 1, ?, ?)", (*name, number, event, b""))
            self._make_room(database)
            return True

    def remove(self, tenant: str, response_id: str) -> bool:
        """Deletes a response, which ends if it runs; returns whether it was here."""
        with changing(self._database) as database:
            return _delete(database, tenant, response_id)

    def renew(self, ids: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        """Renews the leases of responses that run here; returns those that this gateway must not run any more."""
        until, lost = clock.unix_s() + LEASE_S, list[tuple[str, str]]()
        with changing(self._database) as database:
            for tenant, response_id in ids:
                changed = database.execute(
                    "UPDATE background SET leased_until = ? WHERE tenant = ? AND id = ? AND owner = ? AND status IN "
                    f"{RUNNING}",
                    (until, tenant, response_id, self.owner),
                )
                if not changed.rowcount:
                    lost.append((tenant, response_id))
        return lost

    def give_up(self, ids: Sequence[tuple[str, str]]) -> None:
        """Leaves responses to other gateways, or to the next start."""
        with changing(self._database) as database:
            database.executemany(
                "UPDATE background SET leased_until = 0 WHERE tenant = ? AND id = ? AND owner = ?",
                [(tenant, response_id, self.owner) for tenant, response_id in ids],
            )

    def take_over(self, most: int, running: Collection[tuple[str, str]] = ()) -> list[Background]:
        """Takes up to `most` running responses whose gateway is gone; this gateway runs them now. Of those that are
        `running` here a lease may have passed, since the disk or this thread was slow; they are not taken."""
        now = clock.unix_s()
        due = f"SELECT 1 FROM background WHERE status IN {RUNNING} AND leased_until < ? LIMIT 1"
        if not self._database.execute(due, (now,)).fetchall():
            return []
        with changing(self._database) as database:
            names = database.execute(
                f"SELECT tenant, id FROM background WHERE status IN {RUNNING} AND leased_until < ? ORDER BY created",
                (now,),
            ).fetchall()
            taken = [name for name in names if name not in running][:most]
            database.executemany(
                "UPDATE background SET owner = ?, leased_until = ? WHERE tenant = ? AND id = ?",
                [(self.owner, now + LEASE_S, *name) for name in taken],
            )
        return [row for name in taken if (row := self.get(*name)) is not None]

    def written(self, tenant: str, response_id: str) -> tuple[int, list[int]]:
        """How many events of a response are here, and all tokens that they tell of."""
        rows = self._database.execute(
            "SELECT number, tokens FROM background_events WHERE tenant = ? AND id = ? ORDER BY first",
            (tenant, response_id),
        ).fetchall()
        return sum(number for number, _ in rows), [token for _, tokens in rows for token in _tokens(tokens)]

    def _make_room(self, database: sqlite3.Connection) -> None:
        while True:
            (size,) = database.execute("SELECT coalesce(sum(bytes), 0) FROM background").fetchone()
            if size <= self._max_bytes:
                return
            oldest = database.execute(
                f"SELECT tenant, id FROM background WHERE status NOT IN {RUNNING} ORDER BY created LIMIT 1"
            ).fetchall()
            if not oldest:
                return
            _delete(database, *oldest[0])


def no_background(response_id: str) -> NotFound:
    return NotFound(f'response "{response_id:.80}" does not run in the background', reason="RESPONSE_NOT_FOUND")


def _delete(database: sqlite3.Connection, tenant: str, response_id: str) -> bool:
    database.execute("DELETE FROM background_events WHERE tenant = ? AND id = ?", (tenant, response_id))
    deleted = database.execute("DELETE FROM background WHERE tenant = ? AND id = ?", (tenant, response_id))
    return bool(deleted.rowcount)


def _row(values: Sequence[object]) -> Background:
    tenant, response_id, key_id, request, seed, status, response = values
    assert isinstance(request, bytes)
    assert isinstance(response, bytes)
    return Background(str(tenant), str(response_id), str(key_id), request, int(str(seed)), str(status), response)


def _tokens(data: bytes) -> list[int]:
    return decode_int32(data, "tokens", minimum=0).tolist()
