"""The store of all tenants' files and batches: a directory with an SQLite database and the contents of the files.

All gateways of a machine with the same directory share it. A gateway runs a batch under a lease, and only the first
answer to a request is stored. The contents of files are named by random ids; a client's file name is a text in the
database and never a path.
"""

import asyncio
import itertools
import json
import os
import re
import sqlite3
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.sqlite import LOCK_TIMEOUT_S, LeasedTable, NotOwnerError
from quire.model_files.progress import shown_bytes
from quire.rpc.errors import FailedPrecondition, NotFound, ResourceExhausted
from quire.runtime import clock, entropy

VALIDATING, FAILED, IN_PROGRESS, FINALIZING = "validating", "failed", "in_progress", "finalizing"
COMPLETED, EXPIRED, CANCELLING, CANCELLED = "completed", "expired", "cancelling", "cancelled"
ACTIVE = (VALIDATING, IN_PROGRESS, FINALIZING, CANCELLING)
MAX_FILES = 1000
"""Maximum files of one tenant."""
MAX_ACTIVE = 64
"""Maximum active batches of one tenant."""
MAX_ENDED = 1000
"""Maximum ended batches of one tenant; beyond it the oldest ones are deleted."""
_DATABASE = "batches.db"
_TABLES = """
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
"""
_FILE_ID = re.compile(r"file-[0-9a-f]{32}")
_ORPHAN_S = 3600.0
# Results are files, too; until a batch has ended, its answers are in the database.
_TOTAL_BYTES = """
SELECT (SELECT coalesce(sum(bytes), 0) FROM files) + (SELECT coalesce(sum(length(answer)), 0) FROM lines)
"""


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


class BatchFiles:
    """The files. All methods except `path_of` and `new_path` must run in the store's thread.

    Files may be uploaded and batches may begin while all files and answers together have at most `max_bytes`.
    """

    def __init__(self, store: LeasedTable[Any], directory: Path, max_bytes: int) -> None:
        """`store` has the tables of files and batches; `directory` has the contents."""
        self._store = store
        self._directory = directory
        self._max_bytes = max_bytes

    def remove_orphans(self) -> None:
        """Removes old contents without a row: uploads and results that a process did not finish."""
        for path in self._directory.iterdir():
            # Another gateway may have removed the file at its start.
            with suppress(FileNotFoundError):
                if clock.unix_s() - path.stat().st_mtime > _ORPHAN_S:
                    self.remove_unknown([path])

    def remove_unknown(self, paths: Iterable[Path]) -> None:
        """Removes the contents of files that have no row in the database."""
        for path in paths:
            if not self._store.rows("SELECT 1 FROM files WHERE id = ?", path.name):
                path.unlink(missing_ok=True)

    def path_of(self, file_id: str) -> Path:
        """The path of a file's content."""
        assert _FILE_ID.fullmatch(file_id), "ids are made here"
        return self._directory / file_id

    def new_path(self) -> tuple[str, Path]:
        """The id of a new file, and the path for its content."""
        file_id = f"file-{entropy.random_hex(16)}"
        return file_id, self.path_of(file_id)

    def check_room(self, tenant: str, num_bytes: int) -> None:
        """Raises ResourceExhausted if there is no room for another file."""
        ((number,),) = self._store.rows("SELECT count(*) FROM files WHERE tenant = ?", tenant)
        if number >= MAX_FILES:
            raise ResourceExhausted(
                f"this tenant has {number:,} files, which is the max; delete some", reason="FILE_LIMIT"
            )
        self.check_bytes(num_bytes)

    def check_bytes(self, num_bytes: int) -> None:
        """Raises ResourceExhausted if all files and answers have no room for more bytes."""
        ((size,),) = self._store.rows(_TOTAL_BYTES)
        if size + num_bytes > self._max_bytes:
            raise ResourceExhausted(
                f"all files and the answers of batches have {shown_bytes(size)}, and with {shown_bytes(num_bytes)} "
                f"more they exceed {shown_bytes(self._max_bytes)} (--max-batch-dir-bytes); delete some files",
                reason="FILE_LIMIT",
            )

    def add(self, tenant: str, file_id: str, filename: str, purpose: str) -> FileRow:
        """Adds a file whose content was written. Raises ResourceExhausted if there is no room."""
        with self._store.changing():
            self.check_room(tenant, self.path_of(file_id).stat().st_size)
            return self.enter(tenant, file_id, filename, purpose)

    def enter(self, tenant: str, file_id: str, filename: str, purpose: str) -> FileRow:
        row = FileRow(file_id, int(clock.unix_s()), filename, purpose, self.path_of(file_id).stat().st_size)
        self._store.change(
            "INSERT INTO files VALUES (?, ?, ?, ?, ?, ?)",
            tenant,
            file_id,
            row.created,
            filename,
            purpose,
            row.num_bytes,
        )
        return row

    def find(self, tenant: str, file_id: str) -> FileRow:
        """A file of a tenant. Raises NotFound if the tenant has no such file."""
        found = self._store.rows(
            "SELECT id, created, filename, purpose, bytes FROM files WHERE tenant = ? AND id = ?", tenant, file_id
        )
        if not found:
            raise NotFound(f'file "{file_id:.80}" is not known', reason="FILE_NOT_FOUND")
        return FileRow(*found[0])

    def all(self, tenant: str, purpose: str | None) -> list[FileRow]:
        """All files of a tenant, newest first."""
        rows = self._store.rows(
            "SELECT id, created, filename, purpose, bytes FROM files WHERE tenant = ? AND coalesce(?, purpose) = "
            "purpose ORDER BY created DESC, rowid DESC",
            *(tenant, purpose),
        )
        return [FileRow(*row) for row in rows]

    def remove(self, tenant: str, file_id: str) -> None:
        """Deletes a file. Raises NotFound, or FailedPrecondition while a batch reads it."""
        with self._store.changing():
            self.find(tenant, file_id)
            users = self._store.rows(
                f"SELECT id FROM batches WHERE input_file = ? AND status IN {self._store.active}", file_id
            )
            if users:
                raise FailedPrecondition(
                    f'file "{file_id}" is the input of batch "{users[0][0]}", which is not done; cancel that first',
                    reason="FILE_IN_USE",
                )
            self._store.change("DELETE FROM files WHERE id = ?", file_id)
        self.path_of(file_id).unlink(missing_ok=True)


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
    num_lines: int
    num_good: int
    num_bad: int
    facts: dict[str, Any]

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


class BatchStore(LeasedTable[BatchRow]):
    """The store; see the module. `finish` need not run in the store's thread. A batch that has begun is finished even
    if all files and answers exceed `max_bytes`, since its answers were already computed.
    """

    tables = _TABLES
    description = "the directory of batches"
    table = "batches"
    active = ACTIVE

    def __init__(self, directory: Path, owner: str, max_bytes: int) -> None:
        """Raises ConfigurationError if the directory cannot be used."""
        self._contents = directory / "files"
        self.files = BatchFiles(self, self._contents, max_bytes)
        super().__init__(directory / _DATABASE, f"--batch-dir {directory}", owner)

    def _open(self) -> None:
        self._contents.mkdir(mode=0o700, parents=True, exist_ok=True)
        super()._open()
        self.files.remove_orphans()

    def add_batch(
        self, tenant: str, key_id: str, input_file: str, endpoint: str, window_s: int, metadata: dict[str, str] | None
    ) -> BatchRow:
        """Adds a batch, which any gateway may run.

        Raises:
            NotFound: there is no such file.
            ResourceExhausted: the tenant has too many active batches, or there is no room for answers.
        """
        batch_id, now = f"batch_{entropy.random_hex(16)}", int(clock.unix_s())
        with self.changing():
            self.files.find(tenant, input_file)
            self.files.check_bytes(0)
            is_active = f"tenant = ? AND status IN {ACTIVE}"
            ((active,),) = self.rows(f"SELECT count(*) FROM batches WHERE {is_active}", tenant)
            if active >= MAX_ACTIVE:
                raise ResourceExhausted(
                    f"{active:,} batches of this tenant are not done, which is the max; wait for some",
                    reason="BATCH_LIMIT",
                    retry_after_ms=60_000,
                )
            self.change(
                "INSERT INTO batches VALUES (?, ?, ?, ?, ?, ?, ?, NULL, 0, ?, ?)",
                *(tenant, batch_id, now, key_id, input_file, endpoint, VALIDATING, now + window_s),
                json.dumps({"metadata": metadata}),
            )
            ended = self.rows(
                f"SELECT id FROM batches WHERE tenant = ? AND status NOT IN {ACTIVE} ORDER BY created DESC, rowid DESC "
                "LIMIT -1 OFFSET ?",
                *(tenant, MAX_ENDED),
            )
            for name in ended:
                self.change("DELETE FROM lines WHERE batch = ?", *name)
                self.change("DELETE FROM batches WHERE id = ?", *name)
        return self.batch(tenant, batch_id)

    def batch(self, tenant: str, batch_id: str) -> BatchRow:
        """A batch of a tenant. Raises NotFound if the tenant has no such batch."""
        found = self.batches(tenant, [batch_id])
        if not found:
            raise NotFound(f'batch "{batch_id:.80}" is not known', reason="BATCH_NOT_FOUND")
        return found[0]

    def batch_ids(self, tenant: str) -> list[str]:
        """The ids of all batches of a tenant, newest first."""
        rows = self.rows("SELECT id FROM batches WHERE tenant = ? ORDER BY created DESC, rowid DESC", tenant)
        return [batch_id for (batch_id,) in rows]

    def batches(self, tenant: str, batch_ids: Sequence[str]) -> list[BatchRow]:
        """The batches with these ids that the tenant still has, in this order."""
        return [row for batch_id in batch_ids for row in self.select("tenant = ? AND id = ?", tenant, batch_id)]

    def select(self, where: str, *values: object) -> list[BatchRow]:
        rows = self.rows(
            "SELECT tenant, id, created, key_id, input_file, endpoint, status, expires_at, "
            "(SELECT count(*) FROM lines WHERE batch = id), "
            "(SELECT count(*) FROM lines WHERE batch = id AND is_good = 1), "
            f"(SELECT count(*) FROM lines WHERE batch = id AND is_good = 0), facts FROM batches WHERE {where}",
            *values,
        )
        return [BatchRow(*values, facts=json.loads(facts)) for *values, facts in rows]

    def cancel(self, tenant: str, batch_id: str) -> BatchRow:
        """Asks the gateway that runs a batch to end it. Raises NotFound, or FailedPrecondition if it is done."""
        with self.changing():
            row = self.batch(tenant, batch_id)
            if row.status in (CANCELLING, CANCELLED):
                return row
            if row.status not in (VALIDATING, IN_PROGRESS):
                raise FailedPrecondition(
                    f'batch "{batch_id}" is {row.status}; it cannot be cancelled', reason="BATCH_DONE"
                )
            self._set_state(row, CANCELLING, {"cancelling_at": int(clock.unix_s())})
        return self.batch(tenant, batch_id)

    def _set_state(self, row: BatchRow, status: str, facts: dict[str, Any]) -> None:
        facts = row.facts | facts
        self.change("UPDATE batches SET status = ?, facts = ? WHERE id = ?", status, json.dumps(facts), row.id)

    # Runs of batches.

    def choose(self, due: Sequence[tuple[str, str]], running: Collection[str], most: int) -> list[str]:
        """The first batch of each tenant without a running batch is taken in any case, so that no tenant waits for the
        batches of another one; others are taken up to `most` in total."""
        leased = self.rows(f"SELECT tenant FROM batches WHERE status IN {ACTIVE} AND leased_until >= ?", clock.unix_s())
        tenants = {tenant for (tenant,) in leased}
        tenants.update(tenant for tenant, batch_id in due if batch_id in running)
        first, others = list[str](), list[str]()
        for tenant, batch_id in due:
            if batch_id not in running:
                (others if tenant in tenants else first).append(batch_id)
                tenants.add(tenant)
        return (first + others)[: max(most, len(first))]

    def begin(self, batch_id: str, lines: Sequence[Line]) -> None:
        """Begins a batch whose input is valid and has these requests. Raises NotOwnerError."""
        with self.writing(batch_id) as status:
            if status != VALIDATING:
                raise NotOwnerError
            (row,) = self.select("id = ?", batch_id)
            self._set_state(row, IN_PROGRESS, {"in_progress_at": int(clock.unix_s())})
            self._database.executemany(
                "INSERT OR IGNORE INTO lines VALUES (?, ?, ?, ?, ?, NULL, NULL)",
                [(batch_id, each.line, each.custom_id, each.first, each.size) for each in lines],
            )

    def fail(self, batch_id: str, errors: Sequence[dict[str, Any]]) -> None:
        """Fails a batch that is invalid or must stop; only counts remain of its answers. Raises NotOwnerError."""
        with self.writing(batch_id):
            (row,) = self.select("id = ?", batch_id)
            counts = row.shown()["request_counts"]
            self._end(row, FAILED, {"request_counts": counts, "errors": {"object": "list", "data": list(errors)}})

    def _end(self, row: BatchRow, status: str, facts: dict[str, Any]) -> None:
        self._set_state(row, status, {f"{status}_at": int(clock.unix_s())} | facts)
        self.change("DELETE FROM lines WHERE batch = ?", row.id)

    def open_lines(self, batch_id: str, after: int, most: int) -> list[Line]:
        """The next requests without an answer, after the line `after`."""
        rows = self.rows(
            "SELECT line, custom_id, first, size FROM lines WHERE batch = ? AND is_good IS NULL AND line > ? "
            "ORDER BY line LIMIT ?",
            *(batch_id, after, most),
        )
        return [Line(*row) for row in rows]

    def answers_behind(self, batch_id: str, after: int, most: int) -> list[tuple[int, bytes]]:
        """The answers to the next requests after the line `after`, up to the first request without an answer, with
        their lines. Empty if the batch has ended, since its answers are then in the results."""
        rows = self.rows(
            "SELECT line, answer FROM lines WHERE batch = ? AND line > ? ORDER BY line LIMIT ?", batch_id, after, most
        )
        return list(itertools.takewhile(lambda row: row[1] is not None, rows))

    def answer(self, batch_id: str, line: int, answer: bytes, *, is_good: bool) -> None:
        """Stores the answer to a request, unless it already has one. Raises NotOwnerError."""
        with self.writing(batch_id):
            self.change(
                "UPDATE lines SET is_good = ?, answer = ? WHERE batch = ? AND line = ? AND is_good IS NULL",
                *(int(is_good), answer, batch_id, line),
            )

    async def finish(self, batch_id: str, status: str, unanswered: Callable[[str], bytes] | None = None) -> None:
        """Writes the results in the order of the input, and ends a batch. `unanswered` makes the answers of requests
        that have none; without it they are omitted. The results are written in another thread: gigabytes take longer
        than a lease, which the store's thread renews meanwhile.

        Raises:
            NotOwnerError: another gateway runs the batch.
            Unavailable: the directory cannot be used.
        """
        good, bad = _Results(*self.files.new_path(), "output"), _Results(*self.files.new_path(), "error")
        is_over = threading.Event()
        try:
            await asyncio.to_thread(self._write_results, batch_id, good, bad, unanswered, is_over)
            await self.run(self._enter_results, batch_id, status, good, bad)
        except (OSError, sqlite3.Error) as error:
            raise self.unusable(error) from error
        finally:
            # Removes the results of a failed run, for example if the disk is full, since it may be tried many times.
            # The results of a cancelled run stay if the preceding work has added them to the database. A thread that
            # still writes removes its own files.
            is_over.set()
            await asyncio.shield(self.run(self.files.remove_unknown, (good.path, bad.path)))

    def _write_results(
        self,
        batch_id: str,
        good: _Results,
        bad: _Results,
        unanswered: Callable[[str], bytes] | None,
        is_over: threading.Event,
    ) -> None:
        """Writes the results. If `is_over` is set, no task waits for them, and the files are removed."""
        try:
            with (
                closing(sqlite3.connect(self._contents.parent / _DATABASE, timeout=LOCK_TIMEOUT_S)) as database,
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
                    if is_good is None:
                        if unanswered is None:
                            continue
                        answer = unanswered(custom_id)
                    results, file = (good, good_file) if is_good else (bad, bad_file)
                    results.count += 1
                    file.write(answer + b"\n")
                for file in (good_file, bad_file):
                    file.flush()
                    os.fsync(file.fileno())
        finally:
            if is_over.is_set():
                for each in (good, bad):
                    each.path.unlink(missing_ok=True)

    def _enter_results(self, batch_id: str, status: str, good: _Results, bad: _Results) -> None:
        with self.writing(batch_id):
            (row,) = self.select("id = ?", batch_id)
            facts: dict[str, Any] = {
                "finalizing_at": int(clock.unix_s()),
                "output_file_id": good.id if good.count else None,
                "error_file_id": bad.id if bad.count else None,
                "request_counts": {"total": row.num_lines, "completed": good.count, "failed": bad.count},
            }
            for each in (good, bad):
                if each.count:
                    self.files.enter(row.tenant, each.id, f"{batch_id}_{each.kind}.jsonl", "batch_output")
            self._end(row, status, facts)
