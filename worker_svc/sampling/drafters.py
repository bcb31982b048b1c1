"""Speculative decoding: drafters guess the next tokens of a row, which a step then verifies.

A drafter is a function of the row's tokens, so that all ranks draft alike. Its guesses change how many tokens a step
gives, but never the tokens: a draft counts only if the row samples that very token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from worker_svc.step import Int32Array

_NONE = np.zeros(0, np.int32)
_FRESH_RUN, _FOLLOWED_RUN = 2, 8
"""Numbers of consecutive tokens that followed a prediction, from which on it is trusted, and trusted more."""
_GRAMMAR = 3
_NGRAM = 4
_SHARED = 8
OF_MODEL = 11
EXPECTED_RIGHT = (0.4, 0.8, 0.95, 0.8, 0.3, 0.5, 0.6, 0.75, 0.5, 0.6, 0.75, 0.7)
"""Expected acceptance rate of a draft's next token before there is evidence, by kind of draft: three kinds from
predictions, one from constraints, four from repetitions and three from earlier outputs, by the number of matching
tokens, and one from a draft model."""
_MIN_SHARED_MATCH = 4
_MAX_SCOPES, _MAX_TOKENS_OF_SCOPE = 64, 16384
"""Maximum scopes whose earlier outputs are kept, and maximum tokens kept for each scope: 4 MiB in all."""
_NUM_LED_BY = 6
"""Number of prompt tokens kept before an output, so that the beginning of the output is found."""
_BETWEEN = -1
"""Separates two outputs; not a token."""
_MIN_MATCH, _MAX_MATCH = 2, 6
"""Minimum and maximum number of a row's last tokens that are matched with earlier places; the longest match wins."""
_WINDOW = 2048
"""A prediction is searched for the row's last tokens this far before and after their expected place."""
_MAX_CATCH_UP = 64
"""Maximum output tokens with which a row that enters with output is placed in its prediction."""
_FAR, _NUM_SOUGHT = 16, 4
"""A row that left its prediction searches it for its newest `_NUM_SOUGHT` tokens; `_FAR` tokens later, only for the
last one."""
_MIN_REPLACED, _MAX_REPLACED = 2, 16
"""Minimum and maximum length of a passage that, if the output replaces it, is replaced in the rest of the prediction,
too. A single token may be a comma."""
_NEAR = 8
"""Up to this distance from the expected place one matching token suffices; farther away, `_MIN_MATCH` are needed."""


class Draft(NamedTuple):
    """Guessed tokens and their kind; drafts of one kind are about equally probable."""

    token_ids: Int32Array
    kind: int = 0


NO_DRAFT = Draft(_NONE)


class PredictedTokens:
    """The output that a caller predicts for a row, with an index of its tokens."""

    def __init__(self, token_ids: Int32Array) -> None:
        self.token_ids = token_ids
        # Made at the first use: the tokens in order with their places, and all pairs in order.
        self._index: tuple[Int32Array, NDArray[np.intp], NDArray[np.int64]] | None = None

    def may_be_found(self, last: Sequence[int], begin: int, end: int) -> bool:
        """Whether the last two tokens occur anywhere, or the last one at a place from `begin` to before `end`. In most
        text that differs from the prediction neither does, which saves the longer search."""
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
    """A prediction, and the place up to which the row has followed it."""

    predicted: PredictedTokens
    num_prompt_tokens: int
    num_seen: int | None = None
    """The number of the row's tokens that `place` accounts for; None before the first draft."""
    place: int = 0
    """The place at which the prediction continues; while the output differs from it, it moves on token by token."""
    left_at: int | None = None
    """The place where the output left the prediction, until it follows the prediction again."""
    run: int = _FRESH_RUN
    """The number of tokens that followed the prediction since; a new row begins with some trust."""
    original: PredictedTokens | None = None
    """The caller's prediction, if passages of `predicted` have been replaced as in the output."""

    def anew(self) -> "FollowedPrediction":
        """A copy from the start, for a row whose tokens changed or that continues another."""
        return FollowedPrediction(self.original or self.predicted, self.num_prompt_tokens)

    @property
    def num_beside(self) -> int:
        """The number of tokens since the output left the prediction."""
        return 0 if self.left_at is None else self.place - self.left_at

    def after(self, token_ids: Int32Array, max_drafts: int) -> Int32Array:
        """Returns the tokens predicted after the row's tokens; empty while the output differs from the prediction. The
        row's tokens must extend the tokens of the last call."""
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
                # After many tokens without a look, only the newest are searched for, since each search takes time.
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
        """Searches the prediction for the last of these tokens, which was not predicted, and sets `place` near where
        the output should be if it left out or added tokens."""
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
        """Replaces a passage in the rest of the prediction as the output did: the output has `beside` from `left_at` to
        `place`, where it follows the prediction again. A word that changed once probably changes everywhere."""
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
    """The text of a row, and its sources of drafts."""

    token_ids: Int32Array
    """Prompt and output, at least 1."""
    followed: FollowedPrediction | None = None
    forced: Sequence[int] = field(default=())
    """The tokens that its constraint forces, as the tokenizer splits their text; other splits may be allowed, too."""
    scope: bytes = b""
    """Rows of one scope may guess from each other's outputs; empty for none."""


class Drafter(Protocol):
    """Guesses tokens."""

    def draft(self, text: RowText, max_drafts: int) -> Draft:
        """Returns at most `max_drafts` tokens of the vocabulary that may follow the text."""
        ...

    def add_output(self, text: RowText, num_prompt_tokens: int) -> None:
        """The row ends with this text, or is preempted."""
        return


class PredictionDrafter(Drafter):
    """Takes the tokens that the caller predicts, while the output follows them and again after a different passage."""

    def draft(self, text: RowText, max_drafts: int) -> Draft:
        if (followed := text.followed) is None:
            return NO_DRAFT
        token_ids = followed.after(text.token_ids, max_drafts)
        return Draft(token_ids, (followed.run >= _FRESH_RUN) + (followed.run >= _FOLLOWED_RUN))


class GrammarDrafter(Drafter):
    """Takes the tokens that the row's constraint forces."""

    def draft(self, text: RowText, max_drafts: int) -> Draft:
        return Draft(np.array(text.forced[:max_drafts], np.int32), _GRAMMAR)


class NgramDrafter(Drafter):
    """Prompt lookup: takes the tokens that followed an earlier occurrence of the row's last tokens.

    The longest match wins, and of equally long ones the last. A match that reaches the end of the tokens is a
    repetition, which is continued.
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
        """Adds an output; drops the older half if there is no room."""
        half = _MAX_TOKENS_OF_SCOPE // 2
        token_ids = token_ids[-(half - 1) :]
        if self._num_tokens + len(token_ids) + 1 > _MAX_TOKENS_OF_SCOPE:
            newer = self.token_ids[-half:].copy()
            self._token_ids[:half], self._num_tokens = newer, half
        end = self._num_tokens + len(token_ids)
        self._token_ids[self._num_tokens : end], self._token_ids[end] = token_ids, _BETWEEN
        self._num_tokens = end + 1


class SharedDrafter(Drafter):
    """Takes the tokens that followed the row's last tokens in earlier outputs of its scope. The longest match wins, and
    of equally long ones the last. A scan of 16,384 tokens takes less time than the upkeep of an index.

    Scopes are kept apart: if a guess came from another tenant's text, the time of an answer would reveal what that
    tenant was answered.
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

    def add_output(self, text: RowText, num_prompt_tokens: int) -> None:
        if not text.scope or len(text.token_ids) == num_prompt_tokens:
            return
        # The least recently used scope is the first.
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

    def add_output(self, text: RowText, num_prompt_tokens: int) -> None:
        for drafter in self._drafters:
            drafter.add_output(text, num_prompt_tokens)


KINDS = {
    "prediction": PredictionDrafter,
    "grammar": GrammarDrafter,
    "shared": SharedDrafter,
    "ngram": NgramDrafter,
}
"""Drafters by their names in `--speculate`, in the order in which they are tried."""
AUTO = ("prediction", "grammar", "ngram")
"""The drafters of `--speculate auto`."""


def _replaced(token_ids: Int32Array, old: Int32Array, new: Int32Array) -> Int32Array | None:
    """Returns the tokens with `new` for each `old`; None if `old` does not occur."""
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
