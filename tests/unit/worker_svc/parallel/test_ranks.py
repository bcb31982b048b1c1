"""Each rank's part of a layer, and that the parts make up the whole."""

from typing import NoReturn

import pytest
import torch

from quire.runtime.settings import ConfigurationError
from worker_svc.parallel import ranks
from worker_svc.parallel.ranks import DistributedRanks, Ranks, heads_of_rank
from worker_svc.parallel.rendezvous import backend_for
from worker_svc.settings import WorkerSettings
from worker_svc.step import SupersededError


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("total", [1, 7, 8])
def test_the_shards_of_all_ranks_are_everything_once(total: int, size: int) -> None:
    shards = [Ranks(rank, size).shard(total) for rank in range(size)]
    assert [number for shard in shards for number in range(shard.start, shard.end)] == list(range(total))


@pytest.mark.parametrize(
    ("size", "heads", "kv_heads", "expected"),
    [(1, 6, 2, (6, 2)), (2, 8, 4, (4, 2)), (4, 8, 2, (2, 1)), (2, 4, 1, (2, 1))],
)
def test_heads_are_dealt_out(size: int, heads: int, kv_heads: int, expected: tuple[int, int]) -> None:
    assert heads_of_rank(Ranks(0, size), heads, kv_heads) == expected


@pytest.mark.parametrize(
    ("heads", "kv_heads", "named"), [(4, 4, "4 attention heads"), (6, 2, "2 heads of key and value")]
)
def test_heads_that_cannot_be_dealt_out_are_refused(heads: int, kv_heads: int, named: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--tensor-parallel-size is 3; it must divide this model's {named}"):
        heads_of_rank(Ranks(0, 3), heads, kv_heads)


def test_a_rank_beyond_the_group_is_refused() -> None:
    with pytest.raises(ValueError, match="--tensor-parallel-rank is 2; it must be below --tensor-parallel-size"):
        WorkerSettings(tensor_parallel_size=2, tensor_parallel_rank=2)


def test_ranks_agree_on_the_host_on_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group for GPUs also has a backend for numbers of the host, so that nothing waits for the GPU."""
    assert backend_for(torch.device("cpu")) == "gloo"
    assert dict(part.split(":") for part in backend_for(torch.device("cuda", 1)).split(",")) == {
        "cpu": "gloo",
        "cuda": "nccl",
    }
    sent: list[torch.Tensor] = []

    def all_gather(of_all: list[torch.Tensor], mine: torch.Tensor) -> None:
        sent.append(mine)
        for theirs in of_all:
            theirs.copy_(mine)

    monkeypatch.setattr(ranks.dist, "all_gather", all_gather)
    DistributedRanks(1, 2, leave).agree(5, 7)
    assert [tensor.device.type for tensor in sent] == ["cpu"]


def test_gathered_columns_are_contiguous_where_ranks_have_unlike_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampler makes one flat line of float32 logits as they are."""
    whole = torch.arange(15, dtype=torch.float32).view(3, 5)

    def all_gather(parts: list[torch.Tensor], _: torch.Tensor) -> None:
        parts[0].copy_(whole[:, :3])
        parts[1].copy_(torch.nn.functional.pad(whole[:, 3:], (0, 1)))

    monkeypatch.setattr(ranks.dist, "all_gather", all_gather)
    gathered = DistributedRanks(0, 2, leave).gather_columns(whole[:, :3], 5)
    assert gathered.is_contiguous()
    assert torch.equal(gathered, whole)


class LeftError(Exception):
    """Raised in place of the end of the process."""


def leave(why: str) -> NoReturn:
    raise LeftError(why)


class ToldRanks(DistributedRanks):
    """Rank 0, with the position of rank 1 given at each gather."""

    def __init__(self, *others: tuple[int, int]) -> None:
        super().__init__(0, 2, leave)
        self.others = list(others)

    def _gather(self, numbers: list[int]) -> list[list[int]]:
        return [numbers, list(self.others.pop(0))]


@pytest.mark.parametrize("others", [[(2, 3)], [(1, 9), (2, 3)], [(0, 3), (1, 0), (1, 3), (2, 3)]])
def test_a_rank_waits_until_those_of_older_epochs_have_its_step(others: list[tuple[int, int]]) -> None:
    ranks = ToldRanks(*others)
    ranks.agree(2, 3)
    assert ranks.others == []


def test_a_step_is_superseded_by_a_higher_epoch_and_ranks_at_different_steps_of_one_epoch_leave() -> None:
    for others in ([(3, 3)], [(3, 0)], [(1, 3), (3, 1)]):
        with pytest.raises(SupersededError, match="epoch 2 ended before step 3: another rank is at epoch 3"):
            ToldRanks(*others).agree(2, 3)
    for others in ([(2, 4)], [(2, 0)], [(1, 3), (2, 2)]):
        with pytest.raises(LeftError, match=r"rank 0 is at epoch and step \(2, 3\), another rank is not"):
            ToldRanks(*others).agree(2, 3)
