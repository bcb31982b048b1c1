"""What memory and queues look like, for people who watch. Everything here reads the core and changes nothing.

A watcher wants to know what changed since it last looked. `View.look` compares block tables and names of blocks with
those that it saw last, instead of having every operation of the core report to it: so nothing of the core knows whether
anybody watches, and a frame cannot disagree with what is there.
"""

import itertools
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from scheduler_svc.core.admission import Obstacle
from scheduler_svc.core.batch import Batch
from scheduler_svc.core.block_pool import BlockHash, BlockId
from scheduler_svc.core.request import Request
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence, SequenceGroup, SequenceStatus

_NAMES_AT_ONCE = 256
"""Names that are compared together: most of these groups are equal from look to look, which takes no Python."""


class SequenceNumber(NamedTuple):
    """A sequence that holds blocks, or is about to, and the number by which changes name it."""

    number: int
    sequence: Sequence


class Preempted(NamedTuple):
    """A sequence that has left the batch since the last look, and whether its blocks were moved to the host."""

    number: int
    is_swapped: bool


@dataclass(slots=True)
class Changes:
    """What changed since the last look; everything where it `is_whole`.

    new        sequences that were not known
    gone       numbers of sequences that hold nothing any more
    progress   number, status, tokens, computed tokens: of sequences where one of them changed, flat
    lengths    number, length of the block table, where that changed, flat
    tables     number, logical index, block id, for each entry that changed, flat; host blocks of swapped sequences
    names      blocks with another name now, and that name
    pins       block, number of pins that hold it now, flat
    preempted  sequences that left the batch
    """

    is_whole: bool = False
    new: list[SequenceNumber] = field(default_factory=list[SequenceNumber])
    gone: list[int] = field(default_factory=list[int])
    progress: list[int] = field(default_factory=list[int])
    lengths: list[int] = field(default_factory=list[int])
    tables: list[int] = field(default_factory=list[int])
    names: list[tuple[BlockId, BlockHash | None]] = field(default_factory=list[tuple[BlockId, BlockHash | None]])
    pins: list[int] = field(default_factory=list[int])
    preempted: list[Preempted] = field(default_factory=list[Preempted])

    @property
    def is_empty(self) -> bool:
        """Whether nothing changed."""
        lists = (self.new, self.gone, self.progress, self.lengths, self.tables, self.names, self.pins, self.preempted)
        return not (self.is_whole or any(lists))


@dataclass(slots=True)
class _Seen:
    """A sequence as it was at the last look."""

    number: int
    status: SequenceStatus
    table: list[BlockId]
    num_tokens: int
    num_computed: int


class View:
    """The memory of one replica as it was at the last look."""

    def __init__(self) -> None:
        # The batch whose pool was seen: when a worker was lost, there is another one, and nothing seen holds any more.
        self._batch: Batch | None = None
        self._seen: dict[Sequence, _Seen] = {}
        self._names: list[BlockHash | None] = []
        self._pins: dict[BlockId, int] = {}
        self._num_numbered = 0

    def number_of(self, sequence: Sequence) -> int | None:
        """The number of a sequence that the last look saw."""
        seen = self._seen.get(sequence)
        return None if seen is None else seen.number

    def look(self, scheduler: Scheduler) -> Changes:
        """What changed since the last look; everything at the first one, and where the pool is another one."""
        changes = Changes(is_whole=self._batch is not scheduler.batch)
        if changes.is_whole:
            self._batch = scheduler.batch
            self._seen.clear()
            self._pins.clear()
            self._names = [None] * scheduler.batch.blocks.pool.num_blocks
        self._look_at_sequences(scheduler, changes)
        self._look_at_names(scheduler, changes)
        self._look_at_pins(scheduler, changes)
        return changes

    def whole(self) -> Changes:
        """Everything as of the last look, for one who did not see what was before."""
        changes = Changes(is_whole=True)
        for sequence, seen in self._seen.items():
            changes.new.append(SequenceNumber(seen.number, sequence))
            changes.progress += (seen.number, seen.status.value, seen.num_tokens, seen.num_computed)
            changes.lengths += (seen.number, len(seen.table))
            for index, block in enumerate(seen.table):
                changes.tables += (seen.number, index, block)
        changes.names = [(BlockId(block), name) for block, name in enumerate(self._names) if name is not None]
        changes.pins = [*itertools.chain.from_iterable(self._pins.items())]
        return changes

    def _look_at_sequences(self, scheduler: Scheduler, changes: Changes) -> None:
        before, self._seen = self._seen, {}
        rows = scheduler.batch.rows
        computed = np.where(rows.active, rows.num_computed, 0).tolist()
        for sequence in _holders(scheduler):
            seen = before.pop(sequence, None)
            if seen is None:
                self._num_numbered += 1
                seen = _Seen(self._num_numbered, SequenceStatus.WAITING, [], 0, 0)
                changes.new.append(SequenceNumber(seen.number, sequence))
            self._seen[sequence] = seen
            status, num_tokens = sequence.status, len(sequence.token_ids)
            if status is SequenceStatus.SWAPPED:
                num_computed = sequence.num_swapped_tokens
            else:
                num_computed = seen.num_computed if sequence.row is None else computed[sequence.row]
            if (num_computed, num_tokens, status) != (seen.num_computed, seen.num_tokens, seen.status):
                if status is SequenceStatus.SWAPPED is not seen.status:
                    changes.preempted.append(Preempted(seen.number, is_swapped=True))
                seen.num_computed, seen.num_tokens, seen.status = num_computed, num_tokens, status
                changes.progress += (seen.number, status.value, num_tokens, num_computed)
            if sequence.block_table != seen.table:
                _compare_tables(sequence.block_table, seen, changes)
        for sequence, seen in before.items():
            changes.gone.append(seen.number)
            if sequence.status is SequenceStatus.WAITING:
                changes.preempted.append(Preempted(seen.number, is_swapped=False))

    def _look_at_names(self, scheduler: Scheduler, changes: Changes) -> None:
        names, before = scheduler.batch.blocks.pool.names(), self._names
        for start in range(0, len(names), _NAMES_AT_ONCE):
            end = start + _NAMES_AT_ONCE
            if names[start:end] != before[start:end]:
                changes.names += [
                    (BlockId(block), names[block])
                    for block in range(start, min(end, len(names)))
                    if names[block] is not before[block]
                ]
        self._names = names

    def _look_at_pins(self, scheduler: Scheduler, changes: Changes) -> None:
        pins = scheduler.pins.holders()
        if pins != self._pins:
            blocks = [block for block in {**self._pins, **pins} if pins.get(block, 0) != self._pins.get(block, 0)]
            changes.pins = [each for block in blocks for each in (block, pins.get(block, 0))]
            self._pins = pins


def _holders(scheduler: Scheduler) -> Iterator[Sequence]:
    """Sequences that hold blocks, and those that wait in rows to be forked."""
    for group in itertools.chain(scheduler.running, scheduler.swapped):
        yield from group.unfinished
    yield from scheduler.batch.blocks.retired


def _compare_tables(table: list[BlockId], seen: _Seen, changes: Changes) -> None:
    if len(table) != len(seen.table):
        changes.lengths += (seen.number, len(table))
    num_known = len(seen.table)
    changed: Iterable[int] = range(num_known, len(table))
    # Most tables only grow, and this comparison takes no Python.
    if table[:num_known] != seen.table:
        replaced = (index for index, pair in enumerate(zip(table, seen.table, strict=False)) if pair[0] != pair[1])
        changed = itertools.chain(replaced, changed)
    for index in changed:
        changes.tables += (seen.number, index, table[index])
    seen.table = table.copy()


# Queues


class Waiting(NamedTuple):
    """A group that does not run, and why."""

    group: SequenceGroup
    obstacle: Obstacle


def waiting(scheduler: Scheduler, count: int) -> list[Waiting]:
    """The first groups that are swapped or wait, in order: at most `count` of each queue, and as many that are held."""
    stop, rows = scheduler.stopped, scheduler.batch.rows
    found = [
        Waiting(group, _why_held(scheduler, group.request))
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


def _why_held(scheduler: Scheduler, request: Request) -> Obstacle:
    return Obstacle.CONSTRAINT if scheduler.preparations.is_held(request.key) else Obstacle.SHARED_PREFIX


# Blocks


@dataclass(frozen=True, slots=True)
class Owner:
    """A sequence that holds a block, at this place of its table, and the tokens of the slots that are computed."""

    sequence: Sequence
    logical_index: int
    token_ids: SequenceOf[int]


def owners(scheduler: Scheduler, block: BlockId, *, is_host: bool) -> list[Owner]:
    """The live sequences that hold a block of the GPU pool, or of the host pool."""
    size = scheduler.config.block_size
    found: list[Owner] = []
    for group in scheduler.swapped if is_host else scheduler.running:
        for sequence in group.unfinished:
            if block in sequence.block_table:
                index = sequence.block_table.index(block)
                end = min((index + 1) * size, scheduler.num_computed_tokens(sequence))
                found.append(Owner(sequence, index, sequence.token_ids[index * size : end]))
    return found
