"""Sources of requests: lengths distributed as in known data, and prompts of random tokens.

Request `i` of a dataset depends only on the seed and on `i`, so a longer load begins as a shorter one.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Protocol, Self

import numpy as np

from quire.load.requests import FIRST_TOKEN_ID, LoadRequest, TokenIds, frozen

_PREFIXES = 1 << 33
"""Draws of shared prefixes, apart from requests, which are numbered from 0."""


class Length(Protocol):
    """A distribution of lengths in tokens."""

    def draw(self, generator: np.random.Generator) -> int: ...


@dataclass(frozen=True, slots=True)
class Constant:
    """Always the same length."""

    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"a length is {self.tokens} tokens, must be at least 1")

    def draw(self, generator: np.random.Generator) -> int:
        del generator
        return self.tokens


@dataclass(frozen=True, slots=True)
class Lognormal:
    """A lognormal distribution by its median and sigma; not clipped."""

    median: float
    sigma: float

    @classmethod
    def fit(cls, mean: float, variation: float) -> Self:
        """The one with this mean and coefficient of variation (deviation / mean)."""
        sigma = math.sqrt(math.log1p(variation**2))
        return cls(mean * math.exp(-(sigma**2) / 2), sigma)

    def scaled(self, factor: float) -> Self:
        """Each length times `factor`. Raises ValueError if it is not above 0."""
        if not (math.isfinite(factor) and factor > 0):
            raise ValueError(f"the scale of lengths is {factor}, must be a number above 0")
        return replace(self, median=self.median * factor)

    def draw(self, generator: np.random.Generator) -> int:
        return round(generator.lognormal(math.log(self.median), self.sigma))


# Fits to the paper's figure 11. Its means are of lengths as they are served, by a model that takes 2,048 tokens: these,
# clipped to that limit, have the means 161 and 338, and 19 and 58. The figure gives only the shape of the variation:
# ShareGPT's outputs are about as wide as exponential ones, its prompts wider, Alpaca's prompts narrow.
SHAREGPT_PROMPT = Lognormal.fit(165.94, 1.3)
SHAREGPT_OUTPUT = Lognormal.fit(342.8, 1.0)
ALPACA_PROMPT = Lognormal.fit(19.0, 0.5)
ALPACA_OUTPUT = Lognormal.fit(58.0, 1.0)


class Dataset(Protocol):
    """A source of requests without an end."""

    @property
    def name(self) -> str: ...

    def requests(self, seed: int) -> Iterator[LoadRequest]:
        """Yields the same requests for the same seed."""
        ...


def take(dataset: Dataset, num_requests: int, seed: int) -> list[LoadRequest]:
    """The first requests of a dataset; the last conversation may be cut short."""
    return list(islice(dataset.requests(seed), num_requests))


@dataclass(frozen=True, slots=True)
class Independent:
    """Requests that know nothing of one another but the prefix that they may share.

    A prompt without its prefix has at most half of the tokens that the prefix leaves of `max_model_len`, an output has
    the tokens that the prompt leaves.

    Attributes:
        vocab_size: Token ids are drawn from FIRST_TOKEN_ID up to it, exclusive.
        prefix_len: Tokens that begin every prompt.
        num_prefixes: Number of different prefixes; requests take them in turn, as in `group`.
    """

    name: str
    prompt: Length
    output: Length
    max_model_len: int
    vocab_size: int
    prefix_len: int = 0
    num_prefixes: int = 1

    def __post_init__(self) -> None:
        _check_limits(self.max_model_len, self.vocab_size)
        if self.prefix_len < 0:
            raise ValueError(f"the prefix has {self.prefix_len} tokens, must be at least 0")
        if self.num_prefixes < 1:
            raise ValueError(f"there are {self.num_prefixes} prefixes, must be at least 1")
        if self.max_model_len - self.prefix_len < 2:
            room = f"{self.max_model_len:,} that the model takes"
            raise ValueError(
                f"the prefix has {self.prefix_len:,} tokens; a prompt and an output need one each of {room}"
            )

    def requests(self, seed: int) -> Iterator[LoadRequest]:
        prefixes = [self._tokens(_generator(seed, _PREFIXES, i), self.prefix_len) for i in range(self.num_prefixes)]
        free = self.max_model_len - self.prefix_len
        for index in count():
            generator = _generator(seed, index)
            prompt_len = _clip(self.prompt.draw(generator), free // 2)
            output_len = _clip(self.output.draw(generator), free - prompt_len)
            prompt = self._tokens(generator, prompt_len)
            if not self.prefix_len:
                yield LoadRequest(index, frozen(prompt), output_len)
                continue
            group = index % self.num_prefixes
            yield LoadRequest(index, frozen(np.concatenate((prefixes[group], prompt))), output_len, group=group)

    def _tokens(self, generator: np.random.Generator, length: int) -> np.ndarray:
        return _draw_tokens(generator, length, self.vocab_size)


@dataclass(frozen=True, slots=True)
class Chat:
    """Conversations of several turns; each prompt carries the history of earlier messages and answers.

    Drawn tokens stand for the answers in the history, since a server answers otherwise. `LoadRequest.carrying` puts the
    real answers into the history; the turns without it are the paper's workload (section 6.5).

    Attributes:
        max_prompt_len: Maximum tokens of a prompt: the last tokens of the history and the message.
        mean_turns: Mean turns of a conversation; the number is geometric, at most `max_turns`.
        delay_s: Mean time from an answer to the next message; exponential.
    """

    message: Length
    output: Length
    max_model_len: int
    vocab_size: int
    max_prompt_len: int
    mean_turns: float = 3.5
    max_turns: int = 20
    delay_s: float = 0.0
    name: str = "chat"

    def __post_init__(self) -> None:
        _check_limits(self.max_model_len, self.vocab_size)
        if not 1 <= self.max_prompt_len < self.max_model_len:
            limit = (
                f"must be in [1, {self.max_model_len - 1:,}]: the model takes {self.max_model_len:,} with the output"
            )
            raise ValueError(f"the prompt is cut to {self.max_prompt_len:,} tokens, {limit}")
        if not (math.isfinite(self.mean_turns) and self.mean_turns >= 1):
            raise ValueError(f"the mean number of turns is {self.mean_turns}, must be at least 1")
        if self.max_turns < 1:
            raise ValueError(f"the greatest number of turns is {self.max_turns}, must be at least 1")
        if not (math.isfinite(self.delay_s) and self.delay_s >= 0):
            raise ValueError(f"the delay between turns is {self.delay_s} s, must be at least 0")

    def requests(self, seed: int) -> Iterator[LoadRequest]:
        index = 0
        for group in count():
            for request in self._conversation(_generator(seed, group), index, group):
                yield request
                index += 1

    def _conversation(self, generator: np.random.Generator, index: int, group: int) -> Iterator[LoadRequest]:
        num_turns = min(int(generator.geometric(1 / self.mean_turns)), self.max_turns)
        history = np.empty(0, np.int32)
        for turn in range(num_turns):
            message_len = _clip(self.message.draw(generator), self.max_prompt_len)
            message = _draw_tokens(generator, message_len, self.vocab_size)
            prompt: TokenIds = frozen(np.concatenate((history, message))[-self.max_prompt_len :])
            output_len = _clip(self.output.draw(generator), self.max_model_len - len(prompt))
            answer = _draw_tokens(generator, output_len, self.vocab_size)
            delay_s = float(generator.exponential(self.delay_s)) if turn else 0.0
            yield LoadRequest(
                index + turn,
                prompt,
                output_len,
                group=group,
                turn=turn,
                num_new_tokens=message_len,
                delay_s=delay_s,
            )
            history = np.concatenate((prompt, answer))


def sharegpt(max_model_len: int, vocab_size: int, scale: float = 1.0) -> Independent:
    """Conversations with ChatGPT that people shared: first messages and long answers, each `scale` times as long."""
    prompt, output = SHAREGPT_PROMPT.scaled(scale), SHAREGPT_OUTPUT.scaled(scale)
    return Independent("sharegpt", prompt, output, max_model_len, vocab_size)


def alpaca(max_model_len: int, vocab_size: int, scale: float = 1.0) -> Independent:
    """Instructions: one sentence in, some sentences out, each `scale` times as long."""
    return Independent("alpaca", ALPACA_PROMPT.scaled(scale), ALPACA_OUTPUT.scaled(scale), max_model_len, vocab_size)


def fixed(prompt_len: int, output_len: int, vocab_size: int) -> Independent:
    """Every prompt and every output of one length."""
    prompt, output = Constant(prompt_len), Constant(output_len)
    # So much that neither is clipped.
    return Independent("fixed", prompt, output, 2 * prompt_len + output_len, vocab_size)


def shared_prefix(
    prefix_len: int,
    prompt: Length,
    output: Length,
    max_model_len: int,
    vocab_size: int,
    num_prefixes: int = 1,
) -> Independent:
    """Prompts that begin alike, as with one system prompt; `prompt` is the length of the rest."""
    return Independent("shared-prefix", prompt, output, max_model_len, vocab_size, prefix_len, num_prefixes)


def chat(
    max_model_len: int,
    vocab_size: int,
    *,
    max_prompt_len: int | None = None,
    mean_turns: float = 3.5,
    max_turns: int = 20,
    delay_s: float = 0.0,
    scale: float = 1.0,
) -> Chat:
    """Conversations with messages and answers `scale` times as long as ShareGPT's; by default a prompt keeps half of
    the model's maximum length."""
    longest = max_model_len // 2 if max_prompt_len is None else max_prompt_len
    lengths = (SHAREGPT_PROMPT.scaled(scale), SHAREGPT_OUTPUT.scaled(scale))
    return Chat(*lengths, max_model_len, vocab_size, longest, mean_turns, max_turns, delay_s)


def _check_limits(max_model_len: int, vocab_size: int) -> None:
    if max_model_len < 2:
        raise ValueError(
            f"the model takes {max_model_len} tokens, must be at least 2: one of a prompt, one of an output"
        )
    if vocab_size <= FIRST_TOKEN_ID:
        raise ValueError(f"the vocabulary has {vocab_size} tokens, must be more than {FIRST_TOKEN_ID}")


def _clip(length: int, longest: int) -> int:
    return max(1, min(length, longest))


def _draw_tokens(generator: np.random.Generator, length: int, vocab_size: int) -> np.ndarray:
    return generator.integers(FIRST_TOKEN_ID, vocab_size, length, dtype=np.int32)


def _generator(seed: int, *stream: int) -> np.random.Generator:
    return np.random.default_rng((seed, *stream))
