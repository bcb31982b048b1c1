"""Runs responses in the background, and serves their events.

A background response does not belong to a connection: a task runs it and appends its events to the store. Readers read
only the store, so each gets the same events with the same numbers, through any gateway that shares the store. If a run
ends early, because its gateway or its scheduler is lost, another run continues: it initializes the request with the
tokens whose events are in the store, reproduces these events without storing them again, and appends the next events.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from pydantic_core import from_json

from gateway.api.answers import OPENAI, as_json, error_answer
from gateway.api.leased_runs import RENEW_S, LeasedRun, LeasedRuns
from gateway.api.respond import EventId, EventWriter
from gateway.api.responses.background_store import (
    CANCELLED,
    FAILED,
    IN_PROGRESS,
    QUEUED,
    RUNNING,
    Background,
    BackgroundStore,
    Piece,
)
from gateway.api.responses.calls import ResponseCall
from gateway.api.responses.write_response import ResponseShaper, error_event, output_so_far
from gateway.auth.caller import current_caller, set_caller
from gateway.auth.keys import Authenticator
from gateway.replicas.events import Chunk, Completed, Event, TokenRun
from gateway.replicas.live import LiveRequest
from gateway.request.answer_memory import STREAMED_AND_REPEATED
from gateway.request.body_memory import count_answer, keep_memory
from gateway.request.models import Models
from gateway.request.parameters import CallParameters
from gateway.request.violations import renaming
from gateway.sqlite import NotOwnerError
from gateway.turns import TOKENS_PER_TURN, Turns
from gateway.types import ChatMessage, ModelKind
from quire.rpc.errors import Internal, NotFound, QuireError, Unauthenticated, Unavailable, invalid_field
from quire.runtime import entropy
from quire.runtime.failpoint import failpoint

_TAKEN_AT_ONCE = 16
# The interval at which the store is polled for events of other gateways, for all readers together.
_POLL_S = 0.1
_RETRY_S = 1.0
_EVENTS = replace(OPENAI, names_events=True)
_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Run(LeasedRun):
    """A response that runs here. `began` gets its first state when its request is admitted, or the error; None if the
    response was taken over."""

    row: Background
    began: asyncio.Future[bytes] | None = None

    @property
    def is_new(self) -> bool:
        """Whether the caller that made the response still waits for its admission."""
        return self.began is not None and not self.began.done()


@dataclass(slots=True)
class _News:
    """Wakes readers here. A change sets and replaces the event: readers that take it before a look miss no change."""

    event: asyncio.Event = field(default_factory=asyncio.Event)
    num_readers: int = 0


class BackgroundResponses(LeasedRuns[Background, _Run]):
    """The background responses that run at this gateway."""

    def __init__(
        self,
        models: Models,
        store: BackgroundStore,
        authenticator: Authenticator,
        read_call: Callable[[bytes, str], ResponseCall],
    ) -> None:
        """`read_call` restores a call from its stored data and its id."""
        super().__init__(store, models, "background responses")
        self._store = store
        self._authenticator = authenticator
        self._read_call = read_call
        self._news: dict[str, _News] = {}

    async def begin(self, call: ResponseCall) -> bytes:
        """Starts a response and returns its first state.

        Raises:
            QuireError: the response is rejected and does not run. The error has the names of fields in the body.
        """
        caller = current_caller()
        with self._models.default.arriving():
            row = Background(
                caller.tenant,
                call.id,
                caller.key_id,
                call.kept(),
                call.seed if call.seed is not None else entropy.random_bits(63),
                QUEUED,
                as_json(call.first_state()),
            )
            await self._store.run(self._store.add, row)
            began: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
            try:
                if self._is_stopping:
                    raise _about_to_stop()
                run = _Run(row.id, row, began)
                # The request of a response stays in memory after its call has ended.
                release = keep_memory()

                def ended(_: asyncio.Task[None]) -> None:
                    release()
                    if run.is_new:
                        began.set_exception(_about_to_stop())

                self._start(run, self._run(run)).add_done_callback(ended)
                return await asyncio.shield(began)
            except QuireError:
                await self._store.run(self._store.remove, row.tenant, row.id)
                raise

    async def get(self, tenant: str, response_id: str) -> Background | None:
        """A background response, running or ended; None if the store does not have it."""
        return await self._store.run(self._store.get, tenant, response_id)

    async def asked(self, tenant: str, response_id: str) -> Sequence[ChatMessage] | None:
        """The conversation that a response, running or ended, answers; None if the store does not have it."""
        row = await self.get(tenant, response_id)
        return None if row is None else self._read_call(row.request, response_id).conversation

    async def cancel(self, tenant: str, response_id: str) -> bytes | None:
        """Ends a response of any gateway; returns its last state, None if the store does not have it."""
        row = await self.get(tenant, response_id)
        if row is None:
            return None
        if row.is_running:
            await self._end(row, CANCELLED, from_json(row.response))
            self._stop(response_id)
            row = await self.get(tenant, response_id)
        return None if row is None else row.response

    async def remove(self, tenant: str, response_id: str) -> bool:
        """Deletes a response, which ends if it runs; returns whether the store had it."""
        removed = await self._store.run(self._store.remove, tenant, response_id)
        if removed:
            self._stop(response_id)
        return removed

    async def events(
        self, tenant: str, response_id: str, after: int, field_name: str = "starting_after"
    ) -> AsyncGenerator[bytes, None]:
        """The events after the number `after`, until the response ends. An error after the first of them, such as a
        deletion, is the last event.

        Raises:
            NotFound: the store does not have the response.
            InvalidArgument: it has no event with this number yet; `field_name` is the reader's field with the number.
            ResourceExhausted: there is no memory for the first events.
        """
        last = await self._store.run(self._store.last_number, tenant, response_id) if after >= 0 else after
        if last < after and await self.get(tenant, response_id) is not None:
            description = f'is {after}; the last event of response "{response_id:.80}" so far is number {last}'
            raise invalid_field(field_name, description)
        news, had, most_bytes = self._news.setdefault(response_id, _News()), after, 0
        news.num_readers += 1
        try:
            while True:
                changed = news.event
                status, pieces = await self._store.run(self._store.pieces, tenant, response_id, after)
                if status is None:
                    known = f'response "{response_id:.80}" does not run in the background'
                    raise NotFound(known, reason="RESPONSE_NOT_FOUND")
                if (num_bytes := sum(len(piece.data) for piece in pieces)) > most_bytes:
                    # Counted as memory, since the reader may be slow.
                    count_answer(num_bytes - most_bytes)
                    most_bytes = num_bytes
                for piece in pieces:
                    events = piece.data.split(b"\n\n")[after + 1 - piece.first : -1]
                    after = piece.first + piece.number - 1
                    yield b"".join(event + b"\n\n" for event in events)
                if pieces:
                    continue
                if status not in RUNNING:
                    return
                try:
                    # All changes wake the reader, except a deletion by another gateway.
                    async with asyncio.timeout(RENEW_S):
                        await changed.wait()
                except TimeoutError:
                    pass
        except QuireError as error:
            if after == had:
                raise
            yield _EVENTS.event(error_event(error_answer(error), after + 1))
        finally:
            news.num_readers -= 1
            if not news.num_readers:
                self._news.pop(response_id, None)

    async def run(self) -> None:
        """Renews the leases of responses that run here, takes over responses that no gateway runs, and wakes readers
        when other gateways write, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._listen(), name="news of background responses")
            await super().run()

    async def _listen(self) -> None:
        while self._store.is_shared:
            await asyncio.sleep(_POLL_S)
            if self._news.keys() <= self._runs.keys():
                continue
            try:
                for response_id in await self._store.run(self._store.news):
                    self._notify(response_id)
            except QuireError:
                """Readers also poll by themselves, and report the error."""

    def _max_taken(self) -> int:
        return _TAKEN_AT_ONCE

    def _run_taken(self, row: Background) -> None:
        _logger.info("response %s continues here: no gateway runs it", row.id)
        run = _Run(row.id, row)
        self._start(run, self._run(run))

    def close(self) -> None:
        """Closes the store, after the last reader has ended."""
        self._store.close()

    def _stop(self, response_id: str) -> None:
        if (run := self._runs.get(response_id)) is not None:
            run.cancel()
        self._notify(response_id)

    def _notify(self, response_id: str) -> None:
        if (news := self._news.get(response_id)) is not None:
            news.event.set()
            news.event = asyncio.Event()

    async def _run(self, run: _Run) -> None:
        row = run.row
        try:
            await self._run_to_end(run)
        except NotOwnerError:
            pass
        except Exception as error:
            known = error if isinstance(error, QuireError) else None
            if known is None:
                _logger.error("response %s failed unexpectedly", row.id, exc_info=error)
                known = Internal("an unexpected error; the server's log has more", reason="UNEXPECTED")
            if run.began is not None and run.is_new:
                run.began.set_exception(known)
            else:
                await self._fail(row, known)
        finally:
            self._notify(row.id)

    async def _run_to_end(self, run: _Run) -> None:
        """Runs a response until it ends, and retries if schedulers are lost or full."""
        row = run.row
        caller = self._authenticator.find(row.key_id, row.tenant)
        if caller is None:
            raise Unauthenticated("the API key of the response is no longer valid", reason="INVALID_API_KEY")
        set_caller(caller)
        while True:
            try:
                return await self._run_once(run)
            except QuireError as error:
                if run.is_new or not error.is_retryable:
                    raise
                delay_s = _RETRY_S if error.retry_after_ms is None else error.retry_after_ms / 1000
                _logger.info("response %s waits: %s", row.id, error)
            await asyncio.sleep(delay_s)

    async def _run_once(self, run: _Run) -> None:
        row = run.row
        num_events, tokens = await self._store.run(self._store.written, row.tenant, row.id)
        call = self._read_call(row.request, row.id)
        generator = self._models.of(call.asked_model, ModelKind.TEXT)
        (options,) = await call.requests(generator)
        options = replace(options, durable=False, front_end=b"", is_steady=True)
        options.sampling.seed = row.seed
        with generator.call_memory(STREAMED_AND_REPEATED) as memory:
            async with AsyncExitStack() as stack:
                with renaming(lambda: call.names(0)):
                    admitted = generator.admitted(options, CallParameters(), memory=memory)
                    live = await stack.enter_async_context(admitted)
                await _give(live, tokens)
                generator.start(live)
                shaper = await call.shaper(generator, [live])
                if run.began is not None and run.is_new:
                    run.began.set_result(as_json(shaper.state(QUEUED)))
                log = _Log(self._store, row, num_events, len(tokens), partial(self._notify, row.id))
                try:
                    await self._write_all(call, shaper, live, log)
                finally:
                    await log.settle()

    async def _write_all(self, call: ResponseCall, shaper: ResponseShaper, live: LiveRequest, log: "_Log") -> None:
        if log.is_new:
            log.state = QUEUED, as_json(shaper.state(QUEUED))
        log.add(shaper.begin())
        has_begun = False
        async with aclosing(_as_generator(live)) as events:
            async for event in events:
                if not has_begun:
                    has_begun = True
                    log.state = IN_PROGRESS, as_json(shaper.state(IN_PROGRESS))
                    log.add(shaper.under_way())
                if isinstance(event, Completed):
                    last = list(shaper.end([event.usage]))
                    await call.keep()
                    log.add(last)
                    failpoint("gateway.background.before_end")
                    response = last[-1]["response"]
                    log.state = response["status"], as_json(response)
                    await log.close()
                    return
                log.add(shaper.event(0, event), event.token_ids if isinstance(event, Chunk) else ())

    async def _fail(self, row: Background, error: QuireError) -> None:
        """Ends a response that failed here, unless another gateway has taken it over."""
        problem = {"code": error.reason.lower(), "message": error.message}
        try:
            await self._end(row, FAILED, from_json(row.response) | {"error": problem}, owner=self._store.owner)
        except QuireError as failed:
            # Another run takes it over when its lease expires.
            _logger.warning("response %s failed, which cannot be stored: %s", row.id, failed)

    async def _end(self, row: Background, status: str, response: dict[str, Any], owner: str | None = None) -> None:
        """Ends a response in this state with its present output and a last event. If `owner` is given, only if that
        gateway runs it."""
        response = response | {"status": status}

        def last(events: bytes, number: int) -> tuple[bytes, bytes]:
            response["output"] = output_so_far(_values(events))
            # Clients have no separate event for a cancelled response.
            kind = "response.failed" if status == FAILED else "response.incomplete"
            value = {"type": kind, "sequence_number": number, "response": response}
            return as_json(response), f"id: {EventId(row.id, number)}\n".encode() + _EVENTS.event(value)

        await self._store.run(self._store.end, row.tenant, row.id, status, last, owner)


def _about_to_stop() -> Unavailable:
    return Unavailable("this gateway is about to stop; try another one", reason="DRAINING")


class _Log:
    """Appends events to the store in the background: all events that come during one write form the next write.

    Attributes:
        is_new: Whether the store has no events of the response yet.
        state: The status and the response to store with the next write.
    """

    def __init__(
        self, store: BackgroundStore, row: Background, num_events: int, num_tokens: int, on_write: Callable[[], object]
    ) -> None:
        """The store has `num_events` events of the response, which contain `num_tokens` tokens."""
        self.is_new = not num_events
        self.state: tuple[str, bytes | None] = QUEUED if self.is_new else IN_PROGRESS, None
        self._store = store
        self._row = row
        self._on_write = on_write
        self._writer = EventWriter(_EVENTS, row.id, num_events)
        self._first = num_events
        self._tokens_had = num_tokens
        self._data: list[bytes] = []
        self._tokens: list[int] = []
        self._writing: asyncio.Task[None] | None = None

    def add(self, values: Any, tokens: Any = ()) -> None:
        """Adds events, and the tokens that they contain. Raises the error of the last write, if any."""
        self._data.append(self._writer.write(values))
        for token in tokens:
            if self._tokens_had:
                self._tokens_had -= 1
            else:
                self._tokens.append(token)
        if self._writing is not None and self._writing.done():
            self._writing.result()
            self._writing = None
        if self._writing is None and self._writer.num_events > self._first:
            self._writing = asyncio.create_task(self._write())

    async def close(self) -> None:
        """Writes the remaining events, with the last state."""
        if self._writing is not None:
            await self._writing
        await self._write_piece()

    async def settle(self) -> None:
        """Waits for the current write, and ignores its error."""
        if self._writing is not None:
            await asyncio.gather(self._writing, return_exceptions=True)

    async def _write(self) -> None:
        while self._writer.num_events > self._first:
            await self._write_piece()

    async def _write_piece(self) -> None:
        first, number = self._first, self._writer.num_events - self._first
        data, self._data = b"".join(self._data), []
        tokens, self._tokens = self._tokens, []
        self._first += number
        status, response = self.state
        piece = Piece(first, number, data, tokens)
        await self._store.run(self._store.write, self._row.tenant, self._row.id, piece, status, response)
        self._on_write()


def _values(events: bytes) -> Iterator[dict[str, Any]]:
    """The objects of serialized events."""
    for event in events.split(b"\n\n")[:-1]:
        yield from_json(event.partition(b"\ndata: ")[2])


async def _give(live: LiveRequest, tokens: list[int]) -> None:
    """Adds the tokens of an earlier run to a request that was not submitted yet."""
    turns = Turns()
    for begin in range(0, len(tokens), TOKENS_PER_TURN):
        live.accept(TokenRun(live.handle, 0, begin, tokens[begin : begin + TOKENS_PER_TURN]))
        await turns.pause()
    if tokens:
        live.end_if_complete()


async def _as_generator(live: LiveRequest) -> AsyncGenerator[Event, None]:
    async for event in live.events():
        yield event
