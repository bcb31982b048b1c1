"""Faults as values: what breaks in a world, and when. Each fault begins at its time and undoes itself."""

import errno
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, ClassVar, Protocol, cast

from quire.messages.layer_groups import LayerGroups
from quire.service.compatibility import ModelFingerprint
from tests.sim.world.block_disk import BlockDisk
from tests.sim.world.device import Devices
from tests.sim.world.disk import Disk
from tests.sim.world.network import Connection, Network
from tests.sim.world.ranks import rank_hosts
from tests.sim.world.supervisor import Supervised
from tests.sim.world.traffic import Kind
from tests.sim.world.world import Node, World
from tests.support.fake_worker import FakeWorkerConfig

MAX_FAULT_S = 30.0
"""Maximum duration of a fault."""
_MAX_CALL_S = 3.0
"""Maximum duration of an operator's call if nothing is broken, without the time of a load."""
RESTART_S = 3.0
"""By then a supervisor has restarted a killed process, and its peers have found it."""

# Failpoints at which the processes of a host can be killed, with the maximum pass that is drawn: low for rare ones.
FAILPOINTS: Mapping[str, Mapping[str, int]] = {
    "worker": {
        "worker.attach.before_inventory": 2,
        "worker.step.admitted": 60,
        "worker.step.moved": 60,
        "worker.step.sealed": 60,
    },
    "scheduler": {
        "scheduler.submit.before_queue": 8,
        "scheduler.submit.accepted": 8,
        "scheduler.step.before_send": 60,
        "scheduler.step.between_ranks": 60,
        "scheduler.apply.before_emit": 60,
        "scheduler.events.before_write": 60,
        "scheduler.attach.before_inventory": 2,
        "scheduler.reader.changed": 4,
        "scheduler.drain.begun": 1,
    },
    "gateway": {
        "gateway.submit.before_send": 8,
        "gateway.connected.before_resubmit": 2,
        "gateway.events.before_apply": 60,
        "gateway.events.before_credit": 60,
        "gateway.stream.before_write": 60,
        "gateway.drain.begun": 1,
    },
}


MOVE_FAILPOINTS: Mapping[str, int] = {"worker.fetch.before_write": 3, "worker.move.written": 3}
"""Failpoints of workers between which blocks move, in the same form."""


class Target(Protocol):
    """The system that faults break."""

    @property
    def world(self) -> World: ...

    @property
    def network(self) -> Network: ...

    @property
    def hosts(self) -> Mapping[str, Supervised]: ...

    @property
    def running(self) -> Mapping[str, Node]:
        """The live process of each host, or the last one that died."""
        ...

    @property
    def devices(self) -> Devices:
        """The workers' devices."""
        ...

    @property
    def disks(self) -> Mapping[str, Disk]:
        """The disks of hosts that have one."""
        ...

    @property
    def block_disks(self) -> Mapping[str, BlockDisk]:
        """The disks of workers' blocks, by host."""
        ...

    def change_worker(self, host: str, change: Callable[[FakeWorkerConfig], FakeWorkerConfig]) -> None:
        """Changes the configuration of a host's worker from its next start on."""
        ...

    def drain(self, host: str) -> None:
        """Drains a scheduler, as `quire drain` does, and lets it run on."""
        ...

    def forget_cached(self, host: str) -> None:
        """Makes a scheduler forget its cached blocks, as `ResetPrefixCache` does."""
        ...

    def start_rival(self, host: str, older_s: float) -> None:
        """Starts another scheduler for this one's worker; by its clock it started `older_s` seconds earlier."""
        ...

    def nap(self, nap: "Nap") -> None:
        """Starts an operator that puts all replicas to sleep."""
        ...


class Fault(Protocol):
    """A fault at a time, in seconds since the world's beginning."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def at(self) -> float: ...

    @property
    def seconds(self) -> float:
        """Duration of the fault and of its consequences."""
        ...

    def begin(self, target: Target) -> None:
        """Starts the fault, which ends by itself within MAX_FAULT_S."""
        ...


@dataclass(frozen=True, slots=True)
class Kill:
    """kill -9 of a process; its supervisor restarts it."""

    at: float
    host: str

    @property
    def seconds(self) -> float:
        return RESTART_S

    def begin(self, target: Target) -> None:
        target.running[self.host].kill()


@dataclass(frozen=True, slots=True)
class KillAt:
    """kill -9 of a process at the n-th pass of a failpoint from then on."""

    at: float
    host: str
    failpoint: str
    number: int

    @property
    def seconds(self) -> float:
        return RESTART_S

    def begin(self, target: Target) -> None:
        target.world.kill_at(self.host, self.failpoint, self.number)


@dataclass(frozen=True, slots=True)
class Stop:
    """SIGTERM: the process shuts down in order, and its supervisor restarts it."""

    at: float
    host: str

    @property
    def seconds(self) -> float:
        return MAX_FAULT_S

    def begin(self, target: Target) -> None:
        target.hosts[self.host].stop_in_order()


@dataclass(frozen=True, slots=True)
class Drain:
    """`quire drain`: a scheduler accepts no new requests any more, and runs on."""

    at: float
    host: str

    @property
    def seconds(self) -> float:
        return 0.0

    def begin(self, target: Target) -> None:
        target.drain(self.host)


@dataclass(frozen=True, slots=True)
class ForgetCached:
    """An operator makes a scheduler forget its cached blocks. Nothing breaks."""

    at: float
    host: str

    @property
    def seconds(self) -> float:
        return 0.0

    def begin(self, target: Target) -> None:
        target.forget_cached(self.host)


@dataclass(frozen=True, slots=True)
class Nap:
    """An operator puts all replicas to sleep, by successive calls of a gateway, and wakes them. Nothing breaks.

    Attributes:
        gateway: The number of the gateway that is called.
        levels: The sleep level of each call.
        sleeps_s: Seconds of sleep after each call.
    """

    at: float
    gateway: int
    levels: tuple[int, ...]
    sleeps_s: float

    @property
    def seconds(self) -> float:
        return len(self.levels) * (self.sleeps_s + _MAX_CALL_S) + _MAX_CALL_S

    def begin(self, target: Target) -> None:
        target.nap(self)


@dataclass(frozen=True, slots=True)
class PowerOff:
    """A machine loses power for some seconds, and its peers' connections to it are half open."""

    at: float
    host: str
    dark_s: float

    @property
    def seconds(self) -> float:
        return self.dark_s + RESTART_S

    def begin(self, target: Target) -> None:
        target.hosts[self.host].power_off(self.dark_s)


@dataclass(frozen=True, slots=True)
class CannotStart:
    """A process ends, and for some seconds no process can start on its host."""

    at: float
    host: str
    lasts_s: float

    @property
    def seconds(self) -> float:
        return self.lasts_s + 2 * RESTART_S

    def begin(self, target: Target) -> None:
        host = target.hosts[self.host]
        host.cannot_start_until = max(host.cannot_start_until, target.world.now + self.lasts_s)
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
    """The network between two hosts fails, in one direction or in both."""

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
    """A connection is reset by something between its ends. `number` selects it, by modulo, among the connections that
    hosts of one kind have opened."""

    at: float
    opened_by: str
    number: int

    @property
    def seconds(self) -> float:
        return 0.0

    def begin(self, target: Target) -> None:
        if (connection := _connection(target, self.opened_by, self.number)) is not None:
            connection.reset()


@dataclass(frozen=True, slots=True)
class HalfOpen:
    """A connection carries nothing more, and neither end is notified: a device between them has forgotten it."""

    at: float
    opened_by: str
    number: int

    @property
    def seconds(self) -> float:
        return MAX_FAULT_S

    def begin(self, target: Target) -> None:
        if (connection := _connection(target, self.opened_by, self.number)) is not None:
            connection.go_silent()


def _connection(target: Target, opened_by: str, number: int) -> Connection | None:
    connections = [each for each in target.network.connections if each.hosts[0].startswith(opened_by)]
    return connections[number % len(connections)] if connections else None


@dataclass(frozen=True, slots=True)
class SetClock:
    """An operator sets a clock back by `back_s` seconds, or forward, and perhaps restarts the process there. Half a
    minute later a worker accepts a scheduler whose clock was set back."""

    at: float
    host: str
    back_s: float
    restarts: bool

    @property
    def seconds(self) -> float:
        return MAX_FAULT_S + RESTART_S

    def begin(self, target: Target) -> None:
        target.world.set_back(self.host, self.back_s)
        if self.restarts:
            target.running[self.host].kill()


@dataclass(frozen=True, slots=True)
class Hang:
    """The device of a worker hangs for some seconds, even if its process restarts."""

    at: float
    host: str
    hangs_s: float

    @property
    def seconds(self) -> float:
        return self.hangs_s + 3 * RESTART_S

    def begin(self, target: Target) -> None:
        target.devices.hang(self.host, self.hangs_s)


@dataclass(frozen=True, slots=True)
class Glitch:
    """The device computes non-finite values for one row of a step. That request fails, and no other one."""

    at: float
    host: str

    @property
    def seconds(self) -> float:
        return 0.0

    def begin(self, target: Target) -> None:
        target.devices.glitch(self.host)


@dataclass(frozen=True, slots=True)
class Flip:
    """One bit is flipped on the way in each of the next `number` messages with blocks from one worker to another."""

    at: float
    host: str
    number: int

    @property
    def seconds(self) -> float:
        return 0.0

    def begin(self, target: Target) -> None:
        target.devices.flip(self.host, self.number)


@dataclass(frozen=True, slots=True)
class Deviate:
    """A rank draws another token than the other ranks: the step is void, and no answer may show that token."""

    at: float
    host: str

    @property
    def seconds(self) -> float:
        return RESTART_S

    def begin(self, target: Target) -> None:
        target.devices.deviate(self.host)


@dataclass(frozen=True, slots=True)
class OtherPool:
    """A worker dies and comes back with a pool of another size, and perhaps with another block size, or with its layers
    in other groups (None if they stay in the same groups)."""

    at: float
    host: str
    block_size: int
    num_blocks: int
    num_host_blocks: int
    groups: LayerGroups | None = None

    @property
    def seconds(self) -> float:
        return RESTART_S

    def begin(self, target: Target) -> None:
        def change(config: FakeWorkerConfig) -> FakeWorkerConfig:
            pool = {"num_blocks": self.num_blocks, "num_host_blocks": self.num_host_blocks}
            groups = config.groups if self.groups is None else self.groups
            return replace(config, block_size=self.block_size, **pool).with_groups(groups)

        target.change_worker(self.host, change)
        target.running[self.host].kill()


@dataclass(frozen=True, slots=True)
class OtherModel:
    """A worker dies and comes back with another model for some seconds, and then with its own model again."""

    at: float
    host: str
    model: ModelFingerprint
    own: ModelFingerprint
    lasts_s: float

    @property
    def seconds(self) -> float:
        return self.lasts_s + 2 * RESTART_S

    def begin(self, target: Target) -> None:
        def become(model: ModelFingerprint) -> None:
            target.change_worker(self.host, lambda config: replace(config, fingerprint=model))
            target.running[self.host].kill()

        become(self.model)
        target.world.after(self.lasts_s, lambda: become(self.own))


@dataclass(frozen=True, slots=True)
class Rival:
    """Another scheduler attaches to a worker, though it started before the worker's own scheduler. It must give up."""

    at: float
    host: str
    older_s: float

    @property
    def seconds(self) -> float:
        return RESTART_S

    def begin(self, target: Target) -> None:
        target.start_rival(self.host, self.older_s)


@dataclass(frozen=True, slots=True)
class BadDisk:
    """The disk of a scheduler is full for some seconds, or fails otherwise. Only its recording may suffer."""

    at: float
    host: str
    error: int
    lasts_s: float

    @property
    def seconds(self) -> float:
        return 0.0

    def begin(self, target: Target) -> None:
        target.disks[self.host].fail(self.error, self.lasts_s)


@dataclass(frozen=True, slots=True)
class BadBlockDisk:
    """The disk of a worker's blocks is full for some seconds, or fails otherwise. No answer shows it."""

    at: float
    host: str
    error: int
    lasts_s: float

    @property
    def seconds(self) -> float:
        return 0.0

    def begin(self, target: Target) -> None:
        target.block_disks[self.host].fail(self.error, self.lasts_s)


@dataclass(frozen=True, slots=True)
class SlowBlockDisk:
    """The disk of a worker's blocks takes up to `job_s` seconds for jobs that usually take milliseconds."""

    at: float
    host: str
    job_s: float
    lasts_s: float

    @property
    def seconds(self) -> float:
        return self.lasts_s

    def begin(self, target: Target) -> None:
        target.block_disks[self.host].slow(self.job_s, self.lasts_s)


@dataclass(frozen=True, slots=True)
class Rot:
    """Bits on the disk of a worker's blocks change."""

    at: float
    host: str
    number: int

    @property
    def seconds(self) -> float:
        return 0.0

    def begin(self, target: Target) -> None:
        target.block_disks[self.host].rot(self.number)


def draw_block_disk_faults(draw: Random, hosts: Sequence[str], over_s: float) -> tuple[Fault, ...]:
    """Draws faults of block disks and of the workers that use them."""
    workers = [host for host in hosts if host.startswith("worker")]
    faults: list[Fault] = []
    for _ in range(draw.choice((0, 1, 2, 4))):
        at, host = draw.uniform(-0.1, over_s), draw.choice(workers)
        faults.append(
            draw.choice(
                (
                    BadBlockDisk(at, host, draw.choice((errno.ENOSPC, errno.EIO)), draw.choice((0.05, 1.0))),
                    SlowBlockDisk(at, host, draw.choice((0.05, 0.5, 9.0)), draw.choice((0.5, 10.0))),
                    Rot(at, host, draw.choice((1, 20))),
                    Rot(at, host, 20),
                    Kill(at, host),
                    KillAt(at, host, "worker.move.written", draw.randint(1, 3)),
                    PowerOff(at, host, draw.uniform(0.1, 3)),
                    Stop(at, host),
                )
            )
        )
    return tuple(faults)


def draw_slow_block_disks(draw: Random, over_s: float) -> tuple[Fault, ...]:
    """Draws a disk that is always slow in some worlds, and in others one that delivers blocks when no request waits for
    them any more, perhaps to the next scheduler."""
    match draw.choice(("usual", "slow", "late")):
        case "slow":
            return (SlowBlockDisk(-0.1, "worker-0", draw.choice((0.05, 0.2)), 10.0),)
        case "late":
            at = draw.uniform(0.2, over_s)
            late = SlowBlockDisk(at, "worker-0", 9.0, 10.0)
            ends_at = at + draw.uniform(0.05, 3)
            ends = (
                Kill(ends_at, "scheduler-0"),
                Reset(ends_at, "scheduler", 0),
                HalfOpen(ends_at, "scheduler", 0),
                PowerOff(ends_at, "scheduler-0", 0.1),
            )
            return (late, *((draw.choice(ends),) if draw.random() < 0.7 else ()))
        case _:
            return ()


def draw_bad_disks(draw: Random, hosts: Sequence[str], over_s: float) -> tuple[BadDisk, ...]:
    """Draws disk faults of a world whose schedulers record."""
    schedulers = [host for host in hosts if host.startswith("scheduler")]
    return tuple(
        BadDisk(
            draw.uniform(-0.1, over_s),
            draw.choice(schedulers),
            draw.choice((errno.ENOSPC, errno.ENOSPC, errno.EIO)),
            draw.choice((0.05, 1.0, MAX_FAULT_S)),
        )
        for _ in range(draw.choice((0, 1, 1, 2)))
    )


_WEIGHTS = {
    "kill": 4,
    "kill at": 6,
    "rack": 4,
    "stop": 1,
    "power off": 1,
    "cannot start": 2,
    "pause": 3,
    "cut": 2,
    "cut both": 2,
    "half open": 1,
    "reset": 4,
    "clock": 1,
    "hang": 1,
    "glitch": 2,
    "rival": 1,
    "other pool": 2,
    "rank": 4,
}
_NAMES = tuple(name for name in _WEIGHTS if name != "rank")
_OF_KIND: Mapping[Kind, Sequence[str]] = {
    Kind.TIGHT: ("kill", "kill at", "pause", "cut", "reset", "other pool", "glitch"),
    Kind.NETWORK: ("pause", "cut", "cut both", "half open", "reset"),
    Kind.RESTARTS: ("kill", "kill at", "rack", "stop", "power off", "cannot start", "clock", "other pool", "reset"),
}
"""The faults of worlds of a kind; other kinds have all of them."""


def draw_faults(
    draw: Random, kind: Kind, hosts: Sequence[str], times: Sequence[float], over_s: float, worker: FakeWorkerConfig
) -> tuple[Fault, ...]:
    """Faults that begin within `over_s` seconds, or soon after requests, which arrive at `times`. A world leaves out
    some kinds of faults, so that the others come together more often; some faults repeat several times in a row."""
    names = [name for name in _OF_KIND.get(kind, _NAMES) if draw.random() < 0.6] or ["reset"]
    if worker.world_size > 1:
        names += ["rank"] * 2
    count = {Kind.CALM: 0, Kind.TIGHT: draw.randrange(5), Kind.NETWORK: draw.randint(2, 8)}.get(kind)
    faults: list[Fault] = []
    for _ in range(draw.randrange(7) if count is None else count):
        name = draw.choices(names, [_WEIGHTS[each] for each in names])[0]
        is_near = times and draw.random() < 0.7
        at = draw.choice(times) + draw.uniform(0, 0.3) if is_near else draw.uniform(0, over_s)
        drawn = _draw_fault(draw, name, hosts, at, worker)
        faults += drawn
        for _ in range(draw.randint(1, 3) if draw.random() < 0.3 else 0):
            at += draw.choice((0.02, 0.1, 1.0)) * draw.random()
            faults += [replace(cast(Any, each), at=at) for each in drawn]
    if any(isinstance(fault, Rival) for fault in faults):
        # A scheduler whose clock was set back is the older one after a restart, and gives up in its turn.
        faults = [fault for fault in faults if not isinstance(fault, SetClock)]
    return tuple(faults)


def draw_drains(
    draw: Random, layout_hosts: Sequence[str], over_s: float, worker: FakeWorkerConfig
) -> tuple[Fault, ...]:
    """Draws drains of schedulers while requests run, one after the other, and faults while blocks move."""
    workers = [host for host in layout_hosts if host.startswith("worker")]
    schedulers = [host for host in layout_hosts if host.startswith("scheduler")]
    faults: list[Fault] = []
    at = draw.uniform(0.02, over_s)
    for host in draw.sample(schedulers, draw.choice((1, 1, 2))):
        faults.append(Stop(at, host))
        for _ in range(draw.choice((0, 0, 1, 2))):
            near, (source, destination) = at + draw.uniform(-0.05, 0.3), draw.sample(workers, 2)
            point = draw.choice(tuple(MOVE_FAILPOINTS))
            faults.append(
                draw.choice(
                    (
                        KillAt(at, source, point, draw.randint(1, MOVE_FAILPOINTS[point])),
                        KillAt(at, source, point, 1),
                        Kill(near, source),
                        Kill(near, draw.choice(schedulers)),
                        Cut(near, source, destination, draw.random() < 0.5, draw.uniform(0.01, 8)),
                        Flip(at - 0.05, source, draw.randint(1, 3)),
                        Reset(near, "worker", draw.randrange(1 << 16)),
                        HalfOpen(near, "worker", draw.randrange(1 << 16)),
                        Pause(near, source, draw.uniform(0.01, 8)),
                        *_draw_fault(draw, "other pool", layout_hosts, at - 2.0, worker),
                    )
                )
            )
        at += draw.uniform(4, 20)
    return tuple(faults)


def draw_other_model(draw: Random, servers: Sequence[str], over_s: float, own: ModelFingerprint) -> OtherModel:
    """Draws a worker that has another model for a while; perhaps with a tokenizer that no gateway has."""
    host = draw.choice([host for host in servers if host.startswith("worker")])
    other = replace(own, weights=draw.choice(("1", "2")), tokenizer=draw.choice((own.tokenizer,) * 3 + ("another",)))
    return OtherModel(draw.uniform(0, over_s), host, other, own, draw.uniform(0.1, 15))


def draw_other_pool(draw: Random, workers: Sequence[str], at: float, worker: FakeWorkerConfig) -> OtherPool:
    """Draws another pool for one of the workers, which are all like `worker`. Requests that fit still fit."""
    size = draw.choice((worker.block_size, 2, 4, 16))
    num_blocks = worker.num_blocks * worker.block_size // size
    num_blocks = draw.choice((num_blocks, num_blocks + 7, 2 * num_blocks))
    return OtherPool(at, draw.choice(workers), size, num_blocks, draw.choice((0, 16, 128)))


def _draw_fault(draw: Random, name: str, hosts: Sequence[str], at: float, worker: FakeWorkerConfig) -> list[Fault]:
    servers = [host for host in hosts if not host.startswith("client")]
    workers = [host for host in servers if host.startswith("worker")]
    schedulers = [host for host in servers if host.startswith("scheduler")]
    opened_by = draw.choice(("client", "gateway", "gateway", "scheduler"))
    match name:
        case "kill":
            return [Kill(at, draw.choice(servers))]
        case "kill at":
            host = draw.choice(servers)
            points = FAILPOINTS[host.partition("-")[0]]
            failpoint = draw.choice(tuple(points))
            return [KillAt(at, host, failpoint, draw.randint(1, points[failpoint]))]
        case "rack":
            count = draw.choice((draw.randint(2, len(servers)), len(servers)))
            return [Kill(at, host) for host in draw.sample(servers, count)]
        case "stop":
            return [Stop(at, draw.choice(servers))]
        case "power off":
            return [PowerOff(at, draw.choice(servers), draw.uniform(0.1, MAX_FAULT_S))]
        case "cannot start":
            return [CannotStart(at, draw.choice([*servers, *workers]), draw.uniform(0.1, 15))]
        case "pause":
            return [Pause(at, draw.choice(hosts), draw.uniform(0.01, draw.choice((0.2, 20))))]
        case "cut" | "cut both":
            source, destination = draw.sample(hosts, 2)
            lasts_s = draw.uniform(0.01, draw.choice((0.5, MAX_FAULT_S)))
            return [Cut(at, source, destination, name == "cut both", lasts_s)]
        case "half open":
            return [HalfOpen(at, opened_by, draw.randrange(1 << 16))]
        case "clock":
            back_s = draw.choice((-600.0, -1.0, 1.0, 30.0, 600.0, 600.0))
            host = draw.choice([*hosts, *schedulers])
            return [SetClock(at, host, back_s, restarts=host in servers and draw.random() < 0.5)]
        case "hang":
            return [Hang(at, draw.choice(workers), draw.choice((0.5, 5.0, MAX_FAULT_S)))]
        case "rival":
            return [Rival(at, draw.choice(schedulers), draw.choice((0.02, 0.5, 3600.0)))]
        case "glitch":
            return [Glitch(at, draw.choice(workers))]
        case "rank":
            # A fault of one rank and not of the other.
            replica = draw.choice(schedulers).rpartition("-")[2]
            worker_hosts = rank_hosts(f"worker-{replica}", worker.world_size)
            rank, peer = draw.sample(worker_hosts, 2)
            return [
                draw.choice(
                    (
                        Kill(at, rank),
                        KillAt(at, f"scheduler-{replica}", "scheduler.step.between_ranks", draw.randint(1, 20)),
                        Pause(at, rank, draw.uniform(0.01, draw.choice((2, 20)))),
                        Cut(at, rank, draw.choice((peer, f"scheduler-{replica}")), True, draw.uniform(0.01, 15)),
                        Deviate(at, rank),
                    )
                )
            ]
        case "other pool":
            return [draw_other_pool(draw, workers, at, worker)]
        case _:
            return [Reset(at, opened_by, draw.randrange(1 << 16))]
