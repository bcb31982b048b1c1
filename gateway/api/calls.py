"""Calls over HTTP that generate text: from the requests that a call makes to its answer, whole or as a stream.

An API has a `Call` for each kind of its calls, and a `Shaper`, which writes what requests generate as objects of that
API. All that APIs have in common is here: requests run together and end together, the memory of an answer is counted
until the client has it, and a client that leaves takes its requests with it.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from functools import partial
from typing import Any, Protocol

from starlette.responses import Response

from gateway.api.answers import (
    Dialect,
    HttpError,
    StreamedResponse,
    WholeResponse,
    error_answer,
    json_pieces,
)
from gateway.replicas.events import Chunk, Completed, Finished, Usage
from gateway.replicas.live import LiveRequest
from gateway.request.answer_memory import IN_PIECES, AnswerForm, CallMemory
from gateway.request.generator import Generator, Result, answer_event, events, results_of, running
from gateway.request.types import RequestOptions
from quire.rpc.errors import QuireError

_HEADER_VALUE = re.compile(r"[!-~]{1,256}")


class Shaper(Protocol):
    """Writes the answer to one call: `whole` alone, or `begin`, then `event` for all events in order, then `end`.

    `position` is that of a request among those of the call.
    """

    def whole(self, results: Sequence[Result]) -> Mapping[str, Any]:
        """The answer, where it is not streamed. `results` has one entry a request."""
        ...

    def begin(self) -> Iterable[Mapping[str, Any]]:
        """The first objects of a stream, before anything is generated."""
        ...

    def event(self, position: int, event: Chunk | Finished) -> Iterable[Mapping[str, Any]]: ...

    def end(self, usages: Sequence[Usage]) -> Iterable[Mapping[str, Any]]:
        """The last objects of a stream; `usages` has one entry a request."""
        ...


class Call(Protocol):
    """One call of an API.

    Attributes:
        dialect: How its API writes errors and streams.
        id: What the header x-request-id of the answer says.
        streams: Whether the answer is a stream.
        shows_prompt_by_choice: Whether each choice has the log probabilities of its prompt.
        stream_form: What a stream of it holds.
    """

    dialect: Dialect
    shows_prompt_by_choice: bool
    stream_form: AnswerForm

    @property
    def id(self) -> str: ...

    @property
    def streams(self) -> bool: ...

    async def requests(self, generator: Generator) -> list[RequestOptions]:
        """Its requests, not validated yet. Raises QuireError or HttpError where the call is wrong."""
        ...

    def param_name(self, position: int, field: str) -> str:
        """The name in the body of a field of the request at `position`."""
        ...

    async def shaper(self, generator: Generator, live: Sequence[LiveRequest]) -> Shaper:
        """What writes the answer, once the requests run."""
        ...


def respond(generator: Generator, call: Call, keep_alive_s: float) -> Response:
    """The answer to a call. `keep_alive_s` is the longest silence of a stream; 0 sets no limit."""
    # An id that will be refused may have characters that no header can hold, or be too long for one.
    headers = dict.fromkeys(call.dialect.id_headers, call.id) if _HEADER_VALUE.fullmatch(call.id) else {}
    names = partial(call.param_name, 0)
    if not call.streams:
        return WholeResponse(partial(_whole, generator, call), names, headers, call.dialect)
    live: list[LiveRequest] = []
    return StreamedResponse(
        partial(_stream, generator, call, live),
        # A request without a replica waits for a scheduler, and fails where none comes.
        lambda: bool(live) and all(each.replica is not None for each in live),
        keep_alive_s,
        names,
        headers,
        call.dialect,
    )


async def _whole(generator: Generator, call: Call) -> AsyncGenerator[bytes, None]:
    """The body in pieces. The memory of the answer is counted until the client has taken it."""
    requests = await call.requests(generator)
    with generator.call_memory(IN_PIECES) as memory:
        async with _running(generator, call, requests, memory) as live:
            shaper = await call.shaper(generator, live)
            results = await results_of(live)
        memory.raise_if_ended()
        writer = asyncio.current_task()
        assert writer is not None
        memory.when_ended(lambda error: writer.cancel(error.message))
        try:
            for piece in json_pieces(shaper.whole(results)):
                yield piece
                # Other calls run between the pieces.
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            # Where the body has not begun, the client still gets the reason.
            memory.raise_if_ended()
            raise


async def _stream(generator: Generator, call: Call, running_now: list[LiveRequest]) -> AsyncGenerator[bytes, None]:
    """The events. The requests are added to `running_now` when they run."""
    requests = await call.requests(generator)
    usages: list[Usage] = []
    has_begun = False
    with generator.call_memory(call.stream_form) as memory:
        async with _running(generator, call, requests, memory) as live, aclosing(events(live)) as all_events:
            running_now += live
            shaper = await call.shaper(generator, live)
            async for position, event in all_events:
                # Not before anything is generated: until then a refusal is an ordinary error.
                if not has_begun:
                    has_begun = True
                    if first := b"".join(map(call.dialect.event, shaper.begin())):
                        yield first
                if isinstance(event, Completed):
                    usages.append(event.usage)
                else:
                    yield await answer_event(live[position], event, partial(_written, call, shaper, position, event))
            if last := b"".join(map(call.dialect.event, shaper.end(usages))):
                yield last


def _written(call: Call, shaper: Shaper, position: int, event: Chunk | Finished) -> bytes:
    return b"".join(map(call.dialect.event, shaper.event(position, event)))


def _running(
    generator: Generator, call: Call, requests: Sequence[RequestOptions], memory: CallMemory
) -> AbstractAsyncContextManager[list[LiveRequest]]:
    return running(
        generator, requests, partial(_refusal, call), memory, shows_prompt_by_sequence=call.shows_prompt_by_choice
    )


def _refusal(call: Call, position: int, error: QuireError) -> HttpError:
    """The answer to an error of the request at `position`, with the body's names of fields."""
    return HttpError(error_answer(error, partial(call.param_name, position)))
