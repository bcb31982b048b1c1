"""Moves groups into the batch and out of it, with the blocks that they need, by swap or by recompute (the paper's
section 4.5). Other modules decide which groups move and when."""

from scheduler_svc.core.admission import TokenShares
from scheduler_svc.core.config import PreemptionMode, SchedulerConfig
from scheduler_svc.core.paging.block_tables import SwapSpace
from scheduler_svc.core.paging.sequence import SequenceStatus
from scheduler_svc.core.policy import Queues
from scheduler_svc.core.running_batch import Batch
from scheduler_svc.core.sequence import Milestone, Sequence, SequenceGroup


class Placement:
    """Moves groups between the three queues, with all that they hold."""

    def __init__(
        self,
        batch: Batch,
        swap_space: SwapSpace[Sequence],
        shares: TokenShares,
        queues: Queues,
        config: SchedulerConfig,
    ) -> None:
        self._batch = batch
        self._swap_space = swap_space
        self._shares = shares
        self._waiting, self._swapped, self._running = queues
        self._block_size, self._mode = config.block_size, config.preemption_mode

    def start(self, group: SequenceGroup, now: float) -> int:
        """Gives a waiting group blocks and rows, and adds its first chunks to the step. There must be room for it.
        Returns the number of its blocks that were cached."""
        self._running.add(self._waiting.remove(group.request.key))
        group.timeline.run(now)
        batch, computing = self._batch, group.computing
        rows: list[int] = []
        num_hits = 0
        for sequence, num_cached in zip(computing, batch.blocks.allocate_slots(computing), strict=True):
            if group.cached_tokens is None:
                # Output that an earlier scheduler produced may be cached, too.
                group.cached_tokens = min(num_cached, len(group.request.prompt))
            num_sealed = num_cached // self._block_size
            num_hits += num_sealed
            rows.append(batch.enter(sequence, group.order, num_cached, num_sealed))
        self._park_others(group)
        for row in rows:
            if batch.draft.budget:
                self._shares.add_chunk(row)
        return num_hits

    def swap_in(self, group: SequenceGroup, now: float) -> None:
        """Gives a swapped group GPU blocks and rows. There must be room for it."""
        self._running.add(self._swapped.remove(group.request.key))
        group.timeline.run(now)
        batch, computing = self._batch, group.computing
        swapped_in = self._swap_space.swap_in(computing)
        for sequence, (num_computed, num_sealed) in zip(computing, swapped_in, strict=True):
            row = batch.enter(sequence, group.order, num_computed, num_sealed)
            batch.rows.shares_tail[row] = len(computing) > 1
            # A sequence that lacks only its newest token, and forks no others, continues as a decode.
            is_decode = sequence.num_output_tokens > 0 and num_computed == sequence.num_tokens - 1
            batch.rows.prefills[row] = not is_decode
        self._park_others(group)

    def preempt(self, group: SequenceGroup, now: float) -> bool:
        """Takes all sequences of a running group out of the batch. Returns whether it was swapped; otherwise it is
        computed again."""
        swaps = self._mode is PreemptionMode.SWAP or (self._mode is PreemptionMode.AUTO and len(group.unfinished) > 1)
        is_swapped = swaps and self._swap_out(group)
        if not is_swapped:
            self.requeue(group)
        group.timeline.note(Milestone.SWAPPED_OUT if is_swapped else Milestone.RECOMPUTED, now)
        group.preemptions += 1
        return is_swapped

    def requeue(self, group: SequenceGroup) -> None:
        """Recompute: a running group waits again. Its prompt and output so far are then computed as its prompt."""
        self._running.remove(group.request.key)
        self._batch.release(group.unfinished)
        group.restart()
        self._waiting.add(group)

    def _swap_out(self, group: SequenceGroup) -> bool:
        """Moves a running group's blocks to host memory. Returns whether it could.

        The newest token is computed again, to sample after it: samples of steps in flight for a released row are
        dropped. Sequences that are prefilled together do not move, since they read blocks that one of them has yet to
        compute. Several sequences do not move if one has no output: it may find fewer cached blocks than the others
        when they come back, and together they would hold more than before.
        """
        batch, computing = self._batch, group.computing
        for sequence in computing:
            assert sequence.row is not None
            sequence.num_swapped_tokens = min(int(batch.rows.num_computed[sequence.row]), sequence.num_tokens - 1)
        may_move = len(computing) == 1 or all(
            sequence.num_output_tokens and sequence.num_swapped_tokens == sequence.num_tokens - 1
            for sequence in computing
        )
        if not may_move or computing[0].num_swapped_tokens <= 0:
            return False
        if not self._swap_space.can_swap_out(computing):
            return False
        self._running.remove(group.request.key)
        batch.release_rows(group.unfinished)
        batch.blocks.free(*(sequence for sequence in group.unfinished if sequence not in computing))
        self._swap_space.swap_out(computing)
        group.restart()
        for sequence in computing:
            sequence.status = SequenceStatus.SWAPPED
        self._swapped.add(group)
        return True

    def _park_others(self, group: SequenceGroup) -> None:
        """Gives rows to sequences that fork from the first one later."""
        for sequence in group.unfinished:
            if sequence.row is None:
                self._batch.rows.occupy(sequence, group.order)
