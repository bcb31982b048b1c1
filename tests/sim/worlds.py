"""Runs worlds: `python -m tests.sim.worlds SEED COUNT` prints the digest of each."""

import sys
import time
from dataclasses import dataclass

from tests.sim.world.cluster import Cluster, checked_cores, draw_config, draw_faults, draw_requests, draw_settings
from tests.sim.world.world import World

_LIMIT_S = 200.0
"""Faults begin within ten seconds and last half a minute at most; after that everything has to end."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a world."""

    digest: str
    num_events: int
    seconds: float
    num_tokens: int
    errors: tuple[str, ...]


def run_world(seed: int) -> Outcome:
    """Runs one replica and its requests under the faults of a seed.

    Raises:
        FalseAnswerError: a stream says what it must not.
        StuckError: not everything has ended in time.
    """
    with World(seed) as world, checked_cores() as cores:
        cluster = Cluster(world, draw_config(world), cores, draw_settings(world))
        num_requests, over_s = world.random.choice((4, 12, 12, 30)), world.random.choice((0.3, 3.0, 10.0))
        draw_requests(cluster, num_requests, over_s)
        draw_faults(cluster, world.random.randrange(9), over_s)
        world.run(lambda: len(cluster.stories) == num_requests and cluster.are_over, _LIMIT_S)
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
        outcome = run_world(seed)
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
