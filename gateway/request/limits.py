"""The limits of requests: constants, and limits from settings and schedulers."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from gateway.replicas.events import Welcome
from gateway.settings import GatewaySettings
from gateway.types import Clamp, ModelKind, RequestOptions

MAX_N = 128
MAX_REQUEST_ID_LENGTH = 128
MAX_CALL_ID_LENGTH = 128
"""The maximum length of the id of a tool call, in characters; ids of known APIs have up to 64."""
MAX_LOGIT_BIAS = 1024
MAX_TEMPLATE_LENGTH = 1 << 16
"""The maximum length of the chat template of a request, in characters; the longest of known models have 20,000."""
MAX_TOOLS = 128
"""The maximum number of tools of a chat."""
MAX_TOOL_SCHEMA_BYTES = 256 * 1024
"""The maximum size of the parameters of one tool."""
# The maximum number of prompts of a call. Each becomes a request, and a body within the size limit could hold millions.
MAX_TEXTS = 2048
"""The maximum number of texts in a call for embeddings, as in OpenAI's API."""
MAX_PROMPTS = 1024
# The limit for all sequences of a call together, since each of them is searched for all stop strings.
MAX_CALL_STOP_BYTES = 4 * 1024 * 1024
# The limit for all requests of a call together, since each of them carries all parameters to its scheduler.
MAX_CALL_PARAMETER_ENTRIES = 4 * 1024 * 1024
MAX_TIME_TO_LIVE_MS = 24 * 60 * 60 * 1000
DEFAULT_MAX_TOKENS = frozenset(
    {*(1 << power for power in range(12, 18)), 4000, 8000, 16000, 20000, 24000, 32000, 64000, 100_000, 128_000, 32_767}
)
"""Values of max_tokens that client libraries and agents send by default: powers of two from 4,096 on, and round
numbers."""
# Tokenize also accepts texts that do not fit as prompts.
MIN_TOKENIZE_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class Number:
    """The range of a number, and its default if neither caller nor model set it.

    Attributes:
        is_above_low: Whether `low` itself is out of range.
        in_beam_search: The only value that a beam search accepts, since it does not sample; None if it accepts all.
    """

    low: float
    high: float
    default: float
    is_above_low: bool = False
    in_beam_search: float | None = None


NUMBERS: Mapping[str, Number] = {
    "temperature": Number(0, 100, default=1, in_beam_search=0),
    "top_k": Number(0, 2**32 - 1, default=0, in_beam_search=0),
    "top_p": Number(0, 1, default=1, is_above_low=True, in_beam_search=1),
    "min_p": Number(0, 1, default=0, in_beam_search=0),
    "presence_penalty": Number(-2, 2, default=0),
    "frequency_penalty": Number(-2, 2, default=0),
    # A smaller temperature may make a logit overflow in single precision.
    "repetition_penalty": Number(1e-30, 10, default=1),
}
"""Ranges by the names in quire.common.v1.SamplingParameters."""
DRAWING = {name: each.in_beam_search for name, each in NUMBERS.items() if each.in_beam_search is not None}
"""The parameters of sampling, with the only value of each that a beam search accepts."""


@dataclass(frozen=True, slots=True)
class Pool:
    """The KV memory of one replica, in blocks of `block_size` tokens of all layers. With windows, a sequence that is by
    itself in its request may be longer than the pool. A sequence also has `state_blocks` blocks for its state, and as
    many for the one that it begins with."""

    num_blocks: int
    block_size: int
    has_windows: bool = False
    state_blocks: int = 0

    @classmethod
    def of(cls, welcome: Welcome) -> Self:
        # One block is not for sequences if there are windows.
        has_windows = welcome.windowed_groups > 0
        num_groups = max(welcome.full_groups + welcome.windowed_groups, 1)
        num_blocks = (welcome.num_gpu_blocks - has_windows) // num_groups
        return cls(num_blocks, welcome.block_size, has_windows, welcome.state_blocks)

    def longest_sequence(self, prompt_tokens: int, num_sequences: int) -> int:
        """The maximum tokens of each of `num_sequences` sequences of one prompt, if no other sequence runs.

        The sequences share only the full blocks of the prompt, or all of the prompt if each gets a single token. With
        states each has its own, and two tokens of the prompt. The last token of each is never computed.
        """
        if self.has_windows and num_sequences == 1:
            return sys.maxsize
        num_blocks = max(self.num_blocks - (num_sequences + 1) * self.state_blocks, 0)
        shared = max(prompt_tokens - 2 * (num_sequences > 1 and self.state_blocks > 0), 0) // self.block_size
        own = (num_blocks - shared) // num_sequences
        longest = (shared + own) * self.block_size + 1
        return max(longest, prompt_tokens + 1) if prompt_tokens <= num_blocks * self.block_size else longest


@dataclass(frozen=True, slots=True)
class Limits:
    """The configured limits, narrowed by the limits of the schedulers.

    Attributes:
        pools: The KV pools of the replicas. Any replica may get the request.
        vocab_size: Width of the logits; token ids are below it.
        max_model_len: The maximum number of tokens, prompt and output.
        shown_model_len: The same as callers are told: the vector or score of a text is no token of output.
        max_prompt_tokens: Always below max_model_len, so that at least one token can be generated.
        longest_token_bytes: The maximum size of the text of one token, in UTF-8.
        max_n: The maximum number of sequences of one request.
        max_call_sequences: The maximum sequences of all requests of one call, including sequences not returned.
    """

    pools: tuple[Pool, ...]
    vocab_size: int
    max_model_len: int
    shown_model_len: int
    max_prompt_tokens: int
    longest_token_bytes: int
    max_message_bytes: int
    max_logprobs: int
    max_stop_strings: int
    max_stop_string_bytes: int
    max_stop_token_ids: int
    max_chat_messages: int
    max_n: int
    max_call_sequences: int
    clamp_max_tokens: str = "never"

    def clamps(self, options: RequestOptions) -> bool:
        """Whether a max_tokens that exceeds the rest of the context is lowered to that."""
        max_tokens = options.asked("stopping.max_tokens")
        if max_tokens is None or options.clamp is Clamp.NEVER:
            return False
        clamp = "always" if options.clamp is Clamp.ALWAYS else self.clamp_max_tokens
        return clamp == "always" or (clamp == "defaults" and max_tokens in DEFAULT_MAX_TOKENS)

    @property
    def max_tokenize_bytes(self) -> int:
        """The maximum size of a text for Tokenize, in bytes of UTF-8."""
        return max(self.max_prompt_tokens * self.longest_token_bytes, MIN_TOKENIZE_BYTES)

    def longest_sequence(self, prompt_tokens: int, num_sequences: int) -> int:
        """The maximum number of tokens, prompt and output, of each sequence on every replica."""
        return min(self.max_model_len, *(pool.longest_sequence(prompt_tokens, num_sequences) for pool in self.pools))


def shown_model_len(kind: ModelKind, max_model_len: int) -> int:
    """`Limits.shown_model_len`."""
    return max_model_len if kind is ModelKind.TEXT else max_model_len - 1


def limits_of(
    settings: GatewaySettings,
    welcomes: Sequence[Welcome],
    longest_token_bytes: int,
    kind: ModelKind = ModelKind.TEXT,
) -> Limits:
    """The limits that hold on every replica, since any replica may get the request."""
    max_model_len = min(welcome.max_model_len for welcome in welcomes)
    most = max_model_len if settings.max_prompt_tokens is None else settings.max_prompt_tokens
    return Limits(
        pools=tuple(map(Pool.of, welcomes)),
        vocab_size=min(welcome.vocab_size for welcome in welcomes),
        max_model_len=max_model_len,
        shown_model_len=shown_model_len(kind, max_model_len),
        max_prompt_tokens=min(max_model_len - 1, most),
        longest_token_bytes=longest_token_bytes,
        max_message_bytes=settings.max_message_bytes,
        max_logprobs=min(settings.max_logprobs, *(welcome.max_logprobs for welcome in welcomes)),
        max_stop_strings=settings.max_stop_strings,
        max_stop_string_bytes=settings.max_stop_string_bytes,
        max_stop_token_ids=settings.max_stop_token_ids,
        max_chat_messages=settings.max_chat_messages,
        max_n=min(MAX_N, settings.max_call_sequences, *(welcome.max_num_seqs for welcome in welcomes)),
        max_call_sequences=settings.max_call_sequences,
        clamp_max_tokens=settings.clamp_max_tokens,
    )
