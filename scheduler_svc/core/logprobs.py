"""Log probabilities as they pass through the core."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log probability of one token id; rank 1 is the most likely."""

    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """The chosen token and the most likely ones, best first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]
