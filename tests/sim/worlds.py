"""Runs worlds: `python -m tests.sim.worlds SEED COUNT` prints the digest of each."""

import sys
import time
from dataclasses import dataclass
from random import Random

from scheduler_svc.settings import SchedulerSettings
from tests.sim.world.cluster import HOSTS, Cluster, checked_cores, draw_config, draw_settings
from tests.sim.world.faults import Fault, draw_faults
from tests.sim.world.traffic import Request, draw_requests
from tests.sim.world.world import World
from tests.support.fake_worker import FakeWorkerConfig

_LIMIT_S = 200.0
"""Faults begin within ten seconds and last half a minute at most; after that everything has to end."""


@dataclass(frozen=True, slots=True)
class Plan:
    """All that a world is a function of. Requests and faults can be left out: what is left is a world, too.

    Attributes:
        seed: Of what chance decides while the world runs: delays, jobs, who goes on first.
    """

    seed: int
    worker: FakeWorkerConfig
    settings: SchedulerSettings
    requests: tuple[Request, ...]
    faults: tuple[Fault, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a world."""

    digest: str
    num_events: int
    seconds: float
    num_tokens: int
    errors: tuple[str, ...]


def draw_plan(seed: int) -> Plan:
    """The plan of a seed. Its generator is not the one that the world itself draws from."""
    draw = Random(f"plan {seed}")
    over_s = draw.choice((0.3, 3.0, 10.0))
    return Plan(
        seed,
        draw_config(draw),
        draw_settings(draw),
        draw_requests(draw, over_s),
        draw_faults(draw, HOSTS, ("worker", "scheduler"), over_s),
    )


def run_world(plan: Plan) -> Outcome:
    """Runs one replica and its requests under the faults of a plan.

    Raises:
        FalseAnswerError: a stream says what it must not.
        StuckError: not everything has ended in time.
    """
    with World(plan.seed) as world, checked_cores() as cores:
        cluster = Cluster(world, plan.worker, cores, plan.settings)
        for request in plan.requests:
            world.at(request.at, lambda request=request: cluster.ask(request))
        for fault in plan.faults:
            world.at(fault.at, lambda fault=fault: fault.begin(cluster))
        world.run(lambda: len(cluster.stories) == len(plan.requests) and cluster.are_over, _LIMIT_S)
        cluster.check()
        # What clients have left behind ends soon after.
        world.run(lambda: cluster.is_quiet, _LIMIT_S)
        errors = tuple(story.error.reason for story in cluster.stories if story.error is not None)
        num_tokens = sum(len(said) for story in cluster.stories for said in story.said)
        return Outcome(world.digest, world.num_events, world.now, num_tokens, errors)


def main(first: int, count: int) -> None:
    """Prints a line for each world; how fast they were goes to stderr."""
    started, num_events, seconds = time.process_time(), 0, 0.0
    for seed in range(first, first + count):
        outcome = run_world(draw_plan(seed))
        num_events, seconds = num_events + outcome.num_events, seconds + outcome.seconds
        print(seed, outcome.digest, outcome.num_events, f"{outcome.seconds:.3f}", *outcome.errors)
    used = time.process_time() - started
    print(
        f"{count} worlds, {num_events} events, {seconds:.0f} virtual s: "
        f"{used:.1f} s of CPU, {num_events / used:.0f} events a second",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
