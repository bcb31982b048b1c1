"""Several replicas behind the gateway's router, in one virtual time, with or without separate prefill and decode.

The router places requests by load, role and the beginning of prompts, without knowing what is cached. A request with a
long prompt leaves a prefill replica once another replica has room for it, as in `gateway.replicas.offers`, and its
blocks follow over a link. Assumptions: the messages of a move take a fixed time, and the query before it takes the
same; blocks on their way slow neither steps nor each other. Requests with several sequences stay where they are.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from gateway.replicas.routing import Candidate, Choice, Router, RoutingPolicy, Stage, Work, has_room
from quire.messages.replica_role import ReplicaRole
from scheduler_svc.core.moves import KvSource, Lease
from scheduler_svc.core.request import EmittedSequence, Request
from scheduler_svc.core.reservations import Kind
from scheduler_svc.core.step import ClientEvents
from simulator.engine import Arrivals, Device, Run, key_of
from simulator.tokens import TOKEN_ID

_LONG_PROMPT = 256
"""`--long-prompt` of gateways."""
_MIN_TOKENS_TO_MOVE = 16
"""As in `gateway.replicas.offers`."""
_LEASE_S = 10.0
_FIRST_LOOK_S = 0.1
"""As in `gateway.replicas.offers`."""
_OFFERS = 1 << 30
"""The handle of an offer is the handle of its request plus this."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """Equal replicas.

    Attributes:
        num_prefill: Number of replicas for prefill; if it is above 0, the others are for decode.
        block_s: Seconds in which a block moves from one replica to another.
        latency_s: Seconds of a move without its blocks, and of the query whether there is room.
    """

    num_replicas: int = 1
    num_prefill: int = 0
    block_s: float = 0.0
    latency_s: float = 0.0

    @property
    def roles(self) -> list[ReplicaRole]:
        others = ReplicaRole.DECODE if self.num_prefill else ReplicaRole.BOTH
        return [ReplicaRole.PREFILL] * self.num_prefill + [others] * (self.num_replicas - self.num_prefill)


@dataclass(slots=True)
class _Place:
    """A replica as the gateway sees it."""

    name: str
    role: ReplicaRole
    device: Device
    work: Work = field(default_factory=Work)
    num_live: int = 0


@dataclass(slots=True, eq=False)
class _Offer:
    """A request that is to leave a replica. `asked` has the number of its tokens when each replica was queried."""

    source: _Place
    asked: dict[str, int] = field(default_factory=dict[str, int])
    told: set[str] = field(default_factory=set[str])
    taker: _Place | None = None


class FleetRun(Run):
    """Requests on a fleet, with a device for each replica."""

    def __init__(self, arrivals: Arrivals, devices: list[Device], fleet: Fleet) -> None:
        super().__init__(arrivals, devices)
        self._fleet = fleet
        names = [f"replica-{index}" for index in range(len(devices))]
        places = zip(names, fleet.roles, devices, strict=True)
        self._places = {name: _Place(name, role, device) for name, role, device in places}
        self._place_of: dict[int, _Place] = {}
        self._offers: dict[int, _Offer] = {}
        self._router = Router(RoutingPolicy.AFFINITY, _LONG_PROMPT)

    def choose(self, request: Request) -> Device:
        index = request.key.handle
        if (offer := self._offers.get(index)) is not None:
            place = offer.taker
            assert place is not None
            place.work.add_stream(index)
        else:
            stage = Stage.STAY if request.num_sequences > 1 else Stage.PROMPT
            chosen = self._choose(request, self._places.values(), stage)
            place = self._places[chosen.replica]
            if chosen.num_new_tokens >= _LONG_PROMPT and place.role is ReplicaRole.PREFILL:
                for other in [each for each in place.work.streams if self._may_leave(each)]:
                    self._open_offer(other, place)
            place.work.add_prompt(index, chosen.num_new_tokens)
        place.num_live += 1
        self._place_of[index] = place
        return place.device

    def _choose(self, request: Request, places: Iterable[_Place], stage: Stage) -> Choice:
        candidates = {
            each.name: Candidate(each.num_live, each.device.scheduler.config.block_size, role=each.role, work=each.work)
            for each in places
        }
        return self._router.choose(np.array(request.prompt, np.int32), request.tenant, candidates, stage=stage)

    def planned(self, device: Device) -> None:
        (place,) = (each for each in self._places.values() if each.device is device)
        for key in device.scheduler.reservations.requests(Kind.PROMISE):
            offer = self._offers.get(key.handle - _OFFERS)
            if offer is not None and place.name not in offer.told:
                offer.told.add(place.name)
                self.at(self.now + self._fleet.latency_s / 2, partial(self._has_room, key.handle - _OFFERS, place))
        for preparation in device.scheduler.take_preparations():
            arriving = preparation.arriving
            assert arriving is not None
            assert arriving.source is not None
            fetched = partial(self._fetched, device, preparation.number, arriving.source)
            self.at(self.now + len(arriving.blocks) * self._fleet.block_s, fetched)

    def _fetched(self, device: Device, number: int, source: KvSource) -> None:
        device.scheduler.prepared(number)
        (name,) = source.endpoints
        self._places[name].device.scheduler.renew_lease(source.lease, self.now, None)

    def deliver(self, events: ClientEvents) -> None:
        firsts = [each for each in dict.fromkeys(events.handles) if not any(self.lives[each].token_times)]
        super().deliver(events)
        for index in firsts:
            if (place := self._place_of.get(index)) is not None:
                self._first_token(index, place)

    def _first_token(self, index: int, place: _Place) -> None:
        """As in `Offers.offer_after_prompt`."""
        is_long = place.work.prompts.get(index, 0) >= _LONG_PROMPT
        place.work.remove(index)
        others = [each.work for each in self._places.values() if each.role is not ReplicaRole.PREFILL]
        leaves = is_long and place.role is ReplicaRole.PREFILL and not has_room(place.work, others)
        place.work.add_stream(index)
        if leaves and self._may_leave(index):
            self._open_offer(index, place)

    def _may_leave(self, index: int) -> bool:
        life = self.lives[index]
        num_tokens, request = len(life.token_times[0]), life.request
        return 0 < num_tokens <= request.max_tokens - _MIN_TOKENS_TO_MOVE and request.num_sequences == 1

    def _open_offer(self, index: int, source: _Place) -> None:
        """As in `Offers.open`: queries the best replica for room, and after a while all others."""
        others = [each for each in self._places.values() if each.role is not ReplicaRole.PREFILL]
        if index not in self._offers and others:
            self._offers[index] = offer = _Offer(source)
            first = self._places[self._choose(self.lives[index].request, others, Stage.STREAM).replica]
            self._ask(index, offer, [first])
            self.at(self.now + _FIRST_LOOK_S, partial(self._ask, index, offer, others))

    def _ask(self, index: int, offer: _Offer, places: Sequence[_Place]) -> None:
        """Submits an offer to the replicas that were not queried before."""
        for place in places:
            if place.name not in offer.asked:
                offer.asked[place.name] = len(self.lives[index].token_times[0])
                self.at(self.now + self._fleet.latency_s / 2, partial(self._submit_offer, index, offer, place))

    def _submit_offer(self, index: int, offer: _Offer, place: _Place) -> None:
        """Submits an offer. No effect if it is closed, or another replica took it."""
        if self._offers.get(index) is offer and offer.taker is None:
            request = self._moved(index, offer.asked[place.name])
            place.device.scheduler.submit(replace(request, key=key_of(_OFFERS + index), is_offer=True), self.now)

    def _has_room(self, index: int, place: _Place) -> None:
        """As in `Offers.has_room`."""
        offer = self._offers.get(index)
        if offer is None or offer.taker is not None:
            return
        if len(self.lives[index].token_times[0]) - offer.asked[place.name] > place.device.scheduler.config.block_size:
            self._withdraw(index, offer, place)
            self._ask(index, offer, [place])
            return
        offer.taker = place
        for name in offer.asked.keys() - {place.name}:
            self._withdraw(index, offer, self._places[name])
        self._release(index, offer)

    def _withdraw(self, index: int, offer: _Offer, place: _Place) -> None:
        del offer.asked[place.name]
        offer.told.discard(place.name)
        place.device.scheduler.abort(key_of(_OFFERS + index))

    def _close_offer(self, index: int) -> None:
        if (offer := self._offers.pop(index, None)) is not None:
            for name in list(offer.asked):
                self._withdraw(index, offer, self._places[name])

    def _moved(self, index: int, num_tokens: int) -> Request:
        emitted = (EmittedSequence([TOKEN_ID] * num_tokens),)
        return replace(self.lives[index].request, emitted=emitted, accepted_before=True)

    def _release(self, index: int, offer: _Offer) -> None:
        """Moves the request to the replica with room, after the time of the release and the submission."""
        life, place = self.lives[index], offer.source
        num_tokens = len(life.token_times[0])
        lease = Lease(index.to_bytes(8, "big") + num_tokens.to_bytes(4, "big"))
        if place.device.scheduler.move_away(life.request.key, lease, self.now, _LEASE_S) is None:
            self._close_offer(index)
            return
        self._remove(index)
        life.moved_at.append(num_tokens)
        source, replaces = KvSource("", (place.name,), lease), key_of(_OFFERS + index).handle
        moved = replace(self._moved(index, num_tokens), source=source, replaces=replaces)
        self.at(self.now + self._fleet.latency_s, partial(self._arrive, index, moved))

    def _arrive(self, index: int, moved: Request) -> None:
        self.submit(moved)
        self._close_offer(index)

    def end_request(self, index: int, *, failed: bool) -> None:
        self._close_offer(index)
        self._remove(index)
        super().end_request(index, failed=failed)

    def _remove(self, index: int) -> None:
        if (place := self._place_of.pop(index, None)) is not None:
            place.work.remove(index)
            place.num_live -= 1
