"""Random bytes and numbers of services: one seam, so that a simulation can draw them from its seed.

Secrets (keys, nonces, ids that grant something) and random delays that only spread load come from the same source.
Draws of tokens do not: they are functions of a request's seed and a position.
"""

import os
import uuid
from contextvars import ContextVar
from typing import Protocol


class Entropy(Protocol):
    """A source of random bytes."""

    def random_bytes(self, count: int) -> bytes: ...


class SystemEntropy:
    """The operating system's source."""

    def random_bytes(self, count: int) -> bytes:
        return os.urandom(count)


ENTROPY: ContextVar[Entropy] = ContextVar("quire entropy", default=SystemEntropy())  # noqa: B039  (it has no state)
"""To be set only by a simulation, in the context of a simulated process."""


def random_bytes(count: int) -> bytes:
    """Unpredictable bytes."""
    return ENTROPY.get().random_bytes(count)


def random_hex(num_bytes: int) -> str:
    """Unpredictable hexadecimal digits, two per byte."""
    return random_bytes(num_bytes).hex()


def random_bits(count: int) -> int:
    """A number in [0, 2**count)."""
    return int.from_bytes(random_bytes((count + 7) // 8)) >> (-count % 8)


def random_uuid() -> uuid.UUID:
    """A random UUID (version 4)."""
    return uuid.UUID(bytes=random_bytes(16), version=4)


def fraction() -> float:
    """A number in [0, 1), with 53 random bits."""
    return random_bits(53) / 2**53


def uniform(low: float, high: float) -> float:
    """A number in [low, high]; for delays, jitter and choices."""
    return low + (high - low) * fraction()
