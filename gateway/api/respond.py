"""Runs the requests of an HTTP call that generates text, and writes its answer, whole or as a stream.

Each API has a `Call` for each kind of call, and a `Shaper`, which writes output as objects of that API. The common part
is here: the requests of a call run and end together, the memory of an answer is counted until the client has it, and a
client that disconnects ends its requests.

A durable request runs on without a reader, and any gateway can reproduce its output (ADR 20 and 25). The events that
an API writes are reproducible, too: they depend only on the request, its body and its tokens. The id of an event is the
id of its request with the number of the event. A reader that sends the last id as `Last-Event-ID` gets exactly the
events after it. Ids are looked up among the requests of the caller's tenant. All data other than the tokens from which
a writer can reproduce the answer is sent with the request, as `front_end`.
"""

import asyncio
import dataclasses
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, Self

from pydantic_core import from_json, to_json
from starlette.requests import Request
from starlette.responses import Response

from gateway.api.answers import (
    OPENAI,
    Dialect,
    HttpError,
    LazyList,
    StreamedResponse,
    WholeResponse,
    error_answer,
    json_pieces,
)
from gateway.api.direct import DirectEvents, writes_directly
from gateway.replicas.events import Chunk, Completed, Finished, Usage
from gateway.replicas.live import LiveRequest
from gateway.request.answer_memory import IN_PIECES, STREAMED, AnswerForm, CallMemory
from gateway.request.generator import Generator, Result, answer_event, events, results_of, running
from gateway.request.models import Models
from gateway.request.violations import renamed, renaming
from gateway.types import RequestOptions
from quire.model_files.progress import shown_bytes
from quire.rpc.errors import NotFound, QuireError, invalid_field

MAX_FRONT_END_BYTES = 256 << 10
LAST_EVENT_ID = "Last-Event-ID"
_ID = re.compile(r"([A-Za-z0-9._:-]{1,128}):([0-9]{1,9})")
_HEADER_VALUE = re.compile(r"[!-~]{1,256}")


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


class Shaper(Protocol):
    """Writes the answer to one call, either by `whole`, or by `begin`, `event` for each event in order, and `end`.

    `position` is the index of a request in the call.
    """

    def whole(self, results: Sequence[Result]) -> Mapping[str, Any] | LazyList[Any]:
        """The whole answer. `results` has one entry per request."""
        ...

    def begin(self) -> Iterable[Mapping[str, Any]]:
        """The first objects of a stream, before anything is generated."""
        ...

    def event(self, position: int, event: Chunk | Finished) -> Iterable[Mapping[str, Any]]: ...

    def repeats_form(self, sequence_index: int) -> bool:
        """Whether later chunks of the sequence of the first request that have text, and no reasoning or calls, are
        one object each, which are equal but for the text. Making such an object has no effect on others."""
        ...

    def end(self, usages: Sequence[Usage]) -> Iterable[Mapping[str, Any]]:
        """The last objects of a stream; `usages` has one entry per request."""
        ...


class Call(ABC):
    """One call of an API.

    Attributes:
        dialect: The form of errors and streams in its API.
        id: The value of the response header x-request-id.
        streams: Whether the answer is a stream.
        shows_prompt_by_choice: Whether each choice has the log probabilities of its prompt.
        stream_form: The form by which the memory of its stream is counted.
    """

    dialect: Dialect = OPENAI
    shows_prompt_by_choice = False
    stream_form: AnswerForm = STREAMED
    id: str
    streams: bool

    @abstractmethod
    async def requests(self, generator: Generator) -> list[RequestOptions]:
        """Its requests, before validation. Raises QuireError or HttpError if the call is invalid."""

    @abstractmethod
    def names(self, position: int) -> Callable[[str], str]:
        """Maps a field of the request at `position` to its name in the body."""

    @abstractmethod
    async def shaper(self, generator: Generator, live: Sequence[LiveRequest]) -> Shaper:
        """The writer of the answer. Called after the requests have started."""

    async def results(self, live: Sequence[LiveRequest]) -> list[Result]:
        """The results of all requests. Raises QuireError if one of them failed."""
        return await results_of(live)

    async def keep(self) -> None:
        """Stores the answer if required. Called after it was written, and before its end is sent."""
        return


def respond(generator: Generator, call: Call, keep_alive_s: float) -> Response:
    """The answer to a call. `keep_alive_s` is the maximum silence of a stream; 0 means no limit."""
    # The id is not validated yet: it may be too long for a header, or have characters that headers do not allow.
    headers = dict.fromkeys(call.dialect.id_headers, call.id) if _HEADER_VALUE.fullmatch(call.id) else {}
    if not call.streams:
        return WholeResponse(partial(_whole, generator, call), headers, call.dialect)
    live: list[LiveRequest] = []
    return StreamedResponse(
        lambda response: streamed(generator, call, live, response),
        # A request without a replica has ended, or waits for a scheduler and fails if none connects.
        lambda: bool(live) and all(each.replica is not None or each.is_over for each in live),
        keep_alive_s,
        headers,
        call.dialect,
    )


async def whole_answer(generator: Generator, call: Call, priority: int) -> bytes:
    """The answer to a call without a connection, run with this priority. Raises HttpError and QuireError."""
    return b"".join([piece async for piece in _whole(generator, call, priority)])


async def _whole(generator: Generator, call: Call, priority: int | None = None) -> AsyncGenerator[bytes, None]:
    """The body in pieces. The memory of the answer is counted until the client has read it."""
    with renaming(lambda: call.names(0)):
        requests = await call.requests(generator)
    if priority is not None:
        requests = [dataclasses.replace(each, priority=priority, priority_sign=1) for each in requests]
    with renaming(lambda: call.names(0)), generator.call_memory(IN_PIECES) as memory:
        async with _running(generator, call, requests, memory) as live:
            shaper = await call.shaper(generator, live)
            results = await call.results(live)
        memory.raise_if_ended()
        writer = asyncio.current_task()
        assert writer is not None
        memory.when_ended(lambda error: writer.cancel(error.message))
        try:
            whole = shaper.whole(results)
            await call.keep()
            for piece in json_pieces(whole):
                yield piece
                # Other calls run between the pieces.
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            # If no part of the body was sent, the client still gets the reason.
            memory.raise_if_ended()
            raise


async def streamed(
    generator: Generator, call: Call, running_now: list[LiveRequest], response: StreamedResponse | None = None
) -> AsyncGenerator[bytes, None]:
    """The events of a call, one or more at a time; events that are written directly to the response are left out. The
    requests are added to `running_now` when they start."""
    with renaming(lambda: call.names(0)):
        requests = await call.requests(generator)
    durable_id = requests[0].request_id if requests[0].front_end else None
    with renaming(lambda: call.names(0)), generator.call_memory(call.stream_form) as memory:
        async with _running(generator, call, requests, memory) as live:
            running_now += live
            shaper = await call.shaper(generator, live)
            writer, direct = EventWriter(call.dialect, durable_id), None
            if response is not None and durable_id is None and writes_directly(live):
                direct = DirectEvents(response, partial(_written, writer, shaper, 0), shaper.repeats_form)
            async with aclosing(_events(call, shaper, live, writer, direct)) as written:
                async for each in written:
                    yield each


async def _events(
    call: Call, shaper: Shaper, live: Sequence[LiveRequest], writer: EventWriter, direct: DirectEvents | None = None
) -> AsyncGenerator[bytes, None]:
    usages: list[Usage] = []
    has_begun = False
    async with aclosing(events(live)) as all_events:
        async for position, event in all_events:
            # The stream begins with the first output: until then a rejection is an ordinary error response.
            if not has_begun:
                has_begun = True
                if first := writer.write(shaper.begin()):
                    yield first
            if isinstance(event, Completed):
                usages.append(event.usage)
            else:
                yield await answer_event(live[position], event, partial(_written, writer, shaper, position, event))
                # From the first event on.
                live[position].direct = direct
        if last := writer.write(shaper.end(usages)):
            await call.keep()
            yield last


def _written(writer: EventWriter, shaper: Shaper, position: int, event: Chunk | Finished) -> bytes:
    return writer.write(shaper.event(position, event))


def resumed(
    models: Models,
    last: EventId,
    read_call: Callable[[LiveRequest], Call],
    keep_alive_s: float,
    dialect: Dialect,
) -> Response:
    """The events of a durable stream after the last one that the caller has. `read_call` restores the call that began
    the stream; `dialect` is the form of errors before the first event."""
    live: list[LiveRequest] = []
    return StreamedResponse(
        # Only the call knows the number of an error event, which follows the events before it.
        lambda response: rest_of(models, last, read_call, live, response.use),
        lambda: bool(live),
        keep_alive_s,
        {},
        dialect,
    )


async def rest_of(
    models: Models,
    last: EventId,
    read_call: Callable[[LiveRequest], Call],
    running_now: list[LiveRequest],
    on_begin: Callable[[Dialect], object],
) -> AsyncGenerator[bytes, None]:
    """The events of a durable stream after the last one that the caller has, from 0 if its number is -1. `on_begin` is
    called with the dialect of the call before each event."""
    generator = await models.holding(last.request_id)
    async with generator.resume(last.request_id, ()) as live:
        call = read_call(live)
        shaper = await call.shaper(generator, [live])
        running_now.append(live)
        writer = EventWriter(call.dialect, last.request_id, last.number + 1)
        with renaming(lambda: call.names(0)):
            async with aclosing(_events(call, shaper, [live], writer)) as written:
                async for each in written:
                    if each:
                        on_begin(call.dialect)
                        yield each


def _running(
    generator: Generator, call: Call, requests: Sequence[RequestOptions], memory: CallMemory
) -> AbstractAsyncContextManager[list[LiveRequest]]:
    return running(
        generator, requests, partial(_refusal, call), memory, shows_prompt_by_sequence=call.shows_prompt_by_choice
    )


def _refusal(call: Call, position: int, error: QuireError) -> HttpError:
    """The answer to an error of the request at `position`, with the names of fields in the body."""
    return HttpError(error_answer(renamed(error, call.names(position))))
