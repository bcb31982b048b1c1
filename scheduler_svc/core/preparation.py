"""What workers prepare before rows need it: constraints to compile, adapters to load, blocks to fetch from another
replica. One table of all that requests wait for.

All rows of a step wait for each other, and a constraint may take half a second to compile, an adapter as long to load.
So a group enters the batch only after the workers have said that they have what it needs; meanwhile it is held, and
those behind it pass.

Blocks of a request are fetched once, from its arrival on, or when it is next and there is room for them: it waits for
those that are underway, and for no others. Those of its blocks that are cached are kept meanwhile.

Workers keep at least the `NUM_KEPT` constraints that were prepared last. What is older is prepared again, should a
group with it come, or come back after a preemption. `adapter_slots` says which adapters workers have.

What the worker was lost for several times while it was prepared is a suspect (see `fault_isolation`): it is prepared
alone, while no step is in flight and nothing else is prepared.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

from scheduler_svc.core.adapter_slots import AdapterSlots
from scheduler_svc.core.block_pool import BlockHash, BlockId
from scheduler_svc.core.fault_isolation import Trials
from scheduler_svc.core.moves import Arriving
from scheduler_svc.core.request import Adapter, Constraint, MovedBlocks, Need, Request, RequestKey

NUM_KEPT = 64
"""What workers must keep; see PrepareConstraint."""
_MAX_UNDERWAY = 2
"""Of constraints, and of adapters. A worker compiles one after the other. More would only wait there, where tenants
have no turns."""

_MAX_WAITING = 16
"""While no more groups wait, what a group needs is prepared on arrival; otherwise when the group is next."""


@dataclass(frozen=True, slots=True)
class Preparation:
    """What the workers are to be told, and a number for the answer. `slot` is the one for an adapter, `arriving` the
    blocks that are fetched."""

    number: int
    need: Need
    slot: int | None = None
    arriving: Arriving | None = None


class Preparations:
    """What the workers have prepared, and what comes next: one need of each tenant in turn."""

    def __init__(
        self,
        adapters: AdapterSlots,
        trials: Trials,
        make_room: Callable[[RequestKey], Arriving | MovedBlocks | None],
        *,
        compiles: bool,
    ) -> None:
        """Without `compiles` every constraint counts as compiled: workers compile when rows need it. `make_room` takes
        blocks for those of a request that can be fetched now, or says with whose blocks they come already; None where
        there are none, or no room for them."""
        self.trials = trials
        self._make_room = make_room
        self._adapters = adapters
        self._compiles = compiles
        # Compiled ones, the oldest first.
        self._compiled: dict[Constraint, None] = {}
        self._underway: dict[int, Preparation] = {}
        self._wanted: OrderedDict[str, dict[Need, None]] = OrderedDict()
        # What each held request waits for, and who waits for what.
        self._need_of: dict[RequestKey, Need] = {}
        self._held: dict[Need, dict[RequestKey, None]] = {}
        # Requests that an adapter was loaded for, until one with this adapter is next: it is not evicted before.
        self._owed: dict[RequestKey, Adapter] = {}
        # The adapter of the group that was next last in the step that is or was planned, likewise.
        self._next: Adapter | None = None
        self._num_begun = 0
        # Whether a suspect is wanted and has what it takes, so that nothing else begins before it has begun.
        self._suspect_waits = False
        # A suspect that has begun since `take` was called last.
        self._begun_alone: list[Preparation] = []
        # Those that took too long; their answers may still come.
        self._given_up: dict[int, Preparation] = {}

    def planning(self) -> None:
        """A step is planned from now on."""
        self._next = None

    def arrived(self, request: Request, num_waiting: int) -> None:
        """A request joined the queue. Prepares what it needs now, unless it will wait for long."""
        self._fetch(request)
        if num_waiting <= _MAX_WAITING:
            for need in self._missing(request):
                self._want(request, need)

    def hold(self, request: Request, *, may_compile: bool = False) -> bool:
        """Whether a request that is next must wait for something. `done` returns it then. With `may_compile` its row
        may compile its constraint, and nothing is fetched for it."""
        missing = [need for need in self._missing(request) if not (may_compile and isinstance(need, Constraint))]
        if not may_compile and (moved := self._fetch(request)) is not None:
            missing.append(moved)
        if not missing:
            self._next = request.adapter
            if self._owed:
                self._owed = {key: adapter for key, adapter in self._owed.items() if adapter != request.adapter}
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
        """What a request waits for; None if it waits for nothing here."""
        return self._need_of.get(key)

    def ended(self, request: Request) -> None:
        """A request that may wait for something waits no more. What no other one is held for is not prepared for it:
        one that needs it, too, wants it when it is next."""
        key, wanted = request.key, self._wanted.get(request.tenant)
        self._owed.pop(key, None)
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
        """What the workers prepare now, be it late, but for blocks, which are not fetched a second time."""
        needs = [each.need for each in (*self._underway.values(), *self._given_up.values())]
        return [need for need in needs if not isinstance(need, MovedBlocks)]

    def arriving(self, number: int) -> Arriving | None:
        """The blocks that a preparation fetches, be it late; None for any other."""
        known = self._underway.get(number) or self._given_up.get(number)
        return None if known is None else known.arriving

    def fetching(self, content: BlockHash) -> MovedBlocks | None:
        """With which blocks this one comes that is fetched now; None if it is not."""
        for each in self._underway.values():
            if isinstance(each.need, MovedBlocks) and each.arriving is not None and content in each.arriving.hashes:
                return each.need
        return None

    def held_tables(self) -> list[tuple[BlockId, ...]]:
        """The blocks that are held for each preparation."""
        return [table for arriving in self._all_arriving for table in (arriving.blocks, arriving.kept)]

    @property
    def num_arriving(self) -> int:
        """Blocks that are being fetched."""
        return sum(len(arriving.blocks) for arriving in self._all_arriving)

    @property
    def _all_arriving(self) -> Iterator[Arriving]:
        known = (*self._underway.values(), *self._given_up.values())
        return (each.arriving for each in known if each.arriving is not None)

    def awaited_slots(self) -> list[int]:
        """The slots of the adapters that the workers load now, and are not late with."""
        return sorted(each.slot for each in self._underway.values() if each.slot is not None)

    @property
    def num_underway(self) -> int:
        """How much of it is not late."""
        return len(self._underway)

    @property
    def has_suspect_underway(self) -> bool:
        """Whether workers prepare a suspect now: no step may be planned meanwhile."""
        return any(self.trials.is_suspect(each.need) for each in self._underway.values())

    @property
    def suspect_is_next(self) -> bool:
        """Whether a suspect waits for nothing but the end of the steps in flight: `begin_suspect` is to be called
        then."""
        return self._suspect_waits and not self._underway

    def begin_suspect(self) -> bool:
        """No step is in flight: begins a suspect that waits for that. Returns whether there is one that could."""
        self._suspect_waits = False
        for need in [need for wanted in self._wanted.values() for need in wanted]:
            if need in self._held and self.trials.is_suspect(need) and (begun := self._start(need, set())):
                self._begun_alone.append(begun)
                return True
        return False

    @property
    def has_wanted(self) -> bool:
        """Whether there may be something for `take`."""
        return bool(self._wanted or self._begun_alone)

    def take(self, *, is_idle: bool = False) -> Iterator[Preparation]:
        """What the workers are to be told now. All of it must be told. `is_idle` if no step is in flight."""
        begun_alone, self._begun_alone = self._begun_alone, []
        yield from begun_alone
        # Kinds of which no more can begin now.
        stuck: set[type[Need]] = set()
        while begun := self._begin_next(stuck, is_idle=is_idle):
            yield begun

    def _begin_next(self, stuck: set[type[Need]], *, is_idle: bool) -> Preparation | None:
        """Begins a need of the first tenant that has one which can begin, and only this tenant's turn is over."""
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
        """Begins to prepare something. None where it is prepared or underway, which another tenant may have wanted, or
        where it has to wait."""
        if self._is_known(need):
            return None
        if self.trials.is_suspect(need):
            if need not in self._held:
                return None
            if isinstance(need, Adapter) and not self._adapters.may_take(need, self._kept):
                # Others go on until it has a slot, which may take as long as a request runs.
                self._slot_for(need, stuck)
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
        slot = self._slot_for(need, stuck) if isinstance(need, Adapter) else None
        if isinstance(need, Adapter) and slot is None:
            return None
        self._num_begun += 1
        begun = self._underway[self._num_begun] = Preparation(self._num_begun, need, slot)
        return begun

    def _fetch(self, request: Request) -> MovedBlocks | None:
        """Begins to fetch blocks of a request, where some can be fetched and there is room. Returns what it has to wait
        for."""
        own = MovedBlocks(request.key)
        if any(each.need == own and each.arriving and each.arriving.blocks for each in self._underway.values()):
            return own
        if self._suspect_waits or self.has_suspect_underway:
            # Under a stream of requests with blocks to fetch it would wait for ever.
            return None
        arriving = self._make_room(request.key)
        if not isinstance(arriving, Arriving):
            return arriving
        self._num_begun += 1
        begun = self._underway[self._num_begun] = Preparation(self._num_begun, own, arriving=arriving)
        self._begun_alone.append(begun)
        return own if arriving.blocks else None

    @property
    def _kept(self) -> set[Adapter]:
        """Adapters that are not evicted for another one."""
        return {*self._owed.values(), *filter(None, (self._next,))}

    def _slot_for(self, adapter: Adapter, stuck: set[type[Need]]) -> int | None:
        """A slot for an adapter: an empty one, or if a request waits for it that is next, one that is not used."""
        is_drained = self._adapters.slot_of(adapter) is not None
        if adapter not in self._held:
            return None if is_drained else self._adapters.take_empty()
        if is_drained and any(isinstance(need, Adapter) and need != adapter for need in self._held):
            # Its slot is for one of those.
            return None
        slot = self._adapters.take(adapter, self._kept)
        if slot is None and not is_drained:
            stuck.add(Adapter)
        return slot

    def done(self, number: int, failure: str | None = None) -> list[RequestKey]:
        """All workers have prepared it, or found that they cannot: a constraint fails its row then, and an adapter has
        a `failure`. Returns the requests that waited for it, which have to end after a failure.

        Raises ValueError if nothing of this number is underway.
        """
        if (late := self._given_up.pop(number, None)) is not None:
            # Whatever it loaded: the slot is another one's, or empty.
            self.trials.prepared(late.need)
            if isinstance(late.need, Constraint):
                # It is one of those that workers keep, and may be in the place of another one.
                self._note_compiled(late.need)
                return self._take_held(late.need)
            return []
        if number not in self._underway:
            raise ValueError(f"preparation {number} was answered; underway are {sorted(self._underway)}")
        need, slot = self._underway[number].need, self._underway.pop(number).slot
        self.trials.prepared(need)
        fails = failure is not None and not isinstance(need, MovedBlocks)
        keys = list(self._held.get(need, ()) if fails else self._take_held(need))
        if isinstance(need, Constraint):
            self._note_compiled(need)
        elif isinstance(need, Adapter) and slot is not None:
            self._adapters.loaded(slot, need if failure is None else None)
            if failure is None:
                self._owed |= dict.fromkeys(keys, need)
        return keys

    def give_up(self, number: int) -> tuple[Need, list[RequestKey]]:
        """The workers take too long for it: others take its turn. Returns what it is, and the requests that waited for
        it, which have to end, unless it is blocks: these are computed, and nothing is kept beside them. The slot of an
        adapter is free: its next load replaces this one. KeyError if nothing of this number is underway."""
        late = self._underway.pop(number)
        if late.arriving is not None:
            late = replace(late, arriving=replace(late.arriving, kept=()))
        self._given_up[number] = late
        if late.slot is not None:
            self._adapters.loaded(late.slot, None)
        if isinstance(late.need, MovedBlocks):
            return late.need, self._take_held(late.need)
        return late.need, list(self._held.get(late.need, ()))

    def refused(self, rows: Collection[int]) -> None:
        """The workers refused how these rows sample. If a constraint failed, they drop what they compiled, so all is
        prepared again when it is needed: what is still there is answered at once."""
        if rows:
            self._compiled.clear()

    def _note_compiled(self, constraint: Constraint) -> None:
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
        """Whether the workers have prepared it."""
        if isinstance(need, Constraint):
            return not self._compiles or need in self._compiled
        return isinstance(need, MovedBlocks) or self._adapters.is_ready(need)

    def _want(self, request: Request, need: Need) -> None:
        if not self._is_known(need):
            self._wanted.setdefault(request.tenant, {})[need] = None

    def _is_known(self, need: Need) -> bool:
        """Whether it is prepared, or will be."""
        return self.is_ready(need) or any(each.need == need for each in self._underway.values())
