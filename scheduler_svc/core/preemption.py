"""Making room: who gives way when blocks run out, and how (the paper's section 4.5)."""

from scheduler_svc.core.config import PreemptionMode
from scheduler_svc.core.planning import blocks_for_decodes
from scheduler_svc.core.sequence import Milestone, SequenceGroup
from scheduler_svc.core.state import SchedulerState


class Preemption:
    """Takes groups out of the batch, all or nothing. `num_preemptions` and `num_swap_outs` count since the start."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._mode = state.config.preemption_mode
        self.num_preemptions = 0
        self.num_swap_outs = 0

    def take_over(self, old: "Preemption") -> None:
        """Counts on from where another one stands."""
        self.num_preemptions, self.num_swap_outs = old.num_preemptions, old.num_swap_outs

    def make_room_for_decodes(self, now: float) -> bool:
        """Preempts until every decoding row can have the slot of its next token. Returns whether it preempted."""
        state = self._state
        victims = state.policy.victims(state.running)
        preempted = False
        pool = state.batch.blocks.pool
        while blocks_for_decodes(state.batch) > pool.num_free:
            if state.batch.blocks.reclaim():
                continue
            # Alone it fits without the pins, as it was asked when it came.
            if len(state.running) == 1 and state.pins.give_way(pool):
                continue
            self.preempt(next(victims), now)
            preempted = True
        return preempted

    def preempt(self, group: SequenceGroup, now: float) -> None:
        """Takes one running group out of the batch, by swap or by recompute."""
        swaps = self._mode is PreemptionMode.SWAP or (self._mode is PreemptionMode.AUTO and len(group.unfinished) > 1)
        if swaps and self._state.swap_out(group):
            self.num_swap_outs += 1
            self._count(group, Milestone.SWAPPED_OUT, now)
        else:
            self._state.requeue(group)
            self._count(group, Milestone.RECOMPUTED, now)

    def _count(self, group: SequenceGroup, milestone: Milestone, now: float) -> None:
        group.timeline.note(milestone, now)
        group.preemptions += 1
        self.num_preemptions += 1
