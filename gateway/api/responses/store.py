"""The store of responses for `previous_response_id` and for references to their items: in memory, or in an SQLite file,
which persists and which all gateways of a machine share. The input of a stored response is shown as pages of items."""

import asyncio
import json
import logging
import re
import sqlite3
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from gateway.api.answers import as_json
from gateway.api.responses.answers import CallHead, InputItem, InputItems, InputText, ItemHead
from gateway.api.responses.write_response import output_text, reasoning_text
from gateway.request.body_memory import count_memory
from gateway.request.violations import Violations, shortened
from gateway.settings import SQLITE
from gateway.sqlite import Store
from gateway.types import ChatMessage
from quire.gateway.v1.generation_pb2 import ToolCall
from quire.model_files.progress import shown_bytes
from quire.rpc.errors import InvalidArgument, NotFound, Unavailable, invalid_field
from quire.runtime import clock

# Bytes of a row without its response and its messages.
_RESPONSE_BYTES = 1000
# The id of an item: a prefix, the id of its response, "in" if it belongs to the input, and its position.
_ITEM_ID = re.compile(r"[a-z]{2,3}_([0-9a-f]{32})(?:in)?\d{1,6}")
# Maximum bytes of all items that one body refers to: each reference adds a whole item to the conversation.
_MAX_REFERRED_BYTES = 16 << 20
_TABLES = """
CREATE TABLE IF NOT EXISTS responses (
    tenant TEXT NOT NULL, id TEXT NOT NULL, used_at REAL NOT NULL, bytes INTEGER NOT NULL, body BLOB NOT NULL,
    messages TEXT NOT NULL, PRIMARY KEY (tenant, id)
);
CREATE INDEX IF NOT EXISTS by_use ON responses (tenant, used_at, bytes);
CREATE TABLE IF NOT EXISTS streams (
    tenant TEXT NOT NULL, name TEXT NOT NULL, response TEXT NOT NULL, PRIMARY KEY (tenant, name)
);
"""
# Maximum names of streams of one tenant; the oldest ones are forgotten.
_MAX_STREAMS = 4096
_DEFAULT_LIMIT, _MAX_LIMIT = 20, 100
_ORDERS = ("asc", "desc")
# `include` has no effect, since these items lack the fields that it requests.
_PARAMETERS = frozenset({"after", "include", "include[]", "limit", "order"})
_ANSWER, _RESULT = "assistant", "tool"
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as JSON, and the conversation up to its answer, without instructions."""

    body: bytes
    messages: Sequence[ChatMessage]

    @property
    def asked(self) -> Sequence[ChatMessage]:
        """The conversation that it answers. A response that generated nothing has no answer."""
        return self.messages[:-1] if from_json(self.body)["output"] else self.messages


class ResponseStore(Store):
    """The responses of all tenants, at most `max_bytes` together; 0 stores none.

    If the sum exceeds `max_bytes`, the least recently used response of the largest tenant is deleted. Each response
    counts with its whole conversation. If the file cannot be written, a response is not stored, and a warning is
    logged; if it cannot be read, calls that need it fail.
    """

    tables = _TABLES
    description = "the store of responses"

    def __init__(self, path: Path | None, max_bytes: int) -> None:
        """Raises ConfigurationError if the file cannot be used."""
        super().__init__(path, f"--response-store {path}")
        self._max_bytes = max_bytes

    @property
    def keeps_any(self) -> bool:
        return self._max_bytes > 0

    def unusable(self, error: Exception) -> Unavailable:
        _logger.warning("%s cannot be used: %s", self._path, error)
        return Unavailable("the store of responses cannot be used; the gateway's log says why")

    def add(self, tenant: str, response_id: str, response: StoredResponse) -> None:
        """Stores a response, unless it is larger than the store. Replaces a response with the same id: each reader that
        reaches the end of a durable stream stores it."""
        messages = json.dumps([plain_message(each) for each in response.messages])
        num_bytes = _RESPONSE_BYTES + len(response.body) + len(messages)
        if num_bytes > self._max_bytes:
            return
        try:
            with self.changing():
                self.change(
                    "INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?, ?, ?)",
                    *(tenant, response_id, clock.unix_s(), num_bytes, response.body, messages),
                )
                self._make_room()
        except sqlite3.Error as error:
            _logger.warning("a response could not be kept in %s: %s", self._path, error)

    def _make_room(self) -> None:
        sizes: dict[str, int] = dict(self.rows("SELECT tenant, sum(bytes) FROM responses GROUP BY tenant"))
        while sum(sizes.values()) > self._max_bytes:
            largest = max(sizes, key=lambda tenant: sizes[tenant])
            ((row_id, num_bytes),) = self.rows(
                "SELECT rowid, bytes FROM responses WHERE tenant = ? ORDER BY used_at LIMIT 1", largest
            )
            self.change("DELETE FROM responses WHERE rowid = ?", row_id)
            sizes[largest] -= num_bytes

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """A response of the tenant, which becomes the most recently used one."""
        name = tenant, response_id
        if not self.change("UPDATE responses SET used_at = ? WHERE tenant = ? AND id = ?", clock.unix_s(), *name):
            return None
        rows = self.rows("SELECT body, messages FROM responses WHERE tenant = ? AND id = ?", *name)
        return StoredResponse(rows[0][0], tuple(map(message_of, json.loads(rows[0][1])))) if rows else None

    def remove(self, tenant: str, response_id: str) -> None:
        """Deletes a response. Raises NotFound if the store does not have it."""
        if not self.change("DELETE FROM responses WHERE tenant = ? AND id = ?", tenant, response_id):
            raise self._not_found(response_id)

    def find(self, tenant: str, response_id: str) -> StoredResponse:
        """Like `get`, but raises NotFound if the store does not have the response."""
        found = self.get(tenant, response_id)
        if found is None:
            raise self._not_found(response_id)
        return found

    def _not_found(self, response_id: str) -> NotFound:
        return NotFound(f'response "{response_id:.80}" {self._absence}', reason="RESPONSE_NOT_FOUND")

    def name_stream(self, tenant: str, name: str, response_id: str) -> None:
        """Records the newest response of a stream of a WebSocket."""
        with self.changing():
            self.change("INSERT OR REPLACE INTO streams VALUES (?, ?, ?)", tenant, name, response_id)
            self.change(
                "DELETE FROM streams WHERE tenant = ?1 AND rowid IN (SELECT rowid FROM streams WHERE tenant = ?1 "
                "ORDER BY rowid DESC LIMIT -1 OFFSET ?2)",
                *(tenant, _MAX_STREAMS),
            )

    def of_stream(self, tenant: str, name: str) -> str | None:
        """The id of the newest response of a stream; None if this store has none."""
        rows = self.rows("SELECT response FROM streams WHERE tenant = ? AND name = ?", tenant, name)
        return rows[0][0] if rows else None

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
        whose = "only its own responses (--response-store shares them)"
        if self._path is not None:
            whose = f"the responses in {self._path.name} (--response-store)"
        return (
            f"is not known to this gateway: it stores {whose}, and deletes the oldest ones if all together "
            f"exceed {shown_bytes(self._max_bytes)} (--max-stored-response-bytes)"
        )


def _items_of(
    response_id: str, response: StoredResponse, asked: Collection[str]
) -> dict[str, tuple[dict[str, Any], int]]:
    """The requested items of a response's input and output, with their sizes."""
    items: list[Any] = [*input_items(response_id, response.asked), *from_json(response.body)["output"]]
    return {item["id"]: (item, len(as_json(item))) for item in items if item["id"] in asked}


def plain_message(message: ChatMessage) -> dict[str, Any]:
    """A message as JSON values."""
    calls = [[call.id, call.name, call.arguments] for call in message.tool_calls]
    return {each.name: getattr(message, each.name) for each in fields(message)} | {"tool_calls": calls}


def message_of(plain: dict[str, Any]) -> ChatMessage:
    """The inverse of `plain_message`."""
    calls = tuple(ToolCall(id=id, name=name, arguments=text) for id, name, text in plain.pop("tool_calls"))
    return ChatMessage(**plain, tool_calls=calls)


def input_items(response_id: str, messages: Sequence[ChatMessage]) -> list[InputItem]:
    """The items of a conversation, in its order. Their ids are derived from the id of the response."""
    items: list[InputItem] = []

    def head(prefix: str) -> ItemHead:
        return {"id": f"{prefix}_{response_id.removeprefix('resp_')}in{len(items)}", "status": "completed"}

    for message in messages:
        role, text = message.role, message.content
        if message.reasoning:
            content = [reasoning_text(message.reasoning)]
            items.append({**head("rs"), "type": "reasoning", "summary": [], "content": content})
        if role == _RESULT:
            call_id = message.tool_call_id or ""
            items.append({**head("fco"), "type": "function_call_output", "call_id": call_id, "output": text})
        elif role != _ANSWER:
            part = InputText(type="input_text", text=text)
            items.append({**head("msg"), "type": "message", "role": role, "content": [part]})
        elif text:
            items.append({**head("msg"), "type": "message", "role": role, "content": [output_text(text)]})
        for call in message.tool_calls:
            called: CallHead = {**head("fc"), "call_id": call.id, "name": call.name}
            items.append({"type": "function_call", **called, "arguments": call.arguments})
    return items


def item_page(items: Sequence[InputItem], parameters: Mapping[str, str]) -> InputItems:
    """The page of a list that the query parameters request.

    Raises:
        InvalidArgument: a parameter is unknown or has an invalid value.
    """
    violations = Violations()
    for name in sorted(parameters.keys() - _PARAMETERS):
        violations.add(name[:80], f"is not known here; the parameters are {', '.join(sorted(_PARAMETERS))}")
    order, after = parameters.get("order", "desc"), parameters.get("after")
    if order not in _ORDERS:
        violations.add("order", f'is "{shortened(order)}"; it must be {" or ".join(_ORDERS)}')
    asked_limit = parameters.get("limit", str(_DEFAULT_LIMIT))
    limit = int(asked_limit) if asked_limit.isdecimal() and asked_limit.isascii() and len(asked_limit) < 4 else 0
    if not 1 <= limit <= _MAX_LIMIT:
        violations.add("limit", f'is "{shortened(asked_limit)}"; it must be in [1, {_MAX_LIMIT}]')
    violations.raise_if_any()
    ordered = list(items if order == "asc" else reversed(items))
    if after is not None:
        position = next((place for place, item in enumerate(ordered) if item["id"] == after), None)
        if position is None:
            raise invalid_field("after", f'is "{shortened(after)}", which is not an item of this response')
        ordered = ordered[position + 1 :]
    page = ordered[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else "",
        "last_id": page[-1]["id"] if page else "",
        "has_more": len(ordered) > limit,
    }


def sqlite_path(place: str) -> Path | None:
    """The path in a place, "memory" or "sqlite:PATH"; None for memory."""
    return Path(place.removeprefix(SQLITE)) if place.startswith(SQLITE) else None
