"""The state of memory and queues, for watchers. Everything here reads the core and changes nothing.

A watcher needs the changes since its last look. `View.look` compares block tables and hashes of blocks with the state
at the last look, so operations of the core report nothing to it: the core does not know whether there are watchers,
and a frame cannot disagree with the real state. A new watcher gets a `Picture` instead, in parts, so that a large pool
takes many short turns of the event loop and not a long one.
"""

import itertools
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from quire.messages.prefix_hashes import BlockHash
from scheduler_svc.core.admission import Obstacle
from scheduler_svc.core.paging.block_pool import BlockId
from scheduler_svc.core.paging.sequence import SequenceStatus
from scheduler_svc.core.request import Constraint, MovedBlocks
from scheduler_svc.core.running_batch import Batch
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence, SequenceGroup

_NAMES_AT_ONCE = 256
"""Names that are compared at once: most such chunks are equal from look to look, and one C comparison shows that."""

_MAX_ENTRIES = 8_192
"""Entries of block tables, names and pins in one `Changes`: a few milliseconds to collect and to write."""

_Names = list[BlockHash | None]


class SequenceNumber(NamedTuple):
    """A sequence that holds blocks, or is about to, and the number that identifies it in changes."""

    number: int
    sequence: Sequence


class Preempted(NamedTuple):
    """A sequence that has left the batch since the last look, and whether its blocks were moved to the host."""

    number: int
    is_swapped: bool


@dataclass(slots=True)
class Changes:
    """Changes since the last look. If `is_whole`, they replace everything that was reported before.

    new       sequences that were not known
    gone      numbers of sequences that hold nothing any more
    progress  number, status, tokens, computed tokens of sequences for which one of them changed, flat
    lengths   number, length of the block table, if that changed, flat
    tables    number, index into the table, block id, for each entry that changed, flat; host blocks of swapped
              sequences
    states    number, index, block id, for each block of the state of a sequence that changed, flat
    names     blocks with another name now, and that name
    pins      block, number of pins that hold it now, flat
    """

    is_whole: bool = False
    new: list[SequenceNumber] = field(default_factory=list[SequenceNumber])
    gone: list[int] = field(default_factory=list[int])
    progress: list[int] = field(default_factory=list[int])
    lengths: list[int] = field(default_factory=list[int])
    tables: list[int] = field(default_factory=list[int])
    states: list[int] = field(default_factory=list[int])
    names: list[tuple[BlockId, BlockHash | None]] = field(default_factory=list[tuple[BlockId, BlockHash | None]])
    pins: list[int] = field(default_factory=list[int])

    @property
    def is_empty(self) -> bool:
        lists = (self.new, self.gone, self.progress, self.lengths, self.tables, self.states, self.names, self.pins)
        return not (self.is_whole or any(lists))

    @property
    def is_full(self) -> bool:
        """Whether it has the maximum number of entries of tables, states, names and pins."""
        num_placed = (len(self.tables) + len(self.states)) // 3
        return num_placed + len(self.names) + len(self.pins) // 2 >= _MAX_ENTRIES

    def extend_table(self, number: int, first: int, blocks: SequenceOf[BlockId]) -> None:
        """Adds the entries of a table from the index `first` on."""
        self.tables += _entries(number, first, blocks)

    def add_state(self, number: int, first: int, blocks: SequenceOf[BlockId]) -> None:
        """Adds the blocks of a sequence's state from the index `first` on."""
        self.states += _entries(number, first, blocks)


def _entries(number: int, first: int, blocks: SequenceOf[BlockId]) -> Iterator[int]:
    return itertools.chain.from_iterable(zip(itertools.repeat(number), itertools.count(first), blocks, strict=False))


class Look(NamedTuple):
    """The result of one look: sequences that left the batch, and the changes. `changes` is None if a picture is to be
    sent instead: this is the first look, the pool is another one, or too much changed."""

    preempted: list[Preempted]
    changes: Changes | None

    @property
    def is_empty(self) -> bool:
        return not self.preempted and self.changes is not None and self.changes.is_empty


class _Seen(NamedTuple):
    """A sequence as it was at the last look. The table and the blocks of the state are copies."""

    number: int
    status: SequenceStatus
    num_tokens: int
    num_computed: int
    table: list[BlockId]
    state: list[BlockId]


@dataclass(frozen=True, slots=True)
class Picture:
    """The whole state at one look. It is immutable: later looks make other lists."""

    _sequences: list[tuple[Sequence, _Seen]]
    _names: list[_Names]
    _pins: dict[BlockId, int]

    def parts(self) -> Iterator[Changes]:
        """The picture as changes, each with a bounded number of entries. The first one `is_whole`."""
        part = Changes(is_whole=True)
        for sequence, seen in self._sequences:
            part.new.append(SequenceNumber(seen.number, sequence))
            part.progress += (seen.number, seen.status.value, seen.num_tokens, seen.num_computed)
            for start in range(0, len(seen.table), _NAMES_AT_ONCE):
                blocks = seen.table[start : start + _NAMES_AT_ONCE]
                part.extend_table(seen.number, start, blocks)
                part.lengths += (seen.number, start + len(blocks))
                if part.is_full:
                    yield part
                    part = Changes()
            for start in range(0, len(seen.state), _NAMES_AT_ONCE):
                part.add_state(seen.number, start, seen.state[start : start + _NAMES_AT_ONCE])
                if part.is_full:
                    yield part
                    part = Changes()
        first = 0
        for names in self._names:
            part.names += [(BlockId(block), name) for block, name in enumerate(names, first) if name is not None]
            first += len(names)
            if part.is_full:
                yield part
                part = Changes()
        for pin in self._pins.items():
            part.pins += pin
            if part.is_full:
                yield part
                part = Changes()
        if not part.is_empty:
            yield part


class View:
    """The memory of one replica as it was at the last look."""

    def __init__(self) -> None:
        # The batch whose pool was seen. After the loss of a worker there is another one, and earlier state is void.
        self._batch: Batch | None = None
        self._seen: dict[Sequence, _Seen] = {}
        # Each list has _NAMES_AT_ONCE names, and is replaced when one of them changed.
        self._names: list[_Names] = []
        self._pins: dict[BlockId, int] = {}
        self._num_numbered = 0

    def number_of(self, sequence: Sequence) -> int | None:
        """The number of a sequence that the last look saw."""
        seen = self._seen.get(sequence)
        return None if seen is None else seen.number

    def look(self, scheduler: Scheduler) -> Look:
        """The changes since the last look. Takes at most about 20 ms for a pool of 500,000 blocks."""
        is_other_pool = self._batch is not scheduler.batch
        if is_other_pool:
            self._batch = scheduler.batch
            self._seen, self._names, self._pins = {}, [], {}
        preempted: list[Preempted] = []
        changes = self._look_at_sequences(scheduler, None if is_other_pool else Changes(), preempted)
        changes = self._look_at_names(scheduler, changes)
        self._look_at_pins(scheduler, changes)
        return Look(preempted, changes)

    def picture(self) -> Picture:
        """The whole state at the last look, for a new watcher."""
        return Picture(list(self._seen.items()), self._names.copy(), self._pins)

    def _look_at_sequences(
        self, scheduler: Scheduler, changes: Changes | None, preempted: list[Preempted]
    ) -> Changes | None:
        """Returns the changes; None if they were None before, or are too many now."""
        before, self._seen = self._seen, {}
        rows = scheduler.batch.rows
        computed = np.where(rows.active, rows.num_computed - rows.num_unsure, 0).tolist()
        for sequence in _holders(scheduler):
            seen = before.pop(sequence, None)
            status, num_tokens = sequence.status, len(sequence.token_ids)
            if seen is None:
                self._num_numbered += 1
                seen = _Seen(self._num_numbered, SequenceStatus.WAITING, 0, 0, [], [])
                if changes is not None:
                    changes.new.append(SequenceNumber(seen.number, sequence))
            elif status is SequenceStatus.SWAPPED is not seen.status:
                preempted.append(Preempted(seen.number, is_swapped=True))
            if status is SequenceStatus.SWAPPED:
                num_computed = sequence.num_swapped_tokens
            else:
                num_computed = seen.num_computed if sequence.row is None else computed[sequence.row]
            table = seen.table if sequence.block_table == seen.table else sequence.block_table.copy()
            state = seen.state if sequence.state_blocks == seen.state else sequence.state_blocks.copy()
            now = _Seen(seen.number, status, num_tokens, num_computed, table, state)
            self._seen[sequence] = now
            if changes is not None:
                _compare(seen, now, changes)
                changes = None if changes.is_full else changes
        for sequence, seen in before.items():
            if changes is not None:
                changes.gone.append(seen.number)
            if sequence.status is SequenceStatus.WAITING:
                preempted.append(Preempted(seen.number, is_swapped=False))
        return changes

    def _look_at_names(self, scheduler: Scheduler, changes: Changes | None) -> Changes | None:
        """Returns the changes in the same way."""
        pool = scheduler.batch.blocks.pool
        if not self._names:
            # The names of a pool that was never seen are all missing.
            self._names = [[] for _ in range(0, pool.num_blocks, _NAMES_AT_ONCE)]
        for place, before in enumerate(self._names):
            first = place * _NAMES_AT_ONCE
            names = pool.names(first, first + _NAMES_AT_ONCE)
            if names == before:
                continue
            self._names[place] = names
            if changes is not None:
                changes.names += [
                    (BlockId(block), name)
                    for block, (name, old) in enumerate(zip(names, before, strict=True), first)
                    if name is not old
                ]
                changes = None if changes.is_full else changes
        return changes

    def _look_at_pins(self, scheduler: Scheduler, changes: Changes | None) -> None:
        pins, before = scheduler.pins.holders(), self._pins
        if pins == before:
            return
        self._pins = pins
        if changes is not None:
            blocks = [block for block in {**before, **pins} if pins.get(block, 0) != before.get(block, 0)]
            changes.pins = [each for block in blocks for each in (block, pins.get(block, 0))]


def _holders(scheduler: Scheduler) -> Iterator[Sequence]:
    """Sequences that hold blocks, and sequences that wait in rows to be forked."""
    for group in itertools.chain(scheduler.running, scheduler.swapped):
        yield from group.unfinished
    yield from scheduler.batch.blocks.retired


def _compare(before: _Seen, now: _Seen, changes: Changes) -> None:
    """Adds the differences of one sequence to the changes."""
    if (now.num_computed, now.num_tokens, now.status) != (before.num_computed, before.num_tokens, before.status):
        changes.progress += (now.number, now.status.value, now.num_tokens, now.num_computed)
    if now.state is not before.state:
        changes.add_state(now.number, 0, now.state)
    table, known = now.table, before.table
    if table is known:
        return
    num_known = len(known)
    if len(table) != num_known:
        changes.lengths += (now.number, len(table))
    # Most tables only grow, or change in few places, and these comparisons run in C.
    for first in range(0, num_known, _NAMES_AT_ONCE):
        olds = known[first : first + _NAMES_AT_ONCE]
        blocks = table[first : first + len(olds)]
        if blocks != olds:
            for index, (block, old) in enumerate(zip(blocks, olds, strict=False), first):
                if block != old:
                    changes.tables += (now.number, index, block)
    changes.extend_table(now.number, num_known, table[num_known:])


# Queues


class Waiting(NamedTuple):
    """A group that does not run, and why."""

    group: SequenceGroup
    obstacle: Obstacle


def waiting(scheduler: Scheduler, count: int) -> list[Waiting]:
    """The first swapped and waiting groups, in order: at most `count` of each queue, and `count` held ones of each."""
    stop, rows = scheduler.stopped, scheduler.batch.rows
    found = [
        Waiting(group, _why_held(scheduler, group))
        for group in (*scheduler.swapped.held_few(count), *scheduler.waiting.held_few(count))
    ]
    for place, group in enumerate(scheduler.swapped.next_few(count)):
        why = Obstacle.BLOCKS if len(group.unfinished) <= rows.num_free else Obstacle.ROWS
        found.append(Waiting(group, Obstacle.BEHIND if place else why))
    stopped_at_first = stop is None or stop.key is None or stop.key not in scheduler.waiting
    for place, group in enumerate(scheduler.waiting.next_few(count)):
        is_next = place == 0 if stopped_at_first else stop is not None and stop.key == group.request.key
        why = Obstacle.NEXT_STEP if stop is None else stop.why
        found.append(Waiting(group, why if is_next else Obstacle.BEHIND))
    return sorted(found, key=lambda each: each.group.order)


def _why_held(scheduler: Scheduler, group: SequenceGroup) -> Obstacle:
    request = group.request
    need = scheduler.preparations.needed_by(request.key)
    if need is None and scheduler.is_held_as_new(group):
        return Obstacle.NEXT_STEP
    if need is None and not request.is_offer:
        return Obstacle.SHARED_PREFIX
    if need is None or isinstance(need, MovedBlocks):
        return Obstacle.MOVED_BLOCKS
    return Obstacle.CONSTRAINT if isinstance(need, Constraint) else Obstacle.ADAPTER


# Blocks


@dataclass(frozen=True, slots=True)
class Owner:
    """A sequence that holds a block, the block's logical index, the tokens of its computed slots, and its group of
    layers. The blocks of a state are further groups, as in `BlockNames`; they have no tokens."""

    sequence: Sequence
    logical_index: int
    token_ids: SequenceOf[int]
    group: int = 0


def owners(scheduler: Scheduler, block: BlockId, *, is_host: bool) -> list[Owner]:
    """The live sequences that hold a block of the GPU pool, or of the host pool."""
    size, num_groups = scheduler.config.block_size, scheduler.config.layout.num_groups
    of_state = scheduler.batch.blocks.names.of_state
    found: list[Owner] = []
    blocks = scheduler.batch.blocks
    if block in (blocks.blank_on_host if is_host else blocks.blank):
        return found
    for group in scheduler.swapped if is_host else scheduler.running:
        for sequence in group.unfinished:
            if block in sequence.block_table:
                index, group = divmod(sequence.block_table.index(block), num_groups)
                end = min((index + 1) * size, scheduler.num_computed_tokens(sequence))
                found.append(Owner(sequence, index, sequence.token_ids[index * size : end], group))
            elif block in sequence.state_blocks:
                found.append(Owner(sequence, 0, [], of_state[sequence.state_blocks.index(block)]))
    return found
