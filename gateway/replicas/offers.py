"""Moves of running requests to other replicas: each request runs on its replica until another one has room for it.

An offer is a submission that only waits in the queue of another replica. When its turn comes, that replica reserves
room and reports it. Only then is the request released where it runs, so that its stream does not pause meanwhile. The
best replica gets the offer first, and after a while all others get it, too. A request whose replica drains leaves after
some time even if no replica has room.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.replicas.ledger import Ledger
from gateway.replicas.live import LiveRequest
from gateway.replicas.replica_table import Replica, ReplicaTable, next_stage
from gateway.replicas.routing import Stage, has_room
from quire.messages.replica_role import ReplicaRole

_FIRST_LOOK_S, _NEXT_LOOK_S = 0.1, 1.0
_MAX_WAIT_S = 30.0
"""The longest delay before a replica that rejected an offer gets it again. Delays start at 1 s and double each time."""
_RESERVED_S = 5.0
"""A released request whose replica does not answer for this long is offered anew."""
_LEAVE_AFTER_S = 15.0
"""The time after which requests leave a draining replica that does not announce a time."""
_MIN_TOKENS_TO_MOVE = 16
"""A request with fewer tokens to come is not worth a move."""


@dataclass(slots=True, eq=False)
class _Offer:
    """An open offer. `asked` maps each replica that has the offer to the number of tokens in it; `refused` maps each
    replica that rejected it to the time of the next attempt and the delay before that. `taker` is the replica that has
    reserved room, since `taken_at`; `released_at` is the time of the last release of the request."""

    live: LiveRequest
    source: str
    leaves_at: float | None
    asked: dict[str, int] = field(default_factory=dict[str, int])
    refused: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    taker: str | None = None
    taken_at: float = 0.0
    released_at: float | None = None
    timer: asyncio.TimerHandle | None = None


class Offers:
    """The offers of all requests, at most one per request."""

    def __init__(self, replicas: ReplicaTable, ledger: Ledger) -> None:
        self._replicas = replicas
        self._ledger = ledger
        self._open: dict[int, _Offer] = {}

    # Requests that should move.

    def offer_streams_of(self, replica: Replica) -> None:
        """Moves streams away from a prefill replica that is about to get a long prompt."""
        if replica.role is ReplicaRole.PREFILL and replica.work.streams:
            for live in self._ledger.running_on(replica.address):
                if self._may_leave(live, replica) and self._replicas_for_stream(live, replica):
                    self.open(live, replica)

    def offer_after_prompt(self, live: LiveRequest, replica: Replica) -> None:
        """Handles the first token of a request. If its prompt was long, the request leaves a prefill replica, whose
        prompts would delay its tokens, unless the other replicas have more streams and this one has no prompts."""
        work = replica.work
        is_long = work.prompts.get(live.handle, 0) >= self._replicas.long_prompt
        work.remove(live.handle)
        if is_long and replica.role is ReplicaRole.PREFILL and self._may_leave(live, replica):
            others = self._replicas_for_stream(live, replica)
            if others and not has_room(work, [other.work for other in others]):
                self.open(live, replica)
        work.add_stream(live.handle)

    def offer_from_draining(self) -> None:
        """Moves requests away from draining replicas if others can continue them; requests without tokens go first,
        since they may not have started. Must be called whenever a replica starts to drain or becomes available."""
        for replica in self._replicas:
            if not (replica.link.is_connected and replica.link.is_draining):
                continue
            running = self._ledger.running_on(replica.address)
            for live in sorted(running, key=lambda live: live.num_generated_tokens > 0):
                if next_stage(live) is not Stage.STAY and self._destinations(live, replica):
                    self.open(live, replica, replica.link.leave_after_s or _LEAVE_AFTER_S)

    def _may_leave(self, live: LiveRequest, replica: Replica) -> bool:
        if live.is_over or not live.num_generated_tokens or next_stage(live) is Stage.STAY:
            return False
        num_left = live.max_generated_tokens - live.num_generated_tokens
        return num_left >= _MIN_TOKENS_TO_MOVE and replica.link.is_connected and live.replica == replica.address

    def _replicas_for_stream(self, live: LiveRequest, source: Replica) -> list[Replica]:
        """The ready replicas, except prefill replicas, that can fetch the request's KV blocks from its replica."""
        return [
            each
            for each in self._replicas.candidates(live)
            if each.link.is_ready and each.role is not ReplicaRole.PREFILL and each.can_fetch_from(source)
        ]

    def _destinations(self, live: LiveRequest, source: Replica) -> list[Replica]:
        """The replicas to which a request may move from this one."""
        if source.link.is_draining:
            return [each for each in self._replicas.candidates(live) if each.link.is_ready]
        return self._replicas_for_stream(live, source)

    # The course of an offer.

    def open(self, live: LiveRequest, source: Replica, leave_after_s: float | None = None) -> None:
        """Starts to move a request away from its replica, as soon as another replica has room, or after `leave_after_s`
        in any case."""
        offer = self._open.get(live.handle)
        leaves_at = None if leave_after_s is None else asyncio.get_running_loop().time() + leave_after_s
        if offer is None:
            offer = self._open[live.handle] = _Offer(live, source.address, leaves_at)
            best, _ = self._replicas.choose(live, self._destinations(live, source))
            self._ask(offer, [best])
            self._look_later(offer, _FIRST_LOOK_S)
        elif leaves_at is not None and (offer.leaves_at is None or leaves_at < offer.leaves_at):
            offer.leaves_at = leaves_at
            self._look_later(offer, _FIRST_LOOK_S)

    def on_room(self, replica: Replica, handle: int) -> None:
        """Handles the report that a replica has reserved room for a request that was offered to it."""
        offer, address, welcome = self._open.get(handle), replica.address, replica.link.welcome
        if offer is None or address not in offer.asked or welcome is None:
            return
        if offer.taker not in (None, address):
            self._withdraw(offer, address)
        elif offer.live.num_generated_tokens - offer.asked[address] > welcome.block_size:
            # The request has grown since the offer and needs more room.
            self._ask(offer, [replica])
        else:
            offer.taker, offer.taken_at = address, asyncio.get_running_loop().time()
            for other in offer.asked.keys() - {address}:
                self._withdraw(offer, other)
            self._release(offer)

    def on_refusal(self, address: str, handle: int) -> None:
        """Handles the rejection of an offer, which the replica may accept later."""
        offer = self._open.get(handle)
        if offer is not None and offer.asked.pop(address, None) is not None:
            if offer.taker == address:
                offer.taker = None
            wait_s = min(2 * offer.refused[address][1] if address in offer.refused else _NEXT_LOOK_S, _MAX_WAIT_S)
            offer.refused[address] = asyncio.get_running_loop().time() + wait_s, wait_s

    def on_disconnected(self, address: str) -> None:
        """Drops the offers at a replica whose stream broke."""
        for offer in self._open.values():
            offer.refused.pop(address, None)
            if address in offer.asked:
                self._withdraw(offer, address)

    def on_draining(self, address: str) -> None:
        """Withdraws offers from a draining replica, except of requests that are already released: it waits for them."""
        for offer in self._open.values():
            if address in offer.asked and offer.released_at is None:
                self._withdraw(offer, address)

    def taker(self, live: LiveRequest) -> Replica | None:
        """The replica that has reserved room for a request, else the first with the offer; None without an offer."""
        offer = self._open.get(live.handle)
        return None if offer is None else self._replicas.get(offer.taker or next(iter(offer.asked), None))

    def close(self, live: LiveRequest, taken_by: str | None = None) -> None:
        """Withdraws the offer of a request that is over or was submitted to a replica. Idempotent."""
        if (offer := self._open.pop(live.handle, None)) is not None:
            if offer.timer is not None:
                offer.timer.cancel()
            for address in offer.asked.keys() - {taken_by}:
                self._withdraw(offer, address)

    def _ask(self, offer: _Offer, replicas: Sequence[Replica]) -> None:
        for each in replicas:
            if each.link.welcome is not None and not each.link.welcome.takes_offers:
                # A scheduler of this release cannot report room.
                self._release(offer)
            else:
                offer.asked[each.address] = offer.live.num_generated_tokens
                each.link.offer(offer.live)

    def _withdraw(self, offer: _Offer, address: str) -> None:
        del offer.asked[address]
        if offer.taker == address:
            offer.taker = None
        if (replica := self._replicas.get(address)) is not None:
            replica.link.abort(offer.live.handle)

    def _release(self, offer: _Offer) -> None:
        source = self._replicas.get(offer.source)
        if source is not None and source.link.is_connected:
            offer.released_at = asyncio.get_running_loop().time()
            source.link.release(offer.live.handle)

    def _look_later(self, offer: _Offer, delay_s: float) -> None:
        loop = asyncio.get_running_loop()
        if offer.timer is not None:
            offer.timer.cancel()
        if offer.leaves_at is not None:
            delay_s = min(delay_s, max(offer.leaves_at - loop.time(), _FIRST_LOOK_S))
        offer.timer = loop.call_later(delay_s, self._look, offer)

    def _look(self, offer: _Offer) -> None:
        now, source = asyncio.get_running_loop().time(), self._replicas.get(offer.source)
        if offer.taker is not None and now - offer.taken_at > _RESERVED_S:
            self._withdraw(offer, offer.taker)
        if source is not None and offer.taker is None:
            destinations = {each.address: each for each in self._destinations(offer.live, source)}
            if offer.released_at is not None and now - offer.released_at > _RESERVED_S:
                # The source did not answer the release in time: the request still runs there.
                offer.released_at = None
                for address in offer.asked.keys() - destinations.keys():
                    self._withdraw(offer, address)
            due = (each for at, each in destinations.items() if offer.refused.get(at, (now, 0.0))[0] <= now)
            self._ask(offer, [each for each in due if each.address not in offer.asked])
            if destinations and offer.leaves_at is not None and now >= offer.leaves_at:
                self._release(offer)
        self._look_later(offer, _NEXT_LOOK_S)
