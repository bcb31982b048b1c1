"""Whole clusters as functions of a seed: whatever dies or breaks, each answer equals the undisturbed one."""

import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from unittest.mock import patch
from weakref import ref

import pytest

from scheduler_svc.service import replica
from tests.sim import worlds
from tests.sim.plans import Plan, with_broken_naps
from tests.sim.races import draw_moves_of_one_rank
from tests.sim.shrink import check_world
from tests.sim.situations import draw_naps
from tests.sim.world.cluster import Cluster
from tests.sim.world.faults import Deviate, Kill, KillAt
from tests.sim.world.world import World
from tests.sim.worlds import Outcome, draw_plan, run_world

RANKED_REPLICA = ["worker-0", "worker-0-1", "scheduler-0"]


def test_answers_say_what_they_say_undisturbed(seeds: Sequence[int]) -> None:
    threads = set(threading.enumerate())
    for seed in seeds:
        check_world(draw_plan(seed))
    # A world ends with everything that it started, its killed gateways included. Threads of earlier tests may end late.
    assert not set(threading.enumerate()) - threads


@pytest.mark.extended
@pytest.mark.long
def test_worlds_that_once_failed() -> None:
    """The failures were: loads of adapters that never ended (288); a request that preempted no other one though enough
    room had become free (720201); a request that preempted others for rows reserved for an offer (1130626); workers
    that died of a request between two looks (1130164, which was no fault); blocks that came for a finished request
    whose gateways heard of it only with the next step (1520103); a stop string that ended a request whose reader still
    lacked tokens (41292); a cancelled request whose scheduler heard of it late, behind slow submissions (41433, which
    was no fault); a block from disk behind blocks of the host whose tokens no watcher was sent (41206); a tenant that
    came back behind one that was preempted and had got less (343); a durable request that ran on though it was
    cancelled while its scheduler, which slept meanwhile, was away (3000028); non-finite log probabilities of a prompt
    whose worker died before the request failed (4000628); a constraint that was blamed for a rank that was cut off
    (4004124); blocks of a further checkpoint that were not counted, since others before it came from host memory
    (342); and blocks from disk in the place of others that had yet to be swapped out (54, as it was)."""
    for seed in (288, 342, 720201, 1130626, 1130164, 1520103, 41206, 41292, 41433, 343, 3000028, 4000628, 4004124):
        check_world(draw_plan(seed))
    check_world(replace(draw_plan(54), faults=(), low_limits=()))


@pytest.mark.extended
def test_a_request_enters_for_which_rows_are_lacking_that_are_kept_for_those_behind_it() -> None:
    """Once such a request waited for ever, and so did all requests behind it."""
    check_world(draw_moves_of_one_rank(1, Random("x 1")))


@pytest.mark.extended
@pytest.mark.long
def test_naps_that_once_failed() -> None:
    """The failures were a second sleep that failed and woke the sleeping replicas (170), and a scheduler that was
    stopped while its workers discarded their weights, and attached them before they ended."""
    check_world(draw_plan(170))
    draw = Random("hunt brk 10")
    check_world(with_broken_naps(draw, draw_naps(10, draw)))


def test_without_faults_nothing_is_unavailable() -> None:
    plan = replace(draw_plan(7), faults=())
    assert plan.requests
    assert "UNAVAILABLE" not in run_world(plan).errors


@pytest.mark.long
def test_a_plan_with_parts_left_out_is_a_world_too() -> None:
    plan = next(plan for plan in map(draw_plan, range(100)) if plan.faults)
    part = replace(plan, faults=plan.faults[:1], requests=plan.requests[::2])
    outcome = run_world(part)
    assert run_world(part) == outcome
    assert run_world(plan).digest != outcome.digest


@pytest.mark.long
@pytest.mark.parametrize("limit", [4, 8])
def test_worlds_hold_where_a_step_with_streams_computes_few_tokens_of_prompts(limit: int) -> None:
    with patch.object(replica, "_MAX_MIXED_ON_CPU", limit):
        for seed in (870007, 871026):
            run_world(draw_plan(seed))


def test_a_world_is_the_same_in_another_process() -> None:
    """Compares worlds with another hash seed, and after other worlds: nothing depends on set order or addresses."""
    seeds = range(16, 18)
    environment = os.environ | {"PYTHONHASHSEED": "77"}
    command = [sys.executable, "-m", "tests.sim.worlds", str(seeds.start), str(len(seeds))]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=True, timeout=120)
    elsewhere = [line.split()[1] for line in done.stdout.splitlines()]
    here = [run_world(draw_plan(seed)).digest for seed in reversed(seeds)]
    assert elsewhere == here[::-1]
    assert len(set(here)) == len(seeds)


def test_worlds_leave_nothing_in_memory() -> None:
    plan, worlds = draw_plan(7), list[ref[World]]()
    plan = replace(plan, faults=(), requests=plan.requests[:1])
    for _ in range(2):
        run_world(plan, lambda world: worlds.append(ref(world)))
    assert [each() for each in worlds] == [None, None]


def test_a_world_opens_only_files_of_its_disks() -> None:
    """The files of a killed process stay open until its objects are collected; a warning would then fail any test."""
    plan = next(plan for plan in map(draw_plan, range(200)) if plan.layout.recording and plan.layout.recording.traces)
    plan = replace(plan, faults=(Kill(1.0, "scheduler-0"),), requests=plan.requests[:2])
    before, opened = _open_files(), list[set[str]]()
    run_world(plan, on_quiet=lambda cluster: opened.append(_open_files() - before - _files_of(cluster)))
    assert opened == [set()]


def _open_files() -> set[str]:
    return {str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}


def _files_of(cluster: Cluster) -> set[str]:
    return {str(path) for disk in cluster.disks.values() for path in disk.folder.iterdir()}


def test_a_process_that_dies_fails_only_the_world_that_it_ran(capsys: pytest.CaptureFixture[str]) -> None:
    def run(plan: Plan) -> Outcome:
        if plan.seed == 17:
            os._exit(9)
        return Outcome(f"digest-{plan.seed}", 3, 1.5, 0, ("UNAVAILABLE",))

    with patch.object(worlds, "run_world", run), patch.object(worlds, "_WORLDS_OF_CHILD", 3):
        assert worlds.main(16, 5, num_processes=2) == 1
    assert capsys.readouterr().out.splitlines() == [
        "16 digest-16 3 1.500 UNAVAILABLE",
        "17 fails: its process ended with 9",
        *(f"{seed} digest-{seed} 3 1.500 UNAVAILABLE" for seed in (18, 19, 20)),
    ]


def test_a_scheduler_that_dies_between_ranks_costs_no_rank() -> None:
    """Ranks that wait in a step that the other ranks never got drop it when the next scheduler attaches."""
    plan = next(plan for plan in map(draw_plan, range(200)) if plan.layout.replicas == RANKED_REPLICA)
    fault = KillAt(2.0, "scheduler-0", "scheduler.step.between_ranks", 3)
    worlds: list[World] = []
    run_world(replace(plan, faults=(fault,)), worlds.append)
    num_started = Counter(node.host for node in worlds[0].nodes)
    assert [num_started[host] for host in RANKED_REPLICA] == [1, 1, 2]


@pytest.mark.long
def test_a_rank_that_draws_another_token_costs_a_step() -> None:
    plan = next(plan for plan in map(draw_plan, range(200)) if plan.layout.replicas == RANKED_REPLICA)
    worlds: list[World] = []

    def listen(world: World) -> None:
        world.story = []
        worlds.append(world)

    run_world(replace(plan, faults=(Deviate(2.0, "worker-0-1"),)), listen)
    attached = [what for _, what in worlds[0].story or [] if "scheduler-0#0" in what and "connect" in what]
    assert attached.count(("connect", "scheduler-0#0", "worker-0:7001")) > 1


def test_requests_go_on_from_the_pool_of_a_worker_that_was_killed() -> None:
    """The successor computes much less than it would without the pool."""
    plan = next(
        plan
        for plan in map(draw_plan, range(28, 300))
        if plan.layout.num_replicas == plan.layout.worker.world_size == 1
        and not plan.layout.worker.max_adapters
        and plan.layout.worker.block_size <= 4
        and plan.layout.slowness > 1
        and len(plan.requests) > 8
    )
    layout = replace(plan.layout, weather=replace(plan.layout.weather, max_delay_s=0.001))

    def computed_by_successor(*, keeps_pools: bool) -> int:
        clusters: list[Cluster] = []
        with patch.object(worlds, "Cluster", lambda *arguments: clusters.append(Cluster(*arguments)) or clusters[0]):
            faults = (Kill(max(each.at for each in plan.requests) + 0.5, "worker-0"),)
            run_world(replace(plan, layout=replace(layout, keeps_pools=keeps_pools), faults=faults))
        first, second = clusters[0].runners.values()
        assert first.num_computed_tokens > 200
        return second.num_computed_tokens

    kept, lost = computed_by_successor(keeps_pools=True), computed_by_successor(keeps_pools=False)
    assert kept < lost - 200
