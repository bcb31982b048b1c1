"""Moves of running requests to other replicas: each request runs on its replica until another one has room for it.

An offer is a submission that only waits in the queue of another replica. When its turn comes, that replica reserves
room and reports it. Only then is the request released where it runs, so that its stream does not pause meanwhile. The
best replica gets the offer first, and after a while all others get it, too. A request whose replica drains leaves after
some time even if no replica has room.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from gateway.replicas.link import SchedulerLink
from gateway.replicas.live import LiveRequest

_FIRST_LOOK_S, _NEXT_LOOK_S = 0.1, 1.0
_MAX_WAIT_S = 30.0
"""The longest delay before a replica that rejected an offer gets it again. Delays start at 1 s and double each time."""
_KEPT_S = 5.0
"""A released request whose replica does not answer for this long is offered anew."""


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

    def __init__(
        self,
        links: Mapping[str, SchedulerLink],
        takers: Callable[[LiveRequest, SchedulerLink], Mapping[str, SchedulerLink]],
        choose: Callable[[LiveRequest, Mapping[str, SchedulerLink]], str],
    ) -> None:
        """`takers` returns the replicas to which a request may now move from its replica, `choose` the best of them."""
        self._links = links
        self._takers = takers
        self._choose = choose
        self._open: dict[int, _Offer] = {}

    def open(self, live: LiveRequest, source: SchedulerLink, leave_after_s: float | None = None) -> None:
        """Starts to move a request away from its replica, as soon as another replica has room, or after `leave_after_s`
        in any case."""
        offer = self._open.get(live.handle)
        leaves_at = None if leave_after_s is None else asyncio.get_running_loop().time() + leave_after_s
        if offer is None:
            offer = self._open[live.handle] = _Offer(live, source.address, leaves_at)
            takers = self._takers(live, source)
            self._ask(offer, [takers[self._choose(live, takers)]])
            self._look_later(offer, _FIRST_LOOK_S)
        elif leaves_at is not None and (offer.leaves_at is None or leaves_at < offer.leaves_at):
            offer.leaves_at = leaves_at
            self._look_later(offer, _FIRST_LOOK_S)

    def has_room(self, link: SchedulerLink, handle: int) -> None:
        """Handles the report that a replica has reserved room for a request that was offered to it."""
        offer = self._open.get(handle)
        if offer is None or link.address not in offer.asked or link.welcome is None:
            return
        if offer.taker not in (None, link.address):
            self._withdraw(offer, link.address)
        elif offer.live.num_generated_tokens - offer.asked[link.address] > link.welcome.block_size:
            # The request has grown since the offer and needs more room.
            self._ask(offer, [link])
        else:
            offer.taker, offer.taken_at = link.address, asyncio.get_running_loop().time()
            for address in offer.asked.keys() - {link.address}:
                self._withdraw(offer, address)
            self._release(offer)

    def refused(self, address: str, handle: int) -> None:
        """Handles the rejection of an offer, which the replica may accept later."""
        offer = self._open.get(handle)
        if offer is not None and offer.asked.pop(address, None) is not None:
            if offer.taker == address:
                offer.taker = None
            wait_s = min(2 * offer.refused[address][1] if address in offer.refused else _NEXT_LOOK_S, _MAX_WAIT_S)
            offer.refused[address] = asyncio.get_running_loop().time() + wait_s, wait_s

    def taker(self, live: LiveRequest) -> str | None:
        """The replica that has reserved room for a request, else the first with the offer; None without an offer."""
        offer = self._open.get(live.handle)
        return None if offer is None else offer.taker or next(iter(offer.asked), None)

    def close(self, live: LiveRequest, taken_by: str | None = None) -> None:
        """Withdraws the offer of a request that is over or was submitted to a replica. Idempotent."""
        if (offer := self._open.pop(live.handle, None)) is not None:
            if offer.timer is not None:
                offer.timer.cancel()
            for address in offer.asked.keys() - {taken_by}:
                self._withdraw(offer, address)

    def lost(self, address: str) -> None:
        """Forgets the offers at a replica whose stream broke."""
        for offer in self._open.values():
            offer.refused.pop(address, None)
            if address in offer.asked:
                self._withdraw(offer, address)

    def drains(self, address: str) -> None:
        """Withdraws offers from a draining replica, except of requests that are already released: it waits for them."""
        for offer in self._open.values():
            if address in offer.asked and offer.released_at is None:
                self._withdraw(offer, address)

    def _ask(self, offer: _Offer, links: Sequence[SchedulerLink]) -> None:
        for link in links:
            if link.welcome is not None and not link.welcome.takes_offers:
                # A scheduler of this release cannot report room.
                self._release(offer)
            else:
                offer.asked[link.address] = offer.live.num_generated_tokens
                link.offer(offer.live)

    def _may_ask(self, offer: _Offer, address: str, now: float) -> bool:
        return address not in offer.asked and offer.refused.get(address, (now, 0.0))[0] <= now

    def _withdraw(self, offer: _Offer, address: str) -> None:
        del offer.asked[address]
        if offer.taker == address:
            offer.taker = None
        if (link := self._links.get(address)) is not None:
            link.abort(offer.live.handle)

    def _release(self, offer: _Offer) -> None:
        source = self._links.get(offer.source)
        if source is not None and source.is_connected:
            offer.released_at = asyncio.get_running_loop().time()
            source.release(offer.live.handle)

    def _look_later(self, offer: _Offer, delay_s: float) -> None:
        loop = asyncio.get_running_loop()
        if offer.timer is not None:
            offer.timer.cancel()
        if offer.leaves_at is not None:
            delay_s = min(delay_s, max(offer.leaves_at - loop.time(), _FIRST_LOOK_S))
        offer.timer = loop.call_later(delay_s, self._look, offer)

    def _look(self, offer: _Offer) -> None:
        now, source = asyncio.get_running_loop().time(), self._links.get(offer.source)
        if offer.taker is not None and now - offer.taken_at > _KEPT_S:
            self._withdraw(offer, offer.taker)
        if source is not None and offer.taker is None:
            takers = self._takers(offer.live, source)
            if offer.released_at is not None and now - offer.released_at > _KEPT_S:
                # The source did not answer the release in time: the request still runs there.
                offer.released_at = None
                for address in offer.asked.keys() - takers.keys():
                    self._withdraw(offer, address)
            self._ask(offer, [link for address, link in takers.items() if self._may_ask(offer, address, now)])
            if takers and offer.leaves_at is not None and now >= offer.leaves_at:
                self._release(offer)
        self._look_later(offer, _NEXT_LOOK_S)
