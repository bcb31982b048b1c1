"""The store of all tenants' files and batches: a directory with an SQLite database and the contents of the files.

All gateways of a machine with the same directory share it. One gateway runs a batch under a lease, as with background
responses: each write checks the owner, and only the first answer to a request is stored. The contents of files are
named by random ids; a client's file name is a text in the database and never a path.
"""

import asyncio
import itertools
import json
import os
import re
import sqlite3
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.sqlite import Arguments, Found, StoreThread, changing
from quire.model_files.progress import shown_bytes
from quire.rpc.errors import FailedPrecondition, NotFound, ResourceExhausted, Unavailable
from quire.runtime import clock, entropy
from quire.runtime.settings import ConfigurationError

VALIDATING, FAILED, IN_PROGRESS, FINALIZING = "validating", "failed", "in_progress", "finalizing"
COMPLETED, EXPIRED, CANCELLING, CANCELLED = "completed", "expired", "cancelling", "cancelled"
ACTIVE = (VALIDATING, IN_PROGRESS, FINALIZING, CANCELLING)
MAX_ACTIVE = 64
"""Maximum active batches of one tenant."""
MAX_ENDED = 1000
"""Maximum ended batches of one tenant; beyond it the oldest ones are deleted."""
MAX_FILES = 1000
"""Maximum files of one tenant."""
LEASE_S = 5.0
_DATABASE = "batches.db"
_LOCK_TIMEOUT_S = 5.0
_FILE_ID = re.compile(r"file-[0-9a-f]{32}")
_ORPHAN_S = 3600.0
# Maximum waiting batches that are considered at once.
_MAX_DUE = 10_000
_VERSION = 1
_TABLES = f"""
CREATE TABLE IF NOT EXISTS files (
    tenant TEXT NOT NULL, id TEXT NOT NULL PRIMARY KEY, created INTEGER NOT NULL, filename TEXT NOT NULL,
    purpose TEXT NOT NULL, bytes INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS files_by_tenant ON files (tenant, created);
CREATE TABLE IF NOT EXISTS batches (
    tenant TEXT NOT NULL, id TEXT NOT NULL PRIMARY KEY, created INTEGER NOT NULL, key_id TEXT NOT NULL,
    input_file TEXT NOT NULL, endpoint TEXT NOT NULL, status TEXT NOT NULL, owner TEXT, leased_until REAL NOT NULL,
    expires_at INTEGER NOT NULL, facts TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS batches_by_tenant ON batches (tenant, created);
CREATE TABLE IF NOT EXISTS lines (
    batch TEXT NOT NULL, line INTEGER NOT NULL, custom_id TEXT NOT NULL, first INTEGER NOT NULL, size INTEGER NOT NULL,
    is_good INTEGER, answer BLOB, PRIMARY KEY (batch, line)
);
CREATE INDEX IF NOT EXISTS lines_by_answer ON lines (batch, is_good, line);
PRAGMA user_version = {_VERSION};
"""
# Results are files, too; until a batch has ended, its answers are in the database.
_TOTAL_BYTES = """
SELECT (SELECT coalesce(sum(bytes), 0) FROM files) + (SELECT coalesce(sum(length(answer)), 0) FROM lines)
"""
_COLUMNS = ("tenant", "id", "created", "key_id", "input_file", "endpoint", "status", "expires_at")
_COUNTS = ("num_lines", "num_good", "num_bad")


class NotOwnerError(Exception):
    """This run must not write: another gateway runs the batch, or its state has changed."""


@dataclass(frozen=True, slots=True)
class FileRow:
    id: str
    created: int
    filename: str
    purpose: str
    num_bytes: int

    def shown(self) -> dict[str, Any]:
        """The file in OpenAI's form."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "expires_at": None,
            "status_details": None,
        }


@dataclass(frozen=True, slots=True)
class BatchRow:
    """A batch. `facts` are fields that are only shown: times, ids of its results, errors, metadata."""

    tenant: str
    id: str
    created: int
    key_id: str
    input_file: str
    endpoint: str
    status: str
    expires_at: int
    facts: dict[str, Any]
    num_lines: int
    num_good: int
    num_bad: int

    def shown(self) -> dict[str, Any]:
        """The batch in OpenAI's form."""
        counts = self.facts.get("request_counts") or {
            "total": self.num_lines,
            "completed": self.num_good,
            "failed": self.num_bad,
        }
        times = ("in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at")
        others = ("cancelling_at", "cancelled_at", "output_file_id", "error_file_id", "errors", "metadata", "model")
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "input_file_id": self.input_file,
            "completion_window": "24h",
            "status": self.status,
            "created_at": self.created,
            "expires_at": self.expires_at,
            "request_counts": counts,
            **{name: self.facts.get(name) for name in (*times, *others)},
        }


@dataclass(frozen=True, slots=True)
class Line:
    """A request of a batch: its line in the input file, and the offset and size of its bytes."""

    line: int
    custom_id: str
    first: int
    size: int


@dataclass(slots=True)
class _Results:
    """A file of results that is being written: its id, its path, its kind, and the number of its answers."""

    id: str
    path: Path
    kind: str
    count: int = 0


def _unusable(error: Exception) -> Unavailable:
    return Unavailable(f"the directory of batches cannot be used: {error}")


def _is_old(path: Path) -> bool:
    # Another gateway may have removed the file at its start.
    with suppress(FileNotFoundError):
        return clock.unix_s() - path.stat().st_mtime > _ORPHAN_S
    return False


def _remove_unknown(database: sqlite3.Connection, paths: Iterable[Path]) -> None:
    """Removes the contents of files that have no row in the database."""
    for path in paths:
        if not database.execute("SELECT 1 FROM files WHERE id = ?", (path.name,)).fetchall():
            path.unlink(missing_ok=True)


class BatchStore:
    """The store; see the module. All methods except `run`, `finish`, `path_of` and `new_path` must run in the store's
    thread, in which `run` calls them. `owner` identifies this gateway.

    Files may be uploaded and batches may begin while all files and answers together have at most `max_bytes`. A batch
    that has begun is finished even beyond that, since its answers were already computed.
    """

    def __init__(self, directory: Path, owner: str, max_bytes: int) -> None:
        """Raises ConfigurationError if the directory cannot be used."""
        self.owner = owner
        self._directory = directory
        self._max_bytes = max_bytes
        self._thread = StoreThread("batches")
        try:
            self._database = self._thread.open(self._open)
        except (OSError, sqlite3.Error) as error:
            raise ConfigurationError(f"--batch-dir {directory} cannot be used: {error}") from error

    def _open(self) -> sqlite3.Connection:
        files = self._directory / "files"
        files.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._directory / _DATABASE
        path.touch(mode=0o600)
        database = sqlite3.connect(path, timeout=_LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        if database.execute("PRAGMA user_version").fetchone()[0] not in (0, _VERSION):
            raise sqlite3.DatabaseError("it is of another version of Quire")
        database.executescript(_TABLES)
        # Contents without a row come from uploads and results that a process did not finish.
        _remove_unknown(database, filter(_is_old, files.iterdir()))
        return database

    async def run(
        self, work: Callable[Arguments, Found], *arguments: Arguments.args, **named: Arguments.kwargs
    ) -> Found:
        """Runs a function in the store's thread. Raises Unavailable if the directory cannot be used."""
        try:
            return await self._thread.run(work, *arguments, **named)
        except (OSError, sqlite3.Error) as error:
            raise _unusable(error) from error

    def close(self) -> None:
        """Ends the thread after its waiting work."""
        self._thread.close(self._database.close)

    # Files.

    def path_of(self, file_id: str) -> Path:
        """The path of a file's content."""
        assert _FILE_ID.fullmatch(file_id), "ids are made here"
        return self._directory / "files" / file_id

    def new_path(self) -> tuple[str, Path]:
        """The id of a new file, and the path for its content."""
        file_id = f"file-{entropy.random_hex(16)}"
        return file_id, self.path_of(file_id)

    def check_room(self, tenant: str, num_bytes: int) -> None:
        """Raises ResourceExhausted if there is no room for another file."""
        (number,) = self._database.execute("SELECT count(*) FROM files WHERE tenant = ?", (tenant,)).fetchone()
        if number >= MAX_FILES:
            raise ResourceExhausted(
                f"this tenant has {number:,} files, which is the max; delete some", reason="FILE_LIMIT"
            )
        self._check_bytes(num_bytes)

    def _check_bytes(self, num_bytes: int) -> None:
        (size,) = self._database.execute(_TOTAL_BYTES).fetchone()
        if size + num_bytes > self._max_bytes:
            raise ResourceExhausted(
                f"all files and the answers of batches have {shown_bytes(size)}, and with {shown_bytes(num_bytes)} "
                f"more they exceed {shown_bytes(self._max_bytes)} (--max-batch-dir-bytes); delete some files",
                reason="FILE_LIMIT",
            )

    def add_file(self, tenant: str, file_id: str, filename: str, purpose: str) -> FileRow:
        """Adds a file whose content was written. Raises ResourceExhausted if there is no room."""
        num_bytes = self.path_of(file_id).stat().st_size
        with changing(self._database) as database:
            self.check_room(tenant, num_bytes)
            return self._enter_file(database, tenant, file_id, filename, purpose)

    def _enter_file(
        self, database: sqlite3.Connection, tenant: str, file_id: str, filename: str, purpose: str
    ) -> FileRow:
        size = self.path_of(file_id).stat().st_size
        row = FileRow(file_id, int(clock.unix_s()), filename, purpose, size)
        database.execute(
            "INSERT INTO files VALUES (?, ?, ?, ?, ?, ?)", (tenant, file_id, row.created, filename, purpose, size)
        )
        return row

    def file(self, tenant: str, file_id: str) -> FileRow:
        """A file of a tenant. Raises NotFound if the tenant has no such file."""
        found = self._database.execute(
            "SELECT id, created, filename, purpose, bytes FROM files WHERE tenant = ? AND id = ?", (tenant, file_id)
        ).fetchall()
        if not found:
            raise NotFound(f'file "{file_id:.80}" is not known', reason="FILE_NOT_FOUND")
        return FileRow(*found[0])

    def files(self, tenant: str, purpose: str | None) -> list[FileRow]:
        """All files of a tenant, newest first."""
        rows = self._database.execute(
            "SELECT id, created, filename, purpose, bytes FROM files WHERE tenant = ? AND coalesce(?, purpose) = "
            "purpose ORDER BY created DESC, rowid DESC",
            (tenant, purpose),
        )
        return [FileRow(*row) for row in rows.fetchall()]

    def remove_file(self, tenant: str, file_id: str) -> None:
        """Deletes a file. Raises NotFound, or FailedPrecondition while a batch reads it."""
        with changing(self._database) as database:
            self.file(tenant, file_id)
            user = database.execute(
                f"SELECT id FROM batches WHERE input_file = ? AND status IN {ACTIVE}", (file_id,)
            ).fetchall()
            if user:
                raise FailedPrecondition(
                    f'file "{file_id}" is the input of batch "{user[0][0]}", which is not done; cancel that first',
                    reason="FILE_IN_USE",
                )
            database.execute("DELETE FROM files WHERE id = ?", (file_id,))
        self.path_of(file_id).unlink(missing_ok=True)

    # Batches.

    def add_batch(
        self, tenant: str, key_id: str, input_file: str, endpoint: str, window_s: int, metadata: dict[str, str] | None
    ) -> BatchRow:
        """Adds a batch, which any gateway may run.

        Raises:
            NotFound: there is no such file.
            ResourceExhausted: the tenant has too many active batches, or there is no room for answers.
        """
        batch_id, now = f"batch_{entropy.random_hex(16)}", int(clock.unix_s())
        with changing(self._database) as database:
            self.file(tenant, input_file)
            self._check_bytes(0)
            (active,) = database.execute(
                f"SELECT count(*) FROM batches WHERE tenant = ? AND status IN {ACTIVE}", (tenant,)
            ).fetchone()
            if active >= MAX_ACTIVE:
                raise ResourceExhausted(
                    f"{active:,} batches of this tenant are not done, which is the max; wait for some",
                    reason="BATCH_LIMIT",
                    retry_after_ms=60_000,
                )
            database.execute(
                "INSERT INTO batches VALUES (?, ?, ?, ?, ?, ?, ?, NULL, 0, ?, ?)",
                (tenant, batch_id, now, key_id, input_file, endpoint, VALIDATING, now + window_s,
                 json.dumps({"metadata": metadata})),
            )  # fmt: skip
            self._forget_ended(database, tenant)
        return self.batch(tenant, batch_id)

    def _forget_ended(self, database: sqlite3.Connection, tenant: str) -> None:
        ended = database.execute(
            f"SELECT id FROM batches WHERE tenant = ? AND status NOT IN {ACTIVE} ORDER BY created DESC, rowid DESC "
            "LIMIT -1 OFFSET ?",
            (tenant, MAX_ENDED),
        ).fetchall()
        database.executemany("DELETE FROM lines WHERE batch = ?", ended)
        database.executemany("DELETE FROM batches WHERE id = ?", ended)

    def batch(self, tenant: str, batch_id: str) -> BatchRow:
        """A batch of a tenant. Raises NotFound if the tenant has no such batch."""
        found = self._select("tenant = ? AND id = ?", (tenant, batch_id))
        if not found:
            raise NotFound(f'batch "{batch_id:.80}" is not known', reason="BATCH_NOT_FOUND")
        return found[0]

    def batch_ids(self, tenant: str) -> list[str]:
        """The ids of all batches of a tenant, newest first."""
        rows = self._database.execute(
            "SELECT id FROM batches WHERE tenant = ? ORDER BY created DESC, rowid DESC", (tenant,)
        )
        return [batch_id for (batch_id,) in rows.fetchall()]

    def batches(self, tenant: str, batch_ids: Sequence[str]) -> list[BatchRow]:
        """The batches with these ids that the tenant still has, in this order."""
        return [row for batch_id in batch_ids for row in self._select("tenant = ? AND id = ?", (tenant, batch_id))]

    def _select(self, where: str, values: Sequence[object]) -> list[BatchRow]:
        rows = self._database.execute(
            "SELECT tenant, id, created, key_id, input_file, endpoint, status, expires_at, facts, "
            "(SELECT count(*) FROM lines WHERE batch = id), "
            "(SELECT count(*) FROM lines WHERE batch = id AND is_good = 1), "
            f"(SELECT count(*) FROM lines WHERE batch = id AND is_good = 0) FROM batches WHERE {where}",
            values,
        ).fetchall()
        return [
            BatchRow(
                **dict(zip(_COLUMNS, row, strict=False)),
                facts=json.loads(row[8]),
                **dict(zip(_COUNTS, row[9:], strict=True)),
            )
            for row in rows
        ]

    def cancel(self, tenant: str, batch_id: str) -> BatchRow:
        """Asks the gateway that runs a batch to end it. Raises NotFound, or FailedPrecondition if it is done."""
        with changing(self._database) as database:
            row = self.batch(tenant, batch_id)
            if row.status in (CANCELLING, CANCELLED):
                return row
            if row.status not in (VALIDATING, IN_PROGRESS):
                raise FailedPrecondition(
                    f'batch "{batch_id}" is {row.status}; it cannot be cancelled', reason="BATCH_DONE"
                )
            database.execute(
                "UPDATE batches SET status = ?, facts = ? WHERE id = ?",
                (CANCELLING, json.dumps(row.facts | {"cancelling_at": int(clock.unix_s())}), batch_id),
            )
        return self.batch(tenant, batch_id)

    # Runs of batches.

    def take(self, most: int, running: Collection[str] = ()) -> list[BatchRow]:
        """Takes active batches that no gateway runs. The first batch of each tenant without a running batch is taken in
        any case, so that no tenant waits for the batches of another one; others are taken up to `most` in total.
        Batches that are `running` here are not taken, even if a lease expired because of a slow disk or thread."""
        now = clock.unix_s()
        due = f"SELECT tenant, id FROM batches WHERE status IN {ACTIVE} AND leased_until < ? ORDER BY created LIMIT ?"
        if not self._database.execute(due, (now, 1)).fetchall():
            return []
        with changing(self._database) as database:
            leased = database.execute(
                f"SELECT tenant FROM batches WHERE status IN {ACTIVE} AND leased_until >= ?", (now,)
            )
            tenants = {tenant for (tenant,) in leased.fetchall()}
            found = database.execute(due, (now, _MAX_DUE)).fetchall()
            tenants.update(tenant for tenant, batch_id in found if batch_id in running)
            first, others = list[str](), list[str]()
            for tenant, batch_id in found:
                if batch_id not in running:
                    (others if tenant in tenants else first).append(batch_id)
                    tenants.add(tenant)
            taken = (first + others)[: max(most, len(first))]
            database.executemany(
                "UPDATE batches SET owner = ?, leased_until = ? WHERE id = ?",
                [(self.owner, now + LEASE_S, batch_id) for batch_id in taken],
            )
            return [row for batch_id in taken for row in self._select("id = ?", (batch_id,))]

    def renew(self, batch_ids: Sequence[str]) -> dict[str, str]:
        """Renews the leases of batches; returns the states of the batches that this gateway still runs."""
        until = clock.unix_s() + LEASE_S
        with changing(self._database) as database:
            states: dict[str, str] = {}
            for batch_id in batch_ids:
                rows = database.execute(
                    f"UPDATE batches SET leased_until = ? WHERE id = ? AND owner = ? AND status IN {ACTIVE} "
                    "RETURNING status",
                    (until, batch_id, self.owner),
                ).fetchall()
                if rows:
                    states[batch_id] = rows[0][0]
        return states

    def give_up(self, batch_ids: Sequence[str]) -> None:
        """Ends the leases of batches, so that another gateway or the next start can run them."""
        with changing(self._database) as database:
            database.executemany(
                "UPDATE batches SET leased_until = 0 WHERE id = ? AND owner = ?",
                [(batch_id, self.owner) for batch_id in batch_ids],
            )

    def begin(self, batch_id: str, lines: Sequence[Line]) -> None:
        """Begins a batch whose input is valid and has these requests. Raises NotOwnerError."""
        with self._owned(batch_id, IN_PROGRESS, (VALIDATING,), {"in_progress_at": int(clock.unix_s())}) as database:
            database.executemany(
                "INSERT OR IGNORE INTO lines VALUES (?, ?, ?, ?, ?, NULL, NULL)",
                [(batch_id, each.line, each.custom_id, each.first, each.size) for each in lines],
            )

    def fail(self, batch_id: str, errors: Sequence[dict[str, Any]]) -> None:
        """Fails a batch that is invalid or must stop; only counts remain of its answers. Raises NotOwnerError."""
        counts = self._select("id = ?", (batch_id,))[0].shown()["request_counts"]
        facts: dict[str, Any] = {"failed_at": int(clock.unix_s()), "request_counts": counts}
        facts["errors"] = {"object": "list", "data": list(errors)}
        with self._owned(batch_id, FAILED, ACTIVE, facts) as database:
            database.execute("DELETE FROM lines WHERE batch = ?", (batch_id,))

    def open_lines(self, batch_id: str, after: int, most: int) -> list[Line]:
        """The next requests without an answer, after the line `after`."""
        rows = self._database.execute(
            "SELECT line, custom_id, first, size FROM lines WHERE batch = ? AND is_good IS NULL AND line > ? "
            "ORDER BY line LIMIT ?",
            (batch_id, after, most),
        )
        return [Line(*row) for row in rows.fetchall()]

    def answers_behind(self, batch_id: str, after: int, most: int) -> list[tuple[int, bytes]]:
        """The answers to the next requests after the line `after`, up to the first request without an answer, with
        their lines. Empty if the batch has ended, since its answers are then in the results."""
        rows = self._database.execute(
            "SELECT line, answer FROM lines WHERE batch = ? AND line > ? ORDER BY line LIMIT ?", (batch_id, after, most)
        )
        return list(itertools.takewhile(lambda row: row[1] is not None, rows.fetchall()))

    def answer(self, batch_id: str, line: int, answer: bytes, *, is_good: bool) -> None:
        """Stores the answer to a request, unless it already has one. Raises NotOwnerError."""
        with changing(self._database) as database:
            self._check_owner(database, batch_id)
            database.execute(
                "UPDATE lines SET is_good = ?, answer = ? WHERE batch = ? AND line = ? AND is_good IS NULL",
                (int(is_good), answer, batch_id, line),
            )

    async def finish(self, batch_id: str, status: str, unanswered: Callable[[str], bytes] | None = None) -> None:
        """Writes the results in the order of the input, and ends a batch. `unanswered` makes the answers of requests
        that have none; without it they are omitted. The results are written in another thread: gigabytes take longer
        than a lease, which the store's thread renews meanwhile.

        Raises:
            NotOwnerError: another gateway runs the batch.
            Unavailable: the directory cannot be used.
        """
        good, bad = _Results(*self.new_path(), "output"), _Results(*self.new_path(), "error")
        is_over = threading.Event()
        try:
            await asyncio.to_thread(self._write_results, batch_id, good, bad, unanswered, is_over)
            await self.run(self._enter_results, batch_id, status, good, bad)
        except (OSError, sqlite3.Error) as error:
            raise _unusable(error) from error
        finally:
            # Removes the results of a failed run, for example if the disk is full, since it may be tried many times.
            # The results of a cancelled run stay if the preceding work has added them to the database. A thread that
            # still writes removes its own files.
            is_over.set()
            await asyncio.shield(self.run(_remove_unknown, self._database, (good.path, bad.path)))

    def _write_results(
        self,
        batch_id: str,
        good: "_Results",
        bad: "_Results",
        unanswered: Callable[[str], bytes] | None,
        is_over: threading.Event,
    ) -> None:
        """Writes the results. If `is_over` is set, no task waits for them, and the files are removed."""
        try:
            self._write_until(is_over, batch_id, good, bad, unanswered)
        finally:
            if is_over.is_set():
                for each in (good, bad):
                    each.path.unlink(missing_ok=True)

    def _write_until(
        self,
        is_over: threading.Event,
        batch_id: str,
        good: "_Results",
        bad: "_Results",
        unanswered: Callable[[str], bytes] | None,
    ) -> None:
        with (
            closing(sqlite3.connect(self._directory / _DATABASE, timeout=_LOCK_TIMEOUT_S)) as database,
            good.path.open("xb") as good_file,
            bad.path.open("xb") as bad_file,
        ):
            for each in (good, bad):
                each.path.chmod(0o600)
            for custom_id, is_good, answer in database.execute(
                "SELECT custom_id, is_good, answer FROM lines WHERE batch = ? ORDER BY line", (batch_id,)
            ):
                if is_over.is_set():
                    return
                if is_good:
                    good.count += 1
                    good_file.write(answer + b"\n")
                elif is_good is not None or unanswered is not None:
                    bad.count += 1
                    bad_file.write(
                        (answer if unanswered is None or is_good is not None else unanswered(custom_id)) + b"\n"
                    )
            for file in (good_file, bad_file):
                file.flush()
                os.fsync(file.fileno())

    def _enter_results(self, batch_id: str, status: str, good: "_Results", bad: "_Results") -> None:
        row, now = self._select("id = ?", (batch_id,))[0], int(clock.unix_s())
        facts: dict[str, Any] = {
            f"{status}_at": now,
            "finalizing_at": now,
            "output_file_id": good.id if good.count else None,
            "error_file_id": bad.id if bad.count else None,
            "request_counts": {"total": row.num_lines, "completed": good.count, "failed": bad.count},
        }
        with self._owned(batch_id, status, ACTIVE, facts) as database:
            for each in (good, bad):
                if each.count:
                    name = f"{batch_id}_{each.kind}.jsonl"
                    self._enter_file(database, row.tenant, each.id, name, "batch_output")
            database.execute("DELETE FROM lines WHERE batch = ?", (batch_id,))

    @contextmanager
    def _owned(
        self, batch_id: str, status: str, before: Sequence[str], facts: dict[str, Any]
    ) -> Iterator[sqlite3.Connection]:
        """A transaction that changes the state of a batch. Raises NotOwnerError if this gateway does not run it."""
        with changing(self._database) as database:
            found = database.execute(
                f"SELECT facts FROM batches WHERE id = ? AND owner = ? AND status IN ({', '.join('?' * len(before))})",
                (batch_id, self.owner, *before),
            ).fetchall()
            if not found:
                raise NotOwnerError
            database.execute(
                "UPDATE batches SET status = ?, facts = ? WHERE id = ?",
                (status, json.dumps(json.loads(found[0][0]) | facts), batch_id),
            )
            yield database

    def _check_owner(self, database: sqlite3.Connection, batch_id: str) -> None:
        if not database.execute("SELECT 1 FROM batches WHERE id = ? AND owner = ?", (batch_id, self.owner)).fetchall():
            raise NotOwnerError
