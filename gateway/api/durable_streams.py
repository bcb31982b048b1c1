"""Durable streams of server-sent events, which a reader may resume.

A durable request runs on without a reader, and any gateway can reproduce its output (ADR 20 and 25). The events that
an API writes are reproducible, too: they depend only on the request, its body and its tokens. The id of an event is the
id of its request with the number of the event. A reader that sends the last id as `Last-Event-ID` gets exactly the
events after it. Ids are looked up among the requests of the caller's tenant.

All data other than the tokens from which a writer can reproduce the answer is sent with the request, as `front_end`.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from pydantic_core import from_json, to_json
from starlette.requests import Request

from gateway.api.answers import Dialect
from quire.model_files.progress import shown_bytes
from quire.rpc.errors import NotFound, invalid_field

MAX_FRONT_END_BYTES = 256 << 10
ONLY_STREAMS = "is true; it has an effect only if stream is true"
LAST_EVENT_ID = "Last-Event-ID"
_ID = re.compile(r"([A-Za-z0-9._:-]{1,128}):([0-9]{1,9})")


@dataclass(frozen=True, slots=True)
class EventId:
    """The id of the event `number`, from 0, in a request's stream."""

    request_id: str
    number: int

    def __str__(self) -> str:
        return f"{self.request_id}:{self.number}"


def last_event_id(request: Request) -> EventId | None:
    """The last event that the caller has, if it resumes a stream. Raises InvalidArgument if it is not an event id."""
    text = request.headers.get(LAST_EVENT_ID)
    if not text:
        return None
    match = _ID.fullmatch(text)
    if match is None:
        raise invalid_field(LAST_EVENT_ID, f'is "{text[:80]}"; it must be the id of an event, such as chatcmpl-a1:17')
    return EventId(match[1], int(match[2]))


class EventWriter:
    """Writes the events of one stream. Events of a durable stream have ids and are counted in `num_events`."""

    def __init__(self, dialect: Dialect, request_id: str | None = None, num_had: int = 0) -> None:
        """`request_id` is set for a durable stream, whose reader already has the first `num_had` events."""
        self._dialect = dialect
        self._request_id = request_id
        self._num_had = num_had
        self.num_events = 0

    def write(self, values: Iterable[Mapping[str, Any]]) -> bytes:
        """The next events, without events that the reader already has."""
        if self._request_id is None:
            return b"".join(map(self._dialect.event, values))
        parts: list[bytes] = []
        for value in values:
            # Always serialized, since lazy lists of log probabilities count characters while they are written.
            event = self._dialect.event(value)
            if self.num_events >= self._num_had:
                parts += [f"id: {EventId(self._request_id, self.num_events)}\n".encode(), event]
            self.num_events += 1
        return b"".join(parts)


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """The data with which an API can write the answer to a request again.

    Attributes:
        api: The name of the API.
        id: The id of the answer.
        created: The time of the answer, in seconds since the Unix epoch.
        model: The model's name in the answer.
        body: The fields of the body that affect the answer.
        more: Further data of the API.
    """

    api: str
    id: str
    created: int
    model: str
    body: Mapping[str, Any]
    more: Mapping[str, Any]

    def to_bytes(self, max_bytes: int | None = MAX_FRONT_END_BYTES) -> bytes:
        """The serialized data. Raises InvalidArgument if it is larger than `max_bytes`."""
        data = to_json(self)
        if max_bytes is not None and len(data) > max_bytes:
            raise invalid_field(
                "durable",
                f"is true, but the fields of this body that affect the answer have {shown_bytes(len(data))}; the max "
                f"for a durable stream is {shown_bytes(max_bytes)}",
            )
        return data

    @classmethod
    def of(cls, data: bytes, api: str, request_id: str) -> Self:
        """Reads serialized data. Raises NotFound if the stream belongs to another API."""
        found = from_json(data) if data else {}
        if found.get("api") != api:
            raise NotFound(
                f'"{request_id}" names no stream of this path; resume the stream on the path where it began',
                reason="REQUEST_NOT_FOUND",
            )
        return cls(**found)
