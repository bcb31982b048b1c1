"""Ranks that exchange messages: torch.distributed, by Gloo on the CPU and by NCCL on GPUs.

Numbers of the host go by Gloo on every device, so that ranks agree on a step without waiting for the GPU.
"""

from collections.abc import Callable
from typing import NoReturn

import torch
import torch.distributed as dist

from worker_svc.parallel.ranks import Ranks
from worker_svc.superseded import SupersededError


class DistributedRanks(Ranks):
    """The ranks of one group, each in a process. Used by the device thread alone.

    Args:
        leave: ends this process, saying why.
    """

    is_recordable = False

    def __init__(self, rank: int, size: int, leave: Callable[[str], NoReturn]) -> None:
        super().__init__(rank, size)
        self._leave = leave

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        self._run(lambda: dist.all_reduce(partial))
        return partial

    def gather_columns(self, part: torch.Tensor, total: int) -> torch.Tensor:
        width = -(-total // self.size)
        part = torch.nn.functional.pad(part, (0, width - part.shape[1])).contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)]
        self._run(lambda: dist.all_gather(parts, part))
        return torch.cat(parts, dim=1)[:, :total].contiguous()

    def smallest(self, *numbers: int) -> tuple[int, ...]:
        values = torch.tensor(numbers, dtype=torch.int64)
        self._run(lambda: dist.all_reduce(values, dist.ReduceOp.MIN))
        return tuple(values.tolist())

    def agree(self, scheduler_epoch: int, step_id: int) -> None:
        mine = [scheduler_epoch, step_id]
        of_all = self._gather(mine)
        while any(theirs != mine for theirs in of_all):
            newest = max(epoch for epoch, _ in of_all)
            if newest > scheduler_epoch:
                raise SupersededError(
                    f"epoch {scheduler_epoch} ended before step {step_id}: another rank is at epoch {newest}"
                )
            if any(epoch == newest and step != step_id for epoch, step in of_all):
                self._leave(f"rank {self.rank} is at epoch and step {scheduler_epoch, step_id}, another rank is not")
            # The others are at older epochs. Each drops the step that it is at, and gathers again for what it has next.
            of_all = self._gather(mine)

    def fail(self, why: str) -> None:
        self._leave(f"rank {self.rank}: {why}")

    def _gather(self, numbers: list[int]) -> list[list[int]]:
        """The numbers of all, in the order of ranks."""
        mine = torch.tensor(numbers, dtype=torch.int64)
        of_all = [torch.empty_like(mine) for _ in range(self.size)]
        self._run(lambda: dist.all_gather(of_all, mine))
        return [theirs.tolist() for theirs in of_all]

    def _run(self, operation: Callable[[], object]) -> None:
        try:
            operation()
        except RuntimeError as error:
            self._leave(f"rank {self.rank} cannot reach another rank: {error}")
