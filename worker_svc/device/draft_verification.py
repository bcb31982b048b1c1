"""Speculative decoding: verifies guessed tokens (drafts) of decoding rows, so that a step gives several tokens a row.

Drafts are verified as further rows of one token over the same block table, so that each is computed bitwise as in a
plain decode. The CPU library recognizes the rows of a sequence by their tables and lengths if they are consecutive in
the batch, and reads keys and values once for all.

At each drafted position the row draws as it would without drafts: from the logits, the prefix and the random number of
that position. Each draw is compared with the draft for the same position. The row keeps its draws up to and including
the first that differs. So drafts that are wrong cost time and change nothing. Keys and values that they left are
overwritten before they are read.

Layers that keep a state have taken in all drafts when the draws are known. So the pass also writes the state after each
token that a draft follows, as it writes checkpoints, to blocks that no sequence has. If not all drafts were right, the
state after the last right token is copied back to the row. A checkpoint of the step after such a token takes the place
of these blocks. If it is after a wrong draft, its content means nothing, and the scheduler does not use it: the row has
not come so far.

Drafts need a host that knows the tokens of the last step when it launches the next one, as on the CPU. There a step of
decodes may also run the model several times (each run is a pass), with a token per row each time: a small model takes
no longer for a token than the services take for the messages of a step.

A sample is an entry of `Batch.samples`: a row that draws a token, or several if it has drafts. A guess is a drafter's
proposal for a sample. Its first tokens, up to the number that the pass verifies, are the drafts of the sample. A step
calls `release_rows` and `apply_row_changes`, then in each pass `begin_pass` (guesses), `expand` (adds the drafts to the
batch) and after the draws `record_draws` (decides how many of them count), and at last `end_step`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from quire_kernels import ops
from worker_svc.device.draft_choice import Guesses, PayingDrafts
from worker_svc.device.draft_model import DraftModel
from worker_svc.device.flat_batch import count_up, sample_places
from worker_svc.device.kv_pool import KvPool
from worker_svc.device.rows import Rows
from worker_svc.sampling.drafters import OF_MODEL, Drafter, RowText
from worker_svc.sampling.sampler import Drawn
from worker_svc.sampling.sampling_table import SamplingColumns
from worker_svc.step import Batch, Int32Array, RowChanges, WorkerLimits

_MAX_PERIOD = 32
"""Maximum passes before the drafter looks again at a row for which it had no guess."""


class _Guess(NamedTuple):
    """Tokens that are guessed to follow a row, and that are written after its tokens."""

    sample: int
    """The sample of the step that it is for."""
    row: int
    kind: int
    num_tokens: int
    end: int
    """Number of tokens of the row, which is the position of the first guessed one."""


@dataclass(frozen=True, slots=True)
class _Guessed:
    """The guesses for a pass, and the parts of them that are verified."""

    guesses: Guesses
    samples: NDArray[np.int64]
    """The sample of the step that each guess is for."""
    first: NDArray[np.int32]
    """The first token of each guess. It is compared with the sample even if the guess is not verified."""
    num_drafts: NDArray[np.int32]
    """For each sample of the step, its number of drafts."""


@dataclass(frozen=True, slots=True)
class DraftedBatch:
    """A batch in which each drafted row occurs once for each of its tokens, in order. It has s samples, the tokens that
    may be drawn: for each sample of the step, one more than its drafts.

    A row that ends with token a and has the drafts b and c occurs three times, with the inputs a, b and c. If it draws
    b, x and y, then b and x are kept: x was drawn after b, as without drafts, and y after c, which is wrong.
    """

    batch: Batch
    places: NDArray[np.int64]
    """[s], the place in `batch.rows` that each draws from."""
    within: NDArray[np.int64]
    """[s], 0 for the first token of a sample of the step, counting up with its drafts."""
    inputs: NDArray[np.int32]
    """[s], the newest token before each draw, which is a draft if `within` is above 0."""
    num_drafts: NDArray[np.int32]
    """For each sample of the step, its number of drafts."""
    checkpoints: Int32Array
    """As `Step` has them: its own ones, and those after tokens that a draft follows, if layers keep states."""

    @property
    def precede_drafts(self) -> NDArray[np.bool_]:
        """[s], whether the input of a draw is followed by a draft."""
        return np.append(self.within[1:] > 0, False)

    def are_kept(self, token_ids: NDArray[np.integer], is_usable: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Which draws count, [s]: the first of each sample, and draws whose preceding drafts were all drawn. An
        unusable draw fails its row only if it is the first: a later one is repeated in the next step.

        Args:
            token_ids: [s], the drawn tokens.
            is_usable: [s], whether anything could be drawn.
        """
        is_wrong = self.within > 0
        is_wrong[1:] &= (token_ids[:-1] != self.inputs[1:]) | ~is_usable[:-1] | ~is_usable[1:]
        # Kept are the draws with no wrong one since the first of their sample.
        num_wrong = np.cumsum(is_wrong)
        return num_wrong == num_wrong[np.arange(len(num_wrong)) - self.within]


@dataclass(frozen=True, slots=True)
class Kept:
    """The draws that count."""

    draws: NDArray[np.int64]
    """Their places among all that were drawn, rising."""
    num_tokens: NDArray[np.int32]
    """Number of tokens of each sample of the step, at least 1."""
    num_drafts: NDArray[np.int32]
    """Number of verified drafts of each sample."""
    num_passes: int = 1
    """Number of runs of the model."""

    @classmethod
    def where(cls, are_kept: NDArray[np.bool_]) -> "Kept":
        """The draws to keep, of a pass without drafts: at most one for each sample."""
        return cls(np.flatnonzero(are_kept), are_kept.astype(np.int32), np.zeros(len(are_kept), np.int32))

    @classmethod
    def from_passes(cls, passes: Sequence["Kept | None"], num_samples: int) -> "Kept":
        """The draws of several consecutive passes, reordered by sample. None stands for a pass without drafts that kept
        one draw of each sample."""
        ones, zeros = np.ones(num_samples, np.int32), np.zeros(num_samples, np.int32)
        num_tokens = [ones if each is None else each.num_tokens for each in passes]
        num_drafts = [zeros if each is None else each.num_drafts for each in passes]
        samples = np.concatenate([np.arange(num_samples).repeat(each) for each in num_tokens])
        draws = np.argsort(samples, kind="stable")
        return cls(draws, np.stack(num_tokens).sum(0, np.int32), np.stack(num_drafts).sum(0, np.int32), len(passes))


class DraftStates:
    """The states of drafted rows after the tokens that drafts follow, until the draws are known.

    Args:
        pool: has a state for each draft of a pass.
    """

    def __init__(self, pool: KvPool, rows: Rows) -> None:
        self._pool, self._blocks, self._tables = pool, pool.draft_states, rows.state_tables

    @property
    def max_drafts(self) -> int:
        """The maximum for all rows of a pass."""
        return len(self._blocks)

    def add_checkpoints(self, drafted: DraftedBatch) -> DraftedBatch:
        """The batch with checkpoints after all tokens that drafts follow."""
        precede, of_step = drafted.precede_drafts, drafted.checkpoints
        rows, ends = drafted.batch.samples[precede, 0], drafted.batch.ends[drafted.places[precede]]
        added = np.column_stack((rows, ends, self._blocks[: len(rows)])).astype(np.int32)
        if len(of_step):
            index, same = np.nonzero((added[:, None, :2] == of_step[:, :2]).all(-1))
            added[index] = of_step[same]
            of_step = np.delete(of_step, same, axis=0)
        return replace(drafted, checkpoints=np.concatenate((added, of_step)))

    def take_back(self, drafted: DraftedBatch, num_tokens: NDArray[np.integer]) -> None:
        """Gives each row whose drafts were not all right its state after the last right one.

        Args:
            drafted: from `add_checkpoints`, when the pass has run.
            num_tokens: the number of tokens that each sample of the step got.
        """
        wrong = np.flatnonzero((drafted.num_drafts > 0) & (num_tokens <= drafted.num_drafts))
        if not len(wrong):
            return
        draws = np.flatnonzero(drafted.within == 0)[wrong] + np.maximum(num_tokens[wrong] - 1, 0)
        lines = drafted.checkpoints[np.cumsum(drafted.precede_drafts)[draws] - 1]
        pairs = np.stack((lines[:, 2:], self._tables[lines[:, 0]]), axis=-1).reshape(-1, 2)
        ops.copy_blocks(self._pool.gpu[:1], torch.from_numpy(pairs.astype(np.int64)))


class Drafts:
    """Tracks the number of tokens of each row, which the scheduler may not know yet, and drafts the next tokens."""

    def __init__(
        self,
        rows: Rows,
        drafter: Drafter | None,
        forced: Callable[[Sequence[int]], Mapping[int, Sequence[int]]],
        limits: WorkerLimits,
        model: DraftModel | None = None,
        states: DraftStates | None = None,
    ) -> None:
        """
        Args:
            rows: on the host.
            drafter: None for no drafts.
            forced: returns the forced next tokens of these constrained rows; omits rows without forced tokens.
            model: guesses for the rows that the drafter has no guess for.
            states: of drafted rows, if layers keep them.
        """
        self.choice: PayingDrafts | None = None
        """Set before the first step that may have drafts."""
        self.looked_in_vain = False
        """Whether the pass that began has looked for guesses and verifies none."""
        self._rows = rows
        self._token_ids = rows.token_ids.numpy()
        self._num_tokens = np.zeros(len(self._token_ids), np.int64)
        self._drafter = drafter
        self._model, self._states = model, states
        self._forced = forced
        self._max_drafts = limits.max_drafts
        self._max_verified = limits.max_verified if states is None else min(limits.max_verified, states.max_drafts)
        # The guesses of the current pass, until it has run.
        self._guessed: _Guessed | None = None
        self._scopes: dict[int, bytes] = {}
        # Rows whose constraint matcher has not seen their latest tokens.
        self._changed: set[int] = set()

    def release_rows(self, rows: Int32Array) -> None:
        """Lets the drafter learn the output of rows that are released. To be called before other sequences get them."""
        if self._drafter is None:
            return
        for row in rows.tolist():
            if scope := self._scopes.pop(row, b""):
                text = RowText(self._token_ids[row, : self._num_tokens[row]], scope=scope)
                self._drafter.add_output(text, int(self._rows.sampling.num_prompt_tokens[row]))

    def apply_row_changes(self, changes: RowChanges) -> None:
        """Follows the row changes of a step, which `Rows` has applied already."""
        if self._model is not None:
            self._model.apply_row_changes(changes)
        self._changed = {*(each.row for each in changes.assign), *changes.fork[:, 1].tolist()}
        self._changed.update(each.row for each in changes.set_tokens)
        for each in changes.assign:
            self._num_tokens[each.row] = len(each.token_ids)
            self._scopes[each.row] = each.draft_scope
        for parent, child in changes.fork.tolist():
            self._scopes[child] = self._scopes.get(parent, b"")
        self._num_tokens[changes.fork[:, 1]] = self._num_tokens[changes.fork[:, 0]]
        for each in changes.set_tokens:
            self._num_tokens[each.row] = each.position + len(each.token_ids)
        followed = self._rows.sampling.followed
        for row in self._changed:
            if self.choice is not None:
                self.choice.enter(row)
            if followed[row] is not None:
                followed[row] = followed[row].anew()

    def begin_pass(self, batch: Batch, left_s: float, *, is_first: bool) -> bool:
        """Chooses drafts for the next pass, which runs this batch, and returns whether there are any. To be called
        before each pass. `is_first` marks the first pass of a step, and `left_s` is the rest of the step's time."""
        self._guessed, self.looked_in_vain = None, False
        if not is_first:
            self._changed.clear()
        drafter, choice = self._drafter, self.choice
        if drafter is None or choice is None or not choice.begin_pass(len(batch.samples), left_s, is_first=is_first):
            return False
        self._guess(batch, drafter, choice)
        has_drafts = self._guessed is not None and bool(self._guessed.num_drafts.any())
        self.looked_in_vain &= not has_drafts
        return has_drafts

    def expand(self, batch: Batch, checkpoints: Int32Array) -> DraftedBatch:
        """Moves rows that sample to their real positions, which the scheduler may not know, and adds an entry for each
        draft. `begin_pass` has written the drafts to the rows. `checkpoints` are the step's."""
        samplers, sources = batch.samples.T
        places = sample_places(batch)
        computed = batch.num_computed_tokens.copy()
        computed[places] = self._num_tokens[sources] - batch.num_new_tokens[places]
        guessed = self._guessed
        num_drafts = np.zeros(len(samplers), np.int32) if guessed is None else guessed.num_drafts
        expanded = Batch(batch.rows, batch.num_new_tokens, computed, batch.samples)
        within = np.zeros(len(samplers), np.int64)
        if num_drafts.any():
            # A drafted row has an entry for each of its draws; all other rows keep one entry.
            num_entries, num_draws = np.ones(len(batch.rows), np.int64), 1 + num_drafts
            num_entries[places[num_drafts > 0]] = num_draws[num_drafts > 0]
            within = count_up(num_draws)
            places = (np.cumsum(num_entries) - num_entries)[places].repeat(num_draws) + within
            expanded = Batch(
                batch.rows.repeat(num_entries),
                batch.num_new_tokens.repeat(num_entries),
                (computed.repeat(num_entries) + count_up(num_entries)).astype(np.int32),
                batch.samples.repeat(num_draws, axis=0),
            )
        inputs = self._token_ids[expanded.rows, expanded.ends - 1][places]
        drafted = DraftedBatch(expanded, places, within, inputs, num_drafts, checkpoints)
        return drafted if self._states is None or not num_drafts.any() else self._states.add_checkpoints(drafted)

    def record_draws(
        self, batch: Batch, drafted: DraftedBatch, drawn: Drawn, columns: SamplingColumns, *, is_first: bool
    ) -> Kept | None:
        """Advances the rows of a pass by the drawn tokens. Returns the draws that count; None if each sample has one
        token and none had drafts. In a pass that is not the first of its step, an unusable sample has no token: the row
        fails in the next step."""
        samplers = batch.samples[:, 0]
        kept, num_tokens = None, np.ones(len(samplers), np.int32)
        is_usable = drawn.is_finite.numpy() & ~columns.is_refused
        if drafted.num_drafts.any() or not (is_first or is_usable.all()):
            are_kept = drafted.are_kept(drawn.token_ids.numpy(), is_usable)
            if not is_first:
                are_kept &= is_usable
            num_tokens = np.add.reduceat(are_kept, np.flatnonzero(drafted.within == 0), dtype=np.int32)
            kept = Kept(np.flatnonzero(are_kept), num_tokens, drafted.num_drafts)
        if self._states is not None and drafted.num_drafts.any():
            self._states.take_back(drafted, num_tokens)
        self._compare(drawn.token_ids.numpy()[drafted.within == 0], num_tokens)
        # Rows that report candidates, as for a beam search, draw no token.
        draws = self._rows.sampling.num_candidates[samplers] == 0
        self._num_tokens[samplers[draws]] += num_tokens[draws]
        if self._model is not None:
            self._model.record_lengths(samplers, self._num_tokens[samplers])
        return kept

    def extend(self, rows: NDArray[np.integer], token_ids: NDArray[np.integer]) -> None:
        """Each of these rows got a token, in a pass without drafts that drew `token_ids` for its samples."""
        self._num_tokens[rows] += 1
        self._compare(token_ids, np.ones(len(token_ids), np.int32))

    def num_tokens(self, rows: NDArray[np.integer]) -> NDArray[np.int64]:
        """Number of tokens of each of these rows."""
        return self._num_tokens[rows]

    def end_step(self, batch: Batch) -> None:
        """All passes of this batch have run."""
        if self._model is not None:
            rows = batch.samples[:, 0].astype(np.int64)
            self._model.end_step(rows, self._num_tokens[rows])

    def _guess(self, batch: Batch, drafter: Drafter, choice: PayingDrafts) -> None:
        """Writes guesses after the tokens of rows that may have drafts, and chooses the drafts that the pass
        verifies."""
        samplers = batch.samples[:, 0]
        # `Batch.max_drafts` counts a token for each run of the model but one, and then the drafts.
        max_drafts = np.minimum(batch.max_drafts - (batch.max_passes - 1), self._max_drafts)
        drafting = np.flatnonzero(max_drafts > 0)
        drafting = drafting[choice.are_due(samplers[drafting])] if len(drafting) else drafting
        if not len(drafting):
            return
        self.looked_in_vain = True
        found = self._guess_by_drafter(drafter, drafting, samplers[drafting], max_drafts[drafting])
        if self._model is not None and len(missing := _without_guess(drafting, found)):
            guesses = Guesses(
                samplers[missing].astype(np.int64),
                np.full(len(missing), OF_MODEL),
                max_drafts[missing].astype(np.int64),
                self._num_tokens[samplers[missing]],
            )
            found += self._guess_by_model(self._model, choice, missing, guesses, len(samplers))
        if len(missing := _without_guess(drafting, found)):
            rows_missing = samplers[missing].tolist()
            choice.found_nothing(rows_missing, list(map(self._max_period, rows_missing)))
        if not found:
            return
        guessing, rows, kinds, num_tokens, ends = np.array(found).T
        guesses, num_drafts = Guesses(rows, kinds, num_tokens, ends), np.zeros(len(samplers), np.int32)
        chosen = choice.choose(guesses, len(samplers))
        num_drafts[guessing] = np.clip(self._max_verified - (np.cumsum(chosen) - chosen), 0, chosen)
        self._guessed = _Guessed(guesses, guessing, self._token_ids[rows, ends], num_drafts)

    def _guess_by_drafter(
        self, drafter: Drafter, samples: NDArray[np.int64], rows: Int32Array, max_drafts: Int32Array
    ) -> list[_Guess]:
        """Guesses for these samples of the step, of at most `max_drafts` tokens each. All are [n]."""
        sampling = self._rows.sampling
        constrained = [row for row in rows[sampling.has_constraint[rows]].tolist() if row not in self._changed]
        forced = self._forced(constrained) if constrained else {}
        found: list[_Guess] = []
        for sample, row, maximum in zip(samples.tolist(), rows.tolist(), max_drafts.tolist(), strict=True):
            end = int(self._num_tokens[row])
            scope = self._scopes.get(row, b"")
            text = RowText(self._token_ids[row, :end], sampling.followed.item(row), forced.get(row, ()), scope)
            token_ids, kind = drafter.draft(text, maximum)
            if len(token_ids):
                self._token_ids[row, end : end + len(token_ids)] = token_ids
                found.append(_Guess(sample, row, kind, len(token_ids), end))
        return found

    def _guess_by_model(
        self, model: DraftModel, choice: PayingDrafts, samples: NDArray[np.int64], most: Guesses, num_rows: int
    ) -> list[_Guess]:
        """Guesses of the draft model for these samples that are expected to pay; `most` are the largest ones."""
        counts = choice.plan(most, num_rows, model.num_missing(most.rows, most.lengths))
        model.guess(most.rows, most.lengths, counts)
        columns = (each[counts > 0].tolist() for each in (samples, most.rows, most.kinds, counts, most.lengths))
        return [_Guess(*guess) for guess in zip(*columns, strict=True)]

    def _max_period(self, row: int) -> int:
        """Maximum passes until a row is looked at again: few if it has a prediction, which soon matches again."""
        followed = self._rows.sampling.followed[row]
        return _MAX_PERIOD if followed is None else max(followed.num_beside // 4, 1)

    def _compare(self, firsts: NDArray[np.integer], num_tokens: NDArray[np.integer]) -> None:
        """Reports which guesses of this pass were correct; for guesses that were not verified, only the first token.
        Each sample has the first of its draws and the number of kept ones."""
        guessed, choice = self._guessed, self.choice
        if guessed is None or choice is None:
            return
        num_drafts, samples = guessed.num_drafts[guessed.samples], guessed.samples
        num_right = np.where(num_drafts > 0, num_tokens[samples] - 1, firsts[samples] == guessed.first)
        choice.record_outcomes(guessed.guesses, np.maximum(num_drafts, 1), np.maximum(num_right, 0))


def _without_guess(samples: NDArray[np.int64], found: Sequence[_Guess]) -> NDArray[np.int64]:
    return samples[~np.isin(samples, [each.sample for each in found])]
