"""What a step's result means: tokens, ends, the steps of beam searches, and blocks that are final now."""

import numpy as np

from scheduler_svc.core.beam import Candidates
from scheduler_svc.core.beam_group import advance
from scheduler_svc.core.events import EventLog
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.core.state import SchedulerState
from scheduler_svc.core.step_plan import StepInFlight, StepResult


class Results:
    """Takes in one step's result; `events` collects what it means for clients."""

    def __init__(self, state: SchedulerState, now: float) -> None:
        self._state = state
        self._now = now
        self.events = EventLog()
        self.ended: list[SequenceGroup] = []
        """Groups that are over, finished or failed."""

    def take(self, step: StepInFlight, result: StepResult) -> None:
        """Takes in the result of `step`. What it says of rows that were released since is dropped.

        Raises ValueError when a row that needs candidates has none.
        """
        table = self._state.batch.rows
        current = table.incarnation[step.rows] == step.incarnations
        self._seal(step, current, result)
        rows, token_ids = step.rows[current], result.token_ids[current]
        plain = table.is_plain[rows]
        if result.logprobs or result.failures:
            plain &= ~np.isin(rows, [*result.logprobs, *result.failures])
        if plain.any():
            self._append_plain(rows[plain], token_ids[plain], step.num_computed[current][plain])
        for row, token_id in zip(rows[~plain].tolist(), token_ids[~plain].tolist(), strict=True):
            self._take_row(row, token_id, result)

    def _append_plain(self, rows: np.ndarray, token_ids: np.ndarray, num_computed: np.ndarray) -> None:
        """Rows that have nothing but a token each: the events are made of whole arrays."""
        table = self._state.batch.rows
        offsets = num_computed - table.num_prompt[rows]
        self.events.tokens(table.client[rows], table.handle[rows], table.index[rows], offsets, token_ids)
        # The newest token is not computed yet.
        is_milestone = (offsets == table.num_emitted[rows]) | (num_computed + 1 >= table.max_len[rows])
        sequences = [table.sequences[row] for row in rows.tolist()]
        for sequence, token_id, is_due in zip(sequences, token_ids.tolist(), is_milestone.tolist(), strict=True):
            assert sequence is not None
            sequence.token_ids.append(token_id)
            if is_due or token_id in sequence.request.stop_token_ids:
                self._on_milestone(sequence)

    def _take_row(self, row: int, token_id: int, result: StepResult) -> None:
        sequence = self._state.batch.rows.sequences[row]
        # Released rows were sorted out before; a group may only end here by a failure of this very step.
        if sequence is None:
            return
        if row in result.failures:
            self._fail(sequence, result.failures[row])
        elif sequence.request.beam is not None:
            self._collect(sequence, _candidates_of(row, result))
        else:
            sequence.token_ids.append(token_id)
            self.events.token(sequence, token_id, result.logprobs.get(row))
            self._on_milestone(sequence)

    def _seal(self, step: StepInFlight, current: np.ndarray, result: StepResult) -> None:
        """Blocks that are full now can be shared from now on. A row that samples a token has finite keys and values, so
        nothing poisoned is ever sealed.

        The newest token of a beam may be computed again, when the group is swapped before all its candidates are there:
        its block is not final yet.
        """
        batch = self._state.batch
        num_full = (step.num_computed - batch.rows.dependent[step.rows]) // batch.blocks.block_size
        for index in np.flatnonzero(current & (num_full > batch.rows.num_sealed[step.rows])).tolist():
            row = int(step.rows[index])
            if row not in result.failures:
                batch.seal(row, int(num_full[index]))

    def _on_milestone(self, sequence: Sequence) -> None:
        """Where the newest token is the sequence's last, or its first of this scheduler."""
        reason = sequence.end_reason()
        if reason is None and sequence.num_output_tokens > sequence.num_emitted_tokens + 1:
            return
        group = self._state.running.get(sequence.request.key)
        self._note_first_token(group)
        if reason is not None:
            self._state.end(sequence)
            sequence.finish_reason = reason
            self.events.sequence_end(sequence, reason)
            if group.finished:
                self._end(group)

    def _collect(self, sequence: Sequence, candidates: Candidates) -> None:
        """One beam's candidates; with the last of them the search goes on."""
        group = self._state.running.get(sequence.request.key)
        assert group.beams is not None
        group.beams.candidates[sequence.index] = candidates
        if len(group.beams.candidates) == len(group.beams.beams):
            self._note_first_token(group)
            advance(group.beams, self._state.batch)
            if not group.beams.beams:
                self._end(group)

    def _fail(self, sequence: Sequence, detail: str) -> None:
        group = self._state.end_group(sequence.request.key)
        assert group is not None
        self.ended.append(group)
        self.events.request_failure(group, "NON_FINITE_LOGITS", detail)

    def _note_first_token(self, group: SequenceGroup) -> None:
        if group.timeline.first_token is None:
            group.timeline.first_token = self._now

    def _end(self, group: SequenceGroup) -> None:
        group.timeline.last_token = self._now
        self._state.end_group(group.request.key)
        self.ended.append(group)
        self.events.request_end(group)


def _candidates_of(row: int, result: StepResult) -> Candidates:
    """Raises ValueError: without them the search would wait for ever."""
    candidates = result.candidates.get(row)
    if candidates is None:
        raise ValueError(f"the result of step {result.step_id} has no candidates of row {row}")
    return candidates
