"""An observer of memory: the changes that a `View` reports must add up to the present state."""

from collections.abc import Iterator
from itertools import chain

from quire.messages.prefix_hashes import BlockHash
from scheduler_svc.core.paging.block_pool import BlockId
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.view import Changes, View


class Onlooker:
    """The state that the changes of a `View` add up to."""

    def __init__(self) -> None:
        self._view = View()
        self._sequences = dict[int, Sequence]()
        self._tables = dict[int, list[BlockId]]()
        self._states = dict[int, tuple[int, int]]()
        self._names = dict[BlockId, BlockHash]()
        self._pins = dict[BlockId, int]()

    def look(self, scheduler: Scheduler) -> str | None:
        """The error in the state after another look; None if it is right."""
        changes = self._view.look(scheduler).changes
        for part in [changes] if changes is not None else self._view.picture().parts():
            self._apply(part)
        pool = scheduler.batch.blocks.pool
        held = {each: (each.status.value, each.num_tokens, each.block_table) for each in _holders(scheduler)}
        known = {self._sequences[number]: (*self._states[number], table) for number, table in self._tables.items()}
        if known != held:
            return "an onlooker knows other block tables than there are"
        if self._names != {BlockId(block): name for block, name in enumerate(pool.names(0, pool.num_blocks)) if name}:
            return "an onlooker knows other names of blocks than there are"
        return "an onlooker knows of other pins than there are" if self._pins != scheduler.pins.holders() else None

    def _apply(self, changes: Changes) -> None:
        if changes.is_whole:
            for known in (self._sequences, self._tables, self._states, self._names, self._pins):
                known.clear()
        for number, sequence in changes.new:
            self._sequences[number], self._tables[number] = sequence, []
        for number in changes.gone:
            del self._sequences[number], self._tables[number], self._states[number]
        for number, status, num_tokens, _ in _rows(changes.progress, 4):
            self._states[number] = status, num_tokens
        for number, length in _rows(changes.lengths, 2):
            table = self._tables[number]
            table[length:] = [BlockId(-1)] * (length - len(table))
        for number, index, block in _rows(changes.tables, 3):
            self._tables[number][index] = BlockId(block)
        for block, name in changes.names:
            self._names.pop(block, None)
            if name is not None:
                self._names[block] = name
        for block, count in _rows(changes.pins, 2):
            self._pins.pop(BlockId(block), None)
            if count:
                self._pins[BlockId(block)] = count


def _rows(flat: list[int], width: int) -> Iterator[tuple[int, ...]]:
    return zip(*[iter(flat)] * width, strict=True)


def _holders(scheduler: Scheduler) -> Iterator[Sequence]:
    groups = chain(scheduler.running, scheduler.swapped)
    return chain((each for group in groups for each in group.unfinished), scheduler.batch.blocks.retired)
