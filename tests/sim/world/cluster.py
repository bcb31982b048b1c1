"""A replica in a world: the real scheduler service, the real worker service down to its device, and a gateway's
replicas with their clients. A supervisor starts anew what dies."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast
from unittest.mock import patch

from gateway.replicas.ledger import Ledger
from gateway.replicas.live import LiveRequest
from gateway.replicas.replica_set import Replicas
from gateway.text.tokenizer import Tokenizer
from quire import clock
from quire.compatibility import UNKNOWN_MODEL
from quire.prefix_hashes import BlockHash
from quire.rpc.errors import QuireError
from scheduler_svc.core import invariants
from scheduler_svc.core.block_pool import BlockId
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.request import ClientId, RequestKey
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step import ClientEvents, StepResult
from scheduler_svc.service import step_loop
from scheduler_svc.service.app import serve
from scheduler_svc.settings import SchedulerSettings
from tests.sim.world.device import HashRunner, SimDeviceLoop, undisturbed
from tests.sim.world.network import Network, Weather
from tests.sim.world.transport import SimTransport
from tests.sim.world.world import Node, World
from tests.support.fake_worker import FakeWorkerConfig
from tests.support.parameters import make_request
from worker_svc.metrics import WorkerMetrics
from worker_svc.protocol.stream import Worker, WorkerServicer, start_server

WORKER, SCHEDULER, GATEWAY = "worker:7001", "scheduler:7002", "gateway"
_VOCAB_SIZE = 250
_HOSTS = ("worker", "scheduler", "gateway")


class _Detokenizer:
    """Text is not what worlds are about."""

    def push(self, token_id: int) -> str:
        return "x"

    def flush(self) -> str:
        return ""


class _Tokenizer:
    def detokenizer(self, **_: Any) -> _Detokenizer:
        return _Detokenizer()


@dataclass
class Story:
    """A request, and what became of it.

    Attributes:
        leaves_after_s: When its client leaves; None where it waits for the end.
        live: The gateway's entry, once there is one.
        has_ended, has_left: Whether it was answered, or its client left before.
        error: What it failed with.
    """

    prompt: list[int]
    max_tokens: int
    num_sequences: int = 1
    tenant: str = ""
    priority: int = 0
    leaves_after_s: float | None = None
    live: LiveRequest | None = None
    has_ended: bool = False
    has_left: bool = False
    error: QuireError | None = None

    @property
    def is_over(self) -> bool:
        return self.has_ended or self.has_left or self.error is not None

    @property
    def said(self) -> list[list[int]]:
        """The tokens of each sequence so far."""
        return [] if self.live is None else [list(stream.token_ids) for stream in self.live.sequences]


class FalseAnswerError(AssertionError):
    """A stream says something else than it does undisturbed."""


@dataclass
class Cluster:
    """Three hosts: a worker, its scheduler, and a gateway."""

    world: World
    config: FakeWorkerConfig
    cores: list["CheckedScheduler"]
    settings: dict[str, Any] = field(default_factory=dict)
    weather: Weather | None = None
    stories: list[Story] = field(default_factory=list)
    runners: list[HashRunner] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.network = Network(self.world, self.weather)
        self.running: dict[str, Node] = {}
        self.replicas: Replicas | None = None
        self._tasks: dict[str, Any] = {}
        self._start("worker", self._run_worker)
        self._start("scheduler", self._run_scheduler)
        self._start("gateway", self._run_gateway)

    def _start(self, host: str, main: Callable[[Node], Coroutine[Any, Any, Any]]) -> None:
        node = self.world.node(host)
        self.running[host] = node
        SimTransport.install(self.network, node)
        task = node.start(lambda: main(node))
        self._tasks[host] = task
        node.on_end.append(lambda: self._restart(host, main))

        def ended(done: asyncio.Task[Any]) -> None:
            if not done.cancelled() and (error := done.exception()) is not None:
                raise AssertionError(f"{node.name} failed") from error

        task.add_done_callback(ended)

    def _restart(self, host: str, main: Callable[[Node], Coroutine[Any, Any, Any]]) -> None:
        self.world.after(self.world.random.uniform(0.05, 1.5), lambda: self._start(host, main))

    async def _run_worker(self, node: Node) -> None:
        config = self.config
        runner = HashRunner(
            config.num_blocks, config.block_size, config.vocab_size, num_host_blocks=config.num_host_blocks
        )
        self.runners.append(runner)
        servicer = WorkerServicer(WorkerMetrics())
        servicer.open(Worker(config.info(), runner, SimDeviceLoop(node, runner)))
        server = await start_server(servicer, WORKER)
        server.set_serving(True)
        await asyncio.Event().wait()

    async def _run_scheduler(self, node: Node) -> None:
        values: dict[str, Any] = {"listen": SCHEDULER, "workers": (WORKER,), "log_level": "error"} | self.settings
        await serve(SchedulerSettings(**values))

    async def _run_gateway(self, node: Node) -> None:
        self.ledger = Ledger(max_chunk_tokens=64, clock=clock.monotonic)
        self.replicas = Replicas(
            [SCHEDULER],
            self.ledger,
            gateway_id="gateway",
            architecture="FakeForCausalLM",
            model=UNKNOWN_MODEL,
            connect_timeout_s=600,
            failover_delay_s=1.0,
            reconnect_grace_s=10.0,
        )
        await self.replicas.run()

    def ask(self, story: Story) -> None:
        """A client of the gateway sends a greedy request."""
        number = len(self.stories)
        self.stories.append(story)
        self.world.note("ask", number, len(story.prompt), story.max_tokens)
        self.running["gateway"].start(lambda: self._read(number, story))

    async def _read(self, number: int, story: Story) -> None:
        request = make_request(
            f"request {number}",
            story.tenant,
            prompt=story.prompt,
            max_tokens=story.max_tokens,
            num_sequences=story.num_sequences,
            eos_token_ids=(),
            nonce=number + 1,
            priority=story.priority,
        )
        assert self.replicas is not None
        live = story.live = self.ledger.open(request, cast(Tokenizer, _Tokenizer()))
        self.replicas.place(live)
        try:
            async with asyncio.timeout(story.leaves_after_s):
                await live.result()
            story.has_ended = True
        except TimeoutError:
            story.has_left = True
        except QuireError as error:
            story.error = error
        finally:
            self.replicas.release(live)
            self.ledger.close(live)
        self.world.note("answer", number, story.said, None if story.error is None else story.error.reason)

    def check(self) -> None:
        """Raises FalseAnswerError where a stream, over or not, says what it must not, or a device misused a block."""
        where = f"(seed {self.world.seed}, second {self.world.now:.3f})"
        for number, story in enumerate(self.stories):
            expected = undisturbed(story.prompt, story.max_tokens, self.config.vocab_size)
            for said in story.said:
                if said != (expected if story.has_ended else expected[: len(said)]):
                    raise FalseAnswerError(f"request {number} says {said}, not {expected} {where}")
        for runner in self.runners:
            if runner.faults:
                raise FalseAnswerError(f"a step misused a block {where}") from runner.faults[0]
        for node in self.world.nodes:
            if node.errors:
                raise FalseAnswerError(f"{node.name}: {node.errors[0]} {where}")

    @property
    def are_over(self) -> bool:
        return all(story.is_over for story in self.stories)

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is held for requests any more, by the gateway or by the scheduler that lives."""
        return not len(self.ledger) and not (self.cores and self.cores[-1].num_live)


class CheckedScheduler(Scheduler):
    """The core, whose invariants hold after every operation that changes it from outside."""

    def abort(self, key: RequestKey) -> bool:
        done = super().abort(key)
        invariants.check(self)
        return done

    def apply(self, result: StepResult, now: float) -> dict[ClientId, ClientEvents]:
        events = super().apply(result, now)
        invariants.check(self)
        return events

    def void_in_flight(self, now: float) -> None:
        super().void_in_flight(now)
        invariants.check(self)

    def restore_sealed(self, sealed: Iterable[tuple[BlockId, BlockHash]]) -> None:
        super().restore_sealed(sealed)
        invariants.check(self)


@contextmanager
def checked_cores() -> Iterator[list[CheckedScheduler]]:
    """Inside the block, services make cores that check themselves; yields the list that they come to, in order."""
    cores: list[CheckedScheduler] = []

    def make(config: SchedulerConfig) -> CheckedScheduler:
        cores.append(CheckedScheduler(config))
        return cores[-1]

    with patch.object(step_loop, "Scheduler", make):
        yield cores


def draw_config(world: World) -> FakeWorkerConfig:
    """A small worker, whose pool is too small for all requests at once as often as not."""
    draw = world.random
    config = FakeWorkerConfig(vocab_size=_VOCAB_SIZE, max_model_len=256)
    block_size = draw.choice((2, 4, 16))
    return replace(
        config,
        block_size=block_size,
        # Three sequences of the longest request fit, so that none is refused.
        num_blocks=draw.choice((560, 640, 1600)) // block_size,
        num_host_blocks=draw.choice((0, 32, 128)),
        max_num_rows=draw.choice((4, 16, 64)),
        max_num_batched_tokens=draw.choice((16, 64, 512)),
    )


def draw_settings(world: World) -> dict[str, Any]:
    """Settings of the scheduler."""
    draw = world.random
    return {
        "policy": draw.choice(("fcfs", "priority", "fair")),
        "preemption_mode": draw.choice(("auto", "swap", "recompute")),
        "max_steps_in_flight": draw.choice((1, 2, 2, 4)),
        "max_prefill_share": draw.choice((0.1, 0.5, 1.0)),
    }


def draw_requests(cluster: Cluster, count: int, over_s: float) -> None:
    """Requests at drawn times; many begin alike, and some clients leave."""
    world, draw = cluster.world, cluster.world.random
    stems = [[draw.randrange(16, _VOCAB_SIZE) for _ in range(64)] for _ in range(draw.choice((1, 4)))]
    for _ in range(count):
        prompt = draw.choice(stems)[: draw.choice((0, 7, 33, 64, 64))]
        story = Story(
            prompt + [draw.randrange(16, _VOCAB_SIZE) for _ in range(draw.choice((0, 1, 2, 40)) or not prompt)],
            max_tokens=draw.randrange(1, 60),
            num_sequences=draw.choice((1, 1, 2, 3)),
            tenant=draw.choice(("", "a", "b")),
            priority=draw.choice((0, 0, 1, -1)),
            leaves_after_s=draw.choice((None, None, None, draw.uniform(0, 3))),
        )
        world.at(draw.uniform(0, over_s), lambda story=story: cluster.ask(story))


def draw_faults(cluster: Cluster, count: int, over_s: float) -> None:
    """Kills, breaks and pauses at drawn times."""
    world, network, draw = cluster.world, cluster.network, cluster.world.random

    def kill(host: str) -> None:
        cluster.running[host].kill()

    def pause(host: str, seconds: float) -> None:
        node = cluster.running[host]
        node.stop()
        world.after(seconds, node.go_on)

    def cut(ways: Sequence[tuple[str, str]], seconds: float) -> None:
        for source, destination in ways:
            network.cut(source, destination)
            world.after(seconds, lambda a=source, b=destination: network.heal(a, b))

    def reset() -> None:
        if network.connections:
            draw.choice(network.connections).reset()

    for _ in range(count):
        at = draw.uniform(0, over_s)
        match draw.choice(("kill", "kill", "pause", "cut", "cut both", "reset")):
            case "kill":
                host = draw.choice(("worker", "scheduler"))
                world.at(at, lambda host=host: kill(host))
            case "pause":
                host, seconds = draw.choice(_HOSTS), draw.uniform(0.01, 15)
                world.at(at, lambda host=host, seconds=seconds: pause(host, seconds))
            case "cut" | "cut both" as kind:
                source, destination = draw.sample(_HOSTS, 2)
                ways = [(source, destination), (destination, source)][: 1 if kind == "cut" else 2]
                seconds = draw.uniform(0.01, 30)
                world.at(at, lambda ways=ways, seconds=seconds: cut(ways, seconds))
            case _:
                world.at(at, reset)
