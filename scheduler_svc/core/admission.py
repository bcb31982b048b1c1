"""Who enters the batch: of the groups that wait and those that are swapped, always the one that the policy names next.

One that does not fit holds up all behind it, so that nobody starves under a stream of smaller ones.
"""

from scheduler_svc.core.block_manager import LeavingTables
from scheduler_svc.core.planning import blocks_for_decodes, blocks_to_grow, plan_chunk_or_share
from scheduler_svc.core.preemption import Preemption
from scheduler_svc.core.request import RequestKey
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.state import SchedulerState
from scheduler_svc.core.trials import Trials

_STEPS_AHEAD = 1
"""For so many steps after the one that a group is admitted to, all who run find blocks to grow into; else it would come
and go with every block that becomes free. ADR 0012 has what more and fewer cost."""

_MAX_ADMISSIONS = 128
"""Groups that are admitted in one step, so that planning it never takes long; the next step goes on. Only prompts of a
few tokens, or cached ones, are so many."""

_MAX_BLOCKS_LOOKED_UP = 4096
"""After so many cached blocks of admitted groups, and blocks that held groups may share, no further group is looked at
in a step, likewise: each of these blocks may cost a hash."""

_MAX_DISPLACED = 128
"""Groups that are pushed out in one step, likewise. Nobody else is admitted before the one that they make room for."""


class Admission:
    """Brings groups into the batch, all or nothing."""

    def __init__(self, state: SchedulerState, preemption: Preemption, trials: Trials) -> None:
        self._state = state
        self._preemption = preemption
        self._trials = trials
        # Whom nobody could make room for, and what ran and was free then.
        self._in_vain: tuple[RequestKey, int, int] | None = None
        # For the step that is being planned.
        self._num_blocks_looked_up = 0

    def begin_step(self) -> None:
        """To be called before anything else for each step."""
        self._num_blocks_looked_up = 0

    def displace(self, now: float) -> None:
        """Makes room for the next group, where the policy lets it push out others; nobody leaves in vain."""
        state = self._state
        if self._trials.are_on or not len(state.running) or (group := self._next()) is None:
            return
        lowest = state.policy.displaces_from(group)
        if lowest is None or state.running.last().rank < lowest:
            return
        growing = blocks_to_grow(state.batch, _STEPS_AHEAD)
        if not self._fits(group, growing):
            for victim in self._victims(group, lowest, growing)[:_MAX_DISPLACED]:
                self._preemption.preempt(victim, now)

    def _victims(self, group: SequenceGroup, lowest: int, growing: int) -> list[SequenceGroup]:
        """The groups of rank `lowest` and above that make room for `group`, the last ones first and no more than it
        takes; none where all of them do not."""
        state, rows, blocks = self._state, self._state.batch.rows, self._state.batch.blocks
        needed, reserve = self._blocks_needed(group, growing)
        missing = blocks.missing(needed, reserve=reserve)
        missing_rows = len(group.unfinished) - rows.num_free
        # If all leave it runs alone, as everybody can.
        all_leave = state.running.first().rank >= lowest
        if not all_leave:
            may_leave = rows.active & (rows.rank >= lowest)
            # As if nobody shared: mostly that is too little already.
            if missing > int(rows.num_slots[may_leave].sum()) // blocks.block_size or self._was_in_vain(group):
                return []
        leaving = LeavingTables(blocks.pool, taken=[block for each in group.computing for block in blocks.hits(each)])
        victims: list[SequenceGroup] = []
        for victim in reversed(state.running):
            if victim.rank < lowest:
                break
            victims.append(victim)
            missing_rows -= len(victim.unfinished)
            missing -= sum(leaving.leave(sequence.block_table) for sequence in victim.unfinished)
            if missing <= 0 and missing_rows <= 0:
                return victims
        if all_leave:
            return victims
        self._in_vain = (group.request.key, state.running.num_changes, blocks.pool.num_free)
        return []

    def _was_in_vain(self, group: SequenceGroup) -> bool:
        """Whether nobody has left since all victims of this group were found to be too few."""
        if self._in_vain is None:
            return False
        key, num_changes, num_free = self._in_vain
        state = self._state
        is_same = key == group.request.key and num_changes == state.running.num_changes
        return is_same and state.batch.blocks.pool.num_free <= num_free

    def swap_in(self, now: float) -> None:
        """Brings swapped groups back until one that waits is next. They compute with the decodes of this step."""
        state = self._state
        while state.swapped.has_next:
            group = self._next()
            if group is None or group.request.key not in state.swapped:
                return
            if not self._fits(group, blocks_to_grow(state.batch, _STEPS_AHEAD)):
                return
            state.running.add(state.swapped.remove(group.request.key))
            group.timeline.run(now)
            self._return(group)

    def admit(self, now: float) -> None:
        """Admits groups that wait, as far as rows, blocks and the token budget go, until a swapped one is next: that
        comes back before the next step."""
        state = self._state
        growing: int | None = None
        for _ in range(_MAX_ADMISSIONS):
            if state.batch.draft.budget <= 0:
                return
            group = self._next()
            if group is None or group.request.key not in state.waiting:
                return
            if growing is None:
                growing = blocks_to_grow(state.batch, _STEPS_AHEAD)
            if not self._fits(group, growing):
                return
            growth = self._growth(group)
            state.running.add(state.waiting.remove(group.request.key))
            group.timeline.run(now)
            self._start(group)
            # What one sequence adds is known; several may share.
            growing = growing + growth if len(group.unfinished) == 1 else None

    def _next(self) -> SequenceGroup | None:
        """Who enters the batch next; None where nobody may."""
        state = self._state
        for key in state.batch.underway.take_let_go():
            state.waiting.let_go(key)
        if self._trials.are_on:
            return state.swapped.first() if state.swapped.has_next else self._trials.next_of_waiting()
        while state.waiting.has_next or state.swapped.has_next:
            if self._num_blocks_looked_up >= _MAX_BLOCKS_LOOKED_UP:
                return None
            group = state.policy.next_of(state.waiting, state.swapped)
            if group.request.key in state.swapped or not self._hold(group):
                return group
        return None

    def _hold(self, group: SequenceGroup) -> bool:
        """Holds a group that waits where enough of its next blocks are underway; returns whether it did. Those behind
        it pass meanwhile. It never waits for a group that it goes before."""
        batch = self._state.batch
        if not batch.underway.has_any:
            return False
        batch.name_underway()
        num_cached, hashes = batch.blocks.next_hashes(group.computing[0], batch.underway.window)
        last = batch.underway.last_of(hashes)
        if last is None or batch.rows.rank[batch.underway.row_of(last)] > group.rank:
            return False
        self._num_blocks_looked_up += num_cached + len(hashes)
        batch.underway.hold(group.request.key, last)
        self._state.waiting.hold(group.request.key)
        return True

    def _fits(self, group: SequenceGroup, growing: int) -> bool:
        """Whether there are rows and blocks for a group that waits or is swapped, beside those who run and take
        `growing` blocks in the next steps."""
        state, blocks = self._state, self._state.batch.blocks
        if len(group.unfinished) > state.batch.rows.num_free:
            return False
        alone = not len(state.running)
        while True:
            needed, reserve = self._blocks_needed(group, growing)
            if blocks.has_room(needed, reserve=reserve, alone=alone):
                return True
            # Whatever was accepted can run alone; a pin may not keep it from that.
            if not (alone and (blocks.reclaim() or state.pins.give_way(blocks.pool))):
                return False

    def _blocks_needed(self, group: SequenceGroup, growing: int) -> tuple[int, int]:
        """Free blocks that go as the group enters, and those that must be left then, unless it runs alone."""
        state, blocks = self._state, self._state.batch.blocks
        if group.request.key not in state.swapped:
            return blocks.blocks_to_allocate(group.computing), growing + self._growth(group)
        # A swapped group comes back before the decodes of the step take their blocks.
        to_decode = blocks_for_decodes(state.batch)
        return state.swap_space.blocks_needed(group.computing, blocks) + to_decode, growing - to_decode

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
            self._num_blocks_looked_up += num_sealed
            rows.append(batch.enter(sequence, group.rank, num_cached, num_sealed))
        self._park_others(group)
        for row in rows:
            if batch.draft.budget:
                plan_chunk_or_share(self._state, row)

    def _park_others(self, group: SequenceGroup) -> None:
        for sequence in group.unfinished:
            if sequence.row is None:
                self._state.batch.rows.park(sequence, group.rank)
