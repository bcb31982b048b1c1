"""Stands in for a worker's model: a rule gives the tokens, and a step takes the time that the test says."""

import sys
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from quire.messages.layer_groups import ONE_GROUP, LayerGroups
from quire.messages.logprob_columns import LogprobLog
from quire.runtime import clock
from quire.runtime.failpoint import failpoint
from tests.support.fake_pool import BlockError, FakeBlocks, FakePool
from tests.support.fake_rows import FakeRows
from tests.support.logprobs import Line, columns_of
from worker_svc.device.seals import SealInventory
from worker_svc.step import AdmittedStep, Batch, PromptLogprobs, SealedBlocks, StepOutput, StepTimings, TokenLogprobs

_NUM_SPECIAL_TOKENS = 16
"""At least the embedded model's number, so that a random seed never ends a sequence early."""


def token_at(seed: int, position: int, vocab_size: int = 1000) -> int:
    """The token of a sequence with this seed at this position; it never ends a sequence."""
    return _NUM_SPECIAL_TOKENS + (seed * 7919 + position * 104_729 + 13) % (vocab_size - _NUM_SPECIAL_TOKENS)


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
    """A step whose blocks are written."""

    output: StepOutput
    sealed: SealedBlocks
    number: int
    seals: SealInventory

    def wait(self) -> StepOutput:
        self.seals.add(self.sealed, self.number)
        failpoint("worker.step.sealed")
        return self.output


def _of_sample(output: StepOutput, place: int) -> StepOutput:
    """The output of one of a step's samples."""
    logprobs = output.logprobs
    if logprobs is not None:
        position = int(np.searchsorted(logprobs.samples, place))
        has_some = position < len(logprobs.samples) and logprobs.samples[position] == place
        columns = logprobs.columns.part(position, position + 1) if has_some else None
        logprobs = None if columns is None else TokenLogprobs(np.zeros(1, np.int32), columns)
    return replace(output, token_ids=output.token_ids[place : place + 1], logprobs=logprobs)


class FakeRunner:
    """A `worker_svc.protocol.stream.SealingRunner` without a model.

    Rows get the tokens of `token_at`, or of a script; no row searches. `num_steps` counts the steps that were begun;
    while `hang` is set, no step goes on. `faults` has faults of a scheduler that no check of the protocol finds: it
    wrote where another row has other tokens, or let a row read blocks that are not its own, because a block was
    overwritten, not copied, or swapped to another place.
    """

    is_asynchronous = False

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        *,
        num_host_blocks: int = 0,
        step_seconds: float = 0.0,
        failing_seeds: Collection[int] = (),
        script: Sequence[int] = (),
        groups: LayerGroups = ONE_GROUP,
    ) -> None:
        self.num_steps = 0
        self.hang = Switch()
        self.faults: list[BlockError] = []
        self._vocab_size = vocab_size
        self._step_seconds = step_seconds
        self._failing_seeds = failing_seeds
        self._script = script
        self._block_size, self._groups = block_size, groups
        self.adapters: dict[int, bytes] = {}
        """The digests of the adapters that are loaded, by slot."""
        self._rows = FakeRows(block_size, self.adapters, groups)
        self._pool = FakePool(num_blocks, num_host_blocks, block_size, groups)
        self._seals = SealInventory(num_blocks)

    def sealed_blocks(self) -> SealedBlocks:
        return self._seals.snapshot()

    def release_memory(self) -> None:
        self._seals.clear()

    @property
    def blocks(self) -> FakeBlocks:
        """Contents of the blocks, as other workers fetch them."""
        return self._pool.blocks(self._seals)

    def launch(self, admitted: AdmittedStep, queue_us: int = 0) -> FakeStep:
        """Runs a step to its end. BlockError if a row overwrites a block that another needs, or reads a foreign one."""
        self.num_steps += 1
        self.hang.wait_until_clear()
        started = clock.monotonic()
        step, written = admitted.step, admitted.written_blocks
        if step.step_id == 1:
            # The first of a session: all rows of the one before are released.
            self._rows = FakeRows(self._block_size, self.adapters, self._groups)
        self._seals.begin_write(written, self.num_steps)
        self._pool.move(step.cache_operations)
        failpoint("worker.step.moved")
        self._rows.apply_row_changes(step.row_changes)
        self._rows.set_checkpoints(step.checkpoints)
        batch = self._rows.placed(step.batch)
        self._compute(batch)
        output = replace(
            self._verify(batch, self._sample(step.step_id, batch)),
            prompt_logprobs=self._judge_prompts(batch),
            non_finite_chunks=self._failing_chunks(batch),
        )
        # Time that the stand-in itself takes is part of the cost, not added to it.
        clock.sleep(max(started + self._step_seconds - clock.monotonic(), 0))
        output = replace(output, timings=StepTimings(queue_us, 0, int((clock.monotonic() - started) * 1e6), 0))
        return FakeStep(output, step.sealed, self.num_steps, self._seals)

    def _compute(self, batch: Batch) -> None:
        try:
            self._rows.compute(batch, self._pool)
        except BlockError as error:
            self.faults.append(error)
            raise

    def _sample(self, step_id: int, batch: Batch) -> StepOutput:
        ends = dict(zip(batch.rows.tolist(), batch.ends.tolist(), strict=True))
        token_ids = np.zeros(len(batch.samples), np.int32)
        lines: dict[int, Line] = {}
        failed: list[int] = []
        refusals: dict[int, str] = {}
        for place, (row, source) in enumerate(batch.samples.tolist()):
            sampling, prefixes = self._rows[row].sampling, self._rows[row].prefixes
            assert sampling.num_candidates is None, "this worker has no candidates for a search"
            if sampling.refusal is not None:
                refusals[row] = sampling.refusal
            if has_failed := sampling.seed in self._failing_seeds or sampling.refusal is not None:
                failed.append(row)
            # A failed row has a token too, since the next step may compute it already.
            token_ids[place] = token_id = 0 if has_failed else self._token_of(row, ends[source])
            prefixes.append(token_id)
            if sampling.logprobs is not None and not has_failed:
                lines[place] = Line(-0.5, 1, *self._top(token_id, sampling.logprobs))
        reported = TokenLogprobs(np.array(list(lines), np.int32), columns_of(lines.values())) if lines else None
        timings = StepTimings(0, 0, 0, 0)
        return StepOutput(
            step_id, batch.samples[:, 0], token_ids, reported, (), tuple(failed), timings, refusals=refusals
        )

    def _verify(self, batch: Batch, output: StepOutput) -> StepOutput:
        """Drafts tokens of the rows that may have some, by a rule that is often right, and adds the right ones, each
        with the token after it. By another rule it repeats this up to the step's maximum number of passes."""
        if not batch.max_drafts.any():
            return output
        parts = [[_of_sample(output, place)] for place in range(len(batch.samples))]
        num_drafts, num_passes = np.zeros_like(batch.max_drafts), 0
        failed = set(output.failed_rows)
        while True:
            num_passes += 1
            num_kept_back = batch.max_passes - num_passes
            rooms = [int(most) + 1 - len(each) for most, each in zip(batch.max_drafts, parts, strict=True)]
            for place, row in enumerate(batch.samples[:, 0].tolist()):
                if (room := 0 if row in failed else rooms[place] - num_kept_back) > 0:
                    salt = (output.step_id * 31 + row * 17 + len(self._rows[row].prefixes.token_ids)) * 40_503 >> 4
                    count = salt % (room + 1)
                    parts[place] += self._draft(row, salt // 11 % (count + 1), count, output.step_id)
                    num_drafts[place] += count
            is_over = failed or not num_kept_back or (output.step_id * 7 + num_passes) * 40_503 >> 5 & 3 == 0
            if is_over or any(len(each) > most for each, most in zip(parts, batch.max_drafts, strict=True)):
                break
            if any(self._reports_more(row) for row in batch.samples[:, 0].tolist()):
                break
            failed = self._go_on(batch, parts, output.step_id)
        joined = [part for each in parts for part in each]
        reported = LogprobLog()
        for part in joined:
            if part.logprobs is not None:
                reported.append(part.logprobs.columns)
        places = np.flatnonzero([part.logprobs is not None for part in joined]).astype(np.int32)
        return replace(
            output,
            token_ids=np.concatenate([part.token_ids for part in joined]),
            logprobs=TokenLogprobs(places, reported.columns()) if len(places) else None,
            num_tokens=np.array(list(map(len, parts)), np.int32),
            num_drafts=num_drafts,
            num_passes=num_passes,
        )

    def _go_on(self, batch: Batch, parts: list[list[StepOutput]], step_id: int) -> set[int]:
        """Runs the model once more, one token further in each row. Returns the rows that drew none: these fail in the
        next step."""
        rows = batch.samples[:, 0]
        ends = np.array([len(self._rows[row].prefixes.token_ids) for row in rows.tolist()], np.int32)
        further = Batch(rows, np.ones_like(rows), ends - 1, np.stack((rows, rows), axis=1))
        self._compute(further)
        output = self._sample(step_id, further)
        for place, row in enumerate(rows.tolist()):
            if row in output.failed_rows:
                self._rows[row].prefixes.replace(int(ends[place]), ())
            else:
                parts[place].append(_of_sample(output, place))
        return set(output.failed_rows)

    def _reports_more(self, row: int) -> bool:
        """Whether a row reports more than tokens, so that the model does not go on with it."""
        sampling = self._rows[row].sampling
        return sampling.logprobs is not None or sampling.num_candidates is not None

    def _draft(self, row: int, num_right: int, num_drafts: int, step_id: int) -> list[StepOutput]:
        """Draws a row's tokens after its first one: `num_right` right drafts, or the number that the row has left."""
        outputs: list[StepOutput] = []
        tokens = self._rows[row].prefixes.token_ids
        one, pair = np.array([1], np.int32), np.array([(row, row)], np.int32)
        while len(outputs) < num_right and len(tokens) - 1 < self._end_of_drafts(row):
            batch = Batch(pair[:, 0], one, np.array([len(tokens) - 1], np.int32), pair)
            self._rows.compute(batch, self._pool)
            outputs.append(self._sample(step_id, batch))
        if len(outputs) == num_right and num_right < num_drafts:
            self._rows.write_wrong(row, num_drafts - num_right, self._pool)
        return outputs

    def _end_of_drafts(self, row: int) -> int:
        """No draft is computed from this position on."""
        return sys.maxsize

    def _token_of(self, row: int, position: int) -> int:
        """The token of a row at this position: by its seed, or the next of the script, whose last one repeats."""
        state = self._rows[row]
        if self._script:
            return self._script[min(position - state.num_prompt_tokens, len(self._script) - 1)]
        return token_at(state.sampling.seed, position, self._vocab_size)

    def _failing_chunks(self, batch: Batch) -> tuple[int, ...]:
        sampling = set(batch.samples[:, 1].tolist())
        chunks = [row for row in batch.rows.tolist() if row not in sampling]
        return tuple(row for row in chunks if self._rows[row].sampling.seed in self._failing_seeds)

    def _judge_prompts(self, batch: Batch) -> tuple[PromptLogprobs, ...]:
        """The token at position p has log probability -p and rank p."""
        reports = []
        for row, start, end in zip(
            batch.rows.tolist(), batch.num_computed_tokens.tolist(), batch.ends.tolist(), strict=True
        ):
            count = self._rows[row].sampling.prompt_logprobs
            judged = range(start + 1, min(end + 1, self._rows[row].num_prompt_tokens))
            if count is not None and judged:
                lines = [Line(-float(position), position, *self._top(position, count)) for position in judged]
                reports.append(PromptLogprobs(row, start + 1, columns_of(lines)))
        return tuple(reports)

    def _top(self, token_id: int, count: int) -> tuple[list[int], list[float]]:
        """The token and its successors in the vocabulary, as the most likely ones."""
        ranks = range(min(count, self._vocab_size))
        return [(token_id + rank) % self._vocab_size for rank in ranks], [-0.5 - rank for rank in ranks]
