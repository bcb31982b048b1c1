"""When a cluster is quiet, its tables hold no entries of finished requests, links and sessions."""

import pytest

from gateway.request.body_memory import BodyMemory
from tests.sim.world.cluster import Cluster
from tests.sim.world.tables import held_by
from tests.sim.worlds import draw_plan, run_world


@pytest.mark.parametrize("seed", [2000, 3001, *(pytest.param(seed, marks=pytest.mark.long) for seed in (2002, 3002))])
def test_tables_are_empty_once_all_is_quiet(seed: int) -> None:
    held = dict[str, int]()

    def look(cluster: Cluster) -> None:
        held.update(held_by(cluster.gateways, cluster.loops, cluster.requests, cluster.workers))

    run_world(draw_plan(seed), on_quiet=look)
    assert held == {}


def test_what_an_object_holds_is_found() -> None:
    memory = BodyMemory(max_bytes=9)
    body = memory.begin(lambda: None)
    assert held_by({"a": [(memory,)]}) == {"BodyMemory.arriving": 1}
    body.release()
    assert held_by(memory) == {}
