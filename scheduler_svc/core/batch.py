"""The running batch: which sequence sits in which of the worker's rows, and with which blocks."""

from collections.abc import Sequence as SequenceOf

from scheduler_svc.core.block import BlockId
from scheduler_svc.core.block_manager import BlockManager
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.rows import RowTable
from scheduler_svc.core.sequence import Sequence, SequenceStatus
from scheduler_svc.core.step_draft import StepDraft
from scheduler_svc.core.step_plan import RowAssignment, StepPlan
from scheduler_svc.core.underway import BlocksUnderway


class Batch:
    """Rows, GPU blocks, in `draft` what the worker is still to be told of them, and in `underway` the full blocks that
    rows are computing."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.blocks = BlockManager(config.num_blocks, config.block_size, config.watermark)
        self.rows = RowTable(config.max_num_seqs)
        self.draft = StepDraft(config.max_num_batched_tokens)
        self.underway = BlocksUnderway(config.block_size, config.max_num_batched_tokens)
        self._block_size = config.block_size
        self._token_budget = config.max_num_batched_tokens

    def sequence(self, row: int) -> Sequence:
        sequence = self.rows.sequences[row]
        assert sequence is not None, f"row {row} holds no sequence"
        return sequence

    def tail(self, row: int) -> tuple[int, BlockId]:
        """Logical index and block of the slot that the row's next token is written to."""
        index = int(self.rows.num_computed[row]) // self._block_size
        return index, self.sequence(row).block_table[index]

    def enter(self, sequence: Sequence, rank: int, num_computed: int, num_sealed: int) -> int:
        """Puts a sequence that has its blocks into a row, which it returns."""
        row = self.rows.assign(sequence, rank, self._block_size, num_computed, num_sealed)
        sequence.status = SequenceStatus.RUNNING
        if self.underway.is_worth_it(self._num_full(row) - num_sealed):
            self.underway.expect(row)
        self.draft.assign(
            RowAssignment(
                row,
                tuple(sequence.token_ids),
                tuple(sequence.block_table),
                sequence.request.sampling_of(sequence.index),
                len(sequence.request.prompt),
                sequence.request.traceparent,
            )
        )
        return row

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The child, which has a row and no blocks, shares all blocks of the parent and goes on from its tokens."""
        assert parent.row is not None
        assert child.row is not None
        self.blocks.fork(parent, child)
        self.underway.stop(child.row)
        self.rows.fork(parent.row, child.row, self._block_size)
        self.draft.fork(parent.row, child.row)
        child.status = SequenceStatus.RUNNING

    def leave(self, *sequences: Sequence) -> None:
        """Frees the rows of those sequences that have one. Steps in flight may still write to their blocks, but every
        later step runs after those."""
        rows = [sequence.row for sequence in sequences if sequence.row is not None]
        for row in rows:
            self.underway.stop(row)
        self.draft.release(rows)
        self.rows.release(rows)

    def release(self, *sequences: Sequence) -> None:
        """Frees the rows and blocks of the sequences. Many may end in one step."""
        self.leave(*sequences)
        self.blocks.free(*sequences)

    def retire(self, sequences: SequenceOf[Sequence]) -> None:
        """The same for sequences that are over, some of whose blocks may become free a little later."""
        self.leave(*sequences)
        self.blocks.retire(sequences)

    def seal(self, row: int, num_full: int) -> None:
        """The first `num_full` blocks of the row can be shared from now on."""
        first = int(self.rows.num_sealed[row])
        self.draft.sealed += self.blocks.seal(self.sequence(row), first, num_full)
        self.rows.num_sealed[row] = num_full
        if self.underway.computes(row):
            self._begin(row, num_full)
            sequence = self.sequence(row)
            self.underway.sealed(row, sequence.prefix_hashes.first(num_full, sequence.token_ids)[first:])

    def name_underway(self) -> None:
        """Somebody waits who might want what rows are computing: names the blocks of those that are not named yet."""
        for row in self.underway.take_expected():
            num_sealed = int(self.rows.num_sealed[row])
            if self.underway.is_worth_it(self._num_full(row) - num_sealed):
                self._begin(row, num_sealed)

    def _begin(self, row: int, num_sealed: int) -> None:
        """The blocks that the row computes next are underway."""
        end = min(self._num_full(row), num_sealed + self.underway.window)
        sequence = self.sequence(row)
        self.underway.begin(row, sequence.prefix_hashes.first(end, sequence.token_ids)[num_sealed:])

    def _num_full(self, row: int) -> int:
        """Blocks that are sealed when the row first samples; see `Results`."""
        return (self.sequence(row).num_tokens - int(self.rows.dependent[row])) // self._block_size

    def commit(self, step_id: int) -> StepPlan:
        """The step that was put together. It counts as done, which it is once its result comes."""
        self.draft.sealed = self.blocks.still_sealed(self.draft.sealed)
        plan = self.draft.finish(step_id)
        self.draft = StepDraft(self._token_budget)
        self.rows.num_computed[plan.rows] += plan.num_new_tokens
        self.rows.sampled(plan.samples[:, 0])
        return plan
