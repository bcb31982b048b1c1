"""A generation request in the form that schedulers receive: validated, tokenized, with all defaults set."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gateway.text.formats.answer import PLAIN, AnswerFormat
from gateway.types import optional
from quire.common.v1.common_pb2 import OutputOptions, SamplingParameters, StoppingParameters
from quire.tracing import TraceContext


@dataclass(frozen=True, slots=True)
class NamedAdapter:
    """A LoRA adapter: the digest of its content, the directory where workers find it, and the name in the request."""

    name: str
    digest: bytes
    directory: str


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters of a request that do not depend on its prompt, with every default set. Requests of one call share
    them; `GenerationRequest` describes each field."""

    sampling: SamplingParameters
    stopping: StoppingParameters
    output: OutputOptions
    eos_token_ids: tuple[int, ...]
    row_sampling: bytes
    predicted: Sequence[int] = ()


@dataclass(frozen=True, slots=True, eq=False)
class GenerationRequest:
    """A validated request that can be submitted. `prompt_token_ids` is int32, shape [prompt length].

    Its id is unique among the running requests of its tenant. The messages have every default set; requests of one call
    share them, so they must not be changed. The gateway matches `stopping.stop`, the scheduler the stop token ids;
    neither ends a sequence before `stopping.min_tokens` tokens.
    """

    request_id: str
    tenant: str
    prompt_token_ids: NDArray[np.int32]
    sampling: SamplingParameters
    """`best_of` sequences are sampled or searched, and `n` of them are returned. It has no seed: requests that share
    the message may have different seeds."""
    stopping: StoppingParameters
    output: OutputOptions
    seed: int
    eos_token_ids: Sequence[int] = ()
    """The model's eos ids; empty if they are ignored."""
    row_sampling: bytes = b""
    """The worker's sampling parameters: a serialized quire.common.v1.RowSampling, without the prediction."""
    predicted: Sequence[int] = ()
    """The output tokens that the caller predicts: workers draft from them, and the usage counts the correct ones."""
    priority: int = 0
    expected_tokens: int | None = None
    """The length that the caller expects of each sequence, used to choose a replica; None if unknown."""
    durable: bool = False
    """Whether the request runs on for a while without a reader, and can be resumed."""
    answer_format: AnswerFormat = PLAIN
    """The format by which the text is parsed: plain text, except for chats."""
    nonce: int = 0
    """64 random bits that distinguish the request from others with the same id."""
    trace: TraceContext | None = None
    """The span that the scheduler continues, if the request is traced."""
    adapter: NamedAdapter | None = None
    """None for the base model."""
    cache_salt: bytes = b""
    """The digest of a salt of the prefix cache; empty without a salt."""
    front_end: bytes = b""
    """Data with which the front end of another gateway can write the stream again; empty for other requests."""
    is_steady: bool = False
    """Whether events come token by token, in an order that depends only on the tokens."""

    @property
    def logprobs(self) -> int | None:
        return optional(self.output, "logprobs")

    @property
    def prompt_logprobs(self) -> int | None:
        return optional(self.output, "prompt_logprobs")

    @property
    def prompt_logprobs_start(self) -> int:
        """The position of the first prompt token whose log probability is reported."""
        return self.output.prompt_logprobs_start or 1

    @property
    def ending_token_ids(self) -> frozenset[int]:
        return frozenset((*self.stopping.stop_token_ids, *self.eos_token_ids))

    @property
    def chooses(self) -> bool:
        """Whether the returned sequences are chosen after all candidates finish, so that none is delivered before."""
        return self.sampling.best_of > self.sampling.n or self.sampling.HasField("beam_search")
