"""Who enters the batch: swapped groups first, then those that wait, as the policy has it."""

from scheduler_svc.core.block_manager import CanAllocate
from scheduler_svc.core.planning import blocks_for_decodes, plan_chunk
from scheduler_svc.core.preemption import Preemption
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.state import SchedulerState


class Admission:
    """Brings groups into the batch, all or nothing."""

    def __init__(self, state: SchedulerState, preemption: Preemption) -> None:
        self._state = state
        self._preemption = preemption

    def displace(self) -> None:
        """Makes room for a group that waits, where the policy lets it push out one that runs."""
        state = self._state
        while len(state.waiting) and len(state.running) and not len(state.swapped):
            group, victim = state.policy.next_of(state.waiting), state.policy.victim_of(state.running)
            if not state.policy.displaces(group, victim) or self._fits(group):
                return
            self._preemption.displace(victim)

    def swap_in(self) -> None:
        """Brings swapped groups back, lowest rank first. They compute with the decodes of this step."""
        state = self._state
        while len(state.swapped):
            group = state.swapped.first()
            if len(group.unfinished) > state.batch.rows.num_free or not self._has_room_to_swap_in(group):
                return
            state.running.add(state.swapped.remove(group.request.key))
            self._return(group)

    def admit(self, now: float) -> None:
        """Admits groups that wait, as far as rows, blocks and the token budget go; none while anything is swapped."""
        state = self._state
        while len(state.waiting) and state.batch.draft.budget > 0 and not len(state.swapped):
            group = state.policy.next_of(state.waiting)
            if not self._fits(group):
                return
            state.running.add(state.waiting.remove(group.request.key))
            if group.timeline.started is None:
                group.timeline.started = now
            self._start(group)

    def _fits(self, group: SequenceGroup) -> bool:
        state = self._state
        if len(group.unfinished) > state.batch.rows.num_free:
            return False
        alone = not len(state.running)
        while state.batch.blocks.can_allocate(group.computing, alone=alone) is not CanAllocate.OK:
            # Whatever was accepted can run alone; a pin may not keep it from that.
            if not (alone and state.pins.give_way(state.batch.blocks.pool)):
                return False
        return True

    def _has_room_to_swap_in(self, group: SequenceGroup) -> bool:
        state, blocks = self._state, self._state.batch.blocks
        alone = not len(state.running)
        running = blocks_for_decodes(state.batch)
        while True:
            if blocks.has_room(running + state.swap_space.blocks_needed(group.computing, blocks), alone=alone):
                return True
            if not (alone and state.pins.give_way(blocks.pool)):
                return False

    def _return(self, group: SequenceGroup) -> None:
        batch, computing = self._state.batch, group.computing
        swapped_in = self._state.swap_space.swap_in(computing, batch.blocks)
        batch.draft.swap_in += swapped_in.pairs
        for sequence, num_computed, num_sealed in zip(
            computing, swapped_in.num_computed, swapped_in.num_sealed, strict=True
        ):
            row = batch.enter(sequence, group.rank, num_computed, num_sealed)
            batch.rows.shares_tail[row] = len(computing) > 1
            # Whoever has only its newest token to compute, and forks none, goes on as a decode.
            is_decode = sequence.num_output_tokens > 0 and num_computed == sequence.num_tokens - 1
            batch.rows.prefills[row] = not is_decode
        self._park_others(group)

    def _start(self, group: SequenceGroup) -> None:
        """Lets the group compute. Those of its sequences that fork from the first keep a row until then."""
        batch, computing = self._state.batch, group.computing
        rows = []
        for sequence, num_cached in zip(computing, batch.blocks.allocate(computing), strict=True):
            if group.cached_tokens is None:
                group.cached_tokens = num_cached
            num_sealed = num_cached // self._state.config.block_size
            rows.append(batch.enter(sequence, group.rank, num_cached, num_sealed))
        self._park_others(group)
        for row in rows:
            if batch.draft.budget:
                plan_chunk(batch, row, self._state.running)

    def _park_others(self, group: SequenceGroup) -> None:
        for sequence in group.unfinished:
            if sequence.row is None:
                self._state.batch.rows.park(sequence, group.rank)
