"""What a watcher knows: it applies the changes that it was told, and nothing else."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from scheduler_svc.core.block_pool import BlockId
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import SequenceStatus
from scheduler_svc.core.view import Changes, Picture, View


@dataclass
class ViewMirror:
    """Block tables, statuses and progress by number of the sequence, names and pins by block."""

    tables: dict[int, list[int]] = field(default_factory=dict)
    progress: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    names: dict[int, bytes] = field(default_factory=dict)
    pins: dict[int, int] = field(default_factory=dict)

    def see(self, seen: View, scheduler: Scheduler) -> None:
        """Applies what a look tells: changes, or a picture."""
        changes = seen.look(scheduler).changes
        if changes is None:
            self.apply_all(seen.picture())
        else:
            self.apply(changes)

    def apply_all(self, picture: Picture) -> None:
        """Applies the parts of a picture."""
        for part in picture.parts():
            self.apply(part)

    def apply(self, changes: Changes) -> None:
        if changes.is_whole:
            self.__init__()
        for number in changes.gone:
            del self.tables[number], self.progress[number]
        self.tables.update((each.number, []) for each in changes.new)
        for number, status, num_tokens, num_computed in rows_of(changes.progress, 4):
            self.progress[number] = (status, num_tokens, num_computed)
        for number, length in rows_of(changes.lengths, 2):
            table = self.tables[number]
            self.tables[number] = [*table[:length], *[-1] * (length - len(table))]
        for number, index, block in rows_of(changes.tables, 3):
            self.tables[number][index] = block
        for block, name in changes.names:
            self.names[block] = name or b""
        self.pins.update(rows_of(changes.pins, 2))

    def check(self, scheduler: Scheduler) -> None:
        """That it knows all that there is."""
        pool, host = scheduler.batch.blocks.pool, scheduler.swap_space.pool
        swapped = SequenceStatus.SWAPPED.value
        of_host = [table for number, table in self.tables.items() if self.progress[number][0] == swapped]
        of_gpu = [table for number, table in self.tables.items() if self.progress[number][0] != swapped]
        for its, tables, pins in ((pool, of_gpu, self.pins), (host, of_host, {})):
            holders = Counter(block for table in tables for block in table)
            holders.update(pins)
            blocks = range(its.num_blocks)
            assert [holders[block] for block in blocks] == its.ref_counts_of([BlockId(block) for block in blocks])
        names = [self.names.get(block) or None for block in range(pool.num_blocks)]
        assert names == pool.names(0, pool.num_blocks)


def rows_of(flat: list[int], width: int) -> list[Any]:
    """The rows of a flat list."""
    return list(zip(*[iter(flat)] * width, strict=True))
