"""Processes of one machine that share memory."""

from dataclasses import dataclass

import torch

SLOT_BYTES = 2 << 20
"""Of what is brought together, as much as each process puts in at once."""
MOST_RANKS = 64


@dataclass(frozen=True, slots=True)
class SharedGroup:
    """One process of a group. Used by one thread at a time.

    Attributes:
        rank: which of `size` processes this is.
        memory: [exchange.shared_bytes(size)] uint8 on the CPU, the memory that all of them have mapped. All zeros
            before the group's first operation.
    """

    rank: int
    size: int
    memory: torch.Tensor

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size <= MOST_RANKS:
            raise ValueError(f"rank is {self.rank} of {self.size}; expected 0 up to the size, of at most {MOST_RANKS}")
