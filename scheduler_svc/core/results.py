"""What a step's result means: tokens, ends, the steps of beam searches, and blocks that are final now.

A result is checked as a whole before anything of it is taken in: nonsense changes nothing.
"""

import math
from collections.abc import Sequence as SequenceOf

import numpy as np

from scheduler_svc.core.batch import Batch, RowTable
from scheduler_svc.core.beam_search import Candidates, NoCandidatesError
from scheduler_svc.core.events import EventLog, RequestFailure, hold_back
from scheduler_svc.core.policy import GroupQueue
from scheduler_svc.core.request import RequestKey
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.core.step import Array, SampleLogprobs, StepInFlight, StepResult

_MAX_TOKEN_ID = 2**31 - 1
"""Token ids travel, and are hashed, as int32."""


def check_result(step: StepInFlight, result: StepResult, table: RowTable) -> None:
    """Raises ValueError unless `Results.take` can take in all of the result. Changes nothing.

    Rows that were released since the step was planned are ignored: `take` drops what the result reports of them.
    """
    _check_tokens(step, result)
    reported = {*result.failures, *result.candidates}
    if reported and (strangers := reported.difference(step.rows.tolist())):
        raise ValueError(f"the result of step {step.step_id} reports rows {sorted(strangers)}, which do not sample")
    if strangers := result.non_finite_chunks.difference(step.chunk_rows.tolist()):
        raise ValueError(
            f"the result of step {step.step_id} reports chunks of rows {sorted(strangers)}, which compute none"
        )
    current = table.incarnation[step.rows] == step.incarnations
    if result.failures:
        current &= ~np.isin(step.rows, list(result.failures))
    rows = step.rows[current]
    for row in rows[table.dependent[rows]].tolist():
        _check_candidates(row, step.step_id, result.candidates.get(row))
    has_logprobs = np.zeros(len(step.rows), dtype=bool)
    if result.logprobs is not None:
        _check_logprobs(step, current, result.logprobs, table)
        has_logprobs[result.logprobs.samples] = True
    wants_logprobs = table.wants_logprobs[step.rows]
    if (current & wants_logprobs & ~has_logprobs).any():
        missing = step.rows[current & wants_logprobs & ~has_logprobs].tolist()
        raise ValueError(f"the result of step {step.step_id} has no log probabilities of rows {missing}")
    if (current & ~wants_logprobs & has_logprobs).any():
        unrequested = step.rows[current & ~wants_logprobs & has_logprobs].tolist()
        raise ValueError(
            f"the result of step {step.step_id} has log probabilities of rows {unrequested}, which did not request them"
        )


def _check_tokens(step: StepInFlight, result: StepResult) -> None:
    token_ids = result.token_ids
    if token_ids.shape != step.rows.shape:
        raise ValueError(f"step {step.step_id} sampled {len(step.rows)} rows, its result has {token_ids.size} tokens")
    if not len(token_ids):
        return
    if not np.issubdtype(token_ids.dtype, np.integer):
        raise ValueError(f"the tokens of step {step.step_id} are {token_ids.dtype}, not integers")
    lowest, highest = int(token_ids.min()), int(token_ids.max())
    if lowest < 0 or highest > _MAX_TOKEN_ID:
        raise ValueError(f"step {step.step_id} sampled tokens from {lowest} to {highest}; they are in [0, 2**31)")


def _check_candidates(row: int, step_id: int, candidates: Candidates | None) -> None:
    """Without candidates the search would wait for ever; the search merges those of its beams, so they are in order."""
    if candidates is None or not len(candidates.token_ids):
        raise ValueError(f"the result of step {step_id} has no candidates of row {row}")
    values = np.asarray(candidates.logprobs, dtype=np.float64)
    token_ids = np.asarray(candidates.token_ids)
    if values.shape != token_ids.shape:
        raise ValueError(
            f"the result of step {step_id} has {len(token_ids)} candidates of row {row} and {len(values)} log "
            f"probabilities"
        )
    if token_ids.min() < 0 or token_ids.max() > _MAX_TOKEN_ID:
        raise ValueError(f"the result of step {step_id} has a candidate of row {row} outside of [0, 2**31)")
    # Both comparisons are false for NaN.
    if not (values[0] < math.inf and (values[1:] <= values[:-1]).all()):
        raise ValueError(f"the candidates of row {row} in the result of step {step_id} are not in order of likelihood")


def _check_logprobs(step: StepInFlight, current: Array, logprobs: SampleLogprobs, table: RowTable) -> None:
    logprobs.check(len(step.rows))
    columns, rows = logprobs.columns, step.rows[logprobs.samples]
    is_current = current[logprobs.samples]
    too_many = is_current & (columns.top_counts > table.num_logprobs[rows])
    if too_many.any():
        raise ValueError(
            f"rows {rows[too_many].tolist()} report {columns.top_counts[too_many].tolist()} likely tokens in step "
            f"{step.step_id}; they requested {table.num_logprobs[rows][too_many].tolist()}"
        )
    # Both comparisons are false for NaN.
    are_numbers = (columns.chosen_logprobs[is_current] < math.inf).all()
    if not (are_numbers and (columns.top_logprobs[np.repeat(is_current, columns.top_counts)] < math.inf).all()):
        raise ValueError(f"a log probability in the result of step {step.step_id} is not a number")


class Results:
    """Takes in one step's result; `events` collects what it means for clients."""

    def __init__(self, batch: Batch, running: GroupQueue, now: float) -> None:
        self._batch = batch
        self._running = running
        self._now = now
        self.events = EventLog()
        self.ended: list[SequenceGroup] = []
        """Groups that are over, finished or failed."""

    def take(self, step: StepInFlight, result: StepResult) -> None:
        """Takes in the result of `step`, which passed `check_result`. Drops what it reports of rows that were released
        since."""
        table = self._batch.rows
        current = table.incarnation[step.rows] == step.incarnations
        self._seal(step, current, result)
        self._seal_chunks(step, result)
        plain = current & table.is_plain[step.rows]
        if result.failures:
            plain &= ~np.isin(step.rows, [*result.failures])
        if plain.any():
            self._append_plain(step, np.flatnonzero(plain), result)
        for sample in np.flatnonzero(current & ~plain).tolist():
            self._take_sample(sample, int(step.rows[sample]), result)

    def _append_plain(self, step: StepInFlight, samples: Array, result: StepResult) -> None:
        """Samples that are a token each and nothing else: the events are made of whole arrays."""
        table = self._batch.rows
        rows, token_ids, num_computed = step.rows[samples], result.token_ids[samples], step.num_computed[samples]
        offsets = num_computed - table.num_prompt[rows]
        self.events.tokens(
            table.client[rows],
            table.handle[rows],
            table.index[rows],
            offsets,
            token_ids,
            samples,
            result.logprobs,
        )
        # The newest token is not computed yet.
        is_milestone = (offsets == table.num_emitted[rows]) | (num_computed + 1 >= table.max_len[rows])
        due: list[Sequence] = []
        for sequence, token_id, is_due in zip(
            table.sequences_in(rows), token_ids.tolist(), is_milestone.tolist(), strict=True
        ):
            assert sequence is not None
            sequence.token_ids.append(token_id)
            if is_due or token_id in sequence.request.stop_token_ids:
                due.append(sequence)
        if due:
            self._on_milestones(due)

    def _take_sample(self, sample: int, row: int, result: StepResult) -> None:
        sequence = self._batch.rows.sequences[row]
        # Released rows were sorted out before; a group may only end here by a failure of this very step.
        if sequence is None:
            return
        failure = _failure_of(sequence.request.key, row, result)
        if sequence.request.beam is not None:
            # A beam without a candidate is dropped; the search continues with the others.
            self._collect(sequence, result.candidates[row] if failure is None else Candidates((), ()), failure)
        elif failure is not None:
            self._fail(failure)
        else:
            sequence.token_ids.append(int(result.token_ids[sample]))
            logprobs = None if result.logprobs is None else result.logprobs.of_sample(sample)
            if logprobs is not None:
                hold_back(sequence, logprobs)
            if sequence.end_reason() or sequence.num_output_tokens <= sequence.num_emitted_tokens + 1:
                self._on_milestones([sequence])

    def _seal(self, step: StepInFlight, current: Array, result: StepResult) -> None:
        """Blocks that are full now can be shared from now on. A row that samples a token has finite keys and values, so
        nothing that a failing request computed is ever sealed.

        The newest token of a beam may be computed again, when the group is swapped before all its candidates are there:
        its block is not final yet.
        """
        batch = self._batch
        num_full = (step.num_computed - batch.rows.dependent[step.rows]) // batch.blocks.block_size
        for index in np.flatnonzero(current & (num_full > batch.rows.num_sealed[step.rows])).tolist():
            row = int(step.rows[index])
            if row in result.failures:
                batch.underway.stop(row)
            else:
                batch.seal(row, int(num_full[index]))

    def _seal_chunks(self, step: StepInFlight, result: StepResult) -> None:
        """The same for chunks of prefills before the last. A row with one that is not finite seals nothing more until
        it samples: whether its context is sound is seen then."""
        batch, rows = self._batch, step.chunk_rows
        current = batch.rows.incarnation[rows] == step.chunk_incarnations
        if result.non_finite_chunks:
            spoilt = rows[current & np.isin(rows, list(result.non_finite_chunks))]
            batch.rows.seals_chunks[spoilt] = False
            for row in spoilt.tolist():
                batch.underway.stop(row)
        num_full = step.chunk_num_computed // batch.blocks.block_size
        due = current & batch.rows.seals_chunks[rows] & (num_full > batch.rows.num_sealed[rows])
        for row, count in zip(rows[due].tolist(), num_full[due].tolist(), strict=True):
            batch.seal(row, count)

    def _on_milestones(self, sequences: SequenceOf[Sequence]) -> None:
        """Where the newest token of each is its last, or its first of this scheduler."""
        running, now = self._running, self._now
        ending: list[Sequence] = []
        groups: dict[RequestKey, SequenceGroup] = {}
        for sequence in sequences:
            key = sequence.request.key
            group = running.get(key)
            if group.timeline.first_token is None:
                group.timeline.first_token = now
            reason = sequence.end_reason()
            if reason is not None:
                sequence.finish_reason = reason
                self.events.sequence_end(sequence, reason)
                ending.append(sequence)
                groups[key] = group
        if ending:
            # Together, and each group looked at once: all rows may end in one step.
            self._batch.end(ending)
            self._end([group for group in groups.values() if len(group.sequences) == 1 or group.finished])

    def _collect(self, sequence: Sequence, candidates: Candidates, failure: RequestFailure | None) -> None:
        """One beam's candidates, none where its row failed; with the last of them the search continues."""
        group = self._running.get(sequence.request.key)
        assert group.beams is not None
        group.beams.candidates[sequence.index] = candidates
        if len(group.beams.candidates) == len(group.beams.beams):
            if group.timeline.first_token is None:
                group.timeline.first_token = self._now
            try:
                group.beams.advance(self._batch)
            except NoCandidatesError as error:
                key = sequence.request.key
                self._fail(failure or RequestFailure(key, reason="NON_FINITE_LOGITS", message=str(error)))
                return
            if not group.beams.beams:
                self._batch.end(group.unfinished)
                self._end([group])

    def _fail(self, failure: RequestFailure) -> None:
        group = self._running.remove(failure.key)
        self._batch.end(group.unfinished)
        self.ended.append(group)
        self.events.request_failure(failure)

    def _end(self, groups: SequenceOf[SequenceGroup]) -> None:
        """The groups are over; all of their sequences gave back what they held."""
        self._running.remove_all(groups)
        for group in groups:
            group.timeline.last_token = self._now
            self.events.request_end(group)
        self.ended += groups


def _failure_of(key: RequestKey, row: int, result: StepResult) -> RequestFailure | None:
    message = result.failures.get(row)
    if message is None:
        return None
    if row in result.refused:
        return RequestFailure(key, reason="INVALID_SAMPLING", message=message)
    return RequestFailure(key, reason="NON_FINITE_LOGITS", message=message)
