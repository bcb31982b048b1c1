"""Streams of server-sent events to which a reader may come back.

A durable request runs on when its reader is gone, and any gateway can generate its output again (ADR 20 and 25). Here
the same holds for what an API writes of it: its events depend on the request, its body and its tokens alone. So the id
of an event is the id of its request and the number of the event, and whoever sends the last id as `Last-Event-ID` gets
exactly the events after it. Ids are looked up among the requests of the caller's tenant.

What the writer of the answer needs besides the tokens travels with the request, as `front_end`.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from pydantic_core import from_json, to_json
from starlette.requests import Request

from gateway.api.answers import Dialect
from quire.progress import shown_bytes
from quire.rpc.errors import NotFound, invalid_field

MAX_FRONT_END_BYTES = 256 << 10
ONLY_STREAMS = "is true; it has a meaning only where stream is true"
LAST_EVENT_ID = "Last-Event-ID"
_ID = re.compile(r"([A-Za-z0-9._:-]{1,128}):([0-9]{1,9})")


@dataclass(frozen=True, slots=True)
class EventId:
    """The event `number` of a request's stream, from 0."""

    request_id: str
    number: int

    def __str__(self) -> str:
        return f"{self.request_id}:{self.number}"


def last_event_id(request: Request) -> EventId | None:
    """The last event that the caller has, if it comes back. Raises InvalidArgument if that is no id of an event."""
    text = request.headers.get(LAST_EVENT_ID)
    if not text:
        return None
    match = _ID.fullmatch(text)
    if match is None:
        raise invalid_field(LAST_EVENT_ID, f'is "{text[:80]}"; it must be the id of an event, such as chatcmpl-a1:17')
    return EventId(match[1], int(match[2]))


class EventWriter:
    """Writes the events of one stream; those of a durable one have ids, and are counted in `num_events`."""

    def __init__(self, dialect: Dialect, request_id: str | None = None, num_had: int = 0) -> None:
        """`request_id` is that of a durable stream, whose reader has the first `num_had` events."""
        self._dialect = dialect
        self._request_id = request_id
        self._num_had = num_had
        self.num_events = 0

    def write(self, values: Iterable[Mapping[str, Any]]) -> bytes:
        """The next events, without those that the reader has."""
        if self._request_id is None:
            return b"".join(map(self._dialect.event, values))
        parts: list[bytes] = []
        for value in values:
            # Written in any case: lists of log probabilities count characters as they are written.
            event = self._dialect.event(value)
            if self.num_events >= self._num_had:
                parts += [f"id: {EventId(self._request_id, self.num_events)}\n".encode(), event]
            self.num_events += 1
        return b"".join(parts)


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """What an API needs to write the answer to a request again.

    Attributes:
        api: The name of the API.
        id: The id of the answer.
        created: In seconds since the Unix epoch.
        model: As the answer names it.
        body: The fields of the body that the answer depends on.
        more: What else the API needs.
    """

    api: str
    id: str
    created: int
    model: str
    body: Mapping[str, Any]
    more: Mapping[str, Any]

    def to_bytes(self, max_bytes: int | None = MAX_FRONT_END_BYTES) -> bytes:
        """Raises InvalidArgument if it is larger."""
        data = to_json(
            {"api": self.api, "id": self.id, "created": self.created, "model": self.model}
            | {"body": self.body, "more": self.more}
        )
        if max_bytes is not None and len(data) > max_bytes:
            raise invalid_field(
                "durable",
                f"is true, and what the answer needs of this body has {shown_bytes(len(data))}; a durable stream keeps "
                f"at most {shown_bytes(max_bytes)}",
            )
        return data

    @classmethod
    def of(cls, data: bytes, api: str, request_id: str) -> Self:
        """Raises NotFound if the stream is not one of this API."""
        found = from_json(data) if data else {}
        if found.get("api") != api:
            raise NotFound(
                f'"{request_id}" names no stream of this path; come back to the path that the stream came from',
                reason="REQUEST_NOT_FOUND",
            )
        return cls(**found)
