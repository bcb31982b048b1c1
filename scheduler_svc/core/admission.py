"""Who enters the batch: of the groups that wait and those that are swapped, always the one that the policy names next.

One that does not fit holds up all behind it, so that nobody starves under a stream of smaller ones.
"""

from collections.abc import Sequence as SequenceOf

from scheduler_svc.core.planning import blocks_for_decodes, blocks_to_grow, plan_chunk
from scheduler_svc.core.preemption import Preemption
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.state import SchedulerState
from scheduler_svc.core.trials import Trials

_STEPS_AHEAD = 1
"""For so many steps after the one that a group is admitted to, all who run find blocks to grow into; else it would come
and go with every block that becomes free. ADR 0012 has what more and fewer cost."""


class Admission:
    """Brings groups into the batch, all or nothing."""

    def __init__(self, state: SchedulerState, preemption: Preemption, trials: Trials) -> None:
        self._state = state
        self._preemption = preemption
        self._trials = trials

    def displace(self, now: float) -> None:
        """Makes room for the next group, where the policy lets it push out others; nobody leaves in vain."""
        state = self._state
        if self._trials.are_on:
            return
        while len(state.running) and (group := self._next()) is not None:
            victim = state.policy.victim_of(state.running)
            if not state.policy.displaces(group, victim) or self._fits(group):
                return
            if not self._fits(group, [each for each in state.running if state.policy.displaces(group, each)]):
                return
            self._preemption.preempt(victim, now)

    def swap_in(self, now: float) -> None:
        """Brings swapped groups back until one that waits is next. They compute with the decodes of this step."""
        state = self._state
        while len(state.swapped):
            group = self._next()
            if group is None or group.request.key not in state.swapped or not self._fits(group):
                return
            state.running.add(state.swapped.remove(group.request.key))
            group.timeline.run(now)
            self._return(group)

    def admit(self, now: float) -> None:
        """Admits groups that wait, as far as rows, blocks and the token budget go, until a swapped one is next: that
        comes back before the next step."""
        state = self._state
        while len(state.waiting) and state.batch.draft.budget > 0:
            group = self._next()
            if group is None or group.request.key not in state.waiting or not self._fits(group):
                return
            state.running.add(state.waiting.remove(group.request.key))
            group.timeline.run(now)
            self._start(group)

    def _next(self) -> SequenceGroup | None:
        """Who enters the batch next; None where nobody may."""
        state = self._state
        if self._trials.are_on:
            return state.swapped.first() if len(state.swapped) else self._trials.next_of_waiting()
        if not len(state.waiting) and not len(state.swapped):
            return None
        return state.policy.next_of(state.waiting, state.swapped)

    def _fits(self, group: SequenceGroup, displaced: SequenceOf[SequenceGroup] = ()) -> bool:
        """Whether there are rows and blocks for a group that waits or is swapped, if `displaced` no longer ran."""
        state = self._state
        leaving = [sequence for each in displaced for sequence in each.unfinished]
        if len(group.unfinished) > state.batch.rows.num_free + len(leaving):
            return False
        alone, blocks = len(state.running) == len(displaced), state.batch.blocks
        if alone and displaced:
            return True
        is_swapped = group.request.key in state.swapped
        # A swapped group comes back before the decodes of the step take their blocks.
        to_decode = blocks_for_decodes(state.batch) if is_swapped else 0
        growth = 0 if is_swapped else self._growth(group)
        reserve = 0 if alone else blocks_to_grow(state.batch, _STEPS_AHEAD) - to_decode + growth
        freed = blocks.freed_by(leaving, group.computing) if leaving else 0
        while True:
            needed = self._blocks_to_enter(group) + to_decode - freed
            if blocks.has_room(needed, reserve=reserve, alone=alone):
                return True
            # Whatever was accepted can run alone; a pin may not keep it from that.
            if not (alone and state.pins.give_way(blocks.pool)):
                return False

    def _blocks_to_enter(self, group: SequenceGroup) -> int:
        blocks = self._state.batch.blocks
        if group.request.key in self._state.swapped:
            return self._state.swap_space.blocks_needed(group.computing, blocks)
        return blocks.blocks_to_allocate(group.computing)

    def _growth(self, group: SequenceGroup) -> int:
        """Blocks that a group that is to be admitted takes beyond those for its tokens, likewise."""
        blocks, last = self._state.batch.blocks, group.request.max_len - 1
        return sum(
            max(0, blocks.blocks_for(min(each.num_tokens + _STEPS_AHEAD, last)) - blocks.blocks_for(each.num_tokens))
            for each in group.unfinished
        )

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
                # Output that an earlier scheduler produced may be cached, too.
                group.cached_tokens = min(num_cached, len(group.request.prompt))
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
