"""The running batch: the sequence in each of the worker's rows, its blocks, and its part in the next step.

`RowTable` keeps the counters of all running sequences as arrays over rows. Planning a step and applying its result
touch only these arrays; Python code looks at a single sequence only when it changes state. That keeps a step of
hundreds of sequences well under a millisecond.
"""

import itertools
from collections import Counter
from collections.abc import Container, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import fields
from typing import Annotated

import numpy as np

from quire.messages.prefix_hashes import BlockHash
from scheduler_svc.core.adapter_slots import AdapterSlots
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.draft_budget import DraftBudget
from scheduler_svc.core.kv_cache import BlockManager
from scheduler_svc.core.paging import batch
from scheduler_svc.core.paging.batch import Array, Flags, Numbers
from scheduler_svc.core.paging.block_pool import BlockId
from scheduler_svc.core.paging.block_tables import HostBlocks
from scheduler_svc.core.paging.sequence import Queues
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.core.states import Checkpoint
from scheduler_svc.core.step import RowAssignment, StepPlan
from scheduler_svc.core.underway import BlocksUnderway


class RowTable(batch.RowTable[Sequence]):
    """The rows with what their requests want and may cost.

    `num_computed` counts drafts of steps in flight as if all were right: up to `num_unsure` fewer tokens are computed.
    `num_dependent` counts the rows that are occupied and `dependent`.
    """

    num_unsure: Numbers
    """The part of `num_tokens` that may not come: drafts of steps in flight."""
    num_entered: Numbers
    """Tokens that the sequence had when it entered the batch."""
    num_sealed: Numbers
    """Blocks at the start of the block table that are sealed, or need not be."""
    windows_start: Numbers
    """Logical index from which the block table may have blocks of windowed groups."""
    shares_state: Flags
    """The sequence may share its state with a sequence that forked."""
    waits: Flags
    """The row begins once its sequence's leader has computed the tokens before."""
    seals_chunks: Flags
    """Each chunk of a prefill seals its blocks; False after a chunk that was not finite."""
    client: Numbers
    handle: Numbers
    index: Numbers
    """Index of the sequence in its request, whose key has `client` and `handle`."""
    tenant: Annotated[Array, np.object_]
    num_prompt: Numbers
    num_emitted: Numbers
    """Output tokens that the sequence had when it was submitted."""
    is_plain: Flags
    """Each token is an event of its own at once; False if sequences are selected at the end."""
    wants_logprobs: Flags
    """The worker reports the log probability of each token."""
    num_logprobs: Numbers
    """It also reports at most this many of the most likely tokens."""

    def __init__(self, max_num_rows: int, adapters: AdapterSlots) -> None:
        super().__init__(max_num_rows)
        self._adapters = adapters
        self.tenant[:] = ""
        self.num_dependent = 0
        self.stop_sets = Counter[frozenset[int]]()
        """The sets of stop tokens of the sequences, each with the number of sequences that have it."""

    def occupy(self, sequence: Sequence, order: int) -> int:
        row, request = super().occupy(sequence, order), sequence.request
        self.client[row], self.handle[row], self.index[row] = request.key.client, request.key.handle, sequence.index
        self.tenant[row], self.num_prompt[row] = request.tenant, len(request.prompt)
        self.num_emitted[row] = len(request.emitted[sequence.index].token_ids) if request.emitted else 0
        self.is_plain[row] = not request.selects
        self.wants_logprobs[row] = request.beam is None and (request.selects or request.sampling.logprobs is not None)
        self.num_logprobs[row] = request.sampling.logprobs or 0
        self.num_dependent += sequence.is_dependent
        self.stop_sets[sequence.stop_token_ids] += 1
        if request.adapter is not None:
            self._adapters.use(request.adapter, 1)
        return row

    def activate(self, row: int, sequence: Sequence, num_slots: int, num_computed: int) -> None:
        super().activate(row, sequence, num_slots, num_computed)
        self.num_entered[row] = sequence.num_tokens
        self.waits[row] = sequence.leader is not None
        self.num_unsure[row] = self.windows_start[row] = 0
        self.seals_chunks[row] = sequence.is_finite
        self.shares_state[row] = False

    def prefilling(self) -> Array:
        rows = super().prefilling()
        return rows[~self.waits[rows]]

    def fork(self, parent: int, child: int, block_size: int) -> None:
        super().fork(parent, child, block_size)
        self.waits[child] = False
        self.num_unsure[child] = 0
        self.num_entered[child] = self.num_entered[parent]
        self.num_sealed[child] = self.num_sealed[parent]
        self.windows_start[child] = self.windows_start[parent]
        self.seals_chunks[child] = self.seals_chunks[parent]
        self.shares_state[[parent, child]] = True

    def grow(self, rows: Array, max_drafts: Array) -> None:
        """A planned step may extend each row by one token and up to `max_drafts` further tokens."""
        for column in (self.num_tokens, self.num_computed, self.num_unsure):
            column[rows] += max_drafts

    def settle(self, rows: Array, max_drafts: Array, num_missing: Array) -> None:
        """The result of that step came: `num_missing` of these `max_drafts` tokens did not come."""
        self.num_unsure[rows] -= max_drafts
        for column in (self.num_tokens, self.num_computed):
            column[rows] -= num_missing

    def release(self, rows: SequenceOf[int]) -> None:
        for sequence in (self.sequences[row] for row in rows):
            assert sequence is not None, "a free row is released"
            self.num_dependent -= sequence.is_dependent
            self.stop_sets[sequence.stop_token_ids] -= 1
            if not self.stop_sets[sequence.stop_token_ids]:
                del self.stop_sets[sequence.stop_token_ids]
            if sequence.request.adapter is not None:
                self._adapters.use(sequence.request.adapter, -1)
        super().release(rows)


class StepDraft(batch.StepDraft):
    """The next step, with seals, seeds and drafts. `budget` leaves out the shares set aside."""

    def __init__(self, token_budget: int) -> None:
        super().__init__(token_budget)
        self.aside: list[tuple[int, int]] = []
        """Rows whose chunk is planned last, and the share of the budget that is kept for each until then."""
        self.sealed: list[tuple[BlockId, BlockHash]] = []
        self.short_lived = set[BlockId]()
        self.seeds: list[tuple[int, int]] = []
        """Rows that begin to draw with a seed of their own in this step, and the seeds."""
        self.state_tables: dict[int, tuple[BlockId, ...]] = {}
        self.checkpoints: tuple[tuple[int, int, tuple[BlockId, ...]], ...] = ()
        self._max_drafts: Array | None = None
        self._max_passes = 1

    @property
    def num_decodes(self) -> int:
        """The number of rows that decode."""
        return len(self._rows)

    @property
    def has_chunks(self) -> bool:
        """Whether rows compute more than their newest token."""
        return bool(self._chunks)

    def release(self, rows: SequenceOf[int]) -> None:
        super().release(rows)
        for row in rows if self.state_tables else ():
            self.state_tables.pop(row, None)

    def set_aside(self, row: int, num_tokens: int) -> None:
        """Keeps a share of the budget for a row whose chunk is planned last."""
        assert 0 <= num_tokens <= self.budget
        self.budget -= num_tokens
        self.aside.append((row, num_tokens))

    def decode(self, rows: Array, num_computed: Array, max_drafts: Array | None = None, max_passes: int = 1) -> None:
        """Adds rows that compute one token each and sample. They may grow by up to `max_drafts` more if they have
        drafts or the model may run several times. int64[n] each. Called once, before the chunks."""
        super().decode(rows, num_computed)
        if max_drafts is not None:
            self._spend(int(max_drafts.sum()))
        self._max_drafts, self._max_passes = max_drafts, max_passes

    @property
    def _growth(self) -> Array | None:
        """The number of tokens beyond one that each decoding row may get, int64[n]; None for none."""
        if not self._chunks or self._max_drafts is None:
            return self._max_drafts
        # The model runs once for a chunk.
        return np.maximum(self._max_drafts - (self._max_passes - 1), 0)

    def lengths(self) -> Iterator[tuple[int, int, int, int]]:
        """Row, new tokens, minimum of computed tokens, and maximum of further tokens, for each row of the step."""
        growth = np.zeros_like(self._rows) if self._growth is None else self._growth
        decodes = zip(self._rows.tolist(), self._num_computed.tolist(), growth.tolist(), strict=True)
        yield from ((row, 1, num_computed, further) for row, num_computed, further in decodes)
        yield from ((*chunk, 0) for chunk in self._chunks)

    def finish(self, step_id: int, host: HostBlocks) -> StepPlan:
        """The step as a value, with the copies between pool and host. An empty draft only seals blocks."""
        plan, max_drafts = super().finish(step_id, host), self._growth
        if self._chunks and max_drafts is not None:
            max_drafts = np.concatenate((max_drafts, np.zeros(len(self.chunk_samples), dtype=np.int64)))
        return StepPlan(
            **{name: getattr(plan, name) for name in _PAGED_FIELDS},
            reseed=tuple(self.seeds),
            sealed=tuple(self.sealed),
            short_lived=tuple(block for block, _ in self.sealed if block in self.short_lived),
            state_tables=tuple(self.state_tables.items()),
            checkpoints=self.checkpoints,
            max_drafts=max_drafts,
            max_passes=1 if self._chunks else self._max_passes,
        )


_PAGED_FIELDS = [each.name for each in fields(batch.StepPlan)]

_NUM_COMPARED = 1024
"""Tokens that are copied at a time to compare them."""


def _num_equal(left: SequenceOf[int], right: SequenceOf[int], start: int, end: int) -> int:
    """The length of the common prefix of both, at most `end`. The first `start` tokens are known to be equal."""
    while start < end:
        stop = min(start + _NUM_COMPARED, end)
        parts = left[start:stop], right[start:stop]
        if parts[0] != parts[1]:
            return start + next(place for place, (one, other) in enumerate(zip(*parts, strict=True)) if one != other)
        start = stop
    return start


class Batch(batch.Batch[Sequence, SequenceGroup]):
    """Rows, GPU blocks, adapter slots, the next step in `draft`, and the full blocks that rows are computing in
    `underway`."""

    def __init__(self, config: SchedulerConfig, blocks: BlockManager, queues: Queues[SequenceGroup]) -> None:
        adapters = AdapterSlots(config.max_adapters)
        rows, draft = RowTable(config.max_num_seqs, adapters), StepDraft(config.max_num_batched_tokens)
        super().__init__(blocks, rows, draft, queues, config.swaps_from)
        self.blocks, self.rows, self.draft = blocks, rows, draft
        self.adapters = adapters
        self.underway = BlocksUnderway(config.block_size, config.max_num_batched_tokens)
        self.drafts = DraftBudget(config.max_num_seqs, config.max_drafts, config.fixed_tokens)
        self._max_drafts, self._max_passes = config.max_drafts, config.max_passes
        self.checkpoints: dict[int, list[Checkpoint]] = {}
        """Checkpoints that steps in flight make, by step."""

    # Rows

    def enter(self, sequence: Sequence, order: int, num_computed: int, num_cached_blocks: int) -> int:
        row = super().enter(sequence, order, num_computed, num_cached_blocks)
        self.rows.num_sealed[row] = num_cached_blocks
        self.drafts.had_some[row] = True
        if self.underway.is_worth_it(self._num_full(row) - num_cached_blocks):
            self.underway.expect(row)
        return row

    def _assignment(self, row: int, sequence: Sequence) -> RowAssignment:
        return RowAssignment(
            row,
            tuple(sequence.token_ids),
            tuple(sequence.block_table),
            sequence.request.sampling_of(sequence.index),
            len(sequence.request.prompt),
            sequence.request.traceparent,
            None if sequence.request.adapter is None else self.adapters.slot_of(sequence.request.adapter),
            # Requests that share cached prefixes may share drafts; others could learn answers from response times.
            bytes(sequence.request.cache_root) if self._max_drafts and sequence.request.beam is None else b"",
            tuple(sequence.state_blocks),
        )

    def fork(self, parent: Sequence, child: Sequence) -> int:
        row = super().fork(parent, child)
        self.underway.stop(row)
        self.drafts.had_some[row] = True
        return row

    def release_rows(self, sequences: SequenceOf[Sequence]) -> None:
        for sequence in sequences:
            if sequence.row is not None:
                self.underway.stop(sequence.row)
        super().release_rows(sequences)

    def rows_by_tenant(self) -> Counter[str]:
        return Counter(sequence.request.tenant for sequence in self.rows.sequences if sequence is not None)

    def blocks_by_tenant(self) -> Counter[str]:
        """How many blocks each tenant holds, as if none were shared."""
        held = Counter[str]()
        for sequence in self.rows.sequences:
            if sequence is not None:
                table = sequence.block_table
                num_blocks = len(table) - sum(map(table.count, self.blocks.blank))
                held[sequence.request.tenant] += num_blocks + len(sequence.state_blocks)
        return held

    def blocks_by_kind(self) -> tuple[int, int, int]:
        """How many blocks of full and of windowed groups and of states the sequences hold, as if none were shared."""
        layout, full, held, states = self.blocks.layout, 0, 0, 0
        for sequence in self.rows.sequences:
            if sequence is not None:
                table = sequence.block_table
                full += len(table) // layout.num_groups * layout.num_full
                held += len(table) - sum(map(table.count, self.blocks.blank))
                states += len(sequence.state_blocks)
        return full, held - full, states

    def num_new_tokens(self, group: SequenceGroup) -> int:
        """Tokens that each sequence of a running group got since the group entered, including steps in flight."""
        row = group.computing[0].row
        assert row is not None
        return int(self.rows.num_tokens[row] - self.rows.num_entered[row])

    # Blocks

    def blocks_to_grow(self, num_steps: int) -> int:
        """Free blocks that all sequences in the batch take in `num_steps` steps after this one, if they share none."""
        rows, size = self.rows.active.nonzero()[0], self._block_size
        # The last token of a sequence is never computed and takes no slot.
        slots = np.minimum(self.rows.num_tokens[rows] + num_steps, self.rows.max_len[rows] - 1)
        num_new = np.maximum(-(-slots // size) - self.rows.num_slots[rows] // size, 0).sum()
        num_states = self._num_shared_states(rows) * self.blocks.states.size
        return int(num_new) * self._num_groups + self._blocks_for_chunks() + num_states

    def blocks_for_decodes(self) -> int:
        num_blocks = super().blocks_for_decodes() + self._blocks_for_chunks()
        if not (size := self.blocks.states.size):
            return num_blocks
        return num_blocks + self._num_shared_states(self.rows.decoding()) * size

    def _num_shared_states(self, rows: Array) -> int:
        """States that these rows take before they change what they share. The last holder changes it in place."""
        sharing = rows[self.rows.shares_state[rows]].tolist()
        if not (sharing and self.blocks.states.size):
            return 0
        holders = Counter(self.sequence(row).state_blocks[0] for row in sharing)
        return sum(min(count, self.blocks.pool.ref_count(block) - 1) for block, count in holders.items())

    def _give_slots(self) -> Array:
        rows = super()._give_slots()
        if self.blocks.states.size:
            for row in rows[self.rows.shares_state[rows]].tolist():
                sequence = self.sequence(row)
                if self.blocks.states.separate(sequence, self.blocks.take):
                    self.draft.state_tables[row] = tuple(sequence.state_blocks)
                self.rows.shares_state[row] = False
        return rows

    def _blocks_for_chunks(self) -> int:
        """Free blocks of the windowed groups that the next chunks of the rows' prefills take at most."""
        if not self.blocks.blank:
            return 0
        rows, size = (self.rows.active & self.rows.prefills).nonzero()[0], self._block_size
        ends = np.minimum(self.rows.num_computed[rows] + self._token_budget, self.rows.num_tokens[rows])
        known = [self.sequence(row).windows_end for row in rows.tolist()]
        num_new = np.maximum(-(-ends // size) - np.array(known, dtype=np.int64), 0)
        return int(num_new.sum()) * self.blocks.layout.num_windowed

    def free_before_windows(self) -> None:
        """Frees the blocks of the windowed groups that no step after the planned ones reads. A block that is not sealed
        yet stays until others can find it, unless the row holds its maximum of blocks."""
        blocks, table = self.blocks, self.rows
        if not blocks.blank:
            return
        rows = table.active.nonzero()[0]
        computed = table.num_computed[rows] - table.num_unsure[rows]
        # If the row leaves the batch, its newest known token is computed again.
        position = np.minimum(computed, table.num_known[rows] - 1)
        unread = np.maximum(position - blocks.layout.window + 1, 0) // self._block_size
        must_go = (table.num_computed[rows] + self._token_budget) // self._block_size + 1 - blocks.windows.reach
        ends = np.minimum(unread, np.maximum(table.num_sealed[rows], must_go))
        starts = table.windows_start[rows]
        for place in (ends > starts).nonzero()[0].tolist():
            row, end = int(rows[place]), int(ends[place])
            blocks.windows.free_before(self.sequence(row).block_table, int(starts[place]), end)
            table.windows_start[row] = end

    def add_chunk(self, row: int, group: SequenceGroup, size: int | None = None) -> None:
        size = min(self.rows.num_uncomputed(row), self.draft.budget)
        if self.blocks.states.size and not (size := self._chunk_with_state(row, size)):
            return
        if self.blocks.blank:
            sequence, computed = self.sequence(row), int(self.rows.num_computed[row])
            end = -(-(computed + size) // self._block_size)
            for place, block in self.blocks.windows.extend(sequence, end, self.blocks.take):
                self.draft.blocks[row, place] = block
        super().add_chunk(row, group, size)

    def _chunk_with_state(self, row: int, size: int) -> int:
        """The tokens of the row's next chunk, at most `size`; 0 if it has to wait for a larger share of a step. A
        prompt token behind others must not be computed as the only one: attention would round it otherwise, and the
        remedy, to compute the token before it again, would change the state twice."""
        computed = int(self.rows.num_computed[row])
        num_left = int(self.rows.num_prompt[row]) - computed
        if num_left - size == 1:
            size -= 1
        return 0 if computed and num_left > 0 and size == 1 else size

    def _followers(self) -> dict[Sequence, list[int]]:
        """The rows that wait, by their leader."""
        followers: dict[Sequence, list[int]] = {}
        for row in (self.rows.active & self.rows.waits).nonzero()[0].tolist():
            leader = self.sequence(row).leader
            assert leader is not None, f"row {row} waits for no sequence"
            followers.setdefault(leader, []).append(row)
        return followers

    def begin_followers(self) -> None:
        """Lets rows begin whose leader's step has the state that they begin with. It is in the blocks of the first."""
        for leader, rows in self._followers().items():
            # A leader without a row has ended by now.
            if leader.row is not None and self.rows.num_computed[leader.row] < self.rows.num_computed[rows[0]]:
                continue
            first, *others = (self.sequence(row).state_blocks for row in rows)
            self.blocks.states.copies += [pair for each in others for pair in zip(first, each, strict=True)]
            self.rows.waits[rows] = False
            for row in rows:
                self.sequence(row).leader = None

    def _plan_checkpoints(self, step_id: int) -> None:
        """Adds the checkpoints of the rows to the step, until no free blocks are left for them."""
        table, states, planned = self.rows, self.blocks.states, list[Checkpoint]()
        reserve, followers = self.blocks_to_grow(1), self._followers()
        for row, num_new, num_computed, growth in self.draft.lengths():
            start, sequence, incarnation = int(table.num_computed[row]), self.sequence(row), int(table.incarnation[row])
            shared = 0
            for follower in followers.get(sequence, ())[:1]:
                shared, blocks = int(table.num_computed[follower]), self.sequence(follower).state_blocks
                if start < shared <= start + num_new:
                    self.draft.checkpoints += ((row, shared, tuple(blocks)),)
            # From the least number of computed tokens on: a step in flight may not come to a place of its own.
            for place in states.wanted(sequence, num_computed, start + num_new + growth, num_computed + num_new):
                if place != shared and self.blocks.has_room(states.size, reserve=reserve, others_run=True):
                    is_certain, blocks = (
                        start == num_computed and place <= start + num_new,
                        self.blocks.take(states.size),
                    )
                    planned.append(Checkpoint(row, incarnation, sequence, place, is_certain, blocks))
        if planned:
            self.checkpoints[step_id] = planned
            self.draft.checkpoints += tuple((each.row, each.num_tokens, tuple(each.blocks)) for each in planned)

    def end_checkpoints(self, due: SequenceOf[tuple[Checkpoint, int]], *, failed: Container[int]) -> None:
        """The result of a step came: seals the checkpoints that it made. Each of `due` has the number of known
        tokens of its sequence before; rows in `failed` computed values that are not finite."""
        for each, num_known in due:
            is_current = self.rows.incarnation[each.row] == each.incarnation
            is_made = each.is_certain or num_known <= each.num_tokens < each.sequence.num_tokens
            if is_current and is_made and each.row not in failed:
                sealed = self.blocks.seal_checkpoint(each)
                self.draft.sealed += sealed
                if self.blocks.states.gives_way(each):
                    self.draft.short_lived.update(block for block, _ in sealed)
            self.blocks.pool.free(each.blocks)

    def seal(self, row: int, num_full: int) -> None:
        """The first `num_full` blocks of the row can be shared from now on."""
        first, sequence = int(self.rows.num_sealed[row]), self.sequence(row)
        self.draft.sealed += self.blocks.cache_full_blocks(sequence, first, num_full)
        self.rows.num_sealed[row] = num_full
        if self.underway.computes(row):
            self._begin(row, num_full)
            self.underway.sealed(row, sequence.prefix_hashes.between(first, num_full, sequence.token_ids))
        self.underway.release_waiters(row, num_full)

    def name_underway(self) -> None:
        """Hashes the blocks that expected rows compute, now that a request waits that might share them."""
        for row in self.underway.take_expected():
            num_sealed = int(self.rows.num_sealed[row])
            if self.underway.is_worth_it(self._num_full(row) - num_sealed):
                self._begin(row, num_sealed)

    def num_in_common(self, row: int, sequence: Sequence, num_known: int) -> int:
        """Blocks at the start of a waiting sequence that it may take from the row once the row sealed them. The first
        `num_known` are known to match. Compares tokens, which takes a quarter of the time of hashing them."""
        size, max_blocks = self._block_size, min(self._num_full(row), self.blocks.states.num_shareable(sequence))
        return _num_equal(self.sequence(row).token_ids, sequence.token_ids, num_known * size, max_blocks * size) // size

    def num_left_behind(self, row: int, num_blocks: int) -> int:
        """The number of blocks, at most `num_blocks`, behind which a sequence that shares these with the row can
        continue once the row sealed them. If layers keep states, the row is made to leave a checkpoint behind them; if
        its state is a later one already, steps in flight may make an earlier checkpoint. 0 if there is none."""
        place = num_blocks * self._block_size
        if not self.blocks.states.size:
            return num_blocks
        if self.rows.num_computed[row] < place:
            self.sequence(row).partings.add(place)
            return num_blocks
        incarnation, made = self.rows.incarnation[row], itertools.chain(*self.checkpoints.values())
        places = [each.num_tokens for each in made if (each.row, each.incarnation) == (row, incarnation)]
        return max((each for each in places if each <= place), default=0) // self._block_size

    def _begin(self, row: int, num_sealed: int) -> None:
        """Registers the blocks that the row computes next as underway."""
        end = min(self._num_full(row), num_sealed + self.underway.window)
        sequence = self.sequence(row)
        self.underway.begin(row, sequence.prefix_hashes.between(num_sealed, end, sequence.token_ids))

    def _num_full(self, row: int) -> int:
        """Blocks that are sealed when the row first samples; see `results`."""
        return (self.sequence(row).num_tokens - int(self.rows.dependent[row])) // self._block_size

    # The next step

    def add_decodes(self, *, with_drafts: bool = False) -> None:
        """Adds every decoding row to the step, with a slot for its next token and slots for drafts. The blocks for next
        tokens must be free; blocks for drafts are optional."""
        rows = self._give_slots()
        if len(rows):
            drafts, max_passes = self._growth_of(rows) if with_drafts else (None, 1)
            self.draft.decode(rows, self.rows.num_computed[rows] - self.rows.num_unsure[rows], drafts, max_passes)

    def _growth_of(self, rows: Array) -> tuple[Array | None, int]:
        """The number of tokens beyond one that each of these decoding rows may grow by, with slots for them (None for
        no growth), and the number of times that the model may run. The growth takes at most half of the rest of the
        step's budget, and no block that admission leaves free."""
        table = self.rows
        room = table.max_len[rows] - table.num_tokens[rows] - 1
        share = (self.draft.budget - len(rows)) // (2 * len(rows))
        room[table.dependent[rows]] = 0
        further = min(self._max_passes - 1, share, int(room.min()))
        growths = [np.full(len(rows), further)]
        if self._max_drafts:
            # Later steps are planned before this one is over. Drafts that may not come must not reduce the number of
            # model runs in those steps, for the other rows even less.
            kept_back = np.full(len(rows), 2 * self._max_passes)
            if len(rows) == 1 and self.drafts.had_some[rows].all():
                kept_back = (room - further) // 2
            drafts = np.minimum(self.drafts.of(rows, further + 1), np.maximum(room - further - kept_back, 0))
            growths.insert(0, further + np.minimum(drafts, share - further))
        for growth in growths:
            slots = table.num_computed[rows] + 1 + growth - table.num_slots[rows]
            num_blocks = np.maximum(-(-slots // self._block_size), 0)
            needed, reserve = int(num_blocks.sum()) * self._num_groups, self._blocks_for_chunks()
            if growth.any() and self.blocks.has_room(needed, reserve=reserve, others_run=True):
                self._append_blocks(rows.repeat(num_blocks))
                return growth, further + 1
        return None, 1

    @property
    def has_seals(self) -> bool:
        """Whether there are sealed blocks that no step has reported yet."""
        return bool(self.blocks.pool.still_sealed(self.draft.sealed + self.blocks.states.lasting))

    def commit(self, step_id: int) -> StepPlan:
        """Finishes the step. Its tokens count as computed from now on, although its result comes later."""
        if self.blocks.states.size:
            self._plan_checkpoints(step_id)
            self.draft.copies += self.blocks.states.take_copies()
        lasting = self.blocks.states.lasting
        self.draft.short_lived.difference_update(block for block, _ in lasting)
        sealed = dict.fromkeys((*self.draft.sealed, *self.blocks.sealed_by_step, *lasting))
        self.draft.sealed = self.blocks.pool.still_sealed(sealed)
        self.blocks.sealed_by_step.clear()
        lasting.clear()
        for row, parent in self.draft.chunk_samples:
            if row != parent:
                child = self.sequence(row)
                self.draft.seeds.append((row, child.request.sampling_of(child.index).seed))
        plan = super().commit(step_id)
        assert isinstance(plan, StepPlan)
        if plan.max_drafts is not None:
            self.rows.grow(plan.samples[:, 0], plan.max_drafts)
        return plan
