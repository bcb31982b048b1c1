"""Processes that share memory, played by threads: each has a rank, and calls leave the interpreter lock."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from kernels.exchange import SharedGroup, shared_bytes

T = TypeVar("T")
TIMEOUT_S = 60


def together(size: int, act: Callable[[SharedGroup], T]) -> list[T]:
    """What `act` returns to each rank of a new group, when all have acted at the same time."""
    memory = torch.zeros(shared_bytes(size), dtype=torch.uint8)
    with ThreadPoolExecutor(size) as pool:
        acts = [pool.submit(act, SharedGroup(rank, size, memory)) for rank in range(size)]
        return [each.result(TIMEOUT_S) for each in acts]
