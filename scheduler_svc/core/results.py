"""Applies the result of a step: tokens, ends, the steps of beam searches, and blocks to seal.

A result is checked as a whole before any part of it is applied, so that an invalid one changes nothing.
"""

import math
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import cast

import numpy as np

from quire.messages.logprob_columns import LogprobColumns, LogprobLog
from scheduler_svc.core.beam_search import Candidates, Continuation, NoCandidatesError
from scheduler_svc.core.paging.batch import Array
from scheduler_svc.core.paging.scheduler import end_sequences
from scheduler_svc.core.policy import GroupQueue
from scheduler_svc.core.request import ClientId, Request
from scheduler_svc.core.running_batch import Batch, RowTable
from scheduler_svc.core.sequence import BeamGroup, FinishReason, Sequence, SequenceGroup
from scheduler_svc.core.step import (
    ClientEvents,
    RequestEnd,
    RequestFailure,
    SampleLogprobs,
    SequenceEnd,
    StepInFlight,
    StepResult,
    Usage,
)

_MAX_TOKEN_ID = 2**31 - 1
"""Token ids travel, and are hashed, as int32."""


def check_result(step: StepInFlight, result: StepResult, table: RowTable) -> None:
    """Raises ValueError unless `Results.apply` can apply all of the result. Changes nothing.

    Rows that were released since the step was planned are ignored: `apply` drops their part of the result.
    """
    num_tokens = _check_tokens(step, result)
    reported = {*result.failures, *result.candidates}
    if reported and (unexpected := reported.difference(step.rows.tolist())):
        raise ValueError(f"the result of step {step.step_id} reports rows {sorted(unexpected)}, which do not sample")
    if unexpected := result.non_finite_chunks.difference(step.chunk_rows.tolist()):
        raise ValueError(
            f"the result of step {step.step_id} reports chunks of rows {sorted(unexpected)}, which compute none"
        )
    current = table.incarnation[step.rows] == step.incarnations
    if result.failures:
        current &= ~np.isin(step.rows, list(result.failures))
    rows = step.rows[current]
    for row in rows[table.dependent[rows]].tolist():
        _check_candidates(row, step.step_id, result.candidates.get(row))
    wants_logprobs = table.wants_logprobs[step.rows]
    if result.logprobs is None and not wants_logprobs.any():
        return
    rows = step.rows
    if num_tokens is not None:
        rows, current, wants_logprobs = (each.repeat(num_tokens) for each in (rows, current, wants_logprobs))
    has_logprobs = np.zeros(len(rows), dtype=bool)
    if result.logprobs is not None:
        _check_logprobs(step, rows, current, result.logprobs, table)
        has_logprobs[result.logprobs.samples] = True
    if (current & wants_logprobs & ~has_logprobs).any():
        missing = rows[current & wants_logprobs & ~has_logprobs].tolist()
        raise ValueError(f"the result of step {step.step_id} has no log probabilities of rows {missing}")
    if (current & ~wants_logprobs & has_logprobs).any():
        unrequested = rows[current & ~wants_logprobs & has_logprobs].tolist()
        raise ValueError(
            f"the result of step {step.step_id} has log probabilities of rows {unrequested}, which did not request them"
        )


def _check_tokens(step: StepInFlight, result: StepResult) -> Array | None:
    """Returns `result.num_tokens`."""
    token_ids, num_tokens = result.token_ids, _check_counts(step, result)
    expected = len(step.rows) if num_tokens is None else int(num_tokens.sum())
    if token_ids.shape != (expected,):
        raise ValueError(f"step {step.step_id} sampled {len(step.rows)} rows, its result has {token_ids.size} tokens")
    if not expected:
        return num_tokens
    if token_ids.dtype.kind not in "iu":
        raise ValueError(f"the tokens of step {step.step_id} are {token_ids.dtype}, not integers")
    lowest, highest = int(token_ids.min()), int(token_ids.max())
    if lowest < 0 or highest > _MAX_TOKEN_ID:
        raise ValueError(f"step {step.step_id} sampled tokens from {lowest} to {highest}; they are in [0, 2**31)")
    return num_tokens


def _check_counts(step: StepInFlight, result: StepResult) -> Array | None:
    num_tokens, num_drafts, max_drafts = result.num_tokens, result.num_drafts, step.max_drafts
    if num_tokens is None and num_drafts is None:
        return None
    shapes = {None if each is None else each.shape for each in (num_tokens, num_drafts)}
    if num_tokens is None or num_drafts is None or max_drafts is None or shapes != {step.rows.shape}:
        sizes = ["no" if each is None else str(each.size) for each in (num_tokens, num_drafts)]
        raise ValueError(
            f"the result of step {step.step_id} has {sizes[0]} counts of tokens and {sizes[1]} of drafts; the step has "
            f"{len(step.rows)} samples{' that may have no drafts' if max_drafts is None else ''}"
        )
    max_tokens = np.minimum(max_drafts + 1, num_drafts + result.num_passes)
    invalid = (num_drafts < 0) | (num_tokens < 1) | (num_tokens > max_tokens)
    if invalid.any():
        raise ValueError(
            f"rows {step.rows[invalid].tolist()} have {num_tokens[invalid].tolist()} tokens and "
            f"{num_drafts[invalid].tolist()} drafts in step {step.step_id}, in which the model ran {result.num_passes} "
            f"times; they may have {(max_drafts[invalid] + 1).tolist()} tokens"
        )
    return num_tokens


def _check_candidates(row: int, step_id: int, candidates: Candidates | None) -> None:
    """Without candidates a search would never end; it merges the candidates of its beams, so they must be in order."""
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


def _check_logprobs(
    step: StepInFlight, token_rows: Array, current: Array, logprobs: SampleLogprobs, table: RowTable
) -> None:
    logprobs.check(len(token_rows))
    columns, rows = logprobs.columns, token_rows[logprobs.samples]
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
    """Applies one step's result. `events` collects the events for clients, `ended_groups` the groups that finished."""

    def __init__(self, batch: Batch, running: GroupQueue, now: float) -> None:
        self._batch, self._running = batch, running
        self._now = now
        self.ended_groups: list[SequenceGroup] = []
        self.events: dict[ClientId, ClientEvents] = {}
        self.further: tuple[Array, Array] | None = None
        """Rows that got several tokens in this step, and their numbers of tokens beyond one that the sequences kept."""

    def apply(self, step: StepInFlight, result: StepResult) -> None:
        """Applies the result of `step`, which passed `check_result`. Drops the results of rows that were released
        since."""
        table = self._batch.rows
        checkpoints = [(each, each.sequence.num_tokens) for each in self._batch.checkpoints.pop(step.step_id, ())]
        current = table.incarnation[step.rows] == step.incarnations
        if step.max_drafts is not None:
            counts = 1 if result.num_tokens is None else result.num_tokens
            num_missing = 1 + step.max_drafts - counts
            rows = step.rows[current]
            table.settle(rows, step.max_drafts[current], num_missing[current])
            if result.num_drafts is not None:
                self._batch.drafts.answered(rows, result.num_drafts[current])
        draws = current & ~table.dependent[step.rows]
        if result.failures:
            draws &= ~np.isin(step.rows, [*result.failures])
        due = self._append(step, draws.nonzero()[0], result) if draws.any() else []
        self._seal(step, current, result)
        incomplete = self._seal_chunks(step, result)
        if checkpoints:
            not_finite = step.chunk_rows[~table.seals_chunks[step.chunk_rows]].tolist()
            self._batch.end_checkpoints(checkpoints, failed={*not_finite, *result.failures})
        if due:
            self._handle_due(due, result.vectors)
        for sample in (current & ~draws).nonzero()[0].tolist():
            self._apply_other(int(step.rows[sample]), result)
        for request in incomplete:
            if request.key in self._running:
                message = "the log probabilities of the prompt are not finite"
                self._fail(RequestFailure(request.key, "NON_FINITE_LOGITS", message))

    def _append(self, step: StepInFlight, samples: Array, result: StepResult) -> list[Sequence]:
        """Appends the drawn tokens to their sequences, up to the token that ends each. The events are made of whole
        arrays. Returns the sequences whose newest token is the first from this scheduler or may be the last."""
        table = self._batch.rows
        rows = step.rows[samples]
        known = table.num_known[rows]
        tokens, counts, places, offsets = samples, 1, slice(None), known - table.num_prompt[rows]
        if result.num_tokens is not None:
            firsts = (np.cumsum(result.num_tokens) - result.num_tokens)[samples]
            counts = self._num_kept(rows, firsts, result.num_tokens[samples], result.token_ids)
            self._count_drafts(rows, samples, counts, result)
            self.further = rows[counts > 1], counts[counts > 1] - 1
            places = np.arange(len(rows)).repeat(counts)
            behind = np.arange(len(places)) - (np.cumsum(counts) - counts).repeat(counts)
            tokens, offsets = firsts[places] + behind, offsets[places] + behind
        token_ids = result.token_ids[tokens]
        self._report_tokens(rows[places], offsets, tokens, token_ids, result.logprobs)
        table.num_known[rows] = known = known + counts
        ends = token_ids
        if not isinstance(counts, int):
            lasts = np.cumsum(counts) - 1
            ends = token_ids[lasts]
            for place in (counts > 1).nonzero()[0].tolist():
                before = token_ids[lasts[place] + 1 - counts[place] : lasts[place]]
                self._batch.sequence(int(rows[place])).token_ids += before.tolist()
        is_due = (known - counts == table.num_prompt[rows] + table.num_emitted[rows]) | (known >= table.max_len[rows])
        return _append_tokens(table, rows, ends, is_due)

    def _num_kept(self, rows: Array, firsts: Array, counts: Array, token_ids: Array) -> Array:
        """The number of new tokens that each row keeps: up to the token that ends its sequence."""
        kept = counts.copy()
        for place in (counts > 1).nonzero()[0].tolist():
            stops = self._batch.sequence(int(rows[place])).request.stop_token_ids
            first, count = int(firsts[place]), int(counts[place])
            if not stops.isdisjoint(new := token_ids[first : first + count].tolist()):
                kept[place] = next(index for index, token_id in enumerate(new, 1) if token_id in stops)
        return kept

    def _count_drafts(self, rows: Array, samples: Array, num_kept: Array, result: StepResult) -> None:
        if result.num_tokens is None or result.num_drafts is None:
            return
        num_drafts = result.num_drafts[samples]
        # Each run of the model draws a token that is no draft; the row may have ended before that.
        num_accepted = np.clip(result.num_tokens[samples] - result.num_passes, 0, np.minimum(num_kept, num_drafts))
        for place in num_drafts.nonzero()[0].tolist():
            sequence = self._batch.sequence(int(rows[place]))
            sequence.num_drafted += int(num_drafts[place])
            sequence.num_accepted += int(num_accepted[place])

    def _report_tokens(
        self, rows: Array, offsets: Array, tokens: Array, token_ids: Array, logprobs: SampleLogprobs | None
    ) -> None:
        """Reports the new tokens of plain sequences, and keeps the log probabilities of sequences to select from."""
        table = self._batch.rows
        plain = table.is_plain[rows]
        if not plain.all():
            for row, token in zip(rows[~plain].tolist(), tokens[~plain].tolist(), strict=True):
                if logprobs is not None and (columns := logprobs.of_sample(token)) is not None:
                    sequence = self._batch.sequence(row)
                    sequence.cumulative_logprob += float(columns.chosen_logprobs[0])
                    if sequence.request.sampling.logprobs is not None:
                        sequence.held_back.append(columns)
            rows, offsets, tokens, token_ids = (each[plain] for each in (rows, offsets, tokens, token_ids))
        clients = table.client[rows]
        distinct = sorted(set(clients.tolist()))
        for client in distinct:
            own = clients == client if len(distinct) > 1 else slice(None)
            events = self._events_of(ClientId(client))
            if logprobs is not None:
                places, columns = logprobs.of(tokens[own])
                events.with_logprobs += (places + len(events.token_ids)).tolist()
                events.logprobs.append(columns)
            events.handles += table.handle[rows[own]].tolist()
            events.sequence_indices += table.index[rows[own]].tolist()
            events.offsets += offsets[own].tolist()
            events.token_ids += token_ids[own].tolist()

    def _apply_other(self, row: int, result: StepResult) -> None:
        """Applies the result of a row that failed, or that belongs to a beam search."""
        sequence = self._batch.rows.sequences[row]
        # Rows that were released before this step are dropped already. Another row of the group may have failed in it.
        if sequence is None:
            return
        if (message := result.failures.get(row)) is None:
            self._collect(sequence, result.candidates[row])
        elif row in result.refused:
            self._fail(RequestFailure(sequence.request.key, "INVALID_SAMPLING", message))
        else:
            self._fail(RequestFailure(sequence.request.key, "NON_FINITE_LOGITS", message))

    def _seal(self, step: StepInFlight, current: Array, result: StepResult) -> None:
        """Seals blocks that are full now, so that others can share them. A row that samples a token has finite keys and
        values, so blocks that a failing request computed are never sealed. Layers with a window do not read all of its
        context: with them a row seals nothing more after a chunk that was not finite.

        The newest token of a beam may be computed again, if the group is swapped before all its candidates came: its
        block is not final yet.
        """
        batch = self._batch
        # All tokens but the newest are computed; of a beam the newest one is too.
        num_full = (batch.rows.num_known[step.rows] - 1) // batch.blocks.block_size
        for index in (current & (num_full > batch.rows.num_sealed[step.rows])).nonzero()[0].tolist():
            row = int(step.rows[index])
            if row in result.failures:
                batch.underway.stop(row)
            elif batch.rows.seals_chunks[row] or not batch.blocks.blank:
                batch.seal(row, int(num_full[index]))

    def _seal_chunks(self, step: StepInFlight, result: StepResult) -> list[Request]:
        """Seals blocks of chunks of prefills before the last chunk. After a chunk that is not finite, the row seals
        nothing more until it samples: its logits then show whether its context is finite. Returns the requests
        whose prompts lack log probabilities because of such a chunk: with windows, their tokens may be finite."""
        batch, rows, incomplete = self._batch, step.chunk_rows, list[Request]()
        if not len(rows):
            return incomplete
        current = batch.rows.incarnation[rows] == step.chunk_incarnations
        if result.non_finite_chunks:
            invalid = rows[current & np.isin(rows, list(result.non_finite_chunks))]
            batch.rows.seals_chunks[invalid] = False
            ends = dict(zip(rows.tolist(), step.chunk_num_computed.tolist(), strict=True))
            for row in invalid.tolist():
                sequence = batch.sequence(row)
                sequence.is_finite = False
                batch.underway.stop(row)
                sampling = sequence.request.sampling
                asks = sampling.prompt_logprobs is not None and not sequence.num_output_tokens
                if asks and ends[row] >= sampling.prompt_logprobs_start:
                    incomplete.append(sequence.request)
        num_full = step.chunk_num_computed // batch.blocks.block_size
        due = current & batch.rows.seals_chunks[rows] & (num_full > batch.rows.num_sealed[rows])
        for row, count in zip(rows[due].tolist(), num_full[due].tolist(), strict=True):
            batch.seal(row, count)
        return incomplete

    def _handle_due(self, sequences: SequenceOf[Sequence], vectors: Mapping[int, bytes]) -> None:
        """Handles newest tokens that may be the last of their sequence, or its first from this scheduler. `vectors` are
        keyed by row."""
        running, now = self._running, self._now
        ending: list[Sequence] = []
        for sequence in sequences:
            group = running.get(sequence.key)
            if group.timeline.first_token is None:
                group.timeline.first_token = now
            reason = sequence.end_reason()
            if reason is not None:
                sequence.finish_reason = reason
                ending.append(sequence)
                if not sequence.request.selects:
                    vector = b"" if sequence.row is None else vectors.get(sequence.row, b"")
                    end = _sequence_end(sequence, sequence.index, vector)
                    self._events_of(sequence.request.key.client).finished.append(end)
        if ending:
            self._end_groups(end_sequences(self._batch, self._running, ending))

    def _collect(self, sequence: Sequence, candidates: Candidates) -> None:
        """Collects one beam's candidates, and continues the search once all beams have theirs."""
        group = self._running.get(sequence.request.key)
        assert group.beams is not None
        group.beams.candidates[sequence.index] = candidates
        if len(group.beams.candidates) == len(group.beams.beams):
            if group.timeline.first_token is None:
                group.timeline.first_token = self._now
            try:
                self._advance(group.beams)
            except NoCandidatesError as error:
                # The same reasons as for a sampled row whose parameters leave no token.
                reason = "INVALID_SAMPLING" if sequence.request.has_constraint else "NON_FINITE_LOGITS"
                self._fail(RequestFailure(sequence.request.key, reason, str(error)))
                return
            if not group.beams.beams:
                self._batch.end(group.unfinished)
                self._end_groups([group])

    def _advance(self, beams: BeamGroup) -> None:
        """Advances a search by one step; all its beams have their candidates. `beams` is empty when it is over.

        A parent that continues keeps its row and its blocks for its best continuation. Every other continuation of it
        goes to a sequence whose beam was dropped, which then shares all of the parent's blocks; only blocks that they
        write afterwards are copied. Raises NoCandidatesError.
        """
        parents = beams.beams
        candidates = [beams.candidates[sequence.index] for sequence in parents]
        beams.candidates.clear()
        step = beams.search.advance(candidates, [sequence.output for sequence in parents])
        beams.num_generated += len(parents)
        for each in step.finished:
            sequence = parents[each.parent]
            last = _logprobs_of(sequence, candidates[each.parent], each.place)
            if last is not None:
                logprobs = beams.logprobs[each] = sequence.held_back.copy()
                logprobs.append(last)
        if beams.logprobs and step.finished:
            # Values of hypotheses that better ones have replaced would add up to the square of the length.
            best = beams.search.best()
            beams.logprobs = {each: beams.logprobs[each] for each in best}
        # Taken before a parent's sequence continues: all its continuations share its log probabilities.
        chosen = [
            _logprobs_of(parents[each.parent], candidates[each.parent], each.place) for each in step.continuations
        ]
        beams.beams = self._fork(parents, step.continuations)
        for sequence, continuation, logprobs in zip(beams.beams, step.continuations, chosen, strict=True):
            self._batch.append_chosen(sequence, continuation.token_id)
            if logprobs is not None:
                sequence.held_back.append(logprobs)

    def _fork(self, beams: SequenceOf[Sequence], continuations: SequenceOf[Continuation]) -> list[Sequence]:
        """The sequence of each continuation, with the tokens and blocks of its parent."""
        continued = {each.parent for each in continuations}
        dropped = [sequence for index, sequence in enumerate(beams) if index not in continued] if continuations else []
        self._batch.blocks.free(*dropped)
        taken: set[int] = set()
        chosen: list[Sequence] = []
        for each in continuations:
            sequence = parent = beams[each.parent]
            if each.parent in taken:
                sequence = dropped.pop()
                sequence.become_fork_of(parent)
                self._batch.fork(parent, sequence)
            taken.add(each.parent)
            chosen.append(sequence)
        return chosen

    def _fail(self, failure: RequestFailure) -> None:
        group = self._running.remove(failure.key)
        self._batch.end(group.unfinished)
        self.ended_groups.append(group)
        self._events_of(failure.key.client).failed.append(failure)

    def _end_groups(self, groups: SequenceOf[SequenceGroup]) -> None:
        """Completes groups whose sequences have all given back their rows and blocks."""
        for group in groups:
            group.timeline.last_token = self._now
            self._report_end(group)
        self._running.remove_all(groups)
        self.ended_groups += groups

    def _report_end(self, group: SequenceGroup) -> None:
        """Adds the end of a request, and first the sequences that were held back until the selection."""
        if group.beams is not None:
            self._deliver_hypotheses(group, group.beams)
        elif group.request.selects:
            self._deliver_best(group)
        key = group.request.key
        self._events_of(key.client).completed.append(RequestEnd(key.handle, usage_of(group)))

    def _deliver_best(self, group: SequenceGroup) -> None:
        """Delivers the sequences with the highest mean log probability, best first."""
        best_first = sorted(group.sequences, key=lambda each: -each.cumulative_logprob / each.num_output_tokens)
        for index, sequence in enumerate(best_first[: group.request.num_returned]):
            self._deliver(group, index, sequence.output, sequence.held_back)
            self._events_of(group.request.key.client).finished.append(_sequence_end(sequence, index))

    def _deliver_hypotheses(self, group: SequenceGroup, beams: BeamGroup) -> None:
        """Delivers the hypotheses of the search, best first."""
        key = group.request.key
        for index, hypothesis in enumerate(beams.search.best()[: group.request.num_returned]):
            self._deliver(group, index, hypothesis.token_ids, beams.logprobs.get(hypothesis, LogprobLog()))
            self._events_of(key.client).finished.append(
                SequenceEnd(
                    handle=key.handle,
                    sequence_index=index,
                    num_tokens=len(hypothesis.token_ids),
                    reason=FinishReason.STOP if hypothesis.ended_by_token else FinishReason.LENGTH,
                    stop_token_id=hypothesis.token_ids[-1] if hypothesis.ended_by_token else None,
                    cumulative_logprob=hypothesis.cumulative_logprob,
                )
            )

    def _deliver(self, group: SequenceGroup, index: int, output: SequenceOf[int], logprobs: LogprobLog) -> None:
        """Adds all tokens of a sequence; `logprobs` has one position for each token, or none at all."""
        key = group.request.key
        events = self._events_of(key.client)
        first = len(events.token_ids)
        events.with_logprobs += range(first, first + len(logprobs))
        events.logprobs.extend(logprobs)
        events.handles += [key.handle] * len(output)
        events.sequence_indices += [index] * len(output)
        events.offsets += range(len(output))
        events.token_ids += output

    def _events_of(self, client: ClientId) -> ClientEvents:
        if client not in self.events:
            self.events[client] = ClientEvents()
        return self.events[client]


_FEW_STOP_SETS = 8
"""Up to this many sets of stop tokens are looked up for all rows together."""


def _append_tokens(table: RowTable, rows: Array, token_ids: Array, is_due: Array) -> list[Sequence]:
    """`paging.scheduler.append_tokens`, faster while no sequence gets a stop token."""
    sequences = [cast(Sequence, table.sequences[row]) for row in rows.tolist()]
    tokens: list[int] = token_ids.tolist()
    for sequence, token_id in zip(sequences, tokens, strict=True):
        sequence.token_ids.append(token_id)
    # Most requests have the model's stop tokens, and most steps none of them.
    if len(table.stop_sets) > _FEW_STOP_SETS or not all(each.isdisjoint(tokens) for each in table.stop_sets):
        pairs = enumerate(zip(sequences, tokens, strict=True))
        is_due = is_due.copy()
        is_due[[place for place, (sequence, token_id) in pairs if token_id in sequence.stop_token_ids]] = True
    return [sequences[place] for place in is_due.nonzero()[0].tolist()]


def _logprobs_of(sequence: Sequence, candidates: Candidates, place: int) -> LogprobColumns | None:
    """The log probabilities of a beam's candidate, if the request wants them."""
    num_top = sequence.request.sampling.logprobs
    if num_top is None:
        return None
    token_ids, logprobs = candidates.token_ids[:num_top], candidates.logprobs[:num_top]
    return LogprobColumns(
        np.array([candidates.logprobs[place]], np.float32),
        np.array([place + 1], np.int32),
        np.array([len(token_ids)], np.int32),
        np.array(token_ids, np.int32),
        np.array(logprobs, np.float32),
    )


def _sequence_end(sequence: Sequence, index: int, vector: bytes = b"") -> SequenceEnd:
    request, token_ids, reason = sequence.request, sequence.token_ids, sequence.finish_reason
    assert reason is not None
    stop_token_id = token_ids[-1] if reason is FinishReason.STOP else None
    cumulative_logprob = sequence.cumulative_logprob if request.selects else None
    num_tokens = len(token_ids) - len(request.prompt)
    return SequenceEnd(request.key.handle, index, num_tokens, reason, stop_token_id, cumulative_logprob, vector)


def usage_of(group: SequenceGroup) -> Usage:
    line = group.timeline
    started = line.arrived if line.started is None else line.started
    first = started if line.first_token is None else line.first_token
    last = first if line.last_token is None else line.last_token
    num_prompt = len(group.request.prompt)
    if group.beams is not None:
        num_generated = group.beams.num_generated
    else:
        num_generated = sum([len(each.token_ids) for each in group.sequences]) - num_prompt * len(group.sequences)
    times = (started - line.arrived, first - started, last - first)
    drafts = (sum(each.num_drafted for each in group.sequences), sum(each.num_accepted for each in group.sequences))
    return Usage(num_prompt, group.cached_tokens or 0, num_generated, group.preemptions, *times, *drafts)
