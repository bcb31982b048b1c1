"""The ranks that share one model by tensor parallelism (Megatron-LM), as layers and runner see them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.distributed as dist

from quire.runtime.settings import ConfigurationError
from quire_kernels import exchange
from quire_kernels.exchange import SharedGroup
from worker_svc.step import SupersededError


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a number of features, heads or rows: every `step`-th one from `start` up to `end`."""

    start: int
    end: int
    step: int = 1

    @property
    def size(self) -> int:
        return max(0, -(-(self.end - self.start) // self.step))

    @property
    def slice(self) -> slice:
        return slice(self.start, self.end, self.step)


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbouring features that are split over ranks separately from the features next to them.

    Attributes:
        num_shards: as in `Ranks.shard`.
    """

    size: int
    num_shards: int | None = None


class Ranks:
    """A single rank. The subclasses communicate with other ranks.

    Every rank gets the same steps and draws the same tokens: the operations return bitwise the same on all ranks.

    Attributes:
        rank: index of this process among `size`.
        is_recordable: whether sums and gathers are operations of `kernels`, so that a recording can contain them.
    """

    is_recordable = True

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    def shard(self, total: int, num_shards: int | None = None) -> Shard:
        """This rank's part of `total`. The last part is smaller if it does not divide evenly.

        Args:
            num_shards: the maximum number of parts. With fewer parts than ranks, neighbouring ranks hold the same one.
        """
        count = self.size if num_shards is None else min(self.size, num_shards)
        width = -(-total // count)
        start = min(self.rank * count // self.size * width, total)
        return Shard(start, min(start + width, total))

    def shards(self, segments: Sequence[Segment]) -> Iterator[Shard]:
        """This rank's part of each segment; the segments follow each other."""
        first = 0
        for segment in segments:
            shard = self.shard(segment.size, segment.num_shards)
            yield Shard(first + shard.start, first + shard.end)
            first += segment.size

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks; may be written in place."""
        return partial

    def gather_columns(self, part: torch.Tensor, total: int) -> torch.Tensor:
        """The parts [S, shard(total).size] of all ranks side by side -> [S, total]."""
        return part

    def smallest(self, *numbers: int) -> tuple[int, ...]:
        """The smallest value of each number over all ranks."""
        return numbers

    def agree(self, scheduler_epoch: int, step_id: int) -> None:
        """Waits until all ranks are about to run the same step, so that either all of them run it or none.

        A sum over two different steps would be wrong, and one over a step that some ranks do not have would never
        return. If a rank has reached a higher epoch, the others drop their older steps one by one. Step 0 is the
        beginning of an epoch.

        Raises:
            SupersededError: another rank is at a higher epoch.
        """

    def fail(self, why: str) -> None:
        """Reports a failure, perhaps of this rank only. Ends the process if other ranks would wait for it."""


ALONE = Ranks()


class DistributedRanks(Ranks):
    """Ranks that exchange messages by torch.distributed: Gloo on the CPU, NCCL on GPUs. Used by the device thread only.

    Host numbers go by Gloo on every device, so that ranks agree on a step without waiting for the GPU.

    Args:
        leave: ends this process, with the reason.
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
        own = [scheduler_epoch, step_id]
        of_all = self._gather(own)
        while any(each != own for each in of_all):
            newest = max(epoch for epoch, _ in of_all)
            if newest > scheduler_epoch:
                raise SupersededError(
                    f"epoch {scheduler_epoch} ended before step {step_id}: another rank is at epoch {newest}"
                )
            if any(epoch == newest and step != step_id for epoch, step in of_all):
                self._leave(f"rank {self.rank} is at epoch and step {scheduler_epoch, step_id}, another rank is not")
            # The others are at older epochs. Each drops its step, and gathers again for its next one.
            of_all = self._gather(own)

    def fail(self, why: str) -> None:
        self._leave(f"rank {self.rank}: {why}")

    def _gather(self, numbers: list[int]) -> list[list[int]]:
        """The numbers of all ranks, in their order."""
        own = torch.tensor(numbers, dtype=torch.int64)
        of_all = [torch.empty_like(own) for _ in range(self.size)]
        self._run(lambda: dist.all_gather(of_all, own))
        return [each.tolist() for each in of_all]

    def _run(self, operation: Callable[[], object]) -> None:
        try:
            operation()
        except RuntimeError as error:
            self._leave(f"rank {self.rank} cannot reach another rank: {error}")


class SharedMemoryRanks(DistributedRanks):
    """Ranks of one machine, with models on the CPU, that exchange tensors in shared memory. Used by one thread.

    Sums and gathers are operations of the kernels' library here, so that a forward pass of several ranks can be
    recorded, and each takes microseconds instead of a message by Gloo.

    Args:
        memory: as described in `quire_kernels.exchange`, for `size` ranks.
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
        own = torch.tensor([numbers], dtype=torch.int64)
        of_all = exchange.all_gather(own, self._group, len(numbers) * self.size)
        return of_all.view(self.size, len(numbers)).tolist()


def check_division(ranks: Ranks, divide: Callable[[Ranks], object]) -> None:
    """Checks that ranks can share a model.

    Args:
        divide: raises ConfigurationError if the ranks that it is called with cannot.

    Raises:
        ConfigurationError: they cannot. The error names the largest smaller number of ranks that can.
    """
    refusal: ConfigurationError | None = None
    for size in range(ranks.size, 0, -1):
        try:
            divide(Ranks(0, size))
        except ConfigurationError as error:
            refusal = refusal or error
        else:
            if refusal is not None:
                raise ConfigurationError(f"{refusal}; use {size}") from refusal
            return


def part_of_rank(ranks: Ranks, count: int, name: str) -> int:
    """The number of heads or channels of one rank, of `count` that the model has.

    Raises:
        ConfigurationError: they cannot be divided evenly.
    """
    if count % ranks.size:
        raise ConfigurationError(f"--tensor-parallel-size is {ranks.size}; it must divide this model's {count} {name}")
    return count // ranks.size


def heads_of_rank(ranks: Ranks, num_heads: int, num_kv_heads: int) -> tuple[int, int]:
    """The numbers of query heads, and of key and value heads, of one rank. Ranks share a head of key and value if
    there are fewer of them than ranks.

    Raises:
        ConfigurationError: the heads cannot be divided evenly.
    """
    of_rank = part_of_rank(ranks, num_heads, "attention heads")
    if num_kv_heads % ranks.size and ranks.size % num_kv_heads:
        raise ConfigurationError(
            f"--tensor-parallel-size is {ranks.size}; it must divide this model's {num_kv_heads} heads of key and "
            "value, or be a multiple of them"
        )
    return of_rank, max(num_kv_heads // ranks.size, 1)
