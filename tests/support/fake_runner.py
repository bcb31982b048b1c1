"""The model's place in a worker, taken by a rule: tokens are known before, and a step costs what the test says."""

import threading
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from worker_svc.sealed_blocks import SealInventory
from worker_svc.steps import (
    AdmittedStep,
    Batch,
    Int32Array,
    PromptLogprobs,
    RowCandidates,
    RowChanges,
    RowSampling,
    SealedBlocks,
    StepOutput,
    StepTimings,
    TokenLogprobs,
)


def token_at(seed: int, position: int, vocab_size: int = 1000) -> int:
    """The token that a sequence with this seed has at this position."""
    return (seed * 7919 + position * 104_729 + 13) % vocab_size


class SharedBlockError(Exception):
    """A step writes a token to a block in which another row has, or will have, another one."""


class Switch:
    """Can be set and cleared from any thread; it is clear at first."""

    def __init__(self) -> None:
        self._is_clear = threading.Event()
        self._is_clear.set()

    def set(self) -> None:
        self._is_clear.clear()

    def clear(self) -> None:
        self._is_clear.set()

    def wait_until_clear(self) -> None:
        self._is_clear.wait()


@dataclass(frozen=True, slots=True)
class FakeStep:
    """A step that is over."""

    output: StepOutput

    def wait(self) -> StepOutput:
        return self.output


@dataclass(slots=True)
class _Row:
    sampling: RowSampling
    blocks: dict[int, int]
    """Block ids by logical index."""
    num_prompt_tokens: int
    token_ids: list[int]


class _Rows:
    """Tokens, sampling parameters and block tables of the rows of one session; it counts who holds each block."""

    def __init__(self, block_size: int) -> None:
        self._rows: dict[int, _Row] = {}
        self._holders: Counter[int] = Counter()
        self._block_size = block_size

    def num_prompt_tokens(self, row: int) -> int:
        return self._rows[row].num_prompt_tokens

    def sampling(self, row: int) -> RowSampling:
        return self._rows[row].sampling

    def apply(self, changes: RowChanges) -> None:
        for row in changes.release.tolist():
            self._release(row)
        for assign in changes.assign:
            blocks = dict(enumerate(assign.block_table.tolist()))
            row = _Row(assign.sampling, blocks, assign.num_prompt_tokens, assign.token_ids.tolist())
            self._put(assign.row, row)
        parents = [self._rows[parent] for parent in changes.fork[:, 0].tolist()]
        children = [replace(parent, blocks=dict(parent.blocks), token_ids=[*parent.token_ids]) for parent in parents]
        for row, child in zip(changes.fork[:, 1].tolist(), children, strict=True):
            self._put(row, child)
        for reseed in changes.reseed:
            row = self._rows[reseed.row]
            row.sampling = replace(row.sampling, seed=reseed.seed)
        for row, index, block in changes.block_table_deltas.tolist():
            self._set_block(self._rows[row].blocks, index, block)

    def append(self, row: int, token_id: int) -> None:
        self._rows[row].token_ids.append(token_id)

    def check_written(self, batch: Batch) -> None:
        """A row writes only where every other holder of the block has the same tokens. SharedBlockError otherwise."""
        columns = (column.tolist() for column in (batch.rows, batch.num_computed_tokens, batch.num_new_tokens))
        for row, start, new in zip(*columns, strict=True):
            for index in range(start // self._block_size, (start + new - 1) // self._block_size + 1):
                if self._holders[self._rows[row].blocks[index]] > 1:
                    first = max(start, index * self._block_size)
                    self._check_sharers(row, index, slice(first, min(start + new, (index + 1) * self._block_size)))

    def _check_sharers(self, writer: int, index: int, positions: slice) -> None:
        block = self._rows[writer].blocks[index]
        written = self._rows[writer].token_ids[positions]
        for row, other in self._rows.items():
            if other.blocks.get(index) == block and other.token_ids[positions] != written:
                raise SharedBlockError(f"row {writer} writes to block {block}, in which row {row} has other tokens")

    def _release(self, row: int) -> None:
        # The ledger lets a row be released that holds nothing.
        if row in self._rows:
            self._holders.subtract(self._rows.pop(row).blocks.values())

    def _put(self, row: int, content: _Row) -> None:
        self._release(row)
        self._rows[row] = content
        self._holders.update(content.blocks.values())

    def _set_block(self, blocks: dict[int, int], index: int, block: int) -> None:
        if index in blocks:
            self._holders[blocks[index]] -= 1
        blocks[index] = block
        self._holders[block] += 1


class FakeRunner:
    """A `worker_svc.worker.SealingRunner` without a model.

    `num_steps` counts the steps that were begun; while `hang` is set none goes on; `faults` says what a scheduler did
    wrong that no check of the protocol finds: it wrote where another row has other tokens.
    """

    is_asynchronous = False

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        *,
        step_seconds: float = 0.0,
        failing_seeds: Collection[int] = (),
    ) -> None:
        self.num_steps = 0
        self.hang = Switch()
        self.faults: list[SharedBlockError] = []
        self._vocab_size = vocab_size
        self._step_seconds = step_seconds
        self._failing_seeds = failing_seeds
        self._block_size = block_size
        self._rows = _Rows(block_size)
        self._seals = SealInventory(num_blocks)

    def sealed_blocks(self) -> SealedBlocks:
        return self._seals.snapshot()

    def launch(self, admitted: AdmittedStep, queue_us: int = 0) -> FakeStep:
        """Runs a step to its end. SharedBlockError when it writes where another row has other tokens."""
        self.num_steps += 1
        self.hang.wait_until_clear()
        started = time.perf_counter()
        step, written = admitted.step, admitted.written_blocks
        if step.step_id == 1:
            # The first of a session: all rows of the one before are released.
            self._rows = _Rows(self._block_size)
        self._rows.apply(step.row_changes)
        self._check_written(step.batch)
        self._seals.begin_write(written, self.num_steps)
        output = replace(self._sample(step.step_id, step.batch), prompt_logprobs=self._judge_prompts(step.batch))
        # What the stand-in itself takes is part of the cost, not added to it.
        time.sleep(max(started + self._step_seconds - time.perf_counter(), 0))
        self._seals.add(step.sealed, self.num_steps)
        model_us = int((time.perf_counter() - started) * 1e6)
        return FakeStep(replace(output, timings=StepTimings(queue_us, 0, model_us, 0)))

    def _check_written(self, batch: Batch) -> None:
        try:
            self._rows.check_written(batch)
        except SharedBlockError as error:
            self.faults.append(error)
            raise

    def _sample(self, step_id: int, batch: Batch) -> StepOutput:
        ends = dict(zip(batch.rows.tolist(), (batch.num_computed_tokens + batch.num_new_tokens).tolist(), strict=True))
        rows = batch.samples[:, 0]
        token_ids = np.zeros(len(rows), np.int32)
        logprobs, candidates, failed = [], [], []
        for place, (row, source) in enumerate(batch.samples.tolist()):
            sampling = self._rows.sampling(row)
            token_id = token_at(sampling.seed, ends[source], self._vocab_size)
            if sampling.seed in self._failing_seeds:
                failed.append(row)
            elif sampling.num_candidates is not None:
                candidates.append(RowCandidates(row, *self._top(token_id, sampling.num_candidates)))
            else:
                token_ids[place] = token_id
                self._rows.append(row, token_id)
                if sampling.logprobs is not None:
                    logprobs.append(TokenLogprobs(row, -0.5, 1, *self._top(token_id, sampling.logprobs)))
        timings = StepTimings(0, 0, 0, 0)
        return StepOutput(step_id, rows, token_ids, tuple(logprobs), tuple(candidates), tuple(failed), timings)

    def _judge_prompts(self, batch: Batch) -> tuple[PromptLogprobs, ...]:
        """The token at position p has log probability -p and rank p."""
        reports = []
        columns = (column.tolist() for column in (batch.rows, batch.num_computed_tokens, batch.num_new_tokens))
        for row, start, new in zip(*columns, strict=True):
            count = self._rows.sampling(row).prompt_logprobs
            judged = range(start + 1, min(start + new + 1, self._rows.num_prompt_tokens(row)))
            if count is not None and judged:
                positions = tuple(TokenLogprobs(row, -float(p), p, *self._top(p, count)) for p in judged)
                reports.append(PromptLogprobs(row, start + 1, positions))
        return tuple(reports)

    def _top(self, token_id: int, count: int) -> tuple[Int32Array, np.ndarray]:
        """The token and those that follow it in the vocabulary, as the most likely ones."""
        ranks = np.arange(min(count, self._vocab_size), dtype=np.int32)
        return (token_id + ranks) % np.int32(self._vocab_size), (-0.5 - ranks).astype(np.float32)
