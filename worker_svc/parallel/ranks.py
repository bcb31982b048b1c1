"""The ranks that share one model by tensor parallelism (Megatron-LM), as layers and runner see them."""

from dataclasses import dataclass

import torch

from quire.settings import ConfigurationError


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of `total` features, heads or rows that one rank holds: `start` up to `end`."""

    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start

    @property
    def slice(self) -> slice:
        return slice(self.start, self.end)


class Ranks:
    """One rank alone. `DistributedRanks` and `SharedMemoryRanks` beside it talk to others.

    Every rank gets the same steps and draws the same tokens: what the operations return is bitwise the same on all.

    Attributes:
        rank: which of `size` this process is.
        is_recordable: whether sums and gathers are operations of `kernels`, so that a recording can hold them.
    """

    is_recordable = True

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    def shard(self, total: int, num_shards: int | None = None) -> Shard:
        """This rank's part of `total`, the last one smaller where it does not divide evenly.

        Args:
            num_shards: where there are fewer parts than ranks, neighbouring ranks hold the same one.
        """
        count = self.size if num_shards is None else num_shards
        width = -(-total // count)
        start = min(self.rank * count // self.size * width, total)
        return Shard(start, min(start + width, total))

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks; may be written in place."""
        return partial

    def gather_columns(self, part: torch.Tensor, total: int) -> torch.Tensor:
        """The parts [S, shard(total).size] of all ranks side by side -> [S, total]."""
        return part

    def smallest(self, *numbers: int) -> tuple[int, ...]:
        """The least value of each number over all ranks."""
        return numbers

    def agree(self, scheduler_epoch: int, step_id: int) -> None:
        """Waits until all ranks are about to run the same step, so that all of them run it or none.

        A sum over two different steps would be nonsense, and one over a step that some ranks do not have would wait for
        them without end. Where a rank has come to a higher epoch, those that have not drop what is older, step by step.
        Step 0 is the beginning of an epoch.

        Raises:
            SupersededError: another rank is at a higher epoch.
        """

    def fail(self, why: str) -> None:
        """Something went wrong in this rank, maybe in it alone: ends the process where others would wait for it."""


ALONE = Ranks()


def heads_of_rank(ranks: Ranks, num_heads: int, num_kv_heads: int) -> tuple[int, int]:
    """How many heads of query, and of key and value, one rank has. Ranks share a head of key and value where there are
    fewer than ranks.

    Raises:
        ConfigurationError: the heads cannot be dealt out evenly.
    """
    if num_heads % ranks.size:
        raise ConfigurationError(
            f"--tensor-parallel-size is {ranks.size}; it must divide this model's {num_heads} attention heads"
        )
    if num_kv_heads % ranks.size and ranks.size % num_kv_heads:
        raise ConfigurationError(
            f"--tensor-parallel-size is {ranks.size}; it must divide this model's {num_kv_heads} heads of key and "
            "value, or be a multiple of them"
        )
    return num_heads // ranks.size, max(num_kv_heads // ranks.size, 1)
