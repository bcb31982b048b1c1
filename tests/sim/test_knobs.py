"""Limits of services that worlds lower: each exists under its name, so that no rename leaves a world without it."""

from tests.sim.world import knobs


def test_each_limit_that_a_world_may_lower_exists() -> None:
    for name in (*knobs.LIMITS, *knobs.TURNS):
        with knobs.low_limits((name,)):
            pass
