"""Admission of groups to the batch: the room that they need, the obstacles that keep them out, and the shares of a
step's tokens that prompts get."""

import enum
import itertools
import sys
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np

from scheduler_svc.core.kv_cache import VictimTables, num_cached, taken_from_cache
from scheduler_svc.core.pins import Pins
from scheduler_svc.core.policy import Queues
from scheduler_svc.core.request import RequestKey
from scheduler_svc.core.reservations import Kind, Reservations
from scheduler_svc.core.running_batch import Batch
from scheduler_svc.core.sequence import SequenceGroup

_STEPS_AHEAD = 1
"""Number of steps after the one that admits a group for which every running group finds blocks to grow into. Otherwise
groups would enter and leave with every block that becomes free. ADR 0012 has the costs of other values."""


LEAST_CHUNK_WITH_STATE = 3
"""Minimum tokens of a prompt's share of a step if layers keep states: a chunk of three tokens can be shortened so that
neither it nor the rest of the prompt is a single token (`Batch._chunk_with_state`)."""

_NUM_LOOKED_AT = 4
"""Waiting groups that may limit a longer prompt to its share."""


class Obstacle(enum.Enum):
    """Why a group that waits or is swapped does not run yet."""

    NEXT_STEP = enum.auto()
    """A step admitted, or looked at, its maximum number of groups."""
    ROWS = enum.auto()
    BLOCKS = enum.auto()
    TOKENS = enum.auto()
    """The step's token budget is used up."""
    BEHIND = enum.auto()
    """Another group is next."""
    SWAPPED_FIRST = enum.auto()
    PREEMPTION = enum.auto()
    """The step preempted groups because blocks ran out."""
    CONSTRAINT = enum.auto()
    ADAPTER = enum.auto()
    MOVED_BLOCKS = enum.auto()
    SHARED_PREFIX = enum.auto()
    SUSPECTS = enum.auto()
    """Only the requests run that may have caused the loss of the worker."""


class Stop(NamedTuple):
    """Why the last planned step admitted no further group, and the group that it stopped at, if any."""

    why: Obstacle
    key: RequestKey | None = None


class Room:
    """Decides whether a waiting or swapped group may enter: counts the rows and blocks that it takes, and finds the
    groups that would have to leave for it."""

    def __init__(self, batch: Batch, queues: Queues, reservations: Reservations, pins: Pins) -> None:
        self._batch = batch
        self._waiting, self._swapped, self._running = queues
        self._reservations = reservations
        self._pins = pins
        # The last attempt for which all candidates made too little room, and the number of blocks that it wanted. An
        # attempt has a group, its candidates, counters of changes of the running queue and of released blocks, and the
        # rows that it lacked.
        self._futile: tuple[tuple[object, ...], int] = (), 0
        # The number of blocks that the group looked at last takes, and the versions of its cached blocks.
        self._taken: tuple[RequestKey, list[int], int] | None = None

    @property
    def others_run(self) -> bool:
        """Whether groups run, or are about to come from another replica."""
        return bool(len(self._running) or self._reservations[Kind.PROMISE])

    def to_grow(self) -> int:
        """Blocks that the running groups take in the next steps."""
        return self._batch.blocks_to_grow(_STEPS_AHEAD)

    def to_grow_for_long(self) -> int:
        """`to_grow` for a group that runs at another replica meanwhile and should not have to wait when it comes: each
        running sequence finds one more block."""
        return self._batch.blocks_to_grow(self._batch.blocks.block_size)

    def promise(self, group: SequenceGroup) -> None:
        """Keeps the blocks of a group that waits and fits, and with them its rows."""
        blocks = self._batch.blocks
        num_blocks = self._blocks_taken(group) + self.growth_of(group)
        cached = taken_from_cache(blocks, group.computing)
        num_blocks = min(num_blocks, blocks.pool.num_free) - blocks.pool.num_free_of(cached)
        blocks.pool.touch(cached)
        self._reservations.add(Kind.PROMISE, group.request.key, [*cached, *blocks.take(num_blocks)])

    def growth_of(self, group: SequenceGroup) -> int:
        """Blocks that a waiting group takes in the next steps, in addition to the blocks for its present tokens."""
        length, last = self._batch.blocks.layout.table_length, group.request.max_len - 1
        forks = len(group.unfinished) - len(group.computing)
        return forks * self._batch.blocks.states.size + sum(
            length(min(each.num_tokens + _STEPS_AHEAD, last)) - length(each.num_tokens) for each in group.unfinished
        )

    def lacks_rows(self, group: SequenceGroup) -> bool:
        """Whether too few rows are free for the group."""
        return self._missing_rows(group) > 0

    def _missing_rows(self, group: SequenceGroup) -> int:
        """Rows that the group lacks. Rows that are kept for other groups do not count as free."""
        # A coming group that is not held has its turn after this group: if it kept rows, both would wait forever.
        kept = filter(self._waiting.is_held, self._reservations.requests(Kind.PROMISE, Kind.COMING))
        num_promised = sum(len(self._waiting.get(key).unfinished) for key in kept)
        return len(group.unfinished) - (self._batch.rows.num_free - num_promised)

    def has_room(self, group: SequenceGroup, to_grow: int) -> bool:
        """Whether enough rows and blocks are free for the group, while the running groups take `to_grow` blocks in the
        next steps."""
        if self.lacks_rows(group):
            return False
        needed, reserve = self._blocks_needed(group, to_grow)
        return self._batch.blocks.has_room(needed, reserve=reserve, others_run=self.others_run)

    def fits(self, group: SequenceGroup, to_grow: int) -> bool:
        """Whether `make_way` would succeed. Changes nothing."""
        return self.has_room(group, to_grow) or self._fits_alone(group, to_grow)

    def _fits_alone(self, group: SequenceGroup, to_grow: int) -> bool:
        """`fits`, for a group that has no room as it is."""
        if self.lacks_rows(group) or self.others_run:
            return False
        # Nothing runs: retired blocks and blocks kept for others give way, and the group may share some of the rest.
        blocks, fetches = self._batch.blocks, self._reservations.tables(Kind.FETCH, Kind.FETCH_START)
        arriving = set(itertools.chain(*fetches))
        cached = set(itertools.chain(*(blocks.cached(each) for each in group.computing)))
        if blocks.states.size:
            cached = set(taken_from_cache(blocks, group.computing, with_checkpoints=not blocks.host.caches))
        cached -= arriving | blocks.blank
        needed, _ = self._blocks_needed(group, to_grow)
        needed += len(cached) - blocks.pool.num_free_of([*cached])
        return needed <= blocks.pool.num_blocks - len(arriving | blocks.blank)

    def make_way(self, group: SequenceGroup, to_grow: int) -> bool:
        """Frees blocks that are kept for others until the group, which is about to enter, has room. Every accepted
        request can run by itself, and no pin or lease may prevent that. Returns whether the group has room; if not,
        nothing was freed."""
        if self.has_room(group, to_grow):
            return True
        if not self._fits_alone(group, to_grow):
            return False
        while not self.has_room(group, to_grow):
            if not (self._batch.blocks.reclaim() or self.give_way(may_end_pins=True)):
                return False
        return True

    def give_way(self, *, may_end_pins: bool) -> bool:
        """Ends the reservation that gives way first. A group whose promise is broken waits again. Returns whether there
        was one."""
        ended = self._reservations.give_way(may_end_pins=may_end_pins)
        if ended is None:
            return False
        if isinstance(key := ended.owner, RequestKey):
            self._waiting.release(key)
            if (pin := self._pins.of_key(key)) is not None:
                self._pins.remove(pin)
        return True

    def victims(self, group: SequenceGroup, candidates: SequenceOf[SequenceGroup], to_grow: int) -> list[SequenceGroup]:
        """The shortest start of `candidates`, which are running groups, that makes room for `group`; empty if even all
        of them would not make enough."""
        rows, blocks, running = self._batch.rows, self._batch.blocks, self._running
        needed, reserve = self._blocks_needed(group, to_grow)
        # Blocks that must become free before the group may start in addition to others.
        missing = needed + max(reserve, blocks.watermark_blocks) - blocks.pool.num_free
        missing_rows = self._missing_rows(group)
        # If all leave, the group runs by itself, as every group can, unless room is kept for others.
        all_leave = len(candidates) == len(running) and not self._reservations[Kind.PROMISE]
        orders = tuple(each.order for each in candidates)
        attempt = (group.request.key, orders, running.num_changes, missing_rows, blocks.pool.num_releases)
        wanted = missing + blocks.pool.num_free
        if not all_leave:
            may_leave = rows.active & np.isin(rows.order, orders)
            before, wanted_before = self._futile
            # Blocks that the candidates took since then were free before.
            was_futile = before == attempt and wanted >= wanted_before
            # Assumes that they share no block: mostly even that is too little.
            most = int(rows.num_slots[may_leave].sum()) // blocks.block_size * blocks.num_groups
            most += int(np.count_nonzero(may_leave)) * blocks.states.size
            if missing > most or was_futile:
                return []
        tables = VictimTables(blocks.pool, taken=taken_from_cache(blocks, group.computing))
        victims: list[SequenceGroup] = []
        for victim in candidates:
            victims.append(victim)
            missing_rows -= len(victim.unfinished)
            missing -= sum(tables.free([*each.block_table, *each.state_blocks]) for each in victim.unfinished)
            if missing <= 0 and missing_rows <= 0:
                return victims
        if all_leave and missing_rows <= 0:
            return victims
        self._futile = attempt, wanted
        return []

    def _blocks_needed(self, group: SequenceGroup, to_grow: int) -> tuple[int, int]:
        """Free blocks that the group takes as it enters, and free blocks that must be left then for other groups."""
        taken = self._blocks_taken(group)
        if group.request.key not in self._swapped:
            return taken, to_grow + self.growth_of(group)
        # A swapped group returns before the decodes of the step take their blocks.
        to_decode = self._batch.blocks_for_decodes()
        return taken + to_decode, to_grow - to_decode

    def _blocks_taken(self, group: SequenceGroup) -> int:
        """Free blocks for the group's present tokens. A group that does not fit is counted again only when its cached
        blocks change."""
        key, computing = group.request.key, group.computing
        versions = self._batch.blocks.versions(computing)
        if self._taken is None or self._taken[:2] != (key, versions):
            blocks = self._batch.blocks
            count = blocks.blocks_to_swap_in if key in self._swapped else blocks.blocks_to_allocate
            self._taken = key, versions, count(computing)
        return self._taken[2]


class TokenShares:
    """Splits a step's token budget so that a long prompt does not delay shorter ones: while a prompt with fewer tokens
    to compute is behind it or waits, the long one gets at most `max_share` of the rest of the budget (ADR 0023)."""

    def __init__(self, batch: Batch, queues: Queues, max_share: float) -> None:
        self._batch = batch
        self._waiting, _, self._running = queues
        self._max_share = max_share
        # Tokens that waiting groups have to compute, for the groups that this step looked at.
        self._num_uncached: dict[RequestKey, int] = {}

    def add_prefills(self) -> None:
        """Begins a step's chunks: continues the prefills in order until the budget is spent."""
        self._num_uncached.clear()
        self._batch.begin_followers()
        if not (rows := self._batch.rows.prefilling().tolist()):
            return
        lengths = [self._batch.rows.num_uncomputed(row) for row in rows]
        shortest_behind = [*itertools.accumulate(reversed(lengths), min, initial=sys.maxsize)][::-1][1:]
        for row, shortest in zip(rows, shortest_behind, strict=True):
            if self._batch.draft.budget == 0:
                return
            self.add_chunk(row, shortest)

    def add_chunk(self, row: int, shortest_behind: int = sys.maxsize) -> None:
        """Adds the row's next chunk, or sets its share of the budget aside until `add_set_aside`, so that shorter
        prompts get the rest first. `shortest_behind` is the fewest tokens that a row behind it has to compute."""
        if self._batch.rows.waits[row]:
            return
        draft, length, group = self._batch.draft, self._batch.rows.num_uncomputed(row), self._group_in(row)
        least = min(LEAST_CHUNK_WITH_STATE, draft.budget) if self._batch.blocks.states.size else 1
        share = max(least, int(draft.budget * self._max_share))
        if draft.aside and self._group_in(draft.aside[-1][0]) is group:
            # Rows of a group may share blocks: the row that computes a block comes before the rows that read it.
            draft.set_aside(row, 0)
        elif length > share and (shortest_behind < length or self._is_shorter_waiting(length)):
            draft.set_aside(row, share)
        else:
            self._batch.add_chunk(row, group)

    def add_set_aside(self) -> None:
        """Ends a step's chunks: adds the chunks that were set aside, with the rest of the budget."""
        draft = self._batch.draft
        aside, draft.aside = draft.aside, []
        for row, share in aside:
            draft.budget += share
            if draft.budget:
                self._batch.add_chunk(row, self._group_in(row))

    def _is_shorter_waiting(self, length: int) -> bool:
        """Whether one of the first waiting groups has fewer tokens to compute. Groups further behind do not count: each
        group before them takes a share of the rest, so they would get almost nothing."""
        few = self._waiting.next_few(_NUM_LOOKED_AT)
        return any(group.num_tokens_to_compute < length or self._uncached(group) < length for group in few)

    def _uncached(self, group: SequenceGroup) -> int:
        """Tokens that a waiting group has to compute. Cached for one step, since many rows need it."""
        key, blocks = group.request.key, self._batch.blocks
        if key not in self._num_uncached:
            cached_tokens = num_cached(blocks, group.computing[0]) * blocks.block_size
            self._num_uncached[key] = group.num_tokens_to_compute - cached_tokens
        return self._num_uncached[key]

    def _group_in(self, row: int) -> SequenceGroup:
        return self._running.get(self._batch.sequence(row).request.key)
