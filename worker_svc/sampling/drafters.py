"""Drafters: guesses of the tokens that a row will draw next, which a step verifies.

A drafter is a function of the row's tokens, so that all ranks draft alike. What it guesses decides how many tokens a
step gives, never which: a draft counts only where the row draws that very token.
"""

from typing import Protocol

import numpy as np

from worker_svc.step import Int32Array


class Drafter(Protocol):
    """Guesses tokens."""

    def draft(self, row: int, token_ids: Int32Array, max_drafts: int) -> Int32Array:
        """At most so many tokens, each of the vocabulary, that may follow these, which are at least 1."""
        ...


class NgramDrafter:
    """Prompt lookup: what followed the last tokens of the row where they occurred before, in its prompt or output.

    It takes the longest match of up to `max_match` tokens, and of these the last one. A match that reaches the end of
    the tokens is a repetition, which goes on.
    """

    def __init__(self, min_match: int = 2, max_match: int = 6) -> None:
        self._min_match = min_match
        self._max_match = max_match

    def draft(self, row: int, token_ids: Int32Array, max_drafts: int) -> Int32Array:
        newest = len(token_ids) - 1
        ends = np.flatnonzero(token_ids[:newest] == token_ids[newest])
        num_matched = min(len(ends), 1)
        while num_matched and num_matched < self._max_match:
            longer = ends[ends >= num_matched]
            longer = longer[token_ids[longer - num_matched] == token_ids[newest - num_matched]]
            if not len(longer):
                break
            ends, num_matched = longer, num_matched + 1
        if num_matched < self._min_match:
            return token_ids[:0]
        end = int(ends[-1])
        return token_ids[end + 1 + np.arange(max_drafts) % (newest - end)]
