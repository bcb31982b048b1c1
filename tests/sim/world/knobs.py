"""Service limits that only long outputs or large pools reach. In some worlds they are so low that small ones do; no
answer may depend on them."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from random import Random
from unittest.mock import patch

from quire.runtime.clock import CLOCK

_LOWEST: dict[str, int] = {
    "gateway.replicas.link._MESSAGES_OF_CREDIT": 1,
    "gateway.replicas.link._MESSAGES_AHEAD": 2,
    "gateway.replicas.link._TOKENS_AT_ONCE": 3,
    "gateway.request.durable.MAX_KEPT_TOKENS": 100,
    "scheduler_svc.core.running_batch._NUM_COMPARED": 3,
    "scheduler_svc.core.prefix_index._MAX_CHANGES": 4,
    "scheduler_svc.core.kv_cache._HASHES_AT_FIRST": 1,
    "scheduler_svc.core.kv_cache._MAX_HASHES_AT_ARRIVAL": 2,
    "scheduler_svc.core.kv_cache._MAX_RECLAIMED": 1,
    "scheduler_svc.core.kv_cache._MAX_RECLAIMED_BLOCKS": 4,
    "scheduler_svc.core.planner._MAX_ADMISSIONS": 1,
    "scheduler_svc.core.planner._MAX_BLOCKS_LOOKED_UP": 2,
    "scheduler_svc.core.planner._MAX_DISPLACED": 1,
    "scheduler_svc.core.arrivals._MAX_EXPIRED": 1,
    "scheduler_svc.service.outbox.MAX_SIZE": 8,
    "scheduler_svc.service.history._REPLAYED_AT_ONCE": 4,
    "scheduler_svc.service.kept_requests.MAX_UNDELIVERED": 20,
    "scheduler_svc.core.preparation.NUM_KEPT": 1,
}

_OF_MOVES: dict[str, int] = {
    "worker_svc.protocol.transfers._MESSAGE_BYTES": 100,
    "worker_svc.protocol.transfers._READ_AT_ONCE": 2,
    "worker_svc.device.disk_tier._AT_ONCE": 2,
}
MOVES = tuple(_OF_MOVES)
"""Limits that make moves of blocks take many messages, between which steps run."""


_OF_LEASES: dict[str, float] = {"worker_svc.protocol.transfers._REPORT_INTERVAL_S": 0.02}
LEASES = (*MOVES, *_OF_LEASES)
"""Leases are also renewed while moves of blocks take many messages."""


_OF_TIES: dict[str, int] = {"tests.sim.world.model._LEAST_STEP": 256}
TIES = tuple(_OF_TIES)
"""Candidates of beams have few distinct log probabilities, so that many beams are equally likely."""

_OF_CROWDS: dict[str, int] = {"scheduler_svc.core.policy._MANY": 2}
CROWDS = tuple(_OF_CROWDS)
"""Even a few requests leave a queue by the path for many."""

_OF_STATES: dict[str, int] = {
    "scheduler_svc.core.states.OUTPUT_INTERVAL": 3,
    "scheduler_svc.core.states.PROMPT_INTERVAL": 10,
}
STATES = tuple(_OF_STATES)
"""Sequences have checkpoints of their states at short intervals."""

TURNS = ("gateway.request.durable.TOKENS_PER_TURN", "gateway.turns.clock")
"""Turns of long work take time, so that others wait for theirs."""


class _SlowClock:
    """A clock on which each reading takes a millisecond."""

    def __init__(self) -> None:
        self._num_looks = 0

    def monotonic(self) -> float:
        self._num_looks += 1
        return CLOCK.get().monotonic() + 0.001 * self._num_looks


def draw_low_limits(draw: Random) -> tuple[str, ...]:
    """The names of the limits that are low in a world; empty in half of all worlds."""
    is_usual = draw.random() < 0.5
    low = tuple(name for name in _LOWEST if draw.random() < 0.6)
    return () if is_usual else low


REPLAYS = (
    "gateway.replicas.link._MESSAGES_OF_CREDIT",
    "gateway.replicas.link._MESSAGES_AHEAD",
    "scheduler_svc.service.history._REPLAYED_AT_ONCE",
)
"""Limits that make an output that is read again take many messages."""


LIMITS: dict[str, object] = {**_LOWEST, **_OF_MOVES, **_OF_LEASES, **_OF_TIES, **_OF_CROWDS, **_OF_STATES}
"""Low limits by name."""


@contextmanager
def low_limits(names: tuple[str, ...]) -> Iterator[None]:
    """Inside the block, these limits are low."""
    limits = LIMITS | dict(zip(TURNS, (1, _SlowClock()), strict=True))
    with ExitStack() as stack:
        for name in names:
            module, _, constant = name.rpartition(".")
            stack.enter_context(patch.object(import_module(module), constant, limits[name]))
        yield
