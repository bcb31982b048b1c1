"""What a gateway asks for, as the core sees it."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NewType

ClientId = NewType("ClientId", int)
"""One connection of a gateway."""

Handle = NewType("Handle", int)
"""A gateway's own number for one of its live requests."""


@dataclass(frozen=True, slots=True)
class RequestKey:
    """What tells a live request from all others."""

    client: ClientId
    handle: Handle


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How the worker draws a sequence's tokens. The core carries it and does not look at it, `logprobs` excepted."""

    seed: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    logprobs: int | None = None
    """Report the chosen token and this many of the most likely ones; None reports nothing."""


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and when to stop.

    `emitted` are output tokens that an earlier scheduler produced already: generation goes on after them and counts
    them against `max_tokens`. `stop_token_ids` holds the model's eos ids too. Cached prefixes are shared within a
    tenant.
    """

    key: RequestKey
    request_id: str
    prompt: SequenceOf[int]
    sampling: RowSampling
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    emitted: SequenceOf[int] = ()
    tenant: str = ""

    @property
    def max_len(self) -> int:
        """Tokens of the sequence, prompt and output, at which it ends at the latest."""
        return len(self.prompt) + self.max_tokens

    @property
    def uses_prefix_cache(self) -> bool:
        """Whether cached blocks may stand in for computing the prompt."""
        return True
