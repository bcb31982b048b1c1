"""Preparation of needs by workers before rows use them: constraints to compile, adapters to load, blocks to fetch from
another replica. One table has all needs that requests wait for.

All rows of a step wait for each other, and a constraint may take half a second to compile, an adapter as long to load.
So a group enters the batch only after the workers have reported that its needs are ready. Meanwhile it is held, and
groups behind it pass.

Blocks of a request are fetched once, from its arrival on, or when it is next and there is room for them. The request
waits only for blocks that are on their way, and its cached blocks are kept meanwhile.

Workers keep at least the last `NUM_KEPT` prepared constraints. An older one is prepared again if a group with it
arrives, or comes back after a preemption. `adapter_slots` says which adapters workers have.

A need is a suspect if the worker was lost several times while it prepared the need (see `fault_isolation`). A suspect
is prepared by itself, while no step is in flight and no other need is prepared.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from quire.messages.prefix_hashes import BlockHash
from scheduler_svc.core.adapter_slots import AdapterSlots
from scheduler_svc.core.fault_isolation import Trials
from scheduler_svc.core.moves import Arriving
from scheduler_svc.core.request import Adapter, Constraint, MovedBlocks, Need, Request, RequestKey

NUM_KEPT = 64
"""Constraints that workers must keep; see PrepareConstraint."""
_MAX_UNDERWAY = 2
"""Maximum constraints, and maximum adapters, in preparation. A worker compiles one after the other. More would only
queue there, where tenants have no turns."""

_MAX_WAITING = 16
"""With at most this many waiting groups, needs are prepared when a group arrives; otherwise when the group is next."""


@dataclass(frozen=True, slots=True)
class Preparation:
    """An order to the workers, and a number for the answer. `slot` is the slot for an adapter, `arriving` the blocks
    that are fetched."""

    number: int
    need: Need
    slot: int | None = None
    arriving: Arriving | None = None


class Preparations:
    """The needs that workers have prepared, and the needs to prepare next: one of each tenant in turn."""

    def __init__(
        self,
        adapters: AdapterSlots,
        trials: Trials,
        make_room: Callable[[RequestKey, int], Arriving | MovedBlocks | None],
        *,
        compiles: bool,
    ) -> None:
        """`make_room` reserves pool blocks, for the preparation with this number, for a request's blocks that can be
        fetched now, or returns the need that fetches them already; None if there are no such blocks, or no room for
        them. Without `compiles` every constraint counts as compiled: workers compile it when rows need it."""
        self.adapters, self.trials = adapters, trials
        self._make_room, self._compiles = make_room, compiles
        # The constraints that the workers have compiled, the oldest first.
        self._compiled: dict[Constraint, None] = {}
        self._underway: dict[int, Preparation] = {}
        self._wanted: OrderedDict[str, dict[Need, None]] = OrderedDict()
        # The need that each held request waits for, and the requests that wait for each need.
        self._need_of: dict[RequestKey, Need] = {}
        self._held: dict[Need, dict[RequestKey, None]] = {}
        self._num_begun = 0
        # Whether a wanted suspect waits only for an idle worker, so that no other need begins before it.
        self._suspect_waits = False
        # Suspects and fetches that have begun since the last call of `take`.
        self._begun_alone: list[Preparation] = []
        # Preparations that took too long; their answers may still come.
        self._late: dict[int, Preparation] = {}

    def arrived(self, request: Request, num_waiting: int) -> None:
        """A request joined the queue. Begins to prepare its needs now, unless it will wait for long."""
        self._fetch(request)
        if num_waiting <= _MAX_WAITING:
            for need in self._missing(request):
                self._want(request, need)

    def hold(self, request: Request, *, may_compile: bool = False) -> bool:
        """Whether a request that is next must wait for a need; `done` returns it later. With `may_compile` its row may
        compile its constraint, and nothing is fetched for it."""
        missing = [need for need in self._missing(request) if not (may_compile and isinstance(need, Constraint))]
        if not may_compile and (moved := self._fetch(request)) is not None:
            missing.append(moved)
        if not missing:
            self.adapters.entering(request.adapter)
            return False
        for need in missing:
            self._want(request, need)
        # An adapter stays in its slot until its request runs, and a constraint only while few others are compiled.
        need = next((need for need in missing if isinstance(need, Adapter)), missing[0])
        self._release(request.key)
        self._need_of[request.key] = need
        self._held.setdefault(need, {})[request.key] = None
        return True

    def needed_by(self, key: RequestKey) -> Need | None:
        """The need that a request waits for; None if it waits for none here."""
        return self._need_of.get(key)

    def stop_waiting(self, request: Request) -> None:
        """A request waits no more. Needs that hold no other request are not prepared on its behalf; another request
        with the same need wants it again when it is next."""
        key, wanted = request.key, self._wanted.get(request.tenant)
        self.adapters.owed.pop(key, None)
        self._release(key)
        if wanted:
            for need in set(request.needs) - self._held.keys():
                wanted.pop(need, None)
            if not wanted:
                del self._wanted[request.tenant]

    def _release(self, key: RequestKey) -> None:
        if (need := self._need_of.pop(key, None)) is not None:
            holders = self._held[need]
            del holders[key]
            if not holders:
                del self._held[need]

    @property
    def underway(self) -> list[Need]:
        """Needs that the workers prepare now, late ones included. Blocks are left out: they are fetched only once."""
        needs = [each.need for each in (*self._underway.values(), *self._late.values())]
        return [need for need in needs if not isinstance(need, MovedBlocks)]

    def untold_fetches(self) -> list[tuple[RequestKey, Arriving]]:
        """The requests whose blocks `take` has not yet told the workers to fetch."""
        fetches = [(each.need, each.arriving) for each in self._begun_alone]
        return [(need.key, arriving) for need, arriving in fetches if isinstance(need, MovedBlocks) and arriving]

    def arriving(self, number: int) -> Arriving | None:
        """The blocks that a preparation fetches, even a late one; None for any other preparation."""
        known = self._underway.get(number) or self._late.get(number)
        return None if known is None else known.arriving

    def fetching(self, content: BlockHash) -> MovedBlocks | None:
        """The fetch that is bringing this block now; None if there is none."""
        for each in self._underway.values():
            if isinstance(each.need, MovedBlocks) and each.arriving is not None and content in each.arriving.hashes:
                return each.need
        return None

    def awaited_slots(self) -> list[int]:
        """The slots of the adapters that the workers load now, without late ones."""
        return sorted(each.slot for each in self._underway.values() if each.slot is not None)

    @property
    def num_underway(self) -> int:
        """The number of preparations that are not late."""
        return len(self._underway)

    @property
    def has_suspect_underway(self) -> bool:
        """Whether workers prepare a suspect now: no step may be planned meanwhile."""
        return any(self.trials.is_suspect(each.need) for each in self._underway.values())

    @property
    def suspect_is_next(self) -> bool:
        """Whether a suspect waits only for the end of the steps in flight. The caller calls `begin_suspect` then."""
        return self._suspect_waits and not self._underway

    def begin_suspect(self) -> None:
        """Begins a suspect that waits for an idle worker, if one can begin; no step is in flight now."""
        self._suspect_waits = False
        for need in [need for wanted in self._wanted.values() for need in wanted]:
            if need in self._held and self.trials.is_suspect(need) and (begun := self._start(need, set())):
                self._begun_alone.append(begun)
                return

    @property
    def has_wanted(self) -> bool:
        """Whether `take` may have preparations to return."""
        return bool(self._wanted or self._begun_alone)

    def take(self, *, is_idle: bool = False) -> Iterator[Preparation]:
        """Preparations to send to the workers now. All must be sent. `is_idle` if no step is in flight."""
        begun_alone, self._begun_alone = self._begun_alone, []
        yield from begun_alone
        # Kinds of needs that cannot begin any more now.
        stuck: set[type[Need]] = set()
        while begun := self._begin_next(stuck, is_idle=is_idle):
            yield begun

    def _begin_next(self, stuck: set[type[Need]], *, is_idle: bool) -> Preparation | None:
        """Begins a need of the first tenant that has one which can begin. Only this tenant loses its turn."""
        for tenant, wanted in list(self._wanted.items()):
            begun: Preparation | None = None
            for need in list(wanted):
                if begun is None and type(need) not in stuck:
                    begun = self._begin(need, stuck, is_idle=is_idle)
                    waits_for_request = isinstance(need, Adapter) or self.trials.is_suspect(need)
                    if begun or self._is_known(need) or (waits_for_request and need not in self._held):
                        del wanted[need]
            if not wanted:
                del self._wanted[tenant]
            elif begun:
                self._wanted.move_to_end(tenant)
            if begun:
                return begun
        return None

    def _begin(self, need: Need, stuck: set[type[Need]], *, is_idle: bool) -> Preparation | None:
        """Begins to prepare a need. None if it has to wait, or is ready or underway, perhaps for another tenant."""
        if self._is_known(need):
            return None
        if self.trials.is_suspect(need):
            if need not in self._held:
                return None
            if isinstance(need, Adapter) and not self.adapters.may_take(need):
                # Other needs proceed until it has a slot, which may take as long as a request runs.
                self.adapters.slot_for(need, self._held, stuck)
                return None
            if self._underway or not is_idle:
                self._suspect_waits = True
                return None
        elif self._suspect_waits or self.has_suspect_underway:
            return None
        return self._start(need, stuck)

    def _start(self, need: Need, stuck: set[type[Need]]) -> Preparation | None:
        if sum(type(each.need) is type(need) for each in self._underway.values()) >= _MAX_UNDERWAY:
            stuck.add(type(need))
            return None
        slot = self.adapters.slot_for(need, self._held, stuck) if isinstance(need, Adapter) else None
        if isinstance(need, Adapter) and slot is None:
            return None
        self._num_begun += 1
        begun = self._underway[self._num_begun] = Preparation(self._num_begun, need, slot)
        return begun

    def _fetch(self, request: Request) -> MovedBlocks | None:
        """Begins to fetch a request's blocks, if some can be fetched and there is room. Returns the need that the
        request has to wait for, if any."""
        own = MovedBlocks(request.key)
        if any(each.need == own and each.arriving and each.arriving.blocks for each in self._underway.values()):
            return own
        if self._suspect_waits or self.has_suspect_underway:
            # Under a stream of requests with blocks to fetch the suspect would wait forever.
            return None
        arriving = self._make_room(request.key, self._num_begun + 1)
        if not isinstance(arriving, Arriving):
            return arriving
        self._num_begun += 1
        begun = self._underway[self._num_begun] = Preparation(self._num_begun, own, arriving=arriving)
        self._begun_alone.append(begun)
        return own if arriving.blocks else None

    def done(self, number: int, failure: str | None = None) -> list[RequestKey]:
        """All workers have prepared the need, or found that they cannot: an invalid constraint then fails its row, and
        an adapter has a `failure`. Returns the requests that waited for it, which have to end after a failure.

        Raises ValueError if no preparation of this number is underway.
        """
        if (late := self._late.pop(number, None)) is not None:
            # Ignores an adapter that it loaded: the slot is another adapter's now, or empty.
            self.trials.prepared(late.need)
            if isinstance(late.need, Constraint):
                self._record_compiled(late.need)
                return self._take_held(late.need)
            return []
        if number not in self._underway:
            raise ValueError(f"preparation {number} was answered; underway are {sorted(self._underway)}")
        need, slot = self._underway[number].need, self._underway.pop(number).slot
        self.trials.prepared(need)
        fails = failure is not None and not isinstance(need, MovedBlocks)
        keys = list(self._held.get(need, ()) if fails else self._take_held(need))
        if isinstance(need, Constraint):
            self._record_compiled(need)
        elif isinstance(need, Adapter) and slot is not None:
            self.adapters.loaded(slot, need if failure is None else None, keys)
        return keys

    def mark_late(self, number: int) -> tuple[Need, list[RequestKey]]:
        """The workers take too long: other needs take the turn. Returns the need and the requests that waited for it.
        These have to end, unless the need is blocks: those are computed. An adapter's slot is free: its next load
        replaces this one. KeyError if no such number is underway."""
        late = self._late[number] = self._underway.pop(number)
        if late.slot is not None:
            self.adapters.loaded(late.slot, None)
        if isinstance(late.need, MovedBlocks):
            return late.need, self._take_held(late.need)
        return late.need, list(self._held.get(late.need, ()))

    def refused(self, rows: Collection[int]) -> None:
        """The workers refused the sampling parameters of these rows. If a constraint failed, they drop all compiled
        ones, so all are prepared again when needed. Workers answer at once for a constraint that they still have."""
        if rows:
            self._compiled.clear()

    def _record_compiled(self, constraint: Constraint) -> None:
        """The workers have compiled it, and may have dropped the oldest one for it."""
        self._compiled.pop(constraint, None)
        self._compiled[constraint] = None
        if len(self._compiled) > NUM_KEPT:
            del self._compiled[next(iter(self._compiled))]

    def _take_held(self, need: Need) -> list[RequestKey]:
        keys = list(self._held.pop(need, ()))
        for key in keys:
            del self._need_of[key]
        return keys

    def _missing(self, request: Request) -> list[Need]:
        return [need for need in request.needs if not self.is_ready(need)]

    def is_ready(self, need: Need) -> bool:
        """Whether the workers have prepared the need."""
        if isinstance(need, Constraint):
            return not self._compiles or need in self._compiled
        return isinstance(need, MovedBlocks) or self.adapters.is_ready(need)

    def _want(self, request: Request, need: Need) -> None:
        if not self._is_known(need):
            self._wanted.setdefault(request.tenant, {})[need] = None

    def _is_known(self, need: Need) -> bool:
        """Whether the need is ready or underway."""
        return self.is_ready(need) or any(each.need == need for each in self._underway.values())
