"""Several replicas behind the gateway's router, in one virtual time: together, or for prefill and decode apart.

The router places requests by load, role and the beginning of prompts, without knowing what is cached. A request with a
long prompt leaves a replica for prefill as `gateway.replicas.replica_set` has it, and its blocks follow over a link.
What is assumed: a time for the messages of a move, and that blocks on their way slow neither steps nor each other.
Requests with several sequences stay where they are.
"""

from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from gateway.replicas.roles import Stage, Work, has_room
from gateway.replicas.routing import Candidate, Router, RoutingPolicy
from quire.replica_role import ReplicaRole
from scheduler_svc.core.moves import KvSource, Lease
from scheduler_svc.core.request import EmittedSequence, Request
from scheduler_svc.core.step import ClientEvents
from simulator.engine import Arrivals, Device, Run
from simulator.tokens import TOKEN_ID

_LONG_PROMPT = 256
"""`--long-prompt` of gateways."""
_MIN_TOKENS_TO_MOVE = 16
"""As of `gateway.replicas.replica_set`."""
_LEASE_S = 10.0


@dataclass(frozen=True, slots=True)
class Fleet:
    """Equal replicas.

    Attributes:
        num_prefill: So many are for prefill, and the others for decode then.
        block_s: Seconds in which a block goes from one replica to another.
        latency_s: Seconds of a move beside its blocks.
    """

    num_replicas: int = 1
    num_prefill: int = 0
    block_s: float = 0.0
    latency_s: float = 0.0

    @property
    def roles(self) -> list[ReplicaRole]:
        """Of each replica."""
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


class FleetRun(Run):
    """Requests on a fleet, with a device for each replica."""

    def __init__(self, arrivals: Arrivals, devices: list[Device], fleet: Fleet) -> None:
        super().__init__(arrivals, devices)
        self._fleet = fleet
        names = [f"replica-{index}" for index in range(len(devices))]
        places = zip(names, fleet.roles, devices, strict=True)
        self._places = {name: _Place(name, role, device) for name, role, device in places}
        self._place_of: dict[int, _Place] = {}
        self._router = Router(RoutingPolicy.AFFINITY, _LONG_PROMPT)

    def choose(self, request: Request) -> Device:
        index, stage = request.key.handle, Stage.STREAM if request.emitted else Stage.PROMPT
        candidates = {
            name: Candidate(each.num_live, each.device.scheduler.config.block_size, role=each.role, work=each.work)
            for name, each in self._places.items()
        }
        if request.num_sequences > 1:
            stage = Stage.STAY
        chosen = self._router.choose(np.array(request.prompt, np.int32), request.tenant, candidates, stage=stage)
        place = self._places[chosen.replica]
        if stage is Stage.STREAM:
            place.work.add_stream(index)
        else:
            if chosen.num_new_tokens >= _LONG_PROMPT and place.role is ReplicaRole.PREFILL:
                for other in [each for each in place.work.streams if self._may_leave(each)]:
                    self._release(other, place)
            place.work.add_prompt(index, chosen.num_new_tokens)
        place.num_live += 1
        self._place_of[index] = place
        return place.device

    def planned(self, device: Device) -> None:
        for preparation in device.scheduler.take_preparations():
            arriving = preparation.arriving
            assert arriving is not None
            assert arriving.source is not None
            fetched = partial(self._fetched, device, preparation.number, arriving.source)
            self.at(self.now + len(arriving.blocks) * self._fleet.block_s, fetched)

    def _fetched(self, device: Device, number: int, source: KvSource) -> None:
        device.scheduler.prepared(number)
        (name,) = source.endpoints
        self._places[name].device.scheduler.renew_lease(source.lease, self.now, 0)

    def deliver(self, events: ClientEvents) -> None:
        firsts = [each for each in dict.fromkeys(events.handles) if not any(self.lives[each].token_times)]
        super().deliver(events)
        for index in firsts:
            if (place := self._place_of.get(index)) is not None:
                self._first_token(index, place)

    def _first_token(self, index: int, place: _Place) -> None:
        """As of `ReplicaSet._leave_prefill`."""
        is_long = place.work.prompts.get(index, 0) >= _LONG_PROMPT
        place.work.remove(index)
        others = [each.work for each in self._places.values() if each.role is not ReplicaRole.PREFILL]
        leaves = is_long and place.role is ReplicaRole.PREFILL and not has_room(place.work, others)
        place.work.add_stream(index)
        if leaves and self._may_leave(index):
            self._release(index, place)

    def _may_leave(self, index: int) -> bool:
        life = self.lives[index]
        num_tokens, request = len(life.token_times[0]), life.request
        return 0 < num_tokens <= request.max_tokens - _MIN_TOKENS_TO_MOVE and request.num_sequences == 1

    def _release(self, index: int, place: _Place) -> None:
        """The request goes on elsewhere, once its release and its submission were told."""
        life = self.lives[index]
        num_tokens = len(life.token_times[0])
        lease = Lease(index.to_bytes(8, "big") + num_tokens.to_bytes(4, "big"))
        if place.device.scheduler.hand_over(life.request.key, lease, self.now, _LEASE_S) is None:
            return
        self._leave(index)
        life.moved_at.append(num_tokens)
        emitted, source = (EmittedSequence([TOKEN_ID] * num_tokens),), KvSource("", (place.name,), lease)
        moved = replace(life.request, emitted=emitted, source=source)
        self.at(self.now + self._fleet.latency_s, partial(self.submit, moved))

    def end(self, index: int, *, failed: bool) -> None:
        self._leave(index)
        super().end(index, failed=failed)

    def _leave(self, index: int) -> None:
        if (place := self._place_of.pop(index, None)) is not None:
            place.work.remove(index)
            place.num_live -= 1
