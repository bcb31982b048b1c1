"""The store of background responses: their requests, their events, and the gateway that runs each of them.

It is an SQLite database: in the memory of one gateway, or in the file of `--response-store`, which all gateways of a
machine share. A gateway that takes over a response continues after the tokens whose events are stored. Each write of a
run checks the owner, so the events of a response form one sequence.
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from gateway import sqlite
from gateway.sqlite import LeasedTable
from quire.messages.arrays import decode_int32, encode_int32
from quire.model_files.progress import shown_bytes
from quire.rpc.errors import ResourceExhausted
from quire.runtime import clock

QUEUED, IN_PROGRESS, COMPLETED = "queued", "in_progress", "completed"
FAILED, CANCELLED, INCOMPLETE = "failed", "cancelled", "incomplete"
RUNNING = (QUEUED, IN_PROGRESS)
MAX_RUNNING = 1024
"""Maximum running background responses of one tenant."""
# Number of bytes of events after which a read ends, with the piece that exceeds it.
_PIECES_BYTES = 1 << 18
_ROW_BYTES = 500
_TABLES = """
CREATE TABLE IF NOT EXISTS background (
    tenant TEXT NOT NULL, id TEXT NOT NULL, created REAL NOT NULL, key_id TEXT NOT NULL, request BLOB NOT NULL,
    seed TEXT NOT NULL, status TEXT NOT NULL, owner TEXT, leased_until REAL NOT NULL, response BLOB NOT NULL,
    bytes INTEGER NOT NULL, PRIMARY KEY (tenant, id)
);
CREATE INDEX IF NOT EXISTS background_by_id ON background (id);
CREATE INDEX IF NOT EXISTS background_by_status ON background (status, leased_until);
CREATE INDEX IF NOT EXISTS background_by_age ON background (created, status, bytes);
CREATE INDEX IF NOT EXISTS background_by_tenant ON background (status, tenant, bytes);
CREATE TABLE IF NOT EXISTS background_events (
    tenant TEXT NOT NULL, id TEXT NOT NULL, first INTEGER NOT NULL, number INTEGER NOT NULL, data BLOB NOT NULL,
    tokens BLOB NOT NULL, PRIMARY KEY (tenant, id, first)
);
"""


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


class BackgroundStore(LeasedTable[Background]):
    """The store; see the module.

    If all rows with their events exceed `max_bytes`, ended responses are deleted, oldest first. To leave room for ended
    responses, a new response is rejected if the running ones would take more than half of `max_bytes`, unless its
    tenant's responses take less than an equal share of that half.
    """

    tables = _TABLES
    description = "the store of background responses"
    table = "background"
    active = RUNNING

    def __init__(self, path: Path | None, owner: str, max_bytes: int) -> None:
        """Raises ConfigurationError if the file cannot be used."""
        super().__init__(path, f"--response-store {path}", owner)
        self._max_bytes = max_bytes
        # The file's version, and the newest row of events, at the last call of `news`.
        self._seen_version = self._seen_row = 0

    @property
    def is_shared(self) -> bool:
        """Whether other gateways may share the store."""
        return self._path is not None

    def add(self, row: Background) -> None:
        """Adds a response, which this gateway runs. Raises ResourceExhausted if the tenant has too many running
        responses, or they take too much memory."""
        now, size = clock.unix_s(), _ROW_BYTES + len(row.request) + len(row.response)
        with self.changing():
            self._check_running(row.tenant, size)
            self.change(
                "INSERT INTO background VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                *(row.tenant, row.id, now, row.key_id, row.request, str(row.seed), row.status, self.owner),
                *(now + sqlite.LEASE_S, row.response, size),
            )
            self._make_room()

    def _check_running(self, tenant: str, size: int) -> None:
        """Raises ResourceExhausted unless the tenant may run one more response, of this size."""
        rows = self.rows(
            f"SELECT tenant, count(*), sum(bytes) FROM background WHERE status IN {RUNNING} GROUP BY tenant"
        )
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

    def select(self, where: str, *values: object) -> list[Background]:
        rows = self.rows(
            "SELECT tenant, id, key_id, request, CAST(seed AS INTEGER), status, response FROM background WHERE "
            f"{where}",
            *values,
        )
        return [Background(*row) for row in rows]

    def get(self, tenant: str, response_id: str) -> Background | None:
        return next(iter(self.select("tenant = ? AND id = ?", tenant, response_id)), None)

    def write(
        self, tenant: str, response_id: str, piece: Piece, status: str = IN_PROGRESS, response: bytes | None = None
    ) -> None:
        """Appends events to a response that this gateway runs, and changes its state. Raises NotOwnerError."""
        with self.writing(response_id):
            self._set_state(response_id, status, response, len(piece.data))
            self.set_lease([response_id], clock.unix_s() + sqlite.LEASE_S)
            if piece.number:
                self._add_piece(tenant, response_id, piece)
            if status not in RUNNING:
                self._make_room()

    def _set_state(self, response_id: str, status: str, response: bytes | None, more_bytes: int) -> None:
        self.change(
            "UPDATE background SET status = ?1, response = coalesce(?2, response), "
            "bytes = bytes + ?3 + coalesce(length(?2) - length(response), 0) WHERE id = ?4",
            *(status, response, more_bytes, response_id),
        )

    def _add_piece(self, tenant: str, response_id: str, piece: Piece) -> None:
        self.change(
            "INSERT INTO background_events VALUES (?, ?, ?, ?, ?, ?)",
            *(tenant, response_id, piece.first, piece.number, piece.data, encode_int32(piece.tokens)),
        )

    def pieces(self, tenant: str, response_id: str, after: int) -> tuple[str | None, list[Piece]]:
        """The state of a response, None if the store does not have it, and the next events after the number `after`;
        the first piece may begin earlier."""
        # The state is read first: if it is final, all events are stored.
        state = self.rows("SELECT status FROM background WHERE tenant = ? AND id = ?", tenant, response_id)
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

    def news(self) -> list[str]:
        """Responses that got events from other connections to the file since the last call. It takes microseconds if
        the file has not changed. A response may be missing if its newest events were deleted meanwhile."""
        ((version,),) = self.rows("PRAGMA data_version")
        if version == self._seen_version:
            return []
        seen, self._seen_version = self._seen_row, version
        ((self._seen_row,),) = self.rows("SELECT coalesce(max(rowid), 0) FROM background_events")
        rows = self.rows("SELECT DISTINCT id FROM background_events WHERE rowid > ?", min(seen, self._seen_row))
        return [response_id for (response_id,) in rows]

    def last_number(self, tenant: str, response_id: str) -> int:
        """The number of the last event of a response; -1 before the first one."""
        ((number,),) = self.rows(
            "SELECT coalesce(max(first + number) - 1, -1) FROM background_events WHERE tenant = ? AND id = ?",
            *(tenant, response_id),
        )
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
        with self.changing():
            changed = self.change(
                "UPDATE background SET owner = NULL WHERE tenant = ? AND id = ? AND coalesce(?, owner) = "
                f"owner AND status IN {RUNNING}",
                *(tenant, response_id, owner),
            )
            if not changed:
                return False
            events = self._events(tenant, response_id)
            number = sum(each for each, _, _ in events)
            response, event = last(b"".join(data for _, data, _ in events), number)
            self._set_state(response_id, status, response, len(event))
            self._add_piece(tenant, response_id, Piece(number, 1, event))
            self._make_room()
            return True

    def remove(self, tenant: str, response_id: str) -> bool:
        """Deletes a response, which ends if it runs; returns whether the store had it."""
        with self.changing():
            return self._delete(tenant, response_id)

    def written(self, tenant: str, response_id: str) -> tuple[int, list[int]]:
        """The number of stored events of a response, and all tokens that they contain."""
        events = self._events(tenant, response_id)
        return sum(number for number, _, _ in events), [token for *_, tokens in events for token in _tokens(tokens)]

    def _events(self, tenant: str, response_id: str) -> list[tuple[int, bytes, bytes]]:
        return self.rows(
            "SELECT number, data, tokens FROM background_events WHERE tenant = ? AND id = ? ORDER BY first",
            *(tenant, response_id),
        )

    def _make_room(self) -> None:
        while self.rows("SELECT coalesce(sum(bytes), 0) FROM background")[0][0] > self._max_bytes:
            oldest = self.rows(
                f"SELECT tenant, id FROM background WHERE status NOT IN {RUNNING} ORDER BY created LIMIT 1"
            )
            if not oldest:
                return
            self._delete(*oldest[0])

    def _delete(self, tenant: str, response_id: str) -> bool:
        self.change("DELETE FROM background_events WHERE tenant = ? AND id = ?", tenant, response_id)
        return bool(self.change("DELETE FROM background WHERE tenant = ? AND id = ?", tenant, response_id))


def _tokens(data: bytes) -> list[int]:
    return decode_int32(data, "tokens", minimum=0).tolist()
