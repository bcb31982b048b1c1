"""A request as schedulers get it: validated, tokenized and completed with defaults."""

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
    """A LoRA adapter by its content, where workers find its files, and the name that a request chose it by."""

    name: str
    digest: bytes
    directory: str


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters of a request with every default set, except what depends on the prompt. Requests of one call share
    them; `GenerationRequest` says what each is."""

    sampling: SamplingParameters
    stopping: StoppingParameters
    output: OutputOptions
    eos_token_ids: tuple[int, ...]
    row_sampling: bytes
    predicted: Sequence[int] = ()


@dataclass(frozen=True, slots=True, eq=False)
class GenerationRequest:
    """A request that was checked and can be submitted. `prompt_token_ids` is int32, shape [prompt length].

    Its id is unique among the running requests of its tenant. The messages have every default set; requests of one call
    share them, so nobody changes them. `stopping.stop` is matched by the gateway, the token ids by the scheduler;
    neither ends a sequence before `stopping.min_tokens` tokens.
    """

    request_id: str
    tenant: str
    prompt_token_ids: NDArray[np.int32]
    sampling: SamplingParameters
    """`n` sequences are returned, out of `best_of` that are sampled or searched. Without a seed: requests of one call
    that names none share all but that."""
    stopping: StoppingParameters
    output: OutputOptions
    seed: int
    eos_token_ids: Sequence[int] = ()
    """The model's eos ids; empty if they are ignored."""
    row_sampling: bytes = b""
    """The worker's sampling parameters: a serialized quire.common.v1.RowSampling, without the prediction."""
    predicted: Sequence[int] = ()
    """The tokens that the caller expects, for workers that draft, and for the usage."""
    priority: int = 0
    expected_tokens: int | None = None
    """How many tokens the caller expects of each sequence, for the choice of a replica; None if it does not say."""
    durable: bool = False
    """The request runs on without a reader for a while, and can be resumed."""
    answer_format: AnswerFormat = PLAIN
    """How the text is parsed: as plain text, except for chats."""
    nonce: int = 0
    """64 random bits that distinguish the request from others with the same id."""
    trace: TraceContext | None = None
    """The span that the scheduler continues, if the request is traced."""
    adapter: NamedAdapter | None = None
    """None is the model as it is."""
    cache_salt: bytes = b""
    """The digest of a salt of the prefix cache; empty without one."""
    front_end: bytes = b""
    """Of a stream that another gateway may write again: what its front end needs for that."""
    is_steady: bool = False
    """Its events come token by token, in an order that depends on the tokens alone."""

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
        """Whether the returned sequences are selected when all have finished, so that none is delivered earlier."""
        return self.sampling.best_of > self.sampling.n or self.sampling.HasField("beam_search")
