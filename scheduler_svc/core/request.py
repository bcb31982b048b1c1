"""What a gateway asks for, as the core sees it."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import NamedTuple, NewType

from scheduler_svc.core.beam_search import BeamParameters, num_candidates

MAX_PRIORITY = 100
"""Priorities are from the negative of this to this; higher goes first."""

ClientId = NewType("ClientId", int)
"""One connection of a gateway."""

Handle = NewType("Handle", int)
"""A gateway's own number for one of its live requests."""


class RequestKey(NamedTuple):
    """What tells a live request from all others. A tuple, since every table of requests hashes it."""

    client: ClientId
    handle: Handle


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How the worker draws a sequence's tokens: `parameters`, which the core carries and never reads, and what the core
    decides on or sets itself for each sequence."""

    seed: int
    parameters: bytes = b""
    """As the gateway wrote them for the worker."""
    logprobs: int | None = None
    """Report the chosen token and this many of the most likely ones; None reports nothing."""
    prompt_logprobs: int | None = None
    """The same for each prompt token but the first."""
    num_candidates: int | None = None
    """Draw no token, report this many of the most likely ones: the scheduler chooses."""


@dataclass(frozen=True, slots=True)
class EmittedSequence:
    """Output tokens of one sequence that an earlier scheduler produced already, and whether it ended with them."""

    token_ids: SequenceOf[int]
    has_ended: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt, how many sequences to sample from it, and when to stop.

    `num_sequences` are sampled (`best_of`), of which the `num_returned` (`n`) with the highest mean log probability are
    delivered. With `beam`, sequences are the beams of a search, as many as it is wide, and the `num_returned` best
    hypotheses are delivered. `emitted` is empty, or holds for each sequence what an earlier scheduler produced:
    generation goes on after it and counts it against `max_tokens`. What was `accepted_before`, by this scheduler or an
    earlier one, is not refused for the queue's bounds. `stop_token_ids` holds the model's eos ids too.
    Cached prefixes are shared within a tenant. `traceparent` is carried to the workers as it is.
    """

    key: RequestKey
    request_id: str
    prompt: SequenceOf[int]
    sampling: RowSampling
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    emitted: SequenceOf[EmittedSequence] = ()
    tenant: str = ""
    num_sequences: int = 1
    num_returned: int = 1
    priority: int = 0
    beam: BeamParameters | None = None
    traceparent: str | None = None
    accepted_before: bool = False

    @property
    def selects(self) -> bool:
        """Whether sequences are dropped at the end, so that none can be delivered before."""
        return self.num_returned < self.num_sequences or self.beam is not None

    @property
    def max_len(self) -> int:
        """Tokens of the sequence, prompt and output, at which it ends at the latest."""
        return len(self.prompt) + self.max_tokens

    def sampling_of(self, index: int) -> RowSampling:
        """How the sequence with this index draws: the first as a request of one sequence would, the others each with a
        seed of their own that follows from the request's. Beams draw nothing."""
        sampling = self.sampling
        if self.beam is not None:
            needed = num_candidates(self.beam.width, len(self.stop_token_ids))
            return replace(sampling, num_candidates=max(needed, sampling.logprobs or 0), logprobs=None)
        if self.selects and sampling.logprobs is None:
            sampling = replace(sampling, logprobs=0)
        return sampling if index == 0 else replace(sampling, seed=sequence_seed(sampling.seed, index))


def sequence_seed(seed: int, index: int) -> int:
    """The 64-bit seed of a request's sequence with this index."""
    digest = blake2b(seed.to_bytes(8, "little") + index.to_bytes(8, "little"), digest_size=8, person=b"quire/seed/1")
    return int.from_bytes(digest.digest(), "little")
