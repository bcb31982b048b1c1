"""A replica in a world: the real scheduler service, the real worker service down to its device, and a gateway's
replicas with their clients. A supervisor starts anew what dies."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
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
from tests.sim.world.traffic import VOCAB_SIZE, Request
from tests.sim.world.transport import SimTransport
from tests.sim.world.world import Node, World
from tests.support.fake_worker import FakeWorkerConfig
from tests.support.parameters import make_request
from worker_svc.metrics import WorkerMetrics
from worker_svc.protocol.stream import Worker, WorkerServicer, start_server

WORKER, SCHEDULER, GATEWAY = "worker:7001", "scheduler:7002", "gateway"
HOSTS = ("worker", "scheduler", "gateway")


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
        live: The gateway's entry, once there is one.
        has_ended, has_left: Whether it was answered, or its client left before.
        error: What it failed with.
    """

    request: Request
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
    settings: SchedulerSettings
    weather: Weather | None = None
    stories: list[Story] = field(default_factory=list)
    runners: list[HashRunner] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.network = Network(self.world, self.weather)
        self.running: dict[str, Node] = {}
        self._supervisor = self.world.generator("supervisor")
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
        self.world.after(self._supervisor.uniform(0.05, 1.5), lambda: self._start(host, main))

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
        await serve(self.settings)

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

    def ask(self, asked: Request) -> None:
        """A client of the gateway sends a greedy request."""
        story = Story(asked)
        self.stories.append(story)
        self.world.note("ask", asked.number, len(asked.prompt), asked.max_tokens)
        self.running["gateway"].start(lambda: self._read(story))

    async def _read(self, story: Story) -> None:
        asked = story.request
        request = make_request(
            f"request {asked.number}",
            asked.tenant,
            prompt=asked.prompt,
            max_tokens=asked.max_tokens,
            num_sequences=asked.num_sequences,
            eos_token_ids=(),
            nonce=asked.number + 1,
            priority=asked.priority,
        )
        assert self.replicas is not None
        live = story.live = self.ledger.open(request, cast(Tokenizer, _Tokenizer()))
        self.replicas.place(live)
        try:
            async with asyncio.timeout(asked.leaves_after_s):
                await live.result()
            story.has_ended = True
        except TimeoutError:
            story.has_left = True
        except QuireError as error:
            story.error = error
        finally:
            self.replicas.release(live)
            self.ledger.close(live)
        self.world.note("answer", asked.number, story.said, None if story.error is None else story.error.reason)

    def check(self) -> None:
        """Raises FalseAnswerError where a stream, over or not, says what it must not, or a device misused a block."""
        where = f"(seed {self.world.seed}, second {self.world.now:.3f})"
        for story in self.stories:
            asked = story.request
            expected = undisturbed(asked.prompt, asked.max_tokens, self.config.vocab_size)
            for said in story.said:
                if said != (expected if story.has_ended else expected[: len(said)]):
                    raise FalseAnswerError(f"request {asked.number} says {said}, not {expected} {where}")
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


def draw_config(draw: Random) -> FakeWorkerConfig:
    """A small worker, whose pool is too small for all requests at once as often as not."""
    block_size = draw.choice((2, 4, 16))
    return FakeWorkerConfig(
        vocab_size=VOCAB_SIZE,
        max_model_len=256,
        block_size=block_size,
        # Three sequences of the longest request fit, so that none is refused.
        num_blocks=draw.choice((560, 640, 1600)) // block_size,
        num_host_blocks=draw.choice((0, 32, 128)),
        max_num_rows=draw.choice((4, 16, 64)),
        max_num_batched_tokens=draw.choice((16, 64, 512)),
    )


def draw_settings(draw: Random) -> SchedulerSettings:
    """Settings of the scheduler."""
    return SchedulerSettings(
        listen=SCHEDULER,
        workers=(WORKER,),
        log_level="error",
        policy=draw.choice(("fcfs", "priority", "fair")),
        preemption_mode=draw.choice(("auto", "swap", "recompute")),
        max_steps_in_flight=draw.choice((1, 2, 2, 4)),
        max_prefill_share=draw.choice((0.1, 0.5, 1.0)),
    )
