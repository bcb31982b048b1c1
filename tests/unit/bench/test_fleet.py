"""Several simulated replicas behind the gateway's router."""

import argparse

import numpy as np
import pytest

from bench.fleet import Fleet, add_arguments
from quire.load import arriving_at, fixed, make_arrivals, take
from quire.replica_role import ReplicaRole


@pytest.mark.parametrize("num_prefill", [0, 1])
def test_requests_get_all_their_tokens_wherever_they_move(num_prefill: int) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    load = take(fixed(600, 40, vocab_size=1000), 30, seed=0)
    load = arriving_at(load, make_arrivals(20.0).times(len(load), 0))
    fleet = Fleet(parser.parse_args(["--replicas=3"]), num_prefill, load)
    fleet.run()
    assert [len(each.times) for each in fleet.lives] == [40] * 30
    assert all(np.all(np.diff(each.times) >= 0) for each in fleet.lives)
    assert any(each.moved_at for each in fleet.lives) == bool(num_prefill)
    counts = {name: each.scheduler.move_counts for name, each in fleet.replicas.items()}
    assert sum(each.requests_out for each in counts.values()) == sum(len(each.moved_at) for each in fleet.lives)
    assert sum(each.from_replicas for each in counts.values()) > 0 or not num_prefill
    for name, each in fleet.replicas.items():
        assert each.role is not ReplicaRole.DECODE or counts[name].requests_out == 0
        assert not each.scheduler.num_live
