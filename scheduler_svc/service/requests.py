"""Every request has an owner, the table here, and a reader, a gateway's stream.

To the core all requests are one client's, so who reads one may change while it runs and the core knows nothing of it:
its rank, its blocks and its tokens stay. A request whose reader leaves runs on for a while, and its events are kept. A
reader that comes back, or another one, says what it has and gets the rest. Durable requests differ in that all of their
output is kept from the first token on, that any gateway of the tenant may read them, and in how long they wait.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count
from typing import Protocol

from quire.rpc.errors import Aborted, AlreadyExists, Cancelled, NotFound, QuireError, ResourceExhausted
from scheduler_svc.core.events import ClientEvents, RequestEnd, Usage
from scheduler_svc.core.request import ClientId, Handle, QueueFullError, Request, RequestKey, check_shared_bound
from scheduler_svc.service.client_events import by_request, select
from scheduler_svc.service.history import Held, History, SequenceProgress
from scheduler_svc.service.outbox import Outbox
from scheduler_svc.service.prompt_logprobs import PromptLogprobs

GATEWAYS = ClientId(0)
"""To the core, all requests of gateways are this client's."""

MAX_CANCELLED = 1024
"""How many cancelled requests are remembered."""

MAX_UNDELIVERED = 2_000_000
"""How many tokens and log probabilities are kept of plain requests that ended without a reader."""

MAX_GROWTH = 1024
"""Output tokens for which room is reserved, for each sequence of a running durable request, beyond those that it has.
Tokens beyond the reserved ones are kept, too, and leave less room for new requests."""

_RETRY_MS = 1000
"""After this time a caller may retry that was refused for the limits on durable requests."""


class Timer(Protocol):
    """A call that was scheduled for later."""

    def cancel(self) -> None: ...


CallLater = Callable[[float, Callable[[], object]], Timer]


def _call_later(seconds: float, call: Callable[[], object]) -> Timer:
    return asyncio.get_running_loop().call_later(seconds, call)


@dataclass(frozen=True, slots=True)
class DurableLimits:
    """How much is kept of durable requests: requests; tokens that they have and may soon have; and seconds without a
    reader, or after the end. `tenant_overflow` is as in the core's config."""

    max_requests: int
    max_tokens: int
    grace_s: float
    tenant_overflow: float = 1.0


@dataclass(slots=True, eq=False)
class Connection:
    """One stream of a gateway, and the requests that it reads, by its handles for them. Handles in `reused` stood for
    other requests in messages that may still be on their way."""

    gateway_id: str
    grace_period_s: float
    outbox: Outbox = field(default_factory=Outbox)
    reads: dict[Handle, "OwnedRequest"] = field(default_factory=dict)
    reused: set[Handle] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Reader:
    """The stream that gets a request's events, and the handle that it knows the request by."""

    connection: Connection
    handle: Handle


@dataclass(frozen=True, slots=True)
class Durable:
    """What a durable request has besides: the submission as it came, and what it counts for against the limit. A log
    probability counts as a token."""

    description: bytes
    prompt_charge: int
    charge_per_token: int
    num_sequences: int
    max_tokens: int
    """Of each sequence."""

    @classmethod
    def of(cls, request: Request, description: bytes) -> "Durable":
        sampling = request.sampling
        per_prompt = 1 if sampling.prompt_logprobs is None else 2 + sampling.prompt_logprobs
        per_token = 1 if sampling.logprobs is None else 2 + sampling.logprobs
        prompt_charge = len(request.prompt) * per_prompt
        return cls(description, prompt_charge, per_token, request.num_returned, request.max_tokens)

    def charge(self, num_output_tokens: int, *, is_over: bool) -> int:
        """What it counts for with so many output tokens: those, and while it runs as many as it may soon have."""
        growth = 0 if is_over else self.num_sequences * MAX_GROWTH
        num_tokens = min(num_output_tokens + growth, self.num_sequences * self.max_tokens)
        return self.prompt_charge + num_tokens * self.charge_per_token


@dataclass(slots=True)
class _DurableUsage:
    """What durable requests that run count for, by tenant, and those that are over, oldest first, with theirs."""

    num_of: Counter[str] = field(default_factory=Counter)
    charge_of: Counter[str] = field(default_factory=Counter)
    over: list[tuple["OwnedRequest", int]] = field(default_factory=list)

    def add(self, tenant: str, charge: int) -> None:
        self.num_of[tenant] += 1
        self.charge_of[tenant] += charge


@dataclass(slots=True, eq=False)
class OwnedRequest:
    """One request. `nonce` tells it from others of its id; `gateway_id` is who submitted it; `retention_s` is how long
    it waits for a reader. `history` has all events of a durable request, and of another those that no reader has."""

    key: RequestKey
    tenant: str
    request_id: str
    nonce: int
    gateway_id: str
    retention_s: float
    num_returned: int
    durable: Durable | None
    history: History = field(default_factory=History)
    end_of_prompt_logprobs: int = 1
    """The first position of the prompt whose log probability has yet to come."""
    reader: Reader | None = None
    is_over: bool = False
    expiry: Timer | None = None

    @property
    def keeps_events(self) -> bool:
        return self.durable is not None or self.reader is None


class Requests:
    """All requests that are live, and those that are over and may still be read.

    Invariants: a request has at most one reader, and a handle stands for one request of its connection; a timer runs
    for each request that has no reader, and for each durable one that is over; a plain request that is over and has a
    reader is kept until that has taken in the end.
    """

    def __init__(
        self,
        abort: Callable[[RequestKey], bool],
        progress: Callable[[RequestKey], Sequence[SequenceProgress] | None],
        limits: DurableLimits,
        call_later: CallLater = _call_later,
    ) -> None:
        """`abort` ends a request in the core, and says whether it still ran; `progress` says how far its sequences are,
        as far as that was said to readers, and None for one that is over."""
        self._abort = abort
        self._progress = progress
        self._limits = limits
        self._call_later = call_later
        self._by_handle: dict[Handle, OwnedRequest] = {}
        # Several of an id: of several gateways, or one after another.
        self._by_id: dict[tuple[str, str], list[OwnedRequest]] = {}
        # Those whose events are kept.
        self._kept: dict[Handle, OwnedRequest] = {}
        self._readers: dict[Handle, Reader] = {}
        # Tenant, id and nonce of the newest that were cancelled: their gateways may submit them again.
        self._cancelled: dict[tuple[str, str, int], None] = {}
        # Plain ones that ended without a reader, oldest first, with their sizes.
        self._undelivered: dict[Handle, int] = {}
        self._undelivered_size = 0
        self._durable: dict[Handle, OwnedRequest] = {}
        # None once a step has added to histories since it was summed up.
        self._durable_usage: _DurableUsage | None = None
        self._handles = count()

    def __len__(self) -> int:
        return len(self._by_handle)

    @property
    def durable_grace_s(self) -> float:
        """How long a durable request is kept without a reader, and after its end."""
        return self._limits.grace_s

    @property
    def num_unread(self) -> int:
        """Requests that have no reader."""
        return len(self._by_handle) - len(self._readers)

    @property
    def num_durable(self) -> int:
        return len(self._durable)

    @property
    def num_durable_tokens(self) -> int:
        """What all durable requests count for against the limit: tokens that they have and may soon have. Metrics are
        read in another thread, so this leaves `_usage` alone and copies what may change meanwhile."""
        return sum(map(_charge_of, list(self._durable.values())))

    # Requests come.

    def admit(
        self, request: Request, nonce: int, reader: Reader, description: bytes | None = None
    ) -> tuple[OwnedRequest, Request]:
        """Enters a request, which `reader` reads. Returns it, and what is to be submitted to the core. With a
        description it is durable.

        Raises:
            AlreadyExists: the reader's handle stands for a live request, or a durable one has the id and still runs.
            ResourceExhausted: too much would be kept.
        """
        self._free_handle(reader)
        durable = None if description is None else self._make_durable(request, description)
        connection = reader.connection
        owned = OwnedRequest(
            key=RequestKey(GATEWAYS, Handle(next(self._handles))),
            tenant=request.tenant,
            request_id=request.request_id,
            nonce=nonce,
            gateway_id=connection.gateway_id,
            retention_s=connection.grace_period_s if durable is None else self._limits.grace_s,
            num_returned=request.num_returned,
            durable=durable,
        )
        request = replace(request, key=owned.key)
        if durable is not None:
            owned.history.add_emitted(request)
            self._usage().add(owned.tenant, durable.charge(owned.history.num_tokens, is_over=False))
            self._durable[owned.key.handle] = owned
        self._by_handle[owned.key.handle] = owned
        self._by_id.setdefault((owned.tenant, owned.request_id), []).append(owned)
        self._cancelled.pop((owned.tenant, owned.request_id, nonce), None)
        self._read(owned, reader)
        return owned, request

    def resubmitted(self, request: Request, nonce: int, gateway_id: str, held: Held) -> OwnedRequest | None:
        """The request that a gateway submits again and can go on with; None where it is unknown, or where more is
        missing than is kept: that one ends.

        Raises:
            Aborted: another gateway reads it by now.
            Cancelled: it was cancelled.
        """
        if (request.tenant, request.request_id, nonce) in self._cancelled:
            raise was_cancelled(request.request_id)
        for owned in self._by_id.get((request.tenant, request.request_id), ()):
            if owned.nonce == nonce and (owned.durable is not None or owned.gateway_id == gateway_id):
                break
        else:
            return None
        if owned.reader is not None and owned.reader.connection.gateway_id != gateway_id:
            raise _taken_over(owned)
        if owned.history.completes(held, self._progress(owned.key), owned.end_of_prompt_logprobs - 1):
            return owned
        self.forget(owned)
        return None

    def find(self, tenant: str, request_id: str) -> OwnedRequest:
        """A durable request. Raises NotFound, also where it is another tenant's."""
        for owned in self._by_id.get((tenant, request_id), ()):
            if owned.durable is not None:
                return owned
        raise NotFound(f'request_id "{request_id[:128]}" names no durable request', reason="REQUEST_NOT_FOUND")

    # Readers come and go.

    def read_by(self, reader: Reader) -> OwnedRequest | None:
        """The request that a stream knows by a handle."""
        return reader.connection.reads.get(reader.handle)

    def attach(self, owned: OwnedRequest, reader: Reader, held: Held) -> None:
        """Hands a request to a reader, which gets what it does not hold; another one that read it until now is told.

        Raises AlreadyExists where the reader's handle stands for another live request, and changes nothing.
        """
        self._free_handle(reader, but=owned)
        if owned.reader is not None and owned.reader != reader:
            self._leave(owned, _taken_over(owned))
        events, prompt_logprobs = owned.history.since(held, RequestKey(GATEWAYS, reader.handle))
        if owned.durable is None:
            owned.history.clear()
        self._read(owned, reader)
        if prompt_logprobs:
            reader.connection.outbox.put_prompt_logprobs(prompt_logprobs)
        if not events.is_empty:
            reader.connection.outbox.put(0, events)

    def detach(self, owned: OwnedRequest) -> None:
        """Nobody reads a request any more; its retention begins."""
        self._leave(owned)
        self._await_reader(owned)

    def taken(self, connection: Connection, num_messages: int) -> None:
        """A gateway has taken in so many messages of events of its stream. Raises ValueError where there were fewer."""
        for outgoing in connection.outbox.taken(num_messages):
            for handle in outgoing.ended:
                owned = connection.reads.get(handle)
                if owned is not None and owned.is_over and owned.durable is None:
                    self.forget(owned)

    def close(self, connection: Connection) -> None:
        """A stream is over. What it read waits for another reader, with all that was not taken in. Idempotent."""
        connection.outbox.close()
        reads = dict(connection.reads)
        for owned in reads.values():
            self._leave(owned)
        incomplete = {
            handle: owned
            for handle, owned in reads.items()
            if owned.durable is None and handle not in connection.reused
        }
        for outgoing in connection.outbox.untaken():
            for entry in outgoing.prompt_logprobs:
                if (owned := incomplete.get(entry.handle)) is not None:
                    owned.history.add_prompt_logprobs(entry)
            for handle, events in chain.from_iterable(by_request(batch).items() for batch in outgoing.batches):
                if (owned := incomplete.get(handle)) is not None:
                    owned.history.add(events)
        for owned in reads.values():
            self._await_reader(owned)

    # Requests end.

    def end(self, owned: OwnedRequest, usage: Usage | None) -> None:
        """The reader of a durable request needs no more of it; what came is kept, with what it has cost so far."""
        if not owned.is_over:
            self._abort(owned.key)
            if usage is not None:
                owned.history.add_ends([], [RequestEnd(owned.key.handle, usage)], [])
        owned.is_over = True
        self._durable_usage = None
        self.detach(owned)

    def end_unread(self, gateway_id: str) -> None:
        """Ends the plain requests of a gateway that nobody reads."""
        for owned in list(self._kept.values()):
            if owned.durable is None and owned.gateway_id == gateway_id:
                self.forget(owned)

    def end_all_unread(self) -> None:
        """Ends all requests that nobody reads, durable ones included."""
        for owned in list(self._kept.values()):
            if owned.reader is None:
                self.forget(owned)

    def forget_outputs(self) -> None:
        """Drops what is kept of durable requests that are over: gateways have another tokenizer now."""
        for owned in list(self._durable.values()):
            if owned.is_over:
                self.forget(owned)

    def cancel(self, tenant: str, request_id: str) -> bool:
        """Ends and forgets what the tenant runs under an id, and durable requests that are over, and tells the readers.
        Returns whether there was anything. Gateways know nothing of each other's ids, so there may be several."""
        named = [
            owned
            for owned in self._by_id.get((tenant, request_id), ())
            if owned.durable is not None or not owned.is_over
        ]
        for owned in named:
            self._leave(owned, was_cancelled(request_id))
            self.forget(owned)
            self._cancelled[tenant, request_id, owned.nonce] = None
        while len(self._cancelled) > MAX_CANCELLED:
            del self._cancelled[next(iter(self._cancelled))]
        return bool(named)

    def forget(self, owned: OwnedRequest) -> None:
        """Drops what is kept of a request, and ends it where it still runs. Idempotent."""
        handle = owned.key.handle
        if self._by_handle.pop(handle, None) is None:
            return
        named = self._by_id[owned.tenant, owned.request_id]
        named.remove(owned)
        if not named:
            del self._by_id[owned.tenant, owned.request_id]
        self._leave(owned)
        _stop_timer(owned)
        self._kept.pop(handle, None)
        self._undelivered_size -= self._undelivered.pop(handle, 0)
        if self._durable.pop(handle, None) is not None:
            self._durable_usage = None
        if not owned.is_over:
            self._abort(owned.key)
        owned.is_over = True

    # Events.

    def deliver(self, step_id: int, events: ClientEvents) -> None:
        """Hands out what happened in a step, and keeps what is to be kept. Never waits."""
        if self._kept:
            self._keep(events)
            self._durable_usage = None
        for connection, part in self._by_connection(events):
            connection.outbox.put(step_id, part)
        for handle in chain(
            (end.handle for end in events.completed), (failure.key.handle for failure in events.failed)
        ):
            owned = self._by_handle.get(handle)
            if owned is not None:
                self._note_over(owned)

    def deliver_prompt_logprobs(self, entries: Iterable[PromptLogprobs]) -> None:
        """To be called before `deliver` for the same step. What is computed again is handed out once. Never waits."""
        for entry in entries:
            owned = self._by_handle.get(entry.handle)
            if owned is None or (new := entry.since(owned.end_of_prompt_logprobs)) is None:
                continue
            owned.end_of_prompt_logprobs = new.end
            if owned.keeps_events:
                owned.history.add_prompt_logprobs(new)
            if owned.reader is not None:
                owned.reader.connection.outbox.put_prompt_logprobs([replace(new, handle=owned.reader.handle)])

    def _keep(self, events: ClientEvents) -> None:
        """Adds to the histories of requests whose events are kept."""
        kept = self._kept
        if events.with_logprobs:
            places = [place for place, handle in enumerate(events.handles) if handle in kept]
            for handle, part in by_request(select(events, places, [events.handles[place] for place in places])).items():
                kept[handle].history.add(part)
        else:
            columns = (events.handles, events.sequence_indices, events.offsets, events.token_ids)
            for handle, index, offset, token_id in zip(*columns, strict=True):
                if (owned := kept.get(handle)) is not None:
                    owned.history.add_token(index, offset, token_id)
        for end in events.finished:
            if (owned := kept.get(end.handle)) is not None:
                owned.history.add_ends([end], [], [])
        for end in events.completed:
            if (owned := kept.get(end.handle)) is not None:
                owned.history.add_ends([], [end], [])
        for failure in events.failed:
            if (owned := kept.get(failure.key.handle)) is not None:
                owned.history.add_ends([], [], [failure])

    def _by_connection(self, events: ClientEvents) -> Iterable[tuple[Connection, ClientEvents]]:
        """The events of each stream, under its handles."""
        parts: dict[Connection, ClientEvents] = {}
        readers = list(map(self._readers.get, events.handles))
        if len(connections := {reader and reader.connection for reader in readers}) == 1:
            (connection,) = connections
            if connection is not None:
                # What most steps are, so it is made of whole columns.
                handles = [reader.handle for reader in readers if reader is not None]
                parts[connection] = replace(events, handles=handles, finished=[], completed=[], failed=[])
        else:
            places: dict[Connection, list[int]] = {}
            for place, reader in enumerate(readers):
                if reader is not None:
                    places.setdefault(reader.connection, []).append(place)
            for connection, own in places.items():
                handles = [reader.handle for place in own if (reader := readers[place]) is not None]
                parts[connection] = select(events, own, handles)

        def part_of(reader: Reader) -> ClientEvents:
            return parts.setdefault(reader.connection, ClientEvents())

        for end in events.finished:
            if (reader := self._readers.get(end.handle)) is not None:
                part_of(reader).finished.append(end._replace(handle=reader.handle))
        for end in events.completed:
            if (reader := self._readers.get(end.handle)) is not None:
                part_of(reader).completed.append(end._replace(handle=reader.handle))
        for failure in events.failed:
            if (reader := self._readers.get(failure.key.handle)) is not None:
                part_of(reader).failed.append(replace(failure, key=RequestKey(GATEWAYS, reader.handle)))
        return parts.items()

    def _read(self, owned: OwnedRequest, reader: Reader) -> None:
        handle = owned.key.handle
        owned.reader = self._readers[handle] = reader
        reader.connection.reads[reader.handle] = owned
        if owned.durable is None:
            owned.retention_s = reader.connection.grace_period_s
            self._kept.pop(handle, None)
            self._undelivered_size -= self._undelivered.pop(handle, 0)
            _stop_timer(owned)
            return
        self._kept[handle] = owned
        if not owned.is_over:
            _stop_timer(owned)

    def _leave(self, owned: OwnedRequest, error: QuireError | None = None) -> None:
        if owned.reader is None:
            return
        reader, owned.reader = owned.reader, None
        del self._readers[owned.key.handle]
        del reader.connection.reads[reader.handle]
        if error is not None:
            reader.connection.outbox.put_refusal(reader.handle, error)

    def _await_reader(self, owned: OwnedRequest) -> None:
        self._kept[owned.key.handle] = owned
        self._start_timer(owned)
        if owned.is_over and owned.durable is None:
            self._note_undelivered(owned)

    def _note_over(self, owned: OwnedRequest) -> None:
        owned.is_over = True
        if owned.durable is not None:
            # Kept for the whole time from its end on, also where nobody has read it for a while.
            _stop_timer(owned)
            self._start_timer(owned)
        elif owned.reader is None:
            self._note_undelivered(owned)

    def _note_undelivered(self, owned: OwnedRequest) -> None:
        """A plain request is over and has no reader. Where too much is kept of such ones, the oldest are forgotten:
        their gateways still can submit them again."""
        size = self._undelivered[owned.key.handle] = owned.history.size
        self._undelivered_size += size
        while self._undelivered_size > MAX_UNDELIVERED:
            self.forget(self._by_handle[next(iter(self._undelivered))])

    def _free_handle(self, reader: Reader, but: OwnedRequest | None = None) -> None:
        """Whoever uses a handle again has taken in the end of the request that it stood for. Raises AlreadyExists where
        that one still runs."""
        other = self.read_by(reader)
        if other is None or other is but:
            return
        if not other.is_over:
            raise AlreadyExists(f"handle {reader.handle} is in use by a live request")
        reader.connection.reused.add(reader.handle)
        if other.durable is None:
            self.forget(other)
        else:
            self.detach(other)

    def _make_durable(self, request: Request, description: bytes) -> Durable:
        """Makes room for a durable request. Raises AlreadyExists or ResourceExhausted."""
        for known in list(self._by_id.get((request.tenant, request.request_id), ())):
            if known.durable is None:
                continue
            if not known.is_over:
                raise AlreadyExists(
                    f'request_id "{request.request_id}" names a request that is running', reason="REQUEST_ID_IN_USE"
                )
            self.forget(known)
        durable = Durable.of(request, description)
        num_emitted = sum(len(each.token_ids) for each in request.emitted)
        self._make_room(request.tenant, durable.charge(num_emitted, is_over=False))
        return durable

    def _make_room(self, tenant: str, charge: int) -> None:
        """Forgets durable requests that are over, the oldest first, as far as needed. Raises ResourceExhausted where it
        is too little."""
        usage, limits = self._usage(), self._limits
        num_running, running = usage.num_of.total(), usage.charge_of.total()
        num_tenants = len(usage.num_of) + (tenant not in usage.num_of)
        if not limits.max_requests or charge > limits.max_tokens:
            raise _durable_limit(
                f"1 durable request would be kept, with {charge} tokens; at most {limits.max_requests} requests and "
                f"{limits.max_tokens} tokens are"
            )
        try:
            check_shared_bound(
                "durable requests would run",
                limits.max_requests,
                total=num_running,
                own=usage.num_of[tenant],
                added=1,
                num_tenants=num_tenants,
                overflow=limits.tenant_overflow,
            )
            check_shared_bound(
                "tokens of durable requests would be kept",
                limits.max_tokens,
                total=running,
                own=usage.charge_of[tenant],
                added=charge,
                num_tenants=num_tenants,
                overflow=limits.tenant_overflow,
            )
        except QueueFullError as error:
            raise _durable_limit(str(error)) from error
        num_kept, kept = len(self._durable), running + sum(each for _, each in usage.over)
        for owned, own in usage.over:
            if num_kept < limits.max_requests and kept + charge <= limits.max_tokens:
                return
            self.forget(owned)
            num_kept, kept = num_kept - 1, kept - own

    def _usage(self) -> _DurableUsage:
        if self._durable_usage is None:
            usage = self._durable_usage = _DurableUsage()
            for owned in self._durable.values():
                charge = _charge_of(owned)
                if owned.is_over:
                    usage.over.append((owned, charge))
                else:
                    usage.add(owned.tenant, charge)
        return self._durable_usage

    def _start_timer(self, owned: OwnedRequest) -> None:
        if owned.expiry is None:
            owned.expiry = self._call_later(owned.retention_s, lambda: self.forget(owned))


def was_cancelled(request_id: str) -> Cancelled:
    """What the reader of a request is told that somebody has cancelled."""
    return Cancelled(f'request "{request_id}" was cancelled', reason="CANCELLED_BY_ID")


def _charge_of(owned: OwnedRequest) -> int:
    """What a durable request counts for."""
    assert owned.durable is not None
    return owned.durable.charge(owned.history.num_tokens, is_over=owned.is_over)


def _durable_limit(message: str) -> ResourceExhausted:
    return ResourceExhausted(message, reason="DURABLE_LIMIT", retry_after_ms=_RETRY_MS)


def _taken_over(owned: OwnedRequest) -> Aborted:
    return Aborted(f'request "{owned.request_id}" is read by another call now', reason="REQUEST_TAKEN_OVER")


def _stop_timer(owned: OwnedRequest) -> None:
    if owned.expiry is not None:
        owned.expiry.cancel()
        owned.expiry = None
