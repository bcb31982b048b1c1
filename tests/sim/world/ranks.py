"""The ranks of a worker in a world: their rendezvous, their agreement before each step, and the detection of ranks that
ended. It replaces `worker_svc.parallel`, which needs sockets and torch; `agree` follows its rules."""

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field

from quire.runtime import clock
from tests.sim.world.network import Network
from tests.sim.world.world import Node
from worker_svc.step import SupersededError

Place = tuple[int, int]
"""An epoch and one of its steps; step 0 is the beginning of the epoch."""
_HEARTBEAT_S, _SILENCE_S = 0.25, 10.0
_EXCHANGE_S = 0.000_1


class Undecided(BaseException):
    """Interrupts the work of a rank's thread, which must wait for other ranks."""

    def __init__(self, wait: "Future[None]") -> None:
        self.wait = wait


def rank_hosts(worker: str, num_ranks: int) -> list[str]:
    """The hosts of a worker's ranks, in order; the first one has the worker's own name."""
    return [worker, *(f"{worker}-{rank}" for rank in range(1, num_ranks))]


def worker_of(host: str) -> str:
    """The worker that this host has a rank of."""
    return "-".join(host.split("-")[:2])


class Group:
    """Ranks that have found each other. When one of them ends, all end, and a new group is formed.

    Attributes:
        generation: Worker generation of these ranks.
        deviated: Epochs in which a fault made a rank draw another token than the others.
    """

    def __init__(self, network: Network, nodes: Mapping[int, Node], generation: int) -> None:
        self.generation = generation
        self.deviated: set[int] = set()
        self._network = network
        self._nodes = dict(nodes)
        self._waiting: dict[int, tuple[Place, Future[None]]] = {}
        self._verdicts: dict[int, tuple[Place, bool]] = {}
        self._told: dict[Place, object] = {}

    def __contains__(self, node: Node) -> bool:
        return node in self._nodes.values()

    def is_heard(self, node: Node, other: Node) -> bool:
        """Whether messages between the two processes arrive in both directions."""
        is_open = self._network.is_open(node.host, other.host) and self._network.is_open(other.host, node.host)
        return is_open and not other.is_dead and not other.is_stopped

    async def watch(self, node: Node, is_current: Callable[[Node], bool], stopping: threading.Event) -> None:
        """Returns when the process cannot continue, since another rank has ended, restarted or is silent. While the
        process is stopping, that is no reason to return."""
        others = [other for other in self._nodes.values() if other is not node]
        ended = asyncio.Event()
        for other in others:
            other.on_end.append(lambda other=other: self._hang_up(other, node, ended))
        heard_at = dict.fromkeys(others, clock.monotonic())
        while stopping.is_set() or (not ended.is_set() and all(map(is_current, others))):
            if stopping.is_set():
                # If the stop is called off, only silence shows ranks that ended meanwhile.
                ended.clear()
                heard_at = dict.fromkeys(others, clock.monotonic())
                await asyncio.sleep(_HEARTBEAT_S)
                continue
            for other in others:
                if self.is_heard(node, other):
                    heard_at[other] = clock.monotonic()
                elif clock.monotonic() - heard_at[other] > _SILENCE_S:
                    return
            with suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), _HEARTBEAT_S)

    def _hang_up(self, other: Node, node: Node, ended: asyncio.Event) -> None:
        """The kernel closes a connection between ranks, unless the machine has no power."""
        if not node.is_dead and self._network.is_open(other.host, node.host):
            node.loop.put(asyncio.Handle(ended.set, (), node.loop, node.context))

    def _compare(self) -> None:
        if len(self._waiting) < len(self._nodes):
            return
        nodes = list(self._nodes.values())
        if not all(self._network.is_open(one.host, other.host) for one in nodes for other in nodes):
            if not any(node.is_dead for node in nodes):
                self._network.world.after(_HEARTBEAT_S, self._compare)
            return
        newest = max(place[0] for place, _ in self._waiting.values())
        are_new = {place for place, _ in self._waiting.values() if place[0] == newest}
        if len(are_new) > 1:
            nodes[0].fail(AssertionError(f"ranks are at {sorted(are_new)}, which are steps of one epoch"))
        is_same = all(place[0] == newest for place, _ in self._waiting.values())
        for rank, (place, wait) in list(self._waiting.items()):
            if is_same or place[0] < newest:
                del self._waiting[rank]
                self._verdicts[rank] = place, is_same
                self._nodes[rank].run_job(lambda wait=wait: wait.set_result(None), _EXCHANGE_S)

    def agree(self, rank: int, epoch: int, step_id: int) -> None:
        """`Ranks.agree`: a rank is about to begin a step or an epoch.

        Raises:
            Undecided: it must wait for other ranks, and then call again.
            SupersededError: another rank is at a higher epoch.
        """
        decided, are_all = self._verdicts.get(rank, (None, False))
        if decided != (epoch, step_id):
            self._waiting[rank] = (epoch, step_id), Future()
            wait = self._waiting[rank][1]
            self._compare()
            raise Undecided(wait)
        if not are_all:
            raise SupersededError(f"epoch {epoch} ended before step {step_id}: another rank is at a higher epoch")

    def compare(self, place: Place, told: object) -> None:
        """Compares the data that a rank has read and drawn in a step with another rank's. Raises AssertionError if they
        differ and no fault made them differ."""
        other = self._told.pop(place, None)
        if other is None:
            self._told[place] = told
        elif other != told and place[0] not in self.deviated:
            raise AssertionError(f"ranks differ in {place}: {told} and {other}")


@dataclass
class Rendezvous:
    """The rendezvous of a worker's ranks, each time that they start."""

    network: Network
    num_ranks: int
    _came: dict[int, Node] = field(default_factory=dict[int, Node])
    _group: Group | None = None

    async def meet(self, rank: int, node: Node) -> Group:
        """Waits for the other ranks."""
        self._came[rank] = node
        while self._group is None or node not in self._group:
            nodes = self._came.values()
            is_new = self._group is None or not any(each in self._group for each in nodes)
            ways = ((one.host, other.host) for one in nodes for other in nodes)
            are_there = len(nodes) == self.num_ranks and not any(each.is_dead or each.is_stopped for each in nodes)
            if is_new and are_there and all(self.network.is_open(*way) for way in ways):
                self._group = Group(self.network, self._came, max(each.unix_ns() for each in nodes))
            else:
                await asyncio.sleep(_HEARTBEAT_S)
        return self._group

    def has(self, node: Node) -> bool:
        """Whether no later process has replaced this one."""
        return node in self._came.values()
