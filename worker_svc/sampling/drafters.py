"""Drafters: guesses of the tokens that a row will draw next, which a step verifies.

A drafter is a function of the row's tokens, so that all ranks draft alike. What it guesses decides how many tokens a
step gives, never which: a draft counts only where the row draws that very token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from worker_svc.step import Int32Array

_NONE = np.zeros(0, np.int32)
_FRESH_RUN, _FOLLOWED_RUN = 2, 8
"""A prediction is trusted more after so many tokens that followed it."""
_GRAMMAR = 3
_NGRAM = 4
_SHARED = 8
OF_MODEL = 11
EXPECTED_RIGHT = (0.4, 0.8, 0.95, 0.8, 0.3, 0.5, 0.6, 0.75, 0.5, 0.6, 0.75, 0.7)
"""By kind of draft: how probably its next token is right, before anything was seen. Three kinds are from predictions,
one from constraints, four from repetitions and three from earlier outputs, by how many tokens matched, and one from a
draft model."""
_MIN_SHARED_MATCH = 4
_MAX_SCOPES, _MAX_TOKENS_OF_SCOPE = 64, 16384
"""Of earlier outputs, so many scopes are kept, and of each so many of its last tokens: 4 MiB."""
_NUM_LED_BY = 6
"""So many tokens of the prompt are kept before an output, so that its beginning is found."""
_BETWEEN = -1
"""Between two outputs; no token."""
_MIN_MATCH, _MAX_MATCH = 2, 6
"""Of the last tokens of a row, so many at least occur before, and the place where most of them do, up to so many, is
taken."""
_WINDOW = 2048
"""A prediction is searched for the row's last tokens this far before and behind where they are expected."""
_MAX_CATCH_UP = 64
"""Of a row that comes with output, so many last tokens tell the place in its prediction."""
_FAR, _NUM_SOUGHT = 16, 4
"""A row that left its prediction looks for its newest tokens, so many; after so many tokens for the last one only."""
_MIN_REPLACED, _MAX_REPLACED = 2, 16
"""Where the output has other tokens than the prediction, so many of them at least and at most, it is expected to have
these in all of the rest. A single token may be a comma."""
_NEAR = 8
"""Up to this distance from where it is expected a single token tells the place, else `_MIN_MATCH` do."""


class Draft(NamedTuple):
    """Guessed tokens, and of what kind they are: those of one kind are about equally probable."""

    token_ids: Int32Array
    kind: int = 0


NO_DRAFT = Draft(_NONE)


class PredictedTokens:
    """What the caller of a row expects it to say, and where its tokens are."""

    def __init__(self, token_ids: Int32Array) -> None:
        self.token_ids = token_ids
        # Made when first needed: the tokens in order with their places, and all pairs in order.
        self._index: tuple[Int32Array, NDArray[np.intp], NDArray[np.int64]] | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    def may_be_found(self, last: Sequence[int], begin: int, end: int) -> bool:
        """Whether the last two tokens are anywhere in it, or the last one from `begin` to before `end`. Of most text
        that is another one neither is, and to search for it takes longer."""
        if self._index is None:
            # Dictionaries and lists of the places take ten times as long to make.
            order = np.argsort(self.token_ids, kind="stable")
            self._index = self.token_ids[order], order, np.sort(_pairs_of(self.token_ids))
        tokens, order, pairs = self._index
        first, stop = tokens.searchsorted(last[-1]), tokens.searchsorted(last[-1], "right")
        if first == stop:
            return False
        pair = (last[0] << 32) + last[-1]
        at = pairs.searchsorted(pair)
        if at < len(pairs) and pairs[at] == pair:
            return True
        places = order[first:stop]
        at = places.searchsorted(begin)
        return bool(at < len(places) and places[at] < end)


@dataclass(slots=True)
class FollowedPrediction:
    """A prediction, and how far the row has followed it."""

    predicted: PredictedTokens
    num_prompt_tokens: int
    num_seen: int | None = None
    """How many of the row's tokens `place` is for; None before the first draft."""
    place: int = 0
    """Where the prediction goes on if the output follows it, or token by token beside it while it does not."""
    left_at: int | None = None
    """Where the output left the prediction, until it is found there again."""
    run: int = _FRESH_RUN
    """How many tokens followed it since; a new row is trusted as if some had."""
    original: PredictedTokens | None = None
    """That of the caller, where what the output replaced is replaced in the rest of `predicted`."""

    def anew(self) -> "FollowedPrediction":
        """For a row whose tokens are others than before, or that continues another."""
        return FollowedPrediction(self.original or self.predicted, self.num_prompt_tokens)

    @property
    def num_beside(self) -> int:
        """How many tokens ago the output left the prediction."""
        return 0 if self.left_at is None else self.place - self.left_at

    def after(self, token_ids: Int32Array, max_drafts: int) -> Int32Array:
        """What comes next after the row's tokens, which are at least those of the last call; nothing where the output
        has left the prediction."""
        if self.num_seen is None:
            self.num_seen = max(self.num_prompt_tokens, len(token_ids) - _MAX_CATCH_UP)
            self.place = self.num_seen - self.num_prompt_tokens
        while self.num_seen < len(token_ids):
            num_equal = self._num_equal(token_ids[self.num_seen :], self.predicted.token_ids[self.place :])
            if num_equal:
                self.left_at = None
                self.run += num_equal
            else:
                num_equal = 1
                if self.left_at is None:
                    self.left_at = self.place
                # A row that is looked at after many tokens: the newest tell the place, and each search takes time.
                num_sought = 1 if self.num_beside >= _FAR else _NUM_SOUGHT
                if (num_skipped := len(token_ids) - self.num_seen - num_sought) > 0:
                    self.num_seen, self.place = self.num_seen + num_skipped, self.place + num_skipped
                self._find(token_ids[: self.num_seen + 1], self.left_at)
            self.num_seen += num_equal
            self.place += num_equal
        return _NONE if self.left_at is not None else self.predicted.token_ids[self.place : self.place + max_drafts]

    def _num_equal(self, new: Int32Array, expected: Int32Array) -> int:
        length = min(len(new), len(expected))
        if not length or new[0] != expected[0]:
            return 0
        differ = np.flatnonzero(new[:length] != expected[:length])
        return int(differ[0]) if len(differ) else length

    def _find(self, token_ids: Int32Array, left_at: int) -> None:
        """The last of these is not what was predicted. Sets `place` to where it is, near where the output should be if
        it left out or added tokens."""
        last: list[int] = token_ids[-2:].tolist()
        if not self.predicted.may_be_found(last, left_at - _NEAR, self.place + _NEAR + 1):
            return
        begin = max(left_at - _WINDOW, 0)
        ends, num_matched = _longest_matches(self.predicted.token_ids[begin : self.place + _WINDOW], token_ids)
        if num_matched:
            distances = np.maximum(left_at - begin - ends, 0) + np.maximum(ends + begin - self.place, 0)
            nearest = int(np.argmin(distances))
            if num_matched >= _MIN_MATCH or distances[nearest] <= _NEAR:
                num_beside = self.num_beside + 1
                self.place, self.left_at = begin + int(ends[nearest]), None
                self.run = 0
                self._replace(token_ids[-num_beside:], left_at)

    def _replace(self, beside: Int32Array, left_at: int) -> None:
        """The output had `beside`, the last of which is at `place` again, where the prediction goes on from `left_at`.
        What it has instead it will have again: a word that is another one is so in all of the text."""
        token_ids, end = self.predicted.token_ids, self.place + 1
        instead = token_ids[left_at:end]
        length = min(len(beside), len(instead))
        differ = np.flatnonzero(beside[::-1][:length] != instead[::-1][:length])
        num_equal = int(differ[0]) if len(differ) else length
        old, new = instead[: len(instead) - num_equal], beside[: len(beside) - num_equal]
        if _MIN_REPLACED <= len(old) <= _MAX_REPLACED and len(new) <= _MAX_REPLACED:
            rest = _replaced(token_ids[end:], old, new)
            if rest is not None:
                self.original = self.original or self.predicted
                self.predicted = PredictedTokens(np.concatenate((token_ids[:end], rest)))


@dataclass(frozen=True, slots=True)
class RowText:
    """What is known of a row."""

    token_ids: Int32Array
    """Prompt and output, at least 1."""
    followed: FollowedPrediction | None = None
    forced: Sequence[int] = field(default=())
    """What its constraint leaves no choice about, in the tokens of the tokenizer: others may have the same text."""
    scope: bytes = b""
    """Of rows whose outputs may be guesses for it; empty: there are none."""


class Drafter(Protocol):
    """Guesses tokens."""

    def draft(self, text: RowText, max_drafts: int) -> Draft:
        """At most so many tokens, each of the vocabulary, that may follow the text."""
        ...

    def ended(self, text: RowText, num_prompt_tokens: int) -> None:
        """The row ends with this text, or is preempted."""


class PredictionDrafter(Drafter):
    """The tokens that the caller predicts, from where the output follows them, again behind what is another text."""

    def draft(self, text: RowText, max_drafts: int) -> Draft:
        if (followed := text.followed) is None:
            return NO_DRAFT
        token_ids = followed.after(text.token_ids, max_drafts)
        return Draft(token_ids, (followed.run >= _FRESH_RUN) + (followed.run >= _FOLLOWED_RUN))


class GrammarDrafter(Drafter):
    """The tokens that the row's constraint forces."""

    def draft(self, text: RowText, max_drafts: int) -> Draft:
        return Draft(np.array(text.forced[:max_drafts], np.int32), _GRAMMAR)


class NgramDrafter(Drafter):
    """Prompt lookup: what followed the last tokens of the row where they occurred before, in its prompt or output.

    Of equally long matches it takes the last. A match that reaches the end of the tokens is a repetition, which goes
    on.
    """

    def draft(self, text: RowText, max_drafts: int) -> Draft:
        token_ids, newest = text.token_ids, len(text.token_ids) - 1
        ends, num_matched = _longest_matches(token_ids[:newest], token_ids)
        if num_matched < _MIN_MATCH:
            return NO_DRAFT
        end = int(ends[-1])
        drafts = token_ids[end + 1 + np.arange(max_drafts) % (newest - end)]
        return Draft(drafts, _NGRAM + min(num_matched - _MIN_MATCH, 3))


class _Outputs:
    """The last tokens of the outputs of one scope, one after the other."""

    def __init__(self) -> None:
        self._token_ids = np.full(_MAX_TOKENS_OF_SCOPE, _BETWEEN, np.int32)
        self._num_tokens = 0

    @property
    def token_ids(self) -> Int32Array:
        return self._token_ids[: self._num_tokens]

    def add(self, token_ids: Int32Array) -> None:
        """One more output. Forgets the older half where there is no room."""
        half = _MAX_TOKENS_OF_SCOPE // 2
        token_ids = token_ids[-(half - 1) :]
        if self._num_tokens + len(token_ids) + 1 > _MAX_TOKENS_OF_SCOPE:
            newer = self.token_ids[-half:].copy()
            self._token_ids[:half], self._num_tokens = newer, half
        end = self._num_tokens + len(token_ids)
        self._token_ids[self._num_tokens : end], self._token_ids[end] = token_ids, _BETWEEN
        self._num_tokens = end + 1


class SharedDrafter(Drafter):
    """What followed the last tokens of the row in earlier outputs of its scope, where most of them match; of equally
    long matches the last. A scan of 16,384 tokens takes less time than an index would take to maintain.

    Scopes are kept apart: a guess of another tenant's text would tell by the time of an answer what that tenant was
    answered.
    """

    def __init__(self) -> None:
        self._outputs: dict[bytes, _Outputs] = {}

    def draft(self, text: RowText, max_drafts: int) -> Draft:
        if (outputs := self._outputs.get(text.scope)) is None:
            return NO_DRAFT
        token_ids = outputs.token_ids
        ends, num_matched = _longest_matches(token_ids, text.token_ids)
        if num_matched < _MIN_SHARED_MATCH:
            return NO_DRAFT
        ends = ends[token_ids[ends + 1] != _BETWEEN]
        if not len(ends):
            return NO_DRAFT
        begin = int(ends[-1]) + 1
        following = token_ids[begin : begin + max_drafts]
        following = following[: int((following != _BETWEEN).cumprod().sum())]
        return Draft(following, _SHARED + num_matched - _MIN_SHARED_MATCH)

    def ended(self, text: RowText, num_prompt_tokens: int) -> None:
        if not text.scope or len(text.token_ids) == num_prompt_tokens:
            return
        # The scope that was used longest ago is the first.
        outputs = self._outputs.pop(text.scope, None) or _Outputs()
        outputs.add(text.token_ids[max(num_prompt_tokens - _NUM_LED_BY, 0) :])
        self._outputs[text.scope] = outputs
        if len(self._outputs) > _MAX_SCOPES:
            del self._outputs[next(iter(self._outputs))]


class Drafters(Drafter):
    """The first of several drafters that has a guess."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = drafters

    def draft(self, text: RowText, max_drafts: int) -> Draft:
        for drafter in self._drafters:
            if len((draft := drafter.draft(text, max_drafts)).token_ids):
                return draft
        return NO_DRAFT

    def ended(self, text: RowText, num_prompt_tokens: int) -> None:
        for drafter in self._drafters:
            drafter.ended(text, num_prompt_tokens)


KINDS = {
    "prediction": PredictionDrafter,
    "grammar": GrammarDrafter,
    "shared": SharedDrafter,
    "ngram": NgramDrafter,
}
"""By the names of `--speculate`, in the order in which they are asked."""
AUTO = ("prediction", "grammar", "ngram")
"""Those of `--speculate auto`."""


def _replaced(token_ids: Int32Array, old: Int32Array, new: Int32Array) -> Int32Array | None:
    """The tokens with `new` wherever `old` was; None if that is nowhere."""
    starts = np.flatnonzero(token_ids[: max(len(token_ids) + 1 - len(old), 0)] == old[0])
    for index in range(1, len(old)):
        starts = starts[token_ids[starts + index] == old[index]]
    parts: list[Int32Array] = []
    end = 0
    for start in starts.tolist():
        if start >= end:
            parts += [token_ids[end:start], new]
            end = start + len(old)
    return np.concatenate((*parts, token_ids[end:])) if parts else None


def _pairs_of(token_ids: Int32Array) -> NDArray[np.int64]:
    """Each token with the next one, as one number."""
    return (token_ids[:-1].astype(np.int64) << 32) + token_ids[1:]


def _longest_matches(token_ids: Int32Array, last: Int32Array) -> tuple[NDArray[np.intp], int]:
    """Where the most of the last tokens of `last` occur in `token_ids`, as the index of the last one, rising; and how
    many these are."""
    newest = len(last) - 1
    ends = np.flatnonzero(token_ids == last[newest])
    num_matched = min(len(ends), 1)
    while 0 < num_matched <= min(newest, _MAX_MATCH - 1):
        longer = ends[ends >= num_matched]
        longer = longer[token_ids[longer - num_matched] == last[newest - num_matched]]
        if not len(longer):
            break
        ends, num_matched = longer, num_matched + 1
    return ends, num_matched
