"""Placement as the paper has it, with the times of requests, seals and the shares of prompts."""

from scheduler_svc.core.admission import TokenShares
from scheduler_svc.core.paging import scheduler
from scheduler_svc.core.paging.block_tables import SwapSpace
from scheduler_svc.core.policy import Queues
from scheduler_svc.core.running_batch import Batch
from scheduler_svc.core.sequence import Milestone, Sequence, SequenceGroup


class Placement(scheduler.Placement[Sequence, SequenceGroup]):
    """Moves groups between the three queues, with all that they hold."""

    def __init__(
        self, batch: Batch, swap_space: SwapSpace[Sequence], shares: TokenShares, queues: Queues, swaps_from: int
    ) -> None:
        super().__init__(batch, swap_space, queues, swaps_from)
        self._batch, self._shares = batch, shares

    def start(self, group: SequenceGroup, now: float) -> list[int]:
        group.timeline.run(now)
        num_cached = super().start(group, now)
        if group.cached_tokens is None:
            # Output that an earlier scheduler produced may be cached, too.
            group.cached_tokens = min(num_cached[0], len(group.request.prompt))
        return num_cached

    def _enter(self, sequence: Sequence, group: SequenceGroup, num_computed: int, num_cached_blocks: int) -> int:
        return self._batch.enter(sequence, group.order, num_computed, num_cached_blocks)

    def _add_chunk(self, row: int, group: SequenceGroup) -> None:
        self._shares.add_chunk(row)

    def swap_in(self, group: SequenceGroup, now: float) -> None:
        group.timeline.run(now)
        super().swap_in(group, now)

    def preempt(self, group: SequenceGroup, now: float) -> bool:
        is_swapped = super().preempt(group, now)
        group.timeline.note(Milestone.SWAPPED_OUT if is_swapped else Milestone.RECOMPUTED, now)
        return is_swapped
