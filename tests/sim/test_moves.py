"""Streams that move between replicas with full pools, or while all replicas drain: bounds on their pauses, and no
stream ends."""

from dataclasses import replace
from random import Random

import pytest

from quire.client import GenerationOptions
from quire.runtime.clock import CLOCK
from scheduler_svc.core.moves import Lease
from scheduler_svc.core.request import RequestKey
from scheduler_svc.core.sequence import SequenceGroup
from tests.sim.plans import Plan
from tests.sim.situations import draw_moving
from tests.sim.world.checked_core import CheckedScheduler
from tests.sim.world.cluster import MANY
from tests.sim.world.faults import CannotStart, Drain, Fault, Reset, Stop
from tests.sim.world.network import Weather
from tests.sim.world.traffic import LONGEST, Generate, Verb
from tests.sim.world.world import Node, World
from tests.sim.worlds import run_world
from tests.support.tiers import is_third_tier, parametrize_once

NUM_WORLDS = 12 if is_third_tier() else 6
BEGIN_S = 2.0
"""All processes serve by this time."""
MAX_PAUSE_S = 0.5
"""Blocks move at 20 kB/s or faster, and steps take five times as long as usual. Streams that wait for room pause for up
to 10 s in these worlds."""


def crowded(seed: int) -> Plan:
    """A replica drains without a time limit, two requests fill each pool, and nothing else is wrong."""
    plan = draw_moving(seed, Random(f"drains {seed}"))
    worker = replace(plan.layout.worker, num_blocks=(2 * LONGEST + 40) // plan.layout.worker.block_size)
    settings = replace(plan.layout.settings, drain_timeout=100.0)
    layout = replace(plan.layout, worker=worker, settings=settings, slowness=5.0, first_role="both")
    stops = [fault for fault in plan.faults if isinstance(fault, Stop)]
    return replace(plan, layout=layout, faults=tuple(stops[:1]), low_limits=())


@pytest.mark.long
def test_a_stream_does_not_stand_still_where_other_replicas_have_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    worlds, left, pauses = list[World](), dict[str, float](), list[float]()
    hand_over, start = CheckedScheduler.move_away, CheckedScheduler._start

    def leave(self: CheckedScheduler, key: RequestKey, lease: Lease, now: float, lease_s: float):
        group = self.group(key)
        sealed = hand_over(self, key, lease, now, lease_s)
        if sealed is not None and group is not None and group.num_tokens > len(group.request.prompt):
            left[group.request.request_id] = worlds[-1].now
        return sealed

    def enter(self: CheckedScheduler, group: SequenceGroup, now: float) -> None:
        if (since := left.pop(group.request.request_id, None)) is not None:
            pauses.append(worlds[-1].now - since)
        start(self, group, now)

    monkeypatch.setattr(CheckedScheduler, "move_away", leave)
    monkeypatch.setattr(CheckedScheduler, "_start", enter)
    for seed in range(NUM_WORLDS):
        left.clear()
        run_world(crowded(seed), worlds.append)
    assert len(pauses) >= NUM_WORLDS / 2
    assert max(pauses) < MAX_PAUSE_S


def all_drain(seed: int) -> Plan:
    """All replicas are drained at nearly the same time, once all requests were accepted, and nothing else is wrong."""
    plan, draw = draw_moving(seed, Random(f"drains {seed}")), Random(f"all drain {seed}")
    num_replicas, num_gateways = draw.choice((2, 2, 3)), draw.choice((1, 2, 3))
    layout = replace(plan.layout, slowness=draw.choice((5.0, 20.0)), num_replicas=num_replicas)
    layout = replace(layout, num_gateways=num_gateways)
    if draw.random() < 0.5:
        worker = replace(layout.worker, num_blocks=(2 * LONGEST + 40) // layout.worker.block_size)
        layout = replace(layout, worker=worker)
    settings = replace(layout.settings, max_waiting_requests=MANY, max_durable_requests=MANY)
    requests = tuple(
        replace(
            each,
            at=BEGIN_S,
            tenant="ann",
            timeout_s=None,
            leaves_after_s=None,
            cancels_after_s=None,
            taken_over_after_s=None,
        )
        for each in plan.requests
        if isinstance(each, Generate)
    )
    within_s = draw.choice((0.0, 0.02, 0.1, 0.5))
    hosts = [host for host in layout.replicas if host.startswith("scheduler")]
    faults: list[Fault] = [Drain(BEGIN_S + 1.0 + draw.uniform(0, within_s), host) for host in hosts]
    if draw.random() < 0.5:
        # The streams of gateways to schedulers.
        faults += [Reset(BEGIN_S + 1.0 + draw.uniform(0, 2.0), "gateway", number) for number in range(6)]
    # Long after that the hosts restart.
    faults += [Stop(BEGIN_S + 120.0, host) for host in hosts]
    return replace(
        plan, layout=replace(layout, settings=settings), requests=requests, faults=tuple(faults), low_limits=()
    )


@parametrize_once("seed", range(NUM_WORLDS), second_tier=0)
def test_no_stream_ends_where_all_replicas_drain(seed: int) -> None:
    assert run_world(all_drain(seed)).errors == ()


def test_what_has_not_begun_at_a_replica_that_drains_begins_at_the_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, drains_at = all_drain(0), BEGIN_S + 10.0
    # The second replica starts when all requests are at the first one, which runs half of them.
    worker = replace(plan.layout.worker, max_num_rows=4, num_blocks=2000, max_drafts=0, max_passes=1)
    layout = replace(plan.layout, num_replicas=2, worker=worker, weather=Weather(), slowness=100.0, first_role="both")
    options = GenerationOptions(max_tokens=60, ignore_eos=True)
    request = next(each for each in plan.requests if isinstance(each, Generate))
    requests = tuple(
        replace(request, number=number, options=options, front=None, verb=Verb.STREAM, adapter=None)
        for number in range(8)
    )
    faults = (
        CannotStart(0.0, "scheduler-1", 4.0),
        Drain(drains_at, "scheduler-0"),
        Stop(BEGIN_S + 120.0, "scheduler-0"),
    )
    worlds, begun, start = list[World](), list[tuple[str, bool]](), CheckedScheduler._start

    def enter(self: CheckedScheduler, group: SequenceGroup, now: float) -> None:
        node = CLOCK.get()
        assert isinstance(node, Node)
        if group.cached_tokens is None and not group.request.emitted:
            begun.append((node.host, worlds[-1].now > drains_at))
        start(self, group, now)

    monkeypatch.setattr(CheckedScheduler, "_start", enter)
    run_world(replace(plan, layout=layout, requests=requests, faults=faults), worlds.append)
    assert begun == [("scheduler-0", False)] * 4 + [("scheduler-1", True)] * 4
