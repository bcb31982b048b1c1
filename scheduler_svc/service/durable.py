"""Durable requests: they belong to the scheduler, and a gateway reads them for as long as it is there.

To the core all of them are one client's, so that who reads may change while a request runs and the core knows nothing
of it. Their events are kept, and handed to the reader under its own handle.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from quire.rpc.errors import Aborted, AlreadyExists, NotFound, QuireError, ResourceExhausted
from scheduler_svc.core.request import ClientId, EmittedSequence, Handle, Request, RequestKey
from scheduler_svc.core.sequence import FinishReason
from scheduler_svc.core.step_plan import ClientEvents, RequestEnd, SequenceEnd, Usage
from scheduler_svc.service.client_events import append, by_request, under
from scheduler_svc.service.connections import Connection, was_cancelled
from scheduler_svc.service.prompt_logprobs import PromptLogprobs

DURABLE_CLIENT = ClientId(-2)
"""Whose all durable requests are; a gateway's connection has a number from 0 on."""

MAX_CANCELLED = 1024
"""How many of those that were cancelled are remembered."""


@dataclass(frozen=True, slots=True)
class DurableLimits:
    """How much is kept: requests; tokens that they have and may still generate; and seconds without a reader, or after
    the end."""

    max_requests: int
    max_tokens: int
    grace_s: float


@dataclass(frozen=True, slots=True)
class Reader:
    """The gateway's stream that gets a request's events, and the handle that it knows the request by."""

    connection: Connection
    handle: Handle


@dataclass(slots=True, eq=False)
class DurableRequest:
    """One request and all that happened to it. `description` is the submission as it came; `nonce` tells the request
    from others that have its id before or after it; `num_tokens` are those that it counts for against the limit."""

    key: RequestKey
    tenant: str
    request_id: str
    nonce: int
    description: bytes
    num_tokens: int
    events: ClientEvents = field(default_factory=ClientEvents)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    reader: Reader | None = None
    is_over: bool = False
    expiry: asyncio.TimerHandle | None = None

    @property
    def end_of_prompt_logprobs(self) -> int:
        """The first position of the prompt whose log probability has yet to come."""
        return self.prompt_logprobs[-1].end if self.prompt_logprobs else 1


class DurableRequests:
    """All durable requests that are not forgotten yet, and the ids of the newest that were cancelled: a gateway whose
    stream breaks before it hears so submits them again.

    Invariants: one has at most one reader, and a reader's connection and handle stand for one request; a timer runs for
    exactly those that are over or have no reader; an id that was cancelled is not known.
    """

    def __init__(self, abort: Callable[[RequestKey], object], limits: DurableLimits) -> None:
        self._abort = abort
        self._limits = limits
        self._by_id: dict[tuple[str, str], DurableRequest] = {}
        self._by_key: dict[RequestKey, DurableRequest] = {}
        self._by_reader: dict[RequestKey, DurableRequest] = {}
        # Their nonces.
        self._cancelled: dict[tuple[str, str], int] = {}
        self._num_tokens = 0
        self._handles = count()

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def num_tokens(self) -> int:
        """Tokens of all of them, those that may still be generated included."""
        return self._num_tokens

    def admit(self, request: Request, nonce: int, description: bytes) -> DurableRequest:
        """Makes room for a request under the key that it is then to be submitted with; it has no reader yet.

        Raises:
            AlreadyExists: a running one of its tenant has its id.
            ResourceExhausted: too much would be kept.
        """
        known = self._by_id.get((request.tenant, request.request_id))
        if known is not None and not known.is_over:
            raise AlreadyExists(
                f'request_id "{request.request_id}" names a request that is running', reason="REQUEST_ID_IN_USE"
            )
        if known is not None:
            self.forget(known)
        num_tokens = _num_kept(request)
        self._make_room(num_tokens)
        key = RequestKey(DURABLE_CLIENT, Handle(next(self._handles)))
        durable = DurableRequest(key, request.tenant, request.request_id, nonce, description, num_tokens)
        _remember_emitted(durable, request)
        self._by_id[durable.tenant, durable.request_id] = durable
        self._cancelled.pop((durable.tenant, durable.request_id), None)
        self._by_key[key] = durable
        self._num_tokens += num_tokens
        return durable

    def find(self, tenant: str, request_id: str) -> DurableRequest:
        """Raises NotFound, also where the request is another tenant's."""
        durable = self._by_id.get((tenant, request_id))
        if durable is None:
            raise NotFound(f'request_id "{request_id[:128]}" names no durable request', reason="REQUEST_NOT_FOUND")
        return durable

    def resubmitted(self, request: Request, nonce: int, gateway_id: str) -> DurableRequest | None:
        """The request that a gateway submits again, None where it is not known (any more). One that has its id and
        another nonce is not it.

        Raises:
            Aborted: another gateway reads it by now.
            Cancelled: it was cancelled.
        """
        if self._cancelled.get((request.tenant, request.request_id)) == nonce:
            raise was_cancelled(request.request_id)
        durable = self._by_id.get((request.tenant, request.request_id))
        if durable is None or durable.nonce != nonce:
            return None
        if durable.reader is not None and durable.reader.connection.gateway_id != gateway_id:
            raise _taken_over(durable)
        return durable

    def attach(self, durable: DurableRequest, reader: Reader, *, replays: bool) -> None:
        """Hands a request to a new reader; whoever read it until now is told. Replays all its events where asked."""
        if durable.reader is not None:
            self._leave(durable, _taken_over(durable))
        other = self._by_reader.get(_reader_key(reader))
        if other is not None:
            self.detach(other)
        durable.reader = reader
        self._by_reader[_reader_key(reader)] = durable
        if not durable.is_over:
            self._stop_timer(durable)
        if replays:
            self._put(durable, 0, durable.events, durable.prompt_logprobs)

    def read_by(self, connection: Connection, handle: Handle) -> DurableRequest | None:
        """The request that the stream knows by this handle."""
        return self._by_reader.get(RequestKey(connection.client, handle))

    def detach(self, durable: DurableRequest) -> None:
        """Nobody reads it any more; the grace period begins."""
        self._leave(durable)
        self._start_timer(durable)

    def detach_all(self, connection: Connection) -> None:
        """A stream broke."""
        for durable in list(self._by_id.values()):
            if durable.reader is not None and durable.reader.connection is connection:
                self.detach(durable)

    def end(self, durable: DurableRequest, usage: Usage | None) -> None:
        """Its reader needs no more tokens; those that came are kept for a while, with what they have cost so far."""
        if not durable.is_over:
            self._abort(durable.key)
            if usage is not None:
                durable.events.completed.append(RequestEnd(durable.key.handle, usage))
        durable.is_over = True
        self.detach(durable)

    def cancel(self, tenant: str, request_id: str) -> bool:
        """Ends and forgets a request, and tells its reader. Returns whether the tenant had one of this id."""
        durable = self._by_id.get((tenant, request_id))
        if durable is None:
            return False
        self._leave(durable, was_cancelled(request_id))
        self.forget(durable)
        self._cancelled[tenant, request_id] = durable.nonce
        if len(self._cancelled) > MAX_CANCELLED:
            del self._cancelled[next(iter(self._cancelled))]
        return True

    def forget(self, durable: DurableRequest) -> None:
        """Drops what is kept, and ends what still runs. Idempotent."""
        if self._by_key.pop(durable.key, None) is None:
            return
        del self._by_id[durable.tenant, durable.request_id]
        self._num_tokens -= durable.num_tokens
        self._stop_timer(durable)
        self._leave(durable)
        if not durable.is_over:
            self._abort(durable.key)
        durable.is_over = True

    def forget_all(self) -> None:
        """Drops all requests, and ends those that still run."""
        for durable in list(self._by_id.values()):
            self.forget(durable)

    def deliver(self, step_id: int, events: ClientEvents) -> None:
        """Keeps what happened in a step, and passes it on. Never waits."""
        for handle, part in by_request(events).items():
            durable = self._by_key.get(RequestKey(DURABLE_CLIENT, handle))
            if durable is None:
                continue
            append(durable.events, part)
            self._put(durable, step_id, part, ())
            if part.completed or part.failed:
                durable.is_over = True
                self._start_timer(durable)

    def deliver_prompt_logprobs(self, entries: Iterable[PromptLogprobs]) -> None:
        """To be called before `deliver` for the same step. Never waits."""
        for entry in entries:
            durable = self._by_key.get(RequestKey(DURABLE_CLIENT, entry.handle))
            if durable is not None and (new := entry.since(durable.end_of_prompt_logprobs)) is not None:
                durable.prompt_logprobs.append(new)
                self._put(durable, 0, ClientEvents(), [new])

    def _put(
        self, durable: DurableRequest, step_id: int, events: ClientEvents, prompt_logprobs: Sequence[PromptLogprobs]
    ) -> None:
        if durable.reader is None:
            return
        outbox, handle = durable.reader.connection.outbox, durable.reader.handle
        if prompt_logprobs:
            outbox.put_prompt_logprobs([replace(entry, handle=handle) for entry in prompt_logprobs])
        if events.handles or events.finished or events.completed or events.failed:
            outbox.put(step_id, under(events, RequestKey(durable.reader.connection.client, handle)))

    def _leave(self, durable: DurableRequest, error: QuireError | None = None) -> None:
        if durable.reader is None:
            return
        reader, durable.reader = durable.reader, None
        del self._by_reader[_reader_key(reader)]
        if error is not None:
            reader.connection.outbox.put_refusal(reader.handle, error)

    def _make_room(self, num_tokens: int) -> None:
        """Forgets what is over, the oldest first, as far as needed. Raises ResourceExhausted where it is too little."""
        limits = self._limits
        over = [durable for durable in self._by_id.values() if durable.is_over]
        running = self._num_tokens - sum(durable.num_tokens for durable in over)
        if len(self) - len(over) >= limits.max_requests or running + num_tokens > limits.max_tokens:
            raise ResourceExhausted(
                f"{len(self) - len(over)} durable requests may have {running} tokens, this one {num_tokens}; "
                f"at most {limits.max_requests} requests and {limits.max_tokens} tokens are kept",
                reason="DURABLE_LIMIT",
            )
        for durable in over:
            if len(self) < limits.max_requests and self._num_tokens + num_tokens <= limits.max_tokens:
                return
            self.forget(durable)

    def _start_timer(self, durable: DurableRequest) -> None:
        if durable.expiry is None:
            loop = asyncio.get_running_loop()
            durable.expiry = loop.call_later(self._limits.grace_s, self.forget, durable)

    @staticmethod
    def _stop_timer(durable: DurableRequest) -> None:
        if durable.expiry is not None:
            durable.expiry.cancel()
            durable.expiry = None


def _reader_key(reader: Reader) -> RequestKey:
    return RequestKey(reader.connection.client, reader.handle)


def _taken_over(durable: DurableRequest) -> Aborted:
    return Aborted(f'request "{durable.request_id}" is read by another call now', reason="REQUEST_TAKEN_OVER")


def _num_kept(request: Request) -> int:
    """Prompt and output tokens, a log probability counted as a token."""
    sampling = request.sampling
    per_output = 1 if sampling.logprobs is None else 2 + sampling.logprobs
    per_prompt = 1 if sampling.prompt_logprobs is None else 2 + sampling.prompt_logprobs
    return len(request.prompt) * per_prompt + request.num_returned * request.max_tokens * per_output


def _remember_emitted(durable: DurableRequest, request: Request) -> None:
    """What an earlier scheduler said belongs to what is replayed."""
    handle = durable.key.handle
    for index, emitted in enumerate(request.emitted):
        size = len(emitted.token_ids)
        events = ClientEvents([handle] * size, [index] * size, list(range(size)), list(map(int, emitted.token_ids)))
        if emitted.has_ended:
            events.finished.append(_end_of(emitted, handle, index, request.stop_token_ids))
        append(durable.events, events)


def _end_of(emitted: EmittedSequence, handle: Handle, index: int, stop_token_ids: frozenset[int]) -> SequenceEnd:
    """How a sequence ended, by its tokens. A gateway finds by itself that a stop string ended it."""
    last = emitted.token_ids[-1] if emitted.token_ids else None
    stop_token_id = last if last in stop_token_ids else None
    reason = FinishReason.LENGTH if stop_token_id is None else FinishReason.STOP
    return SequenceEnd(handle, index, len(emitted.token_ids), reason, stop_token_id)
