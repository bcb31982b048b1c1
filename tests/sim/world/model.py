"""The model of a world: pure functions of the contents of the slots that a row reads.

`mixed` hashes the contents to one number; tokens, log probabilities and candidates of beams follow from it, so one slot
that is wrong, stale or early changes each of them.
"""

import math
from typing import NamedTuple

import numpy as np

from tests.sim.world.traffic import EOS_TOKEN_ID, NUM_SPECIAL_TOKENS, VOCAB_SIZE
from tests.support.logprobs import Line

_MASK = (1 << 64) - 1
_MAX_POSITIONS = 1 << 14
_WEIGHTS = np.arange(_MAX_POSITIONS, dtype=np.uint64) * np.uint64(0x9E37_79B9_7F4A_7C15) | np.uint64(1)
_MODEL = 0x5851_F42D_4C95_7F2D
_STRIDE = 37
"""Coprime to the size of the vocabulary, so that candidates differ."""
_EOS_OF_256 = 3
_LEAST_STEP = 1
"""Log probabilities of candidates are multiples of this number of 1024ths."""


class Draw(NamedTuple):
    """The sampling of a row: greedy without a temperature, and only letters if it has a pattern such as [a-e]+. A
    banned token is replaced by the next allowed one."""

    temperature: float
    top_k: int
    seed: int
    pattern: str = ""
    banned: frozenset[int] = frozenset()


def mixed(content: np.ndarray, model: int) -> int:
    """Hashes contents [n] int64 to one number, which differs between models."""
    return int((content.view(np.uint64) * _WEIGHTS[: len(content)]).sum()) + model * _MODEL


def mixed_prefixes(content: np.ndarray, model: int) -> list[int]:
    """The results of `mixed` for all prefixes of contents [n], without the empty one."""
    sums = (content.view(np.uint64) * _WEIGHTS[: len(content)]).cumsum(dtype=np.uint64).tolist()
    return [each + model * _MODEL for each in sums]


def next_token(mix: int, draw: Draw, position: int) -> int:
    """The token at this position."""
    token_id = _drawn(mix, draw, position)
    while token_id in draw.banned:
        token_id = NUM_SPECIAL_TOKENS + (token_id + 1 - NUM_SPECIAL_TOKENS) % (VOCAB_SIZE - NUM_SPECIAL_TOKENS)
    return token_id


def _drawn(mix: int, draw: Draw, position: int) -> int:
    number = _scrambled(mix)
    if draw.temperature:
        luck = _scrambled(draw.seed + position * 0x9E37_79B9_7F4A_7C15 + round(draw.temperature * 1000) + draw.top_k)
        number = _scrambled(number ^ luck)
    if number >> 56 < _EOS_OF_256:
        return EOS_TOKEN_ID
    first, last = (draw.pattern[1], draw.pattern[3]) if draw.pattern else ("", "")
    count = ord(last) - ord(first) + 1 if draw.pattern else VOCAB_SIZE - NUM_SPECIAL_TOKENS
    start = NUM_SPECIAL_TOKENS + (ord(first) - ord("a") if draw.pattern else 0)
    return start + (number >> 20) % count


def line_of(mix: int, token_id: int, count: int) -> Line:
    """The log probabilities of a token at this position and of the `count` most likely tokens."""
    number = _scrambled(mix ^ token_id)
    ids, logprobs = candidates(mix, count)
    return Line(-(1 + number % 4096) / 512, 1 + number % 7, ids, logprobs)


def candidates(mix: int, count: int, pattern: str = "") -> tuple[list[int], list[float]]:
    """The most likely tokens, best first, and their log probabilities, which float32 represents exactly. A pattern such
    as [a-e]+ allows only these letters and, now and then, the end."""
    if pattern:
        first, size = NUM_SPECIAL_TOKENS + ord(pattern[1]) - ord("a"), ord(pattern[3]) - ord(pattern[1]) + 1
        number = _scrambled(mix + 1)
        allowed = [first + (number + place) % size for place in range(size)] + [EOS_TOKEN_ID] * (number >> 40 & 3 == 0)
        banned = [each for each in range(VOCAB_SIZE) if each not in allowed]
        logprobs = [-(1.0 + place) * _LEAST_STEP / 1024 for place in range(len(allowed))]
        return (allowed + banned)[:count], (logprobs + [-math.inf] * len(banned))[:count]
    number = _scrambled(mix + 1)
    first, step = number % VOCAB_SIZE, (1 + (number >> 20) % 512 // _LEAST_STEP) * _LEAST_STEP
    places = range(min(count, VOCAB_SIZE))
    return [(first + place * _STRIDE) % VOCAB_SIZE for place in places], [-(1 + p) * step / 1024 for p in places]


def _scrambled(number: int) -> int:
    number = ((number & _MASK) ^ ((number & _MASK) >> 30)) * 0xBF58_476D_1CE4_E5B9 & _MASK
    number = (number ^ (number >> 27)) * 0x94D0_49BB_1331_11EB & _MASK
    return number ^ (number >> 31)
