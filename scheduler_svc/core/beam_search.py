"""Beam search (the paper's section 4.4), as in transformers: chooses which beams continue, and the finished hypotheses.

A step's candidates come in, continuations and finished hypotheses come out. `results` applies them to sequences.
"""

import enum
import heapq
import math
from bisect import insort
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import islice

_FILLER_LOGPROB = -1e9
"""Far below the log probability of any text: marks a copy that only keeps the number of beams at `width`."""

_LARGEST_EXPONENT = 690.0
"""e to this power, and its inverse, fit in a float."""


class EarlyStopping(enum.Enum):
    """When a search ends before `max_tokens`, once `width` hypotheses are finished."""

    FALSE = enum.auto()
    """When the best live beam, scored as if it ended now, does not beat the worst finished hypothesis."""
    TRUE = enum.auto()
    """At once."""
    NEVER = enum.auto()
    """As FALSE; if longer texts score better, the best live beam is scored as if it ended at `max_tokens`."""


@dataclass(frozen=True, slots=True)
class BeamParameters:
    """How one request searches. A hypothesis scores its summed log probability / its length ** `length_penalty`.

    Raises ValueError if `width` is below 1 or `length_penalty` is not finite.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.FALSE

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError(f"width is {self.width}; it must be >= 1")
        if not math.isfinite(self.length_penalty):
            raise ValueError(f"length_penalty is {self.length_penalty}; it must be finite")


def num_candidates(width: int, num_stop_token_ids: int) -> int:
    """Candidates that each beam must report, so that `width` beams remain if every stop token is among them."""
    return max(2, 1 + num_stop_token_ids) * width


class NoCandidatesError(Exception):
    """No beam has a token that is not banned, and no hypothesis is finished."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """The most likely next tokens of one beam, best first, and their log probabilities. A banned token has -inf. A beam
    all of whose candidates are banned has no continuation.

    Among equal log probabilities the lower token id comes first.
    """

    token_ids: SequenceOf[int]
    logprobs: SequenceOf[float]


@dataclass(frozen=True, slots=True)
class Continuation:
    """A beam of the next step: the tokens of beam `parent`, and one token more.

    `place` is the token's, from 0, among the parent's candidates.
    """

    parent: int
    token_id: int
    place: int
    cumulative_logprob: float


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished line of text: the whole output, final token included.

    `parent` is the beam whose output it ended, and `place` the place of its last token among that beam's candidates.
    `ended_by_token` says that this token is a stop token; otherwise the limit of length ended it.
    """

    token_ids: tuple[int, ...]
    parent: int
    place: int
    cumulative_logprob: float
    score: float
    ended_by_token: bool


@dataclass(frozen=True, slots=True)
class BeamStep:
    """The result of one step.

    continuations  the next live beams, best first: `width` of them, or empty if the search is over
    finished       hypotheses that entered the list of the best in this step, best first
    """

    continuations: SequenceOf[Continuation]
    finished: SequenceOf[Hypothesis]


class BeamSearch:
    """The search of one request.

    There are always `width` beams. If fewer texts are possible, at the very start above all, the rest are fillers:
    copies of the best beam at -1e9 that never finish. They come last, and their candidates are ignored.
    """

    def __init__(self, parameters: BeamParameters, max_tokens: int, stop_token_ids: frozenset[int]) -> None:
        """Raises ValueError if `max_tokens` is below 1."""
        if max_tokens < 1:
            raise ValueError(f"max_tokens is {max_tokens}; it must be >= 1")
        self._parameters = parameters
        self._max_tokens = max_tokens
        self._stop_token_ids = stop_token_ids
        self._num_candidates = num_candidates(parameters.width, len(stop_token_ids))
        self.scores = [0.0]
        """The cumulative log probabilities of the live beams that are no fillers; empty when the search is over."""
        # Best first. Hypotheses leave it only for better ones.
        self._finished: list[Hypothesis] = []

    def best(self) -> list[Hypothesis]:
        """The finished hypotheses, best first: at most `width`, and exactly `width` when the search is over.

        If fewer texts than that were possible, the last one is repeated.
        """
        return list(self._finished)

    def advance(self, candidates: SequenceOf[Candidates], outputs: SequenceOf[SequenceOf[int]]) -> BeamStep:
        """Extends every live beam by one token, or ends it.

        Args:
            candidates: `num_candidates` of each live beam, or the whole vocabulary if that is smaller.
            outputs: the output tokens of each live beam so far, all of one length. Read, and copied only if a
                hypothesis is kept.

        Raises ValueError if the two do not describe `width` beams, and NoCandidatesError if no beam can continue and
        nothing is finished. The search does not change then.
        """
        length = self._next_length(candidates, outputs)
        likely = self._most_likely(candidates)
        finished = self._finish(likely[: self._parameters.width], outputs, length)
        survivors = (each for each in likely if each.token_id not in self._stop_token_ids)
        surviving = [] if length >= self._max_tokens else list(islice(survivors, self._parameters.width))
        if self._is_over(surviving, length):
            self._end()
            return BeamStep((), finished)
        self.scores = [each.cumulative_logprob for each in surviving]
        return BeamStep(self._filled(surviving), finished)

    def _next_length(self, candidates: SequenceOf[Candidates], outputs: SequenceOf[SequenceOf[int]]) -> int:
        width = self._parameters.width
        if len(candidates) != width or len(outputs) != width:
            raise ValueError(f"candidates of {len(candidates)} and outputs of {len(outputs)} beams; width is {width}")
        lengths = {len(output) for output in outputs}
        if len(lengths) > 1:
            raise ValueError(f"outputs have {sorted(lengths)} tokens; all beams must have equally many")
        return lengths.pop() + 1

    def _most_likely(self, candidates: SequenceOf[Candidates]) -> list[Continuation]:
        """The best of all beams' candidates, best first; the lower beam and then the earlier candidate win a tie."""
        # Each beam's candidates are in order already, so a merge looks at few of them.
        beams = enumerate(zip(self.scores, candidates, strict=False))
        merged = heapq.merge(*(_rising_costs(parent, score, each) for parent, (score, each) in beams))
        return [
            Continuation(parent, token_id, place, -cost)
            for cost, parent, place, token_id in islice(merged, self._num_candidates)
        ]

    def _finish(
        self, likely: SequenceOf[Continuation], outputs: SequenceOf[SequenceOf[int]], length: int
    ) -> list[Hypothesis]:
        """Adds the candidates that end with this token and are among the best to the finished; returns them."""
        divisor = self._divisor(length)
        kept: list[Hypothesis] = []
        for each in likely:
            ended_by_token = each.token_id in self._stop_token_ids
            if not ended_by_token and length < self._max_tokens:
                continue
            score = each.cumulative_logprob / divisor
            if self._is_full and score <= self._finished[-1].score:
                # All that follow are of the same length and no better.
                break
            token_ids = (*outputs[each.parent], each.token_id)
            hypothesis = Hypothesis(token_ids, each.parent, each.place, each.cumulative_logprob, score, ended_by_token)
            if self._is_full:
                self._finished.pop()
            insort(self._finished, hypothesis, key=lambda each: -each.score)
            kept.append(hypothesis)
        return kept

    def _filled(self, surviving: SequenceOf[Continuation]) -> list[Continuation]:
        """Exactly `width` beams."""
        best = surviving[0]
        filler = Continuation(best.parent, best.token_id, best.place, _FILLER_LOGPROB)
        return [*surviving, *[filler] * (self._parameters.width - len(surviving))]

    def _is_over(self, surviving: SequenceOf[Continuation], length: int) -> bool:
        if not surviving:
            return True
        if not self._is_full:
            return False
        if self._parameters.early_stopping is EarlyStopping.TRUE:
            return True
        # The length at which the best live beam is scored, to decide whether it can still be among the finished.
        never = self._parameters.early_stopping is EarlyStopping.NEVER
        hopeful_length = self._max_tokens if never and self._parameters.length_penalty > 0 else length
        best_possible = surviving[0].cumulative_logprob / self._divisor(hopeful_length)
        return best_possible <= self._finished[-1].score

    def _end(self) -> None:
        if not self._finished:
            raise NoCandidatesError("every candidate of every beam is banned, and no hypothesis is finished")
        self.scores = []
        self._finished += [self._finished[-1]] * (self._parameters.width - len(self._finished))

    def _divisor(self, length: int) -> float:
        """`length` ** `length_penalty`, or the nearest that a float can hold and divide by."""
        exponent = self._parameters.length_penalty * math.log(length)
        if abs(exponent) > _LARGEST_EXPONENT:
            return math.exp(math.copysign(_LARGEST_EXPONENT, exponent))
        return length**self._parameters.length_penalty

    @property
    def _is_full(self) -> bool:
        return len(self._finished) == self._parameters.width


def _rising_costs(parent: int, score: float, candidates: Candidates) -> Iterator[tuple[float, int, int, int]]:
    """(-cumulative log probability, parent, place, token id) of a beam's candidates that are not banned."""
    pairs = zip(candidates.token_ids, candidates.logprobs, strict=True)
    for place, (token_id, logprob) in enumerate(pairs):
        if logprob > -math.inf:
            yield -(score + logprob), parent, place, token_id
