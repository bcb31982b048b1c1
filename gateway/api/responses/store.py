"""The store of responses for `previous_response_id` and for references to their items: in memory, or in an SQLite file,
which persists and which all gateways of a machine share."""

import asyncio
import json
import logging
import re
import sqlite3
import sys
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, cast

from google.protobuf.message import Message
from pydantic_core import from_json

from gateway.api.answers import as_json
from gateway.api.responses.items import input_items
from gateway.request.body_memory import count_memory
from gateway.settings import SQLITE
from gateway.sqlite import Arguments, Found, StoreThread, changing
from gateway.types import ChatMessage
from quire.gateway.v1.generation_pb2 import ToolCall
from quire.model_files.progress import shown_bytes
from quire.rpc.errors import InvalidArgument, NotFound, Unavailable, invalid_field
from quire.runtime import clock
from quire.runtime.settings import ConfigurationError

# Memory of the Python objects of a message without its values, of a tool call without its texts, and of a response
# without its messages.
_MESSAGE_BYTES = 400
_CALL_BYTES = 300
_RESPONSE_BYTES = 1000
# The id of an item: a prefix, the id of its response, "in" if it belongs to the input, and its position.
_ITEM_ID = re.compile(r"[a-z]{2,3}_([0-9a-f]{32})(?:in)?\d{1,6}")
# Maximum bytes of all items that one body refers to: each reference adds a whole item to the conversation.
_MAX_REFERRED_BYTES = 16 << 20
_LOCK_TIMEOUT_S = 5.0
_VERSION = 1
# The first version with RETURNING.
_NEEDED = (3, 35, 0)
_TABLES = f"""
CREATE TABLE IF NOT EXISTS responses (
    tenant TEXT NOT NULL, id TEXT NOT NULL, used_at REAL NOT NULL, bytes INTEGER NOT NULL, body BLOB NOT NULL,
    messages TEXT NOT NULL, PRIMARY KEY (tenant, id)
);
CREATE INDEX IF NOT EXISTS by_use ON responses (tenant, used_at, bytes);
PRAGMA user_version = {_VERSION};
"""
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as JSON, and the conversation up to its answer, without instructions."""

    body: bytes
    messages: Sequence[ChatMessage]

    @property
    def num_bytes(self) -> int:
        return _RESPONSE_BYTES + len(self.body) + sum(map(_memory_of, self.messages))


def _memory_of(message: ChatMessage) -> int:
    """The memory of a message with all its fields."""
    return _MESSAGE_BYTES + sum(_memory_of_value(getattr(message, each.name)) for each in fields(message))


def _memory_of_value(value: object) -> int:
    match value:
        case None:
            return 0
        case str():
            return sys.getsizeof(value)
        case Message():
            return _CALL_BYTES + value.ByteSize()
        case list() | tuple():
            return sum(map(_memory_of_value, cast(Sequence[object], value)))
        case _:
            raise TypeError(f"the memory of a {type(value).__name__} in a message is not known")


class ResponseStore(ABC):
    """The responses of all tenants, at most `max_bytes` together; 0 stores none.

    If the sum exceeds `max_bytes`, the least recently used response of the largest tenant is deleted. Each response
    counts with its whole conversation.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes

    @property
    def keeps_any(self) -> bool:
        return self._max_bytes > 0

    async def run(
        self, work: Callable[Arguments, Found], *arguments: Arguments.args, **named: Arguments.kwargs
    ) -> Found:
        """Runs a function with the store, and returns its result."""
        return work(*arguments, **named)

    @abstractmethod
    def close(self) -> None:
        """Closes the store after its last use."""

    @abstractmethod
    def add(self, tenant: str, response_id: str, response: StoredResponse) -> None:
        """Stores a response, unless it is larger than the store. Replaces a response with the same id: each reader that
        reaches the end of a durable stream stores it."""

    @abstractmethod
    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """A response of the tenant, which becomes the most recently used one."""

    @abstractmethod
    def remove(self, tenant: str, response_id: str) -> None:
        """Deletes a response. Raises NotFound if the store does not have it."""

    def find(self, tenant: str, response_id: str) -> StoredResponse:
        """Like `get`, but raises NotFound if the store does not have the response."""
        found = self.get(tenant, response_id)
        if found is None:
            raise NotFound(f'response "{response_id:.80}" {self._absence}', reason="RESPONSE_NOT_FOUND")
        return found

    def earlier_messages(self, tenant: str, response_id: str | None) -> Sequence[ChatMessage]:
        """The conversation up to the response with a `previous_response_id`; empty for None. Raises InvalidArgument if
        the response is not stored."""
        if response_id is None:
            return ()
        found = self.get(tenant, response_id)
        if found is None:
            raise self._missing("previous_response_id", response_id)
        return found.messages

    async def items(self, tenant: str, references: Mapping[str, str]) -> dict[str, dict[str, Any]]:
        """The items of stored responses by their ids; `references` has the ids by the paths of their fields.

        Raises:
            InvalidArgument: an item is not stored, or the items are too large together.
        """
        asked: dict[str, dict[str, str]] = {}
        for path, item_id in references.items():
            if (match := _ITEM_ID.fullmatch(item_id)) is None:
                raise self._missing(path, item_id)
            asked.setdefault(f"resp_{match[1]}", {}).setdefault(item_id, path)
        found: dict[str, tuple[dict[str, Any], int]] = {}
        for response_id, paths in asked.items():
            response = await self.run(self.get, tenant, response_id)
            if response is not None:
                found |= await asyncio.to_thread(_items_of, response_id, response, paths.keys())
            for item_id, path in paths.items():
                if item_id not in found:
                    raise self._missing(path, item_id)
        num_bytes = 0
        for path, item_id in references.items():
            num_bytes += found[item_id][1]
            if num_bytes > _MAX_REFERRED_BYTES:
                description = f"adds up to {num_bytes:,} bytes with earlier ones; the max is {_MAX_REFERRED_BYTES:,}"
                raise invalid_field(path, description)
        count_memory(num_bytes)
        return {item_id: item for item_id, (item, _) in found.items()}

    def _missing(self, path: str, id: str) -> InvalidArgument:
        description = f'is "{id:.80}", which {self._absence}; send the items of the earlier turns in input'
        return InvalidArgument.of_field(path, description, reason="RESPONSE_NOT_FOUND")

    @property
    def _absence(self) -> str:
        if not self.keeps_any:
            return "is not known: this gateway stores no responses (--max-stored-response-bytes is 0)"
        return (
            f"is not known to this gateway: it stores {self._whose}, and deletes the oldest ones if all together "
            f"exceed {shown_bytes(self._max_bytes)} (--max-stored-response-bytes)"
        )

    @property
    @abstractmethod
    def _whose(self) -> str:
        """The kind of responses in the store, for errors."""


def _items_of(
    response_id: str, response: StoredResponse, asked: Collection[str]
) -> dict[str, tuple[dict[str, Any], int]]:
    """The requested items of a response's input and output, with their sizes."""
    items = [*input_items(response_id, response.messages[:-1]), *from_json(response.body)["output"]]
    return {item["id"]: (item, len(as_json(item))) for item in items if item["id"] in asked}


@dataclass(slots=True)
class _TenantResponses:
    """The responses of one tenant, least recently used first."""

    by_id: OrderedDict[str, tuple[StoredResponse, int]] = field(
        default_factory=OrderedDict[str, tuple[StoredResponse, int]]
    )
    num_bytes: int = 0


class MemoryStore(ResponseStore):
    """Responses in this gateway's memory."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes)
        self._num_bytes = 0
        self._tenants: dict[str, _TenantResponses] = {}

    def add(self, tenant: str, response_id: str, response: StoredResponse) -> None:
        num_bytes = response.num_bytes
        if num_bytes > self._max_bytes:
            return
        if self.get(tenant, response_id) is not None:
            self._drop(tenant, response_id)
        responses = self._tenants.setdefault(tenant, _TenantResponses())
        responses.by_id[response_id] = response, num_bytes
        responses.num_bytes += num_bytes
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes:
            largest = max(self._tenants, key=lambda name: self._tenants[name].num_bytes)
            self._drop(largest, next(iter(self._tenants[largest].by_id)))

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        responses = self._tenants.get(tenant)
        if responses is None or response_id not in responses.by_id:
            return None
        responses.by_id.move_to_end(response_id)
        return responses.by_id[response_id][0]

    def remove(self, tenant: str, response_id: str) -> None:
        self.find(tenant, response_id)
        self._drop(tenant, response_id)

    @property
    def _whose(self) -> str:
        return "only its own responses (--response-store shares them)"

    def close(self) -> None:
        self._tenants.clear()

    def _drop(self, tenant: str, response_id: str) -> None:
        responses = self._tenants[tenant]
        _, num_bytes = responses.by_id.pop(response_id)
        responses.num_bytes -= num_bytes
        self._num_bytes -= num_bytes
        if not responses.by_id:
            del self._tenants[tenant]


class SqliteStore(ResponseStore):
    """Responses in an SQLite file. The store's thread reads and writes it, in the order of the calls of `run`.

    Several gateways of one machine may have the file open. If it cannot be written, a response is not stored, and a
    warning is logged; if it cannot be read, calls that need it fail.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Raises ConfigurationError if the file cannot be used."""
        super().__init__(max_bytes)
        self._path = path
        self._thread = StoreThread("responses")
        try:
            self._database = self._thread.open(self._open)
        except (OSError, sqlite3.Error) as error:
            raise ConfigurationError(f"--response-store {path} cannot be used: {error}") from error

    def _open(self) -> sqlite3.Connection:
        if sqlite3.sqlite_version_info < _NEEDED:
            raise sqlite3.NotSupportedError(f"SQLite is {sqlite3.sqlite_version}; 3.35 or newer is needed")
        # The file holds conversations.
        self._path.touch(mode=0o600)
        self._path.chmod(0o600)
        database = sqlite3.connect(self._path, timeout=_LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        if database.execute("PRAGMA user_version").fetchone()[0] not in (0, _VERSION):
            raise sqlite3.DatabaseError("it is of another version of Quire")
        database.executescript(_TABLES)
        return database

    async def run(
        self, work: Callable[Arguments, Found], *arguments: Arguments.args, **named: Arguments.kwargs
    ) -> Found:
        return await self._thread.run(work, *arguments, **named)

    def close(self) -> None:
        self._thread.close(self._database.close)

    def add(self, tenant: str, response_id: str, response: StoredResponse) -> None:
        messages = json.dumps([plain_message(each) for each in response.messages])
        num_bytes = _RESPONSE_BYTES + len(response.body) + len(messages)
        if num_bytes > self._max_bytes:
            return
        try:
            with changing(self._database) as database:
                database.execute(
                    "INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?, ?, ?)",
                    (tenant, response_id, clock.unix_s(), num_bytes, response.body, messages),
                )
                self._make_room(database)
        except sqlite3.Error as error:
            _logger.warning("a response could not be kept in %s: %s", self._path, error)

    def _make_room(self, database: sqlite3.Connection) -> None:
        sizes: dict[str, int] = dict(database.execute("SELECT tenant, sum(bytes) FROM responses GROUP BY tenant"))
        while sum(sizes.values()) > self._max_bytes:
            largest = max(sizes, key=lambda tenant: sizes[tenant])
            rows = database.execute(
                "DELETE FROM responses WHERE rowid = (SELECT rowid FROM responses WHERE tenant = ? ORDER BY used_at "
                "LIMIT 1) RETURNING bytes",
                (largest,),
            ).fetchall()
            sizes[largest] -= rows[0][0]

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        if not self.keeps_any:
            return None
        try:
            # Fetching all rows ends the statement and its lock.
            rows = self._database.execute(
                "UPDATE responses SET used_at = ? WHERE tenant = ? AND id = ? RETURNING body, messages",
                (clock.unix_s(), tenant, response_id),
            ).fetchall()
        except sqlite3.Error as error:
            raise self._unusable(error) from error
        return StoredResponse(rows[0][0], tuple(map(message_of, json.loads(rows[0][1])))) if rows else None

    def remove(self, tenant: str, response_id: str) -> None:
        self.find(tenant, response_id)
        try:
            with changing(self._database) as database:
                database.execute("DELETE FROM responses WHERE tenant = ? AND id = ?", (tenant, response_id))
        except sqlite3.Error as error:
            raise self._unusable(error) from error

    def _unusable(self, error: sqlite3.Error) -> Unavailable:
        _logger.warning("%s cannot be used: %s", self._path, error)
        return Unavailable("the store of responses cannot be used; the gateway's log says why")

    @property
    def _whose(self) -> str:
        return f"the responses in {self._path.name} (--response-store)"


def plain_message(message: ChatMessage) -> dict[str, Any]:
    """A message as JSON values."""
    calls = [[call.id, call.name, call.arguments] for call in message.tool_calls]
    return {each.name: getattr(message, each.name) for each in fields(message)} | {"tool_calls": calls}


def message_of(plain: dict[str, Any]) -> ChatMessage:
    """The inverse of `plain_message`."""
    calls = tuple(ToolCall(id=id, name=name, arguments=text) for id, name, text in plain.pop("tool_calls"))
    return ChatMessage(**plain, tool_calls=calls)


def sqlite_path(place: str) -> Path | None:
    """The path in a place, "memory" or "sqlite:PATH"; None for memory."""
    return Path(place.removeprefix(SQLITE)) if place.startswith(SQLITE) else None


def open_store(place: str, max_bytes: int) -> ResponseStore:
    """The store at a place. Raises ConfigurationError if it cannot be used."""
    path = sqlite_path(place)
    return MemoryStore(max_bytes) if path is None else SqliteStore(path, max_bytes)
