"""Ranks of one machine that bring their parts together in memory which all of them have mapped.

Sums and gathers are operations of the kernels' library then, so a forward pass of several ranks can be recorded, and
each costs microseconds instead of a message by Gloo.
"""

from collections.abc import Callable
from typing import NoReturn

import torch

from kernels import exchange
from kernels.exchange import SharedGroup
from worker_svc.parallel.distributed_ranks import DistributedRanks


class SharedMemoryRanks(DistributedRanks):
    """The ranks of one group, each in a process of the same machine, with models on the CPU. Used by one thread.

    Args:
        memory: as `kernels.exchange` has it, for as many ranks.
    """

    is_recordable = True

    def __init__(self, rank: int, size: int, leave: Callable[[str], NoReturn], memory: torch.Tensor) -> None:
        super().__init__(rank, size, leave)
        self._group = SharedGroup(rank, size, memory)

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        return exchange.all_reduce(partial, self._group)

    def gather_columns(self, part: torch.Tensor, total: int) -> torch.Tensor:
        return exchange.all_gather(part, self._group, total)

    def _gather(self, numbers: list[int]) -> list[list[int]]:
        mine = torch.tensor([numbers], dtype=torch.int64)
        of_all = exchange.all_gather(mine, self._group, len(numbers) * self.size)
        return of_all.view(self.size, len(numbers)).tolist()
