"""The table of requests: it owns every request of gateways, and a gateway's stream reads it.

To the core, all requests belong to one client. So a request keeps its place, blocks and tokens while its reader
changes. A request whose reader leaves runs on for a while, and its events are kept. A reader that comes back, or a new
one, says how much it has and gets the rest. Durable requests differ in three ways: all of their output is kept, any
gateway of the tenant may read them, and they have another time to wait for a reader.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, count
from typing import Self

from quire.rpc.errors import Aborted, AlreadyExists, NotFound, QuireError, Unavailable
from quire.runtime.failpoint import failpoint
from scheduler_svc.core.moves import KvSource
from scheduler_svc.core.request import ClientId, Handle, Request, RequestKey
from scheduler_svc.core.step import ClientEvents, RequestEnd, Usage
from scheduler_svc.service.history import Held, PromptLogprobs, Replay, SequenceProgress
from scheduler_svc.service.kept_requests import DurableLimits, DurableRoom, EndedRequests, cancelled_by_id
from scheduler_svc.service.outbox import Readiness
from scheduler_svc.service.readers import (
    CallLater,
    Connection,
    Delivery,
    Durable,
    OwnedRequest,
    Reader,
    call_later,
    keep,
)

_logger = logging.getLogger(__name__)

GATEWAYS = ClientId(0)
"""The client of all gateways' requests in the core."""

KEPT_ROOM_S = 5.0
"""Seconds for which room is kept for a request that still runs at another replica."""

COME_BACK_S = 1.0
"""Seconds in which gateways whose streams broke may come back to a scheduler that drains."""


class _TakenOver(Aborted):
    """Another call reads the request now. The error of its former reader."""

    @classmethod
    def of(cls, owned: OwnedRequest) -> Self:
        return cls(f'request "{owned.request_id}" is read by another call now', reason="REQUEST_TAKEN_OVER")


class AlreadyTakenOver(_TakenOver):
    """Another gateway already reads the request that a gateway submits again."""


class Requests:
    """All live requests, ended requests that may still be read, and the open streams of gateways.

    Invariants: a request has at most one reader, and a handle belongs to one request of its connection; a timer runs
    for each request without a reader, and for each durable one that has ended; a plain request that has ended and has a
    reader is kept until the reader has acknowledged the end.
    """

    def __init__(
        self,
        abort: Callable[[RequestKey], bool],
        progress: Callable[[RequestKey], Sequence[SequenceProgress] | None],
        limits: DurableLimits,
        call_later: CallLater = call_later,
    ) -> None:
        """`abort` ends a request in the core, and returns whether it still ran; `progress` returns how far readers were
        sent its sequences, and None for an ended request."""
        self._abort = abort
        self._progress = progress
        self._call_later = call_later
        self._connections: dict[str, Connection] = {}
        self._none_connected = asyncio.Event()
        self._none_connected.set()
        self._by_handle: dict[Handle, OwnedRequest] = {}
        # Several may have one id: from several gateways, or one after another.
        self._by_id: dict[tuple[str, str], list[OwnedRequest]] = {}
        self._delivery = Delivery()
        self._ended = EndedRequests(call_later)
        self.durable = DurableRoom(limits)
        self._handles = count()

    def __len__(self) -> int:
        return len(self._by_handle)

    @property
    def num_connected(self) -> int:
        return len(self._connections)

    @property
    def num_unread(self) -> int:
        """Number of requests without a reader."""
        return sum(owned.reader is None for owned in list(self._by_handle.values()))

    def get(self, handle: Handle) -> OwnedRequest | None:
        """The request that has this handle in the core; None if it is forgotten."""
        return self._by_handle.get(handle)

    def are_read_by(self, gateway_id: str) -> Callable[[RequestKey], bool]:
        """A predicate: whether the stream of this gateway gets the events of a request."""
        reads = set[Handle]()
        if (connection := self._connections.get(gateway_id)) is not None:
            reads = {owned.key.handle for owned in connection.reads.values()}
        return lambda key: key.client == GATEWAYS and key.handle in reads

    # Streams of gateways

    def connect(self, gateway_id: str, grace_period_s: float) -> Connection:
        """Opens a stream. Closes the gateway's earlier stream if it is still open: its link may be broken."""
        if (earlier := self._connections.get(gateway_id)) is not None:
            self.close(earlier)
        connection = self._connections[gateway_id] = Connection(gateway_id, grace_period_s)
        self._none_connected.clear()
        _logger.info("gateway %s connected", gateway_id)
        return connection

    def close(self, connection: Connection) -> None:
        """Ends a stream. Its requests wait for another reader, with all unacknowledged events. Idempotent."""
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
        for outgoing in connection.outbox.unacknowledged():
            for entry in outgoing.prompt_logprobs:
                if (owned := incomplete.get(entry.handle)) is not None:
                    owned.history.add_prompt_logprobs(entry)
            for batch in outgoing.batches:
                keep(batch, incomplete)
        for owned in reads.values():
            self._update(owned)

    def acknowledge(self, connection: Connection, num_messages: int) -> None:
        """A gateway has acknowledged `num_messages` messages of its stream. Raises ValueError if fewer were sent."""
        for outgoing in connection.outbox.acknowledge(num_messages):
            for handle in outgoing.ended:
                owned = connection.reads.get(handle)
                if owned is not None and owned.is_over and owned.durable is None:
                    self.forget(owned)

    def report_readiness(self, readiness: Readiness) -> None:
        """Reports to every gateway whether this replica is ready, and its workers' progress in loading."""
        for connection in self._connections.values():
            connection.outbox.put_readiness(readiness)

    def has_requests_of(self, gateway_id: str) -> bool:
        """Whether there are requests from this gateway."""
        return any(owned.gateway_id == gateway_id for owned in self._by_handle.values())

    async def forget_abandoned(self) -> None:
        """Ends all live requests of a draining scheduler once no gateway is connected and none comes back: only a
        gateway whose stream broke can connect then, so no reader would ever get them."""
        while True:
            await self._none_connected.wait()
            await asyncio.sleep(COME_BACK_S)
            if self._none_connected.is_set():
                break
        for owned in list(self._delivery.kept.values()):
            if owned.reader is None:
                self.forget(owned)

    # Requests arrive

    def admit(
        self,
        request: Request,
        nonce: int,
        reader: Reader,
        submit: Callable[[Request], object],
        description: bytes | None = None,
    ) -> None:
        """Enters a request that `reader` reads, and submits it to the core. With a description it is durable.

        Raises any error of `submit`, and:
            AlreadyExists: the reader's handle belongs to a live request, or a running durable one has the id.
            Cancelled: it was cancelled when only its offer was here, or when an earlier submission was.
            ResourceExhausted: too much would be kept.
        """
        self._ended.check_not_cancelled(request.tenant, request.request_id, nonce)
        self._free_handle(reader)
        durable = None if description is None else self._check_durable(request, description)
        connection = reader.connection
        owned = OwnedRequest(
            key=RequestKey(GATEWAYS, Handle(next(self._handles))),
            tenant=request.tenant,
            request_id=request.request_id,
            nonce=nonce,
            gateway_id=connection.gateway_id,
            retention_s=self.durable.limits.grace_s,
            durable=durable,
            end_of_prompt_logprobs=request.sampling.prompt_logprobs_start,
            is_offer=request.is_offer,
            comes_in_parts=not request.selects and request.sampling.prompt_logprobs is None,
        )
        request = replace(request, key=owned.key)
        if durable is not None:
            owned.history.add_emitted(request)
            self.durable.add(owned.key.handle, owned)
        self._by_handle[owned.key.handle] = owned
        self._by_id.setdefault((owned.tenant, owned.request_id), []).append(owned)
        self._set_reader(owned, reader)
        self._update(owned)
        try:
            submit(request)
        except Exception:
            self.forget(owned)
            raise
        if durable is not None:
            # Only now, so that a refused request displaces no kept output.
            self._make_room(owned)

    def resubmit(self, request: Request, nonce: int, reader: Reader, held: Held) -> bool:
        """Attaches the reader of a request that a gateway submits again. Returns False if the request is unknown, or if
        needed events are not kept any more; then the request ends.

        Raises:
            AlreadyTakenOver: another gateway reads it by now.
            AlreadyExists: the reader's handle belongs to another live request.
            Cancelled: it was cancelled.
        """
        self._ended.check_not_cancelled(request.tenant, request.request_id, nonce)
        gateway_id = reader.connection.gateway_id
        for owned in self._by_id.get((request.tenant, request.request_id), ()):
            if owned.nonce == nonce and (owned.durable is not None or owned.gateway_id == gateway_id):
                break
        else:
            return False
        if owned.reader is not None and owned.reader.connection.gateway_id != gateway_id:
            raise AlreadyTakenOver.of(owned)
        if not owned.history.can_resume(held, self._progress(owned.key), owned.end_of_prompt_logprobs):
            self.forget(owned)
            return False
        self.attach(owned, reader, held)
        return True

    def announce_room(self, key: RequestKey) -> None:
        """There is room for an offer: notifies its reader, which has `KEPT_ROOM_S` to send the request."""
        if (offer := self._by_handle.get(key.handle)) is not None and offer.reader is not None:
            offer.reader.connection.outbox.put_has_room(offer.reader.handle)
            offer.stop_timer()
            offer.expiry = self._call_later(KEPT_ROOM_S, lambda: self.forget(offer))

    def replace_offer(self, reader: Reader) -> OwnedRequest | None:
        """The reader sends the request that it offered. Forgets the offer, which the core still has, and returns it;
        None if there is none."""
        offer = reader.request
        if offer is None or not offer.is_offer:
            return None
        offer.is_over = True
        self.forget(offer)
        return offer

    def find_durable(self, tenant: str, request_id: str) -> OwnedRequest:
        """The durable request with this id.

        Raises:
            NotFound: there is none, or it is another tenant's.
            Unavailable: it is on its way to another scheduler.
        """
        for owned in self._durable_of(tenant, request_id):
            return owned
        self._ended.check_not_moved(tenant, request_id)
        raise NotFound(f'request_id "{request_id[:128]}" names no durable request', reason="REQUEST_NOT_FOUND")

    # Readers come and go

    def attach(self, owned: OwnedRequest, reader: Reader, held: Held) -> None:
        """Attaches a reader to a request, and sends it the events that it does not hold. An earlier reader gets an
        error.

        Raises AlreadyExists and changes nothing if the reader's handle belongs to another live request.
        """
        self._free_handle(reader, but=owned)
        outbox = reader.connection.outbox
        if owned.durable is not None and owned.comes_in_parts:
            # All of its output is kept, so it goes out in parts, at the reader's pace, until another reader comes.
            self._set_reader(owned, reader, None if owned.reader == reader else _TakenOver.of(owned))
            self._update(owned)
            failpoint("scheduler.reader.changed")
            del self._delivery.readers[owned.key.handle]
            on_done = partial(self._end_replay, owned, reader)
            charge_per_token = owned.durable.charge_per_token
            outbox.put_replay(Replay(owned.history, held, reader.handle, charge_per_token, on_done))
            return
        events, prompt_logprobs = owned.history.rest_after(held, reader.handle)
        if owned.durable is None:
            owned.history.clear()
        self._set_reader(owned, reader, None if owned.reader == reader else _TakenOver.of(owned))
        self._update(owned)
        failpoint("scheduler.reader.changed")
        outbox.put_prompt_logprobs(prompt_logprobs)
        if not events.is_empty:
            outbox.put(0, events)

    def detach(self, owned: OwnedRequest) -> None:
        """Removes the reader of a request; its retention begins."""
        self._set_reader(owned, None)
        self._update(owned)

    # Requests end

    def end_durable(self, owned: OwnedRequest, usage: Usage | None, *, is_read_on: bool = False) -> bool:
        """The reader needs no more of a durable request; its output so far is kept, with its usage so far. A reader
        that `is_read_on` and is being sent a replay still gets the rest and the end; returns whether that is so."""
        if not owned.is_over:
            self._abort(owned.key)
            if usage is not None:
                owned.history.add_end(RequestEnd(owned.key.handle, usage))
        owned.is_over = True
        self.durable.changed()
        if is_read_on and self._is_replayed(owned):
            self._update(owned)
            return True
        self.detach(owned)
        return False

    def forget_unread(self, gateway_id: str) -> None:
        """Ends a gateway's requests without a reader, except durable ones."""
        for owned in list(self._delivery.kept.values()):
            if owned.durable is None and owned.gateway_id == gateway_id:
                self.forget(owned)

    def forget_outputs(self) -> None:
        """Drops the output of ended durable requests: gateways have another tokenizer now. A reader in the middle of
        such an output gets an error."""
        error = Unavailable("the worker has another tokenizer now", reason="MODEL_CHANGED")
        for owned in list(self._by_handle.values()):
            if owned.durable is not None and owned.is_over:
                self._set_reader(owned, None, error if self._is_replayed(owned) else None)
                self.forget(owned)

    def cancel(self, tenant: str, request_id: str) -> bool:
        """Ends and forgets the tenant's requests with an id, including ended durable ones; their readers get an error.
        Returns whether there were any. There may be several, since gateways do not know each other's ids. Raises
        Unavailable if the request is on its way to another scheduler."""
        named = [
            owned
            for owned in self._by_id.get((tenant, request_id), ())
            if owned.durable is not None or not owned.is_over
        ]
        if not named:
            self._ended.check_not_moved(tenant, request_id)
        for owned in named:
            self._set_reader(owned, None, cancelled_by_id(request_id))
            self.forget(owned)
            self._ended.record_cancelled(tenant, request_id, owned.nonce)
        return bool(named)

    def move(self, reader: Reader, hand_over: Callable[[RequestKey], KvSource | None]) -> bool:
        """The reader is about to submit its request to another replica. `hand_over` ends it in the core and returns
        the place of its blocks; with None it continues here. Returns whether it moved."""
        owned = reader.request
        if owned is None or owned.is_over or self._is_replayed(owned):
            return False
        source = hand_over(owned.key)
        if source is None:
            return False
        owned.is_over = True
        self.forget(owned)
        self._ended.record_moved(owned.tenant, owned.request_id)
        reader.connection.outbox.put_moved(reader.handle, source)
        return True

    def forget(self, owned: OwnedRequest) -> None:
        """Drops a request, and ends it if it still runs. If it has ended and a replay of it is being sent, the replay
        continues to its end. Idempotent."""
        handle = owned.key.handle
        if self._by_handle.pop(handle, None) is None:
            return
        named = self._by_id[owned.tenant, owned.request_id]
        named.remove(owned)
        if not named:
            del self._by_id[owned.tenant, owned.request_id]
        self._set_reader(owned, None, ends_replay=not (owned.is_over and self._is_replayed(owned)))
        owned.stop_timer()
        self._delivery.kept.pop(handle, None)
        self._ended.remove_undelivered(handle)
        self.durable.remove(handle)
        if not owned.is_over:
            self._abort(owned.key)
        owned.is_over = True

    # Events

    def deliver_prompt_logprobs(self, entries: Iterable[PromptLogprobs]) -> None:
        """Hands out log probabilities of prompts. Called before `deliver` for the same step. Never waits."""
        self._delivery.deliver_prompt_logprobs(entries, self._by_handle)

    def deliver(self, step_id: int, events: ClientEvents) -> None:
        """Hands out the events of a step, and keeps them if needed. Never waits."""
        self._delivery.deliver(step_id, events)
        if self._delivery.kept:
            self.durable.changed()
        for handle in chain(
            (end.handle for end in events.completed), (failure.key.handle for failure in events.failed)
        ):
            if (owned := self._by_handle.get(handle)) is not None:
                owned.is_over = True
                # A durable request is kept for the whole time after its end, even if it had no reader for a while.
                if owned.durable is not None:
                    owned.stop_timer()
                self._update(owned)

    # Consequences of a change of a request's reader or of its end

    def _is_replayed(self, owned: OwnedRequest) -> bool:
        """Whether the request's reader is being sent a replay."""
        return owned.reader is not None and owned.key.handle not in self._delivery.readers

    def _end_replay(self, owned: OwnedRequest, reader: Reader) -> None:
        """The replay for the reader is done; new events go to it directly. The request may be forgotten by now."""
        if owned.reader == reader:
            self._delivery.readers[owned.key.handle] = reader

    def _set_reader(
        self, owned: OwnedRequest, reader: Reader | None, error: QuireError | None = None, *, ends_replay: bool = True
    ) -> None:
        """Gives a request another reader, or none; the earlier one gets the error. `_update` must follow."""
        before, owned.reader = owned.reader, reader
        if before is not None:
            # Absent while the reader is being sent a replay.
            self._delivery.readers.pop(owned.key.handle, None)
            if ends_replay:
                before.connection.outbox.drop_replay(before.handle)
            del before.connection.reads[before.handle]
            if error is not None:
                before.connection.outbox.put_refusal(before.handle, error)
        if reader is not None:
            self._delivery.readers[owned.key.handle] = reader
            reader.connection.reads[reader.handle] = owned
            if owned.durable is None:
                owned.retention_s = reader.connection.grace_period_s

    def _update(self, owned: OwnedRequest) -> None:
        """Starts or stops keeping a request's events, and its timer, and bounds the output kept of ended requests."""
        handle = owned.key.handle
        if owned.keeps_events:
            self._delivery.kept[handle] = owned
        else:
            self._delivery.kept.pop(handle, None)
        if owned.reader is not None and not (owned.durable is not None and owned.is_over):
            owned.stop_timer()
        elif owned.expiry is None:
            owned.expiry = self._call_later(owned.retention_s, lambda: self.forget(owned))
        self._ended.remove_undelivered(handle)
        if owned.is_over and owned.durable is None and owned.reader is None:
            # If too much is kept, the oldest requests are dropped: their gateways can still submit them again.
            self._ended.add_undelivered(handle, owned.history.size)
            for oldest in self._ended.oldest_above_limit():
                self.forget(self._by_handle[oldest])

    def _free_handle(self, reader: Reader, but: OwnedRequest | None = None) -> None:
        """Frees a handle: a gateway that reuses one has acknowledged the end of its earlier request. Raises
        AlreadyExists if that request still runs."""
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
        """Raises AlreadyExists, or ResourceExhausted if there is no room for a request that was not accepted
        before."""
        if not all(each.is_over for each in self._durable_of(request.tenant, request.request_id)):
            raise AlreadyExists(
                f'request_id "{request.request_id}" names a request that is running', reason="REQUEST_ID_IN_USE"
            )
        durable = Durable.from_request(request, description)
        if not request.accepted_before:
            num_emitted = sum(len(each.token_ids) for each in request.emitted)
            self.durable.check_room(request.tenant, durable.charge(num_emitted, is_over=False))
        return durable

    def _make_room(self, owned: OwnedRequest) -> None:
        """Forgets ended durable requests with the same id, and others to make room for a new one."""
        for each in self._durable_of(owned.tenant, owned.request_id):
            if each is not owned:
                self.forget(each)
        for handle in self.durable.make_room():
            self.forget(self._by_handle[handle])

    def _durable_of(self, tenant: str, request_id: str) -> list[OwnedRequest]:
        return [each for each in self._by_id.get((tenant, request_id), ()) if each.durable is not None]
