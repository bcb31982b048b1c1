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
    """A step writes a block that more than one row holds."""


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


class _Rows:
    """Sampling parameters and block tables of the rows of one session; it counts who holds each block.

    Tokens are not kept: they follow from seeds and positions.
    """

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}
        self._holders: Counter[int] = Counter()

    def sampling(self, row: int) -> RowSampling:
        return self._rows[row].sampling

    def apply(self, changes: RowChanges) -> None:
        for row in changes.release.tolist():
            self._release(row)
        for assign in changes.assign:
            self._put(assign.row, _Row(assign.sampling, dict(enumerate(assign.block_table.tolist()))))
        parents = [self._rows[parent] for parent in changes.fork[:, 0].tolist()]
        children = [_Row(parent.sampling, dict(parent.blocks)) for parent in parents]
        for row, child in zip(changes.fork[:, 1].tolist(), children, strict=True):
            self._put(row, child)
        for reseed in changes.reseed:
            row = self._rows[reseed.row]
            row.sampling = replace(row.sampling, seed=reseed.seed)
        for row, index, block in changes.block_table_deltas.tolist():
            self._set_block(self._rows[row].blocks, index, block)

    def check_written(self, block_ids: Int32Array) -> None:
        """A block that is written is held by one row at most. SharedBlockError otherwise."""
        shared = [block for block in block_ids.tolist() if self._holders[block] > 1]
        if shared:
            raise SharedBlockError(f"the step writes blocks {shared}, which more than one row holds")

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
    wrong that no check of the protocol finds: it wrote to a block that another row holds.
    """

    is_asynchronous = False

    def __init__(
        self, num_blocks: int, vocab_size: int, *, step_seconds: float = 0.0, failing_seeds: Collection[int] = ()
    ) -> None:
        self.num_steps = 0
        self.hang = Switch()
        self.faults: list[SharedBlockError] = []
        self._vocab_size = vocab_size
        self._step_seconds = step_seconds
        self._failing_seeds = failing_seeds
        self._rows = _Rows()
        self._seals = SealInventory(num_blocks)

    def sealed_blocks(self) -> SealedBlocks:
        return self._seals.snapshot()

    def launch(self, admitted: AdmittedStep, queue_us: int = 0) -> FakeStep:
        """Runs a step to its end. SharedBlockError when it writes a block that more than one row holds."""
        self.num_steps += 1
        self.hang.wait_until_clear()
        started = time.perf_counter()
        step, written = admitted.step, admitted.written_blocks
        if step.step_id == 1:
            # The first of a session: all rows of the one before are released.
            self._rows = _Rows()
        self._rows.apply(step.row_changes)
        self._check_written(written)
        self._seals.begin_write(written, self.num_steps)
        output = self._sample(step.step_id, step.batch)
        # What the stand-in itself takes is part of the cost, not added to it.
        time.sleep(max(started + self._step_seconds - time.perf_counter(), 0))
        self._seals.add(step.sealed, self.num_steps)
        model_us = int((time.perf_counter() - started) * 1e6)
        return FakeStep(replace(output, timings=StepTimings(queue_us, 0, model_us, 0)))

    def _check_written(self, block_ids: Int32Array) -> None:
        try:
            self._rows.check_written(block_ids)
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
                if sampling.logprobs is not None:
                    logprobs.append(TokenLogprobs(row, -0.5, 1, *self._top(token_id, sampling.logprobs)))
        timings = StepTimings(0, 0, 0, 0)
        return StepOutput(step_id, rows, token_ids, tuple(logprobs), tuple(candidates), tuple(failed), timings)

    def _top(self, token_id: int, count: int) -> tuple[Int32Array, np.ndarray]:
        """The token and those that follow it in the vocabulary, as the most likely ones."""
        ranks = np.arange(min(count, self._vocab_size), dtype=np.int32)
        return (token_id + ranks) % np.int32(self._vocab_size), (-0.5 - ranks).astype(np.float32)
