"""The table of all live requests of the gateway. It does no I/O: it returns the actions, and its callers send them."""

import asyncio
import hashlib
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from gateway.replicas.events import (
    EventBatch,
    PromptRun,
    RequestEnded,
    RequestEvent,
    RequestFailed,
    RequestMoved,
    SequenceEnded,
    TokenRun,
)
from gateway.replicas.generation_request import GenerationRequest
from gateway.replicas.live import Arrivals, LiveRequest
from gateway.replicas.sequence import SequenceStream, TokenGapError
from gateway.text.stop import StopStrings
from gateway.text.tokenizer import Tokenizer
from quire.rpc.errors import AlreadyExists, QuireError
from quire.runtime import clock

# Handles are int32 in messages.
_END_OF_HANDLES = 2**31


@dataclass(slots=True)
class Outcome:
    """The actions for the caller after a batch of events.

    Attributes:
        arrivals: The tokens that came with this batch.
        ended_here: Requests that the gateway ended by a stop string. The scheduler may still run them, and has yet to
            report their usage.
        sequences_ended_here: Sequences, by index, that a stop string ended in requests that run on.
        failed: Requests that the scheduler rejected or failed.
        begun: Requests that got their first token.
        moved: Requests that the scheduler released, to continue on another replica.
        over: Requests that ended with this batch; no scheduler runs them.
        broken: Requests that failed here because one of their events could not be applied. The scheduler may still run
            them.
        unknown_handles: Handles of requests that the scheduler runs but that have no reader here, for example because
            the client disconnected while the stream was broken.
    """

    arrivals: Arrivals
    ended_here: list[LiveRequest] = field(default_factory=list[LiveRequest])
    sequences_ended_here: list[tuple[LiveRequest, int]] = field(default_factory=list[tuple[LiveRequest, int]])
    failed: list[tuple[LiveRequest, QuireError]] = field(default_factory=list[tuple[LiveRequest, QuireError]])
    begun: list[LiveRequest] = field(default_factory=list[LiveRequest])
    moved: list[LiveRequest] = field(default_factory=list[LiveRequest])
    over: list[LiveRequest] = field(default_factory=list[LiveRequest])
    broken: list[LiveRequest] = field(default_factory=list[LiveRequest])
    unknown_handles: set[int] = field(default_factory=set[int])


class Ledger:
    """Finds live requests by tenant and id, and by handle. It contains a request from `open` to `close`.

    It also counts admitted calls that have not opened a request yet.
    """

    def __init__(
        self, *, max_chunk_tokens: int, clock: Callable[[], float] = clock.monotonic, other: "Ledger | None" = None
    ) -> None:
        """`other` is the ledger of another model, whose requests have other ids than the requests here."""
        self._max_chunk_tokens = max_chunk_tokens
        self._clock = clock
        # Ids are unique within a tenant, for all models.
        self._by_id: dict[tuple[str, str], LiveRequest] = {} if other is None else other._by_id
        self._by_handle: dict[int, LiveRequest] = {}
        self._last_handle = 0
        self._num_arriving = 0
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def __len__(self) -> int:
        return len(self._by_handle)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(list(self._by_handle.values()))

    def get(self, tenant: str, request_id: str) -> LiveRequest | None:
        live = self._by_id.get((tenant, request_id))
        return live if live is not None and self._by_handle.get(live.handle) is live else None

    def check_unused(self, tenant: str, request_id: str) -> None:
        """Raises AlreadyExists if a live request of the tenant has the id."""
        if (tenant, request_id) in self._by_id:
            description = f'"{request_id}" names a request that is running; ids must be unique among running requests'
            raise AlreadyExists.of_field("request_id", description, reason="REQUEST_ID_IN_USE")

    def open(self, request: GenerationRequest, tokenizer: Tokenizer) -> LiveRequest:
        """Adds a request. Raises AlreadyExists if a live request of its tenant has its id."""
        self.check_unused(request.tenant, request.request_id)
        live = self.prepare(request, tokenizer)
        self.enter(live)
        return live

    def prepare(self, request: GenerationRequest, tokenizer: Tokenizer) -> LiveRequest:
        """Makes an entry without adding it to the ledger."""
        stopping = request.stopping
        stop_strings = StopStrings(stopping.stop) if stopping.stop else None
        ending_token_ids = request.ending_token_ids
        streams = [
            SequenceStream(
                index,
                tokenizer.detokenizer(
                    include_special_tokens=request.output.include_special_tokens,
                    shown=request.answer_format.tokens,
                    prompt=request.prompt_token_ids,
                ),
                stop_strings,
                ending_token_ids,
                min_tokens=stopping.min_tokens,
                include_stop_string=stopping.include_stop_string,
                parser=request.answer_format.parser(partial(_call_id, request, index)),
                keeps_logprobs=request.durable,
            )
            for index in range(request.sampling.n)
        ]
        return LiveRequest(
            request, self._next_handle(), streams, max_chunk_tokens=self._max_chunk_tokens, clock=self._clock
        )

    def enter(self, live: LiveRequest) -> None:
        """Adds an entry, whose id no other entry may have."""
        request = live.request
        self._by_id[request.tenant, request.request_id] = live
        self._by_handle[live.handle] = live
        self._is_empty.clear()

    def close(self, live: LiveRequest) -> None:
        """Removes a request; its later events are dropped. Idempotent."""
        if self._by_handle.pop(live.handle, None) is not None:
            del self._by_id[live.request.tenant, live.request.request_id]
            self._update_empty()

    @contextmanager
    def arriving(self) -> Generator[None]:
        """Counts an admitted call, which may open a request while the context runs."""
        self._num_arriving += 1
        self._is_empty.clear()
        try:
            yield
        finally:
            self._num_arriving -= 1
            self._update_empty()

    async def wait_until_empty(self) -> None:
        """Waits until no request is live or arriving."""
        await self._is_empty.wait()

    def placed_on(self, replica: str) -> Iterator[LiveRequest]:
        """The requests that are placed on a replica, including requests that are over."""
        return (live for live in self if live.replica == replica)

    def running_on(self, replica: str) -> list[LiveRequest]:
        """The requests that a replica still runs."""
        return [live for live in self.placed_on(replica) if not live.is_over and not live.awaits_usage]

    def waiting(self) -> Iterator[LiveRequest]:
        """The requests that wait for a replica."""
        return (live for live in self if live.replica is None and live.is_prepared and not live.is_over)

    def apply_events(self, replica: str, batch: EventBatch) -> Outcome:
        """Applies events of a replica; events of requests that are not placed there are dropped.

        An unexpected error while an event is applied fails only the request of that event.

        Raises:
            TokenGapError: events are missing. Clients got no wrong output; a new connection repeats the events.
        """
        outcome = Outcome(Arrivals(self._clock()))
        touched: list[LiveRequest] = []
        try:
            for event in (*batch.prompt_runs, *batch.runs, *batch.ended, *batch.completed):
                self._apply_event(replica, event, outcome, touched)
        except TokenGapError:
            # The caller gets no outcome.
            for live in outcome.arrivals.direct:
                live.wake_reader()
            raise
        # The scheduler reports a completion with the last sequence end. Without a completion, it ended only here.
        outcome.ended_here = [live for live in touched if live.await_usage()]
        outcome.sequences_ended_here = [
            (live, index) for live, index in outcome.sequences_ended_here if not live.is_over and not live.awaits_usage
        ]
        for event in (*batch.failed, *batch.moved):
            self._apply_event(replica, event, outcome, touched)
        return outcome

    def _apply_event(self, replica: str, event: RequestEvent, outcome: Outcome, touched: list[LiveRequest]) -> None:
        live = self._by_handle.get(event.handle)
        if live is None or live.replica != replica:
            if isinstance(event, TokenRun):
                outcome.unknown_handles.add(event.handle)
            return
        if live.is_over:
            return
        try:
            _apply(live, event, outcome, touched)
        except TokenGapError:
            raise
        except Exception as error:
            live.fail_unexpectedly(error)
            outcome.broken.append(live)

    def _update_empty(self) -> None:
        if not self._by_handle and not self._num_arriving:
            self._is_empty.set()

    def _next_handle(self) -> int:
        while True:
            self._last_handle = (self._last_handle + 1) % _END_OF_HANDLES
            if self._last_handle not in self._by_handle:
                return self._last_handle


def _apply(live: LiveRequest, event: RequestEvent, outcome: Outcome, touched: list[LiveRequest]) -> None:
    match event:
        case TokenRun():
            if live.seconds_to_first_token is None:
                outcome.begun.append(live)
            if live.accept(event, outcome.arrivals):
                touched.append(live)
                outcome.sequences_ended_here.append((live, event.sequence_index))
        case PromptRun():
            live.accept_prompt(event)
        case SequenceEnded():
            live.end_sequence(event)
            touched.append(live)
        case RequestEnded():
            live.complete(event)
            outcome.over.append(live)
        case RequestFailed() if live.awaits_usage:
            # The output was complete before: the failure concerns tokens after its end.
            live.end_if_complete()
            outcome.over.append(live)
        case RequestMoved() if live.awaits_usage:
            # A stop string has ended it, and the answer to the abort follows.
            pass
        case RequestMoved():
            live.kv_source = event.source
            outcome.moved.append(live)
        case RequestFailed():
            outcome.failed.append((live, _naming_adapter(event.error, live)))


def _naming_adapter(error: QuireError, live: LiveRequest) -> QuireError:
    """Adds the adapter to an error about non-finite logits: it may be the cause, and workers do not know its name."""
    adapter = live.request.adapter
    if error.reason == "NON_FINITE_LOGITS" and adapter is not None:
        error.message = f'{error.message}; the request has the adapter "{adapter.name}", whose numbers may overflow'
    return error


def _call_id(request: GenerationRequest, sequence_index: int, call_index: int) -> str:
    """The unique id of a tool call. Every gateway computes the same one."""
    of = f"{request.nonce} {sequence_index} {call_index}".encode()
    return request.answer_format.call_id(hashlib.blake2b(of, digest_size=12).hexdigest())
