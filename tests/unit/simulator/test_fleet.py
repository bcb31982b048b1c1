"""Several simulated replicas behind the gateway's router."""

from dataclasses import replace

import numpy as np
import pytest

from quire.load import arriving_at, chat, fixed, make_arrivals, take, with_decoding
from quire.messages.replica_role import ReplicaRole
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.scheduler import Scheduler
from simulator.engine import Device
from simulator.fleet import Fleet, FleetRun
from simulator.load import LoadArrivals
from simulator.replica import Replica
from tests.unit.simulator.test_load import LinearSteps

CONFIG = SchedulerConfig(
    num_blocks=500,
    block_size=16,
    max_num_seqs=16,
    max_num_batched_tokens=256,
    max_model_len=2048,
    max_waiting_requests=99,
)


@pytest.mark.parametrize("num_prefill", [0, 1])
def test_requests_get_all_their_tokens_wherever_they_move(num_prefill: int) -> None:
    load = take(fixed(600, 40, vocab_size=1000), 30, seed=0)
    load = arriving_at(load, make_arrivals(5.0).times(len(load), 0))
    devices = [Device(Scheduler(CONFIG), LinearSteps()) for _ in range(3)]
    fleet = Fleet(3, num_prefill, block_s=1e-3, latency_s=0.005)
    simulation = FleetRun(LoadArrivals(load), devices, fleet).to_end()
    times = [life.token_times[0] for life in simulation.lives]
    assert [len(each) for each in times] == [40] * 30
    assert all(np.all(np.diff(each) >= 0) for each in times)
    num_moves = sum(len(life.moved_at) for life in simulation.lives)
    assert bool(num_moves) == bool(num_prefill)
    assert len(simulation.pauses) == num_moves
    assert all(pause > 0.005 + 37 * 1e-3 for pause in simulation.pauses)
    counts = [each.scheduler.move_counts for each in devices]
    assert sum(each.requests_out for each in counts) == num_moves
    assert sum(each.from_replicas for each in counts) > 0 or not num_prefill
    for role, count in zip(fleet.roles, counts, strict=True):
        assert role is not ReplicaRole.DECODE or count.requests_out == 0


def test_a_request_leaves_once_another_replica_has_room() -> None:
    load = take(fixed(600, 100, vocab_size=1000), 12, seed=0)
    load = arriving_at(load, make_arrivals(50.0).times(len(load), 0))
    # Two requests fill a pool.
    devices = [Device(Scheduler(replace(CONFIG, num_blocks=100)), LinearSteps()) for _ in range(2)]
    simulation = FleetRun(LoadArrivals(load), devices, Fleet(2, 1, block_s=1e-3, latency_s=0.005)).to_end()
    assert [len(life.token_times[0]) for life in simulation.lives] == [100] * 12
    assert simulation.pauses
    assert max(simulation.pauses) < 0.3


@pytest.mark.long
def test_conversations_and_beams_run_on_several_replicas() -> None:
    load = [
        *take(chat(2048, 1000), 12, seed=1),
        *with_decoding(take(fixed(300, 20, vocab_size=1000), 4, seed=4), n=2),
        *with_decoding(take(fixed(400, 30, vocab_size=1000), 4, seed=2), beam_width=2),
        *take(fixed(500, 40, vocab_size=1000), 12, seed=3),
    ]
    load = [replace(each, index=index) for index, each in enumerate(load)]
    outcome = Replica(CONFIG, LinearSteps(), 1000, fleet=Fleet(3, 1)).run(load)
    assert all(record.error is None for record in outcome.records)
    counters = outcome.counters()
    assert counters["moves"] > 0
    assert counters["device_busy_share"] <= 1
