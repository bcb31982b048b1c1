"""Drafters: guesses of the tokens that a row will draw next, which a step verifies.

A drafter is a function of the row's tokens, so that all ranks draft alike. What it guesses decides how many tokens a
step gives, never which: a draft counts only where the row draws that very token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from worker_svc.step import Int32Array

_NONE = np.zeros(0, np.int32)
_MIN_MATCH, _MAX_MATCH = 2, 6
"""Of the last tokens of a row, so many at least occur before, and the place where most of them do, up to so many, is
taken."""


@dataclass(frozen=True, slots=True)
class RowText:
    """What is known of a row."""

    token_ids: Int32Array
    """Prompt and output, at least 1."""
    num_prompt_tokens: int = 0
    predicted: Int32Array | None = None
    """What its caller expects it to say."""
    forced: Sequence[int] = field(default=())
    """What its constraint leaves no choice about, in the tokens of the tokenizer: others may have the same text."""


class Drafter(Protocol):
    """Guesses tokens."""

    def draft(self, text: RowText, max_drafts: int) -> Int32Array:
        """At most so many tokens, each of the vocabulary, that may follow the text."""
        ...


class PredictionDrafter:
    """The tokens that the caller predicts: those that follow the output where that is the beginning of the prediction,
    and where its last tokens occur in it, else."""

    def draft(self, text: RowText, max_drafts: int) -> Int32Array:
        predicted, output = text.predicted, text.token_ids[text.num_prompt_tokens :]
        if predicted is None or not len(output):
            return _NONE
        end = len(output)
        if np.array_equal(predicted[:end], output):
            return predicted[end : end + max_drafts]
        ends = _ends_of_longest_match(predicted, output)
        if not len(ends):
            return _NONE
        # What was left out or added before is mostly less than what repeats.
        nearest = int(ends[np.argmin(np.abs(ends - end))])
        return predicted[nearest + 1 : nearest + 1 + max_drafts]


class GrammarDrafter:
    """The tokens that the row's constraint forces."""

    def draft(self, text: RowText, max_drafts: int) -> Int32Array:
        return np.array(text.forced[:max_drafts], np.int32)


class NgramDrafter:
    """Prompt lookup: what followed the last tokens of the row where they occurred before, in its prompt or output.

    Of equally long matches it takes the last. A match that reaches the end of the tokens is a repetition, which goes
    on.
    """

    def draft(self, text: RowText, max_drafts: int) -> Int32Array:
        token_ids, newest = text.token_ids, len(text.token_ids) - 1
        ends = _ends_of_longest_match(token_ids[:newest], token_ids)
        if not len(ends):
            return _NONE
        end = int(ends[-1])
        return token_ids[end + 1 + np.arange(max_drafts) % (newest - end)]


class Drafters:
    """The first of several drafters that has a guess."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = drafters

    def draft(self, text: RowText, max_drafts: int) -> Int32Array:
        for drafter in self._drafters:
            if len(drafts := drafter.draft(text, max_drafts)):
                return drafts
        return _NONE


KINDS = {"prediction": PredictionDrafter, "grammar": GrammarDrafter, "ngram": NgramDrafter}
"""By the names of `--speculate`, in the order in which they are asked."""


def _ends_of_longest_match(token_ids: Int32Array, last: Int32Array) -> NDArray[np.intp]:
    """Where the last tokens of `last` occur in `token_ids`: the index of the last one of each longest match, rising."""
    newest = len(last) - 1
    ends = np.flatnonzero(token_ids == last[newest])
    num_matched = min(len(ends), 1)
    while 0 < num_matched <= min(newest, _MAX_MATCH - 1):
        longer = ends[ends >= num_matched]
        longer = longer[token_ids[longer - num_matched] == last[newest - num_matched]]
        if not len(longer):
            break
        ends, num_matched = longer, num_matched + 1
    return ends if num_matched >= _MIN_MATCH else ends[:0]
