"""The store of background responses: their requests, their events, and the gateway that runs each of them.

It is an SQLite database: in the memory of one gateway, or in the file of `--response-store`, which all gateways of a
machine share. A gateway holds a lease of each response that it runs, and renews it. If a gateway is lost, another one
takes its responses over and continues after the tokens whose events are stored.

Each write of a run checks the owner, and is rejected if the response has another owner or has ended. So the events of a
response form one sequence, even if a lost gateway writes late.
"""

import sqlite3
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from gateway.sqlite import Arguments, Found, StoreThread, changing
from quire.messages.arrays import decode_int32, encode_int32
from quire.model_files.progress import shown_bytes
from quire.rpc.errors import NotFound, ResourceExhausted, Unavailable
from quire.runtime import clock
from quire.runtime.settings import ConfigurationError

QUEUED, IN_PROGRESS, COMPLETED = "queued", "in_progress", "completed"
FAILED, CANCELLED, INCOMPLETE = "failed", "cancelled", "incomplete"
RUNNING = (QUEUED, IN_PROGRESS)
MAX_RUNNING = 1024
"""Maximum running background responses of one tenant."""
LEASE_S = 5.0
# Number of bytes of events after which a read ends, with the piece that exceeds it.
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
    """This run must not write: another gateway runs the response, or it has ended."""


@dataclass(frozen=True, slots=True)
class Background:
    """A background response, running or ended.

    Attributes:
        key_id: The id of the API key that made it; empty if no key is needed.
        request: The data from which a gateway can run it.
        seed: The seed of its sampling, so that every run samples the same tokens.
        response: Its present state as JSON.
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
    """Consecutive serialized events from the number `first`, and the tokens that they contain."""

    first: int
    number: int
    data: bytes
    tokens: Sequence[int] = ()


class BackgroundStore:
    """The store; see the module. All methods except `run` must run in the store's thread, in which `run` calls them.

    If all rows with their events exceed `max_bytes`, ended responses are deleted, oldest first. To leave room for ended
    responses, a new response is rejected if the running ones would take more than half of `max_bytes`, unless its
    tenant's responses take less than an equal share of that half.
    """

    def __init__(self, path: Path | None, owner: str, max_bytes: int) -> None:
        """Without a path the store is in memory. `owner` identifies this gateway. Raises ConfigurationError if the file
        cannot be used."""
        self.owner = owner
        self._path = path
        self._max_bytes = max_bytes
        self._is_closed = False
        # The file's version, and the newest row of events, at the last call of `news`.
        self._seen_version = self._seen_row = 0
        self._thread = StoreThread("background")
        try:
            self._database = self._thread.open(self._open)
        except (OSError, sqlite3.Error) as error:
            raise ConfigurationError(f"--response-store {path} cannot be used: {error}") from error

    @property
    def is_shared(self) -> bool:
        """Whether other gateways may share the store."""
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
        """Runs a function in the store's thread. Raises Unavailable if the file cannot be used."""
        try:
            return await self._thread.run(work, *arguments, **named)
        except sqlite3.Error as error:
            raise Unavailable(f"the store of background responses cannot be used: {error}") from error

    def close(self) -> None:
        """Ends the thread after its waiting work. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._thread.close(self._database.close)

    def add(self, row: Background) -> None:
        """Adds a response, which this gateway runs. Raises ResourceExhausted if the tenant has too many running
        responses, or they take too much memory."""
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
        """Raises ResourceExhausted unless the tenant may run one more response, of this size."""
        rows = database.execute(
            f"SELECT tenant, count(*), sum(bytes) FROM background WHERE status IN {RUNNING} GROUP BY tenant"
        ).fetchall()
        sizes = {tenant: 0, **{each: num_bytes for each, _, num_bytes in rows}}
        running = next((number for each, number, _ in rows if each == tenant), 0)
        own, total, limit = sizes[tenant], sum(sizes.values()), self._max_bytes // 2
        if running >= MAX_RUNNING:
            problem = f"{running:,} responses of this tenant run in the background, which is the max"
        elif own and total + size > limit and own + size > limit // len(sizes):
            problem = (
                f"running background responses take {shown_bytes(total)}, {shown_bytes(own)} for this tenant, and with "
                f"{shown_bytes(size)} more they would exceed half of --max-stored-response-bytes"
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
        """The state of a response, None if the store does not have it, and the next events after the number `after`;
        the first piece may begin earlier."""
        # The state is read first: if it is final, all events are stored.
        state = self._database.execute(
            "SELECT status FROM background WHERE tenant = ? AND id = ?", (tenant, response_id)
        ).fetchall()
        rows = self._database.execute(
            "SELECT first, number, data, tokens FROM background_events WHERE tenant = ? AND id = ? AND first + number "
            "> ? ORDER BY first LIMIT 256",
            (tenant, response_id, after + 1),
        )
        pieces, num_bytes = list[Piece](), 0
        # Closed, so that it does not hold a snapshot of the file.
        with closing(rows):
            for first, number, data, tokens in rows:
                pieces.append(Piece(first, number, data, _tokens(tokens)))
                if (num_bytes := num_bytes + len(data)) >= _PIECES_BYTES:
                    break
        return state[0][0] if state else None, pieces

    def news(self) -> list[tuple[str, str]]:
        """Responses that got events from other connections to the file since the last call. It takes microseconds if
        the file has not changed. A response may be missing if its newest events were deleted meanwhile."""
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
        """Ends a running response of any gateway, or only of `owner`; returns whether it ended. `last` gets its
        serialized events and their number, and returns the response and the last event."""
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
        """Deletes a response, which ends if it runs; returns whether the store had it."""
        with changing(self._database) as database:
            return _delete(database, tenant, response_id)

    def renew(self, ids: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        """Renews the leases of responses that run here; returns the responses that this gateway must stop running."""
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
        """Ends the leases of responses, so that another gateway or the next start can run them."""
        with changing(self._database) as database:
            database.executemany(
                "UPDATE background SET leased_until = 0 WHERE tenant = ? AND id = ? AND owner = ?",
                [(tenant, response_id, self.owner) for tenant, response_id in ids],
            )

    def take_over(self, most: int, running: Collection[tuple[str, str]] = ()) -> list[Background]:
        """Takes over up to `most` running responses whose gateway is lost. Responses that are `running` here are not
        taken, even if a lease expired because of a slow disk or thread."""
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
        """The number of stored events of a response, and all tokens that they contain."""
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
