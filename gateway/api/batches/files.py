"""The files of all tenants: their rows in the database of batches, and their contents in a directory.

Contents are named by random ids; a client's file name is a text in the database and never a path.
"""

import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.sqlite import LeasedTable
from quire.model_files.progress import shown_bytes
from quire.rpc.errors import FailedPrecondition, NotFound, ResourceExhausted
from quire.runtime import clock, entropy

MAX_FILES = 1000
"""Maximum files of one tenant."""
TABLES = """
CREATE TABLE IF NOT EXISTS files (
    tenant TEXT NOT NULL, id TEXT NOT NULL PRIMARY KEY, created INTEGER NOT NULL, filename TEXT NOT NULL,
    purpose TEXT NOT NULL, bytes INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS files_by_tenant ON files (tenant, created);
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
