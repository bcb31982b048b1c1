"""Ranks of one model in threads of one process."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from worker_svc.parallel.ranks import Ranks


class ThreadedRanks(Ranks):
    """A rank that exchanges tensors with the others in memory. Each runs in a thread of its own."""

    is_recordable = False

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, parts: list[torch.Tensor]) -> None:
        super().__init__(rank, size)
        self._barrier, self._parts = barrier, parts

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchange(partial)).sum(0)

    def gather_columns(self, part: torch.Tensor, total: int) -> torch.Tensor:
        return torch.cat(self._exchange(part), dim=1)

    def _exchange(self, part: torch.Tensor) -> list[torch.Tensor]:
        self._parts[self.rank] = part
        self._barrier.wait(60)
        found = list(self._parts)
        self._barrier.wait(60)
        return found


def run_ranks(size: int, run: Callable[[Ranks], Any]) -> list[Any]:
    """The results of all ranks, which run at the same time."""
    barrier, parts = threading.Barrier(size), [torch.empty(0)] * size
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, [ThreadedRanks(rank, size, barrier, parts) for rank in range(size)]))
