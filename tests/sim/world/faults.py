"""Faults as values: what breaks in a world, and when. Each begins at its time and undoes itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from tests.sim.world.network import Network
from tests.sim.world.world import Node, World

MAX_FAULT_S = 30.0
"""No fault lasts longer."""
RESTART_S = 3.0
"""By then a supervisor has started a killed process anew, and others have found it."""


class Target(Protocol):
    """What faults break."""

    @property
    def world(self) -> World: ...

    @property
    def network(self) -> Network: ...

    @property
    def running(self) -> dict[str, Node]:
        """The process of each host that lives, or that died last."""
        ...


class Fault(Protocol):
    """Something that breaks at a time, in seconds since the world's beginning."""

    @property
    def at(self) -> float: ...

    @property
    def seconds(self) -> float:
        """How long it lasts, with what follows from it."""
        ...

    def begin(self, target: Target) -> None:
        """Breaks it; what lasts ends by itself within MAX_FAULT_S."""
        ...


@dataclass(frozen=True, slots=True)
class Kill:
    """kill -9 of a process; its supervisor starts another one."""

    at: float
    host: str

    @property
    def seconds(self) -> float:
        return RESTART_S

    def begin(self, target: Target) -> None:
        target.running[self.host].kill()


@dataclass(frozen=True, slots=True)
class Pause:
    """SIGSTOP, and SIGCONT after some seconds."""

    at: float
    host: str
    seconds: float

    def begin(self, target: Target) -> None:
        node = target.running[self.host]
        node.stop()
        target.world.after(self.seconds, node.go_on)


@dataclass(frozen=True, slots=True)
class Cut:
    """The network between two hosts fails, one way or both."""

    at: float
    source: str
    destination: str
    both_ways: bool
    seconds: float

    def begin(self, target: Target) -> None:
        ways = [(self.source, self.destination), (self.destination, self.source)]
        for source, destination in ways if self.both_ways else ways[:1]:
            target.network.cut(source, destination)
            target.world.after(self.seconds, lambda a=source, b=destination: target.network.heal(a, b))


@dataclass(frozen=True, slots=True)
class Reset:
    """A connection ends by something between its ends: the one that has this number, counted round."""

    at: float
    number: int

    @property
    def seconds(self) -> float:
        return 0.0

    def begin(self, target: Target) -> None:
        if connections := target.network.connections:
            connections[self.number % len(connections)].reset()


def draw_faults(draw: Random, hosts: Sequence[str], servers: Sequence[str], over_s: float) -> tuple[Fault, ...]:
    """Up to eight faults that begin within so many seconds. Servers are the hosts whose processes are killed."""
    return tuple(_draw_fault(draw, hosts, servers, draw.uniform(0, over_s)) for _ in range(draw.randrange(9)))


def _draw_fault(draw: Random, hosts: Sequence[str], servers: Sequence[str], at: float) -> Fault:
    match draw.choice(("kill", "kill", "pause", "cut", "cut both", "reset")):
        case "kill":
            return Kill(at, draw.choice(servers))
        case "pause":
            return Pause(at, draw.choice(hosts), draw.uniform(0.01, 15))
        case "cut" | "cut both" as kind:
            source, destination = draw.sample(hosts, 2)
            return Cut(at, source, destination, kind == "cut both", draw.uniform(0.01, MAX_FAULT_S))
        case _:
            return Reset(at, draw.randrange(1 << 16))
