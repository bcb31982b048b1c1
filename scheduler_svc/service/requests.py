"""Every request has an owner, the table here, and a reader, a gateway's stream.

To the core all requests are one client's, so the reader of a request may change while it runs and the core knows
nothing of it: its place, its blocks and its tokens stay. A request whose reader leaves runs on for a while, and its
events are kept. A reader that comes back, or another one, says what it has and gets the rest. Durable requests differ
in that all of their output is kept from the first token on, that any gateway of the tenant may read them, and in how
long they wait.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, count
from typing import Protocol

from quire.failpoint import failpoint
from quire.rpc.errors import Aborted, AlreadyExists, Cancelled, NotFound, QuireError, Unavailable
from scheduler_svc.core.moves import KvSource
from scheduler_svc.core.request import ClientId, Handle, Request, RequestKey
from scheduler_svc.core.step import ClientEvents, RequestEnd, Usage
from scheduler_svc.service.durable import Durable, DurableLimits, DurableRoom
from scheduler_svc.service.outbox import (
    Held,
    History,
    Outbox,
    PromptLogprobs,
    Readiness,
    Replay,
    SequenceProgress,
    add_end,
    by_request,
    ends_of,
    select,
)

_logger = logging.getLogger(__name__)

GATEWAYS = ClientId(0)
"""To the core, all requests of gateways are this client's."""

MAX_CANCELLED = 1024
"""How many cancelled requests are remembered."""

KEPT_ROOM_S = 5.0
"""How long room is kept for a request that still runs at another replica."""

COME_BACK_S = 1.0
"""How long gateways whose streams broke may take to come back to a scheduler that drains."""

MOVED_S = 1.0
"""How long one that has left is known by its id: its gateway is about to submit it to another scheduler."""

MAX_UNDELIVERED = 2_000_000
"""How many tokens and log probabilities are kept of plain requests that ended without a reader."""


_MOVED_RETRY_MS = 100


class Timer(Protocol):
    """A call that was scheduled for later."""

    def cancel(self) -> None: ...


CallLater = Callable[[float, Callable[[], object]], Timer]


def _call_later(seconds: float, call: Callable[[], object]) -> Timer:
    return asyncio.get_running_loop().call_later(seconds, call)


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

    @property
    def request(self) -> "OwnedRequest | None":
        """The request that the stream knows by the handle."""
        return self.connection.reads.get(self.handle)


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
    durable: Durable | None
    end_of_prompt_logprobs: int
    """The first position of the prompt whose log probability has yet to come."""
    is_offer: bool = False
    """Whether it only waits for room here, and goes on by another submission."""
    comes_in_parts: bool = False
    """Whether a reader that comes later may get the output in parts. It needs all at once of a request that selects
    among its sequences at the end, and log probabilities of the prompt before all else."""
    history: History = field(default_factory=History)
    reader: Reader | None = None
    is_over: bool = False
    expiry: Timer | None = None

    @property
    def keeps_events(self) -> bool:
        return self.durable is not None or self.reader is None

    @property
    def charge(self) -> int:
        """The tokens with which a durable request counts towards the limit."""
        assert self.durable is not None
        return self.durable.charge(self.history.num_tokens, is_over=self.is_over)

    def stop_timer(self) -> None:
        if self.expiry is not None:
            self.expiry.cancel()
            self.expiry = None


class Requests:
    """All requests that are live, and those that are over and may still be read; and the open streams of gateways.

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
        as far as readers were told, and None for one that is over."""
        self._abort = abort
        self._progress = progress
        self._call_later = call_later
        self._connections: dict[str, Connection] = {}
        self._none_connected = asyncio.Event()
        self._none_connected.set()
        self._by_handle: dict[Handle, OwnedRequest] = {}
        # Several of an id: of several gateways, or one after another.
        self._by_id: dict[tuple[str, str], list[OwnedRequest]] = {}
        # The requests whose events are kept.
        self._kept: dict[Handle, OwnedRequest] = {}
        self._readers: dict[Handle, Reader] = {}
        # Tenant, id and nonce of the newest that were cancelled: their gateways may submit them again.
        self._cancelled: dict[tuple[str, str, int], None] = {}
        # Tenant and id of those that have just left for another scheduler.
        self._moved: dict[tuple[str, str], Timer] = {}
        # Plain ones that ended without a reader, oldest first, with their sizes.
        self._undelivered: dict[Handle, int] = {}
        self._undelivered_size = 0
        self._durable = DurableRoom(limits)
        self._handles = count()

    def __len__(self) -> int:
        return len(self._by_handle)

    @property
    def durable_grace_s(self) -> float:
        """How long a durable request is kept without a reader, and after its end."""
        return self._durable.limits.grace_s

    @property
    def num_connected(self) -> int:
        return len(self._connections)

    @property
    def num_unread(self) -> int:
        """Requests that have no reader."""
        return sum(owned.reader is None for owned in list(self._by_handle.values()))

    @property
    def num_durable(self) -> int:
        return len(self._durable.requests)

    @property
    def num_durable_tokens(self) -> int:
        """What all durable requests take of the limit. Metrics are read in another thread, so this uses no running
        sums, and copies what may change meanwhile."""
        return sum(each.charge for each in list(self._durable.requests.values()))

    def of_handle(self, handle: Handle) -> OwnedRequest | None:
        """The request that the core knows by this handle; None where it is forgotten."""
        return self._by_handle.get(handle)

    def are_read_by(self, gateway_id: str) -> Callable[[RequestKey], bool]:
        """Whether the stream of this gateway gets the events of a request."""
        reads = set[Handle]()
        if (connection := self._connections.get(gateway_id)) is not None:
            reads = {owned.key.handle for owned in connection.reads.values()}
        return lambda key: key.client == GATEWAYS and key.handle in reads

    # Streams of gateways

    def connect(self, gateway_id: str, grace_period_s: float) -> Connection:
        """Opens a stream. An earlier one of the gateway ends now, if it has not: its link may be broken."""
        if (earlier := self._connections.get(gateway_id)) is not None:
            self.close(earlier)
        connection = self._connections[gateway_id] = Connection(gateway_id, grace_period_s)
        self._none_connected.clear()
        _logger.info("gateway %s connected", gateway_id)
        return connection

    def close(self, connection: Connection) -> None:
        """A stream is over. What it read waits for another reader, with all that was not taken in. Idempotent."""
        if self._connections.get(connection.gateway_id) is not connection:
            return
        _logger.info("gateway %s left; it read %d requests", connection.gateway_id, len(connection.reads))
        del self._connections[connection.gateway_id]
        if not self._connections:
            self._none_connected.set()
        connection.outbox.close()
        for offer in [owned for owned in connection.reads.values() if owned.is_offer]:
            self.forget(offer)
        reads = dict(connection.reads)
        for owned in reads.values():
            self._set_reader(owned, None)
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
            self._update(owned)

    def taken(self, connection: Connection, num_messages: int) -> None:
        """A gateway has taken in so many messages of events of its stream. Raises ValueError where fewer were sent."""
        for outgoing in connection.outbox.taken(num_messages):
            for handle in outgoing.ended:
                owned = connection.reads.get(handle)
                if owned is not None and owned.is_over and owned.durable is None:
                    self.forget(owned)

    def report_readiness(self, readiness: Readiness) -> None:
        """Says to every gateway whether this replica is one to send requests to, and how far its workers are loaded."""
        for connection in self._connections.values():
            connection.outbox.put_readiness(readiness)

    def has_of(self, gateway_id: str) -> bool:
        """Whether there are requests that the gateway submitted."""
        return any(owned.gateway_id == gateway_id for owned in self._by_handle.values())

    async def end_once_unread(self) -> None:
        """For a scheduler that drains, where only a gateway can connect whose stream broke: once none is connected and
        none comes back, nobody will ever read what is live, and it ends."""
        while True:
            await self._none_connected.wait()
            await asyncio.sleep(COME_BACK_S)
            if self._none_connected.is_set():
                break
        for owned in list(self._kept.values()):
            if owned.reader is None:
                self.forget(owned)

    # Requests come

    def admit(
        self,
        request: Request,
        nonce: int,
        reader: Reader,
        submit: Callable[[Request], object],
        description: bytes | None = None,
    ) -> None:
        """Enters a request, which `reader` reads, and has it submitted to the core. With a description it is durable.

        Raises what `submit` raises, and:
            AlreadyExists: the reader's handle stands for a live request, or a durable one has the id and still runs.
            ResourceExhausted: too much would be kept.
        """
        self._free_handle(reader)
        durable = None if description is None else self._check_durable(request, description)
        connection = reader.connection
        owned = OwnedRequest(
            key=RequestKey(GATEWAYS, Handle(next(self._handles))),
            tenant=request.tenant,
            request_id=request.request_id,
            nonce=nonce,
            gateway_id=connection.gateway_id,
            retention_s=self.durable_grace_s,
            durable=durable,
            end_of_prompt_logprobs=request.sampling.prompt_logprobs_start,
            is_offer=request.is_offer,
            comes_in_parts=not request.selects and request.sampling.prompt_logprobs is None,
        )
        request = replace(request, key=owned.key)
        if durable is not None:
            owned.history.add_emitted(request)
            self._durable.add(owned.key.handle, owned)
        self._by_handle[owned.key.handle] = owned
        self._by_id.setdefault((owned.tenant, owned.request_id), []).append(owned)
        self._cancelled.pop((owned.tenant, owned.request_id, nonce), None)
        self._set_reader(owned, reader)
        self._update(owned)
        try:
            submit(request)
        except Exception:
            self.forget(owned)
            raise
        if durable is not None:
            # Not before: one that is refused costs nobody what is kept.
            self._make_room(owned)

    def resubmit(self, request: Request, nonce: int, reader: Reader, held: Held) -> bool:
        """Hands a request that a gateway submits again to its reader. Returns False where the request is unknown, or
        where more is missing than is kept: that one ends.

        Raises:
            Aborted: another gateway reads it by now.
            AlreadyExists: the reader's handle stands for another live request.
            Cancelled: it was cancelled.
        """
        if (request.tenant, request.request_id, nonce) in self._cancelled:
            raise _was_cancelled(request.request_id)
        gateway_id = reader.connection.gateway_id
        for owned in self._by_id.get((request.tenant, request.request_id), ()):
            if owned.nonce == nonce and (owned.durable is not None or owned.gateway_id == gateway_id):
                break
        else:
            return False
        if owned.reader is not None and owned.reader.connection.gateway_id != gateway_id:
            raise _taken_over(owned)
        if not owned.history.completes(held, self._progress(owned.key), owned.end_of_prompt_logprobs):
            self.forget(owned)
            return False
        self.attach(owned, reader, held)
        return True

    def keep_room(self, key: RequestKey) -> None:
        """There is room for an offer: its reader is told, and has `KEPT_ROOM_S` to send the request."""
        if (offer := self._by_handle.get(key.handle)) is not None and offer.reader is not None:
            offer.reader.connection.outbox.put_has_room(offer.reader.handle)
            offer.stop_timer()
            offer.expiry = self._call_later(KEPT_ROOM_S, lambda: self.forget(offer))

    def replace_offer(self, reader: Reader) -> OwnedRequest | None:
        """The reader sends the request that it offered. Forgets the offer, which the core still has, and returns it;
        None where there is none."""
        offer = reader.request
        if offer is None or not offer.is_offer:
            return None
        offer.is_over = True
        self.forget(offer)
        return offer

    def find(self, tenant: str, request_id: str) -> OwnedRequest:
        """A durable request.

        Raises:
            NotFound: there is none, or it is another tenant's.
            Unavailable: it is on its way to another scheduler.
        """
        for owned in self._durable_of(tenant, request_id):
            return owned
        self._check_not_moved(tenant, request_id)
        raise NotFound(f'request_id "{request_id[:128]}" names no durable request', reason="REQUEST_NOT_FOUND")

    # Readers come and go

    def attach(self, owned: OwnedRequest, reader: Reader, held: Held) -> None:
        """Hands a request to a reader, which gets what it does not hold. Another one that read it until now gets an
        error.

        Raises AlreadyExists where the reader's handle stands for another live request, and changes nothing.
        """
        self._free_handle(reader, but=owned)
        outbox = reader.connection.outbox
        if owned.durable is not None and owned.comes_in_parts:
            # All of its output is kept, so it goes out in parts, as far as the reader takes it and no other one comes.
            self._set_reader(owned, reader, None if owned.reader == reader else _taken_over(owned))
            self._update(owned)
            failpoint("scheduler.reader.changed")
            del self._readers[owned.key.handle]
            go_on = partial(self._go_on, owned, reader)
            charge_per_token = owned.durable.charge_per_token
            outbox.put_replay(Replay(owned.history, held, reader.handle, charge_per_token, go_on))
            return
        events, prompt_logprobs = owned.history.since(held, reader.handle)
        if owned.durable is None:
            owned.history.clear()
        self._set_reader(owned, reader, None if owned.reader == reader else _taken_over(owned))
        self._update(owned)
        failpoint("scheduler.reader.changed")
        outbox.put_prompt_logprobs(prompt_logprobs)
        if not events.is_empty:
            outbox.put(0, events)

    def detach(self, owned: OwnedRequest) -> None:
        """Nobody reads a request any more; its retention begins."""
        self._set_reader(owned, None)
        self._update(owned)

    # Requests end

    def end(self, owned: OwnedRequest, usage: Usage | None, *, is_read_on: bool = False) -> bool:
        """The reader of a durable request needs no more of it; what came is kept, with what it has cost so far. Who
        reads on is sent what it lacks, where that is on its way, and then the end; returns whether that is so."""
        if not owned.is_over:
            self._abort(owned.key)
            if usage is not None:
                owned.history.add_end(RequestEnd(owned.key.handle, usage))
        owned.is_over = True
        self._durable.changed()
        if is_read_on and self._is_replayed(owned):
            self._update(owned)
            return True
        self.detach(owned)
        return False

    def end_unread(self, gateway_id: str) -> None:
        """Ends a gateway's requests without a reader, except durable ones."""
        for owned in list(self._kept.values()):
            if owned.durable is None and owned.gateway_id == gateway_id:
                self.forget(owned)

    def forget_outputs(self) -> None:
        """Drops what is kept of durable requests that are over: gateways have another tokenizer now. Who is being sent
        one gets an error."""
        error = Unavailable("the worker has another tokenizer now", reason="MODEL_CHANGED")
        for owned in list(self._by_handle.values()):
            if owned.durable is not None and owned.is_over:
                self._set_reader(owned, None, error if self._is_replayed(owned) else None)
                self.forget(owned)

    def cancel(self, tenant: str, request_id: str) -> bool:
        """Ends and forgets what the tenant runs under an id, and durable requests that are over; the readers get an
        error. Returns whether there was anything. Gateways know nothing of each other's ids, so there may be
        several. Raises Unavailable where it is on its way to another scheduler."""
        named = [
            owned
            for owned in self._by_id.get((tenant, request_id), ())
            if owned.durable is not None or not owned.is_over
        ]
        if not named:
            self._check_not_moved(tenant, request_id)
        for owned in named:
            self._set_reader(owned, None, _was_cancelled(request_id))
            self.forget(owned)
            self._cancelled[tenant, request_id, owned.nonce] = None
        while len(self._cancelled) > MAX_CANCELLED:
            del self._cancelled[next(iter(self._cancelled))]
        return bool(named)

    def move(self, reader: Reader, hand_over: Callable[[RequestKey], KvSource | None]) -> bool:
        """The reader is about to submit its request to another replica. `hand_over` ends it in the core and says where
        its blocks are; with None it goes on here. Returns whether it moved."""
        owned = reader.request
        if owned is None or owned.is_over or self._is_replayed(owned):
            return False
        source = hand_over(owned.key)
        if source is None:
            return False
        owned.is_over = True
        self.forget(owned)
        self._note_moved((owned.tenant, owned.request_id))
        reader.connection.outbox.put_moved(reader.handle, source)
        return True

    def _note_moved(self, name: tuple[str, str]) -> None:
        if (timer := self._moved.get(name)) is not None:
            timer.cancel()
        self._moved[name] = self._call_later(MOVED_S, lambda: self._moved.pop(name, None))

    def _check_not_moved(self, tenant: str, request_id: str) -> None:
        """Raises Unavailable: to who asks all schedulers, it would be nowhere until the other one has it."""
        if (tenant, request_id) in self._moved:
            text = f'request "{request_id[:128]}" is on its way to another scheduler'
            raise Unavailable(text, retry_after_ms=_MOVED_RETRY_MS)

    def forget(self, owned: OwnedRequest) -> None:
        """Drops what is kept of a request, and ends it where it still runs. What is over and being sent to a reader is
        sent to its end. Idempotent."""
        handle = owned.key.handle
        if self._by_handle.pop(handle, None) is None:
            return
        named = self._by_id[owned.tenant, owned.request_id]
        named.remove(owned)
        if not named:
            del self._by_id[owned.tenant, owned.request_id]
        self._set_reader(owned, None, ends_replay=not (owned.is_over and self._is_replayed(owned)))
        owned.stop_timer()
        self._kept.pop(handle, None)
        self._undelivered_size -= self._undelivered.pop(handle, 0)
        self._durable.remove(handle)
        if not owned.is_over:
            self._abort(owned.key)
        owned.is_over = True

    # Events

    def deliver(self, step_id: int, events: ClientEvents) -> None:
        """Hands out what happened in a step, and keeps what is to be kept. Never waits."""
        if self._kept:
            self._keep(events)
            self._durable.changed()
        for connection, part in self._by_connection(events).items():
            connection.outbox.put(step_id, part)
        for handle in chain(
            (end.handle for end in events.completed), (failure.key.handle for failure in events.failed)
        ):
            if (owned := self._by_handle.get(handle)) is not None:
                owned.is_over = True
                # A durable one is kept for the whole time from its end on, also where nobody has read it for a while.
                if owned.durable is not None:
                    owned.stop_timer()
                self._update(owned)

    def deliver_prompt_logprobs(self, entries: Iterable[PromptLogprobs]) -> None:
        """Must come before `deliver` for the same step. What is computed again is handed out once. Never waits."""
        for entry in entries:
            owned = self._by_handle.get(entry.handle)
            if owned is None or (new := entry.since(owned.end_of_prompt_logprobs)) is None:
                continue
            if new.first_position > owned.end_of_prompt_logprobs:
                # Those between were not finite: the request fails, or its prompt is computed again.
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
        for handle, end in ends_of(events):
            if (owned := kept.get(handle)) is not None:
                owned.history.add_end(end)

    def _by_connection(self, events: ClientEvents) -> Mapping[Connection, ClientEvents]:
        """The events of each stream, under its handles."""
        parts: dict[Connection, ClientEvents] = {}
        readers = list(map(self._readers.get, events.handles))
        if len(connections := {reader and reader.connection for reader in readers}) == 1:
            (connection,) = connections
            if connection is not None:
                # Most steps are of one gateway: its part is made of whole columns.
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
        for handle, end in ends_of(events):
            if (reader := self._readers.get(handle)) is not None:
                add_end(parts.setdefault(reader.connection, ClientEvents()), end, reader.handle)
        return parts

    # What follows from who reads a request, and whether it is over

    def _is_replayed(self, owned: OwnedRequest) -> bool:
        """Whether its reader is being sent what it lacks."""
        return owned.reader is not None and owned.key.handle not in self._readers

    def _go_on(self, owned: OwnedRequest, reader: Reader) -> None:
        """The reader has been sent what it lacked. It may be one of a request that is forgotten."""
        if owned.reader == reader:
            self._readers[owned.key.handle] = reader

    def _set_reader(
        self, owned: OwnedRequest, reader: Reader | None, error: QuireError | None = None, *, ends_replay: bool = True
    ) -> None:
        """Gives a request another reader, or none; the one before gets the error. `_update` must follow."""
        before, owned.reader = owned.reader, reader
        if before is not None:
            # It has none while the reader is sent what it lacks.
            self._readers.pop(owned.key.handle, None)
            if ends_replay:
                before.connection.outbox.drop_replay(before.handle)
            del before.connection.reads[before.handle]
            if error is not None:
                before.connection.outbox.put_refusal(before.handle, error)
        if reader is not None:
            self._readers[owned.key.handle] = reader
            reader.connection.reads[reader.handle] = owned
            if owned.durable is None:
                owned.retention_s = reader.connection.grace_period_s

    def _update(self, owned: OwnedRequest) -> None:
        """Keeps the events of a request or not, starts or stops its timer, and bounds what is kept of ended ones."""
        handle = owned.key.handle
        if owned.keeps_events:
            self._kept[handle] = owned
        else:
            self._kept.pop(handle, None)
        if owned.reader is not None and not (owned.durable is not None and owned.is_over):
            owned.stop_timer()
        elif owned.expiry is None:
            owned.expiry = self._call_later(owned.retention_s, lambda: self.forget(owned))
        self._undelivered_size -= self._undelivered.pop(handle, 0)
        if owned.is_over and owned.durable is None and owned.reader is None:
            # If too much is kept, the oldest requests are dropped: their gateways can still submit them again.
            size = self._undelivered[handle] = owned.history.size
            self._undelivered_size += size
            while self._undelivered_size > MAX_UNDELIVERED:
                self.forget(self._by_handle[next(iter(self._undelivered))])

    def _free_handle(self, reader: Reader, but: OwnedRequest | None = None) -> None:
        """A gateway that uses a handle again has taken in the end of the request that it stood for. Raises
        AlreadyExists where that one still runs."""
        other = reader.request
        if other is None or other is but:
            return
        if not other.is_over:
            raise AlreadyExists(f"handle {reader.handle} is in use by a live request")
        reader.connection.reused.add(reader.handle)
        if other.durable is None:
            self.forget(other)
        else:
            self.detach(other)

    def _check_durable(self, request: Request, description: bytes) -> Durable:
        """Raises AlreadyExists, or ResourceExhausted where there is no room for a request that was not accepted
        before."""
        if not all(each.is_over for each in self._durable_of(request.tenant, request.request_id)):
            raise AlreadyExists(
                f'request_id "{request.request_id}" names a request that is running', reason="REQUEST_ID_IN_USE"
            )
        durable = Durable.of(request, description)
        if not request.accepted_before:
            num_emitted = sum(len(each.token_ids) for each in request.emitted)
            self._durable.check_room(request.tenant, durable.charge(num_emitted, is_over=False))
        return durable

    def _make_room(self, owned: OwnedRequest) -> None:
        """A new durable request takes the place of those of its id and of others, all of which are over."""
        for each in self._durable_of(owned.tenant, owned.request_id):
            if each is not owned:
                self.forget(each)
        for handle in self._durable.make_room():
            self.forget(self._by_handle[handle])

    def _durable_of(self, tenant: str, request_id: str) -> list[OwnedRequest]:
        return [each for each in self._by_id.get((tenant, request_id), ()) if each.durable is not None]


def _was_cancelled(request_id: str) -> Cancelled:
    return Cancelled(f'request "{request_id}" was cancelled', reason="CANCELLED_BY_ID")


def _taken_over(owned: OwnedRequest) -> Aborted:
    return Aborted(f'request "{owned.request_id}" is read by another call now', reason="REQUEST_TAKEN_OVER")
