"""A cluster in a world: replicas of the real scheduler service and of the real worker service down to its device, the
real gateways, and clients. A supervisor restarts processes that die."""

import asyncio
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from hashlib import blake2b
from random import Random
from types import MethodType
from typing import Any
from unittest.mock import patch

from gateway.app import Gateway
from gateway.auth.keys import KeyRing
from gateway.auth.quota import Account
from gateway.request.constraint_checker import MAX_RUNNING
from quire.messages.prefix_hashes import BlockHash, short
from quire.model_files.progress import READING, LoadProgress
from quire.runtime.clock import CLOCK
from quire.runtime.settings import ConfigurationError
from scheduler_svc.core.config import PolicyKind, SchedulerConfig
from scheduler_svc.core.paging.block_pool import BlockId
from scheduler_svc.core.reservations import Reservations
from scheduler_svc.recording.recorder import RecordedScheduler, Recorder
from scheduler_svc.service import app as scheduler_app
from scheduler_svc.service import replica, step_loop
from scheduler_svc.service.app import serve
from scheduler_svc.service.cache_changes import CacheDigest
from scheduler_svc.service.metrics import SchedulerMetrics
from scheduler_svc.service.requests import Requests
from scheduler_svc.service.step_loop import StepLoop
from scheduler_svc.settings import SchedulerSettings
from tests.sim.world.block_disk import BlockDisk, SimDiskTier, open_tier, simulated_block_disks
from tests.sim.world.charges import Charges
from tests.sim.world.checked_core import STEP_TIMEOUT_S, CheckedScheduler, expire_checked
from tests.sim.world.clients import Client, Story
from tests.sim.world.device import Devices, HashRunner, HeldPool, SimAdapters, SimDeviceLoop, prepare
from tests.sim.world.disk import Disk, Recording, simulated_disks
from tests.sim.world.durations import Times, misread_usage
from tests.sim.world.faults import Nap
from tests.sim.world.gateways import PORT, fingerprint_of, run_gateway, settings_of
from tests.sim.world.http_calls import HttpClient
from tests.sim.world.leaving import ordered
from tests.sim.world.network import Network, Weather
from tests.sim.world.oracles import Circumstances, FalseAnswerError
from tests.sim.world.ranks import Group, Rendezvous, rank_hosts, worker_of
from tests.sim.world.sleeps import CheckedLifecycle, Operator
from tests.sim.world.supervisor import Supervised
from tests.sim.world.tallies import checked_routing, counted_once, wrong_at, wrong_at_gateways
from tests.sim.world.traffic import LONGEST, MAX_MODEL_LEN, TENANTS, VOCAB_SIZE, Generate, Kind, Pin, Request
from tests.sim.world.transport import SimTransport
from tests.sim.world.watch import (
    CheckedReplica,
    CheckedRequests,
    CheckedSessions,
    CheckedWorker,
    Names,
    Watch,
    parent_of,
    watched_errors,
)
from tests.sim.world.world import Node, World
from tests.support.fake_worker import FakeWorkerConfig
from worker_svc.app import serve_until_discarded
from worker_svc.device.device_loop import end_when_hung
from worker_svc.metrics import WorkerMetrics
from worker_svc.protocol.stream import Worker, WorkerServicer, start_server

_WORKER_PORT, _SCHEDULER_PORT = 7001, 7002
MANY = 1024
"""A request limit that no world reaches."""
_DRAIN_TIMEOUT_S = 5.0
_RELEASE_S = 2.0
"""A request stops running within this time after its client has left."""
_MOST_LEFT = 12
"""Maximum number of tasks of one kind that an idle service may have."""
_Main = Callable[[Node], Coroutine[Any, Any, Any]]


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """Flags of all gateways."""

    routing: str
    failover_delay: float
    reconnect_grace: float
    max_chunk_tokens: int
    long_prompt: int = 256


@dataclass(frozen=True, slots=True)
class Layout:
    """The hosts of a cluster, and the services that run on them.

    Attributes:
        worker: Configuration of each replica's worker. Its `world_size` is the number of ranks, each on its own host.
        settings: Settings of each replica's scheduler, except its addresses.
        slowness: Factor by which steps take longer than usual, so that more happens while requests run.
        recording: How schedulers record; None if they do not.
        loads_fail: Whether some loads of adapters fail.
        preparations_are_slow: Whether some constraints and adapters take longer than schedulers wait for them.
        deadly: The adapter, or the pattern of a constraint, that kills each worker that prepares it.
        keeps_pools: Whether the pool of a worker outlives its process, if the machine has power.
        disk_blocks: Room on the disk of each worker in blocks; None if it has no disk.
        first_role: Role of the first replica; if it is not "both", the other replicas decode.
        load_s: Seconds that a worker takes to load its model again after it has discarded it.
    """

    num_replicas: int
    num_gateways: int
    num_clients: int
    worker: FakeWorkerConfig
    settings: SchedulerSettings
    gateway: GatewayOptions
    weather: Weather
    slowness: float = 1.0
    recording: Recording | None = None
    loads_fail: bool = False
    preparations_are_slow: bool = False
    deadly: str | None = None
    keeps_pools: bool = False
    disk_blocks: int | None = None
    first_role: str = "both"
    load_s: float = 0.0

    @property
    def replicas(self) -> list[str]:
        numbers = range(self.num_replicas)
        return [host for number in numbers for host in (*self.ranks(f"worker-{number}"), f"scheduler-{number}")]

    def ranks(self, worker: str) -> list[str]:
        """The hosts of a worker's ranks."""
        return rank_hosts(worker, self.worker.world_size)

    def workers_of(self, scheduler: str) -> tuple[str, ...]:
        """The addresses of a scheduler's worker."""
        hosts = self.ranks(scheduler.replace("scheduler", "worker"))
        return tuple(f"{host}:{_WORKER_PORT}" for host in hosts)

    @property
    def gateways(self) -> list[str]:
        return [f"gateway-{number}" for number in range(self.num_gateways)]

    @property
    def clients(self) -> list[str]:
        return [f"client-{number}" for number in range(self.num_clients)]

    @property
    def servers(self) -> list[str]:
        """The hosts whose processes are killed and restarted."""
        return self.replicas + self.gateways

    @property
    def hosts(self) -> list[str]:
        return self.servers + self.clients


@dataclass
class Cluster:
    """All hosts of a layout.

    Attributes:
        running: The live process of each host, or the last one that died.
        gateways: The gateway of each host, once it serves.
        cores, requests, loops: The latest scheduler core, table of requests and step loop of each host.
    """

    world: World
    layout: Layout
    circumstances: Circumstances
    stories: list[Story] = field(default_factory=list[Story])
    runners: dict[str, HashRunner] = field(default_factory=dict[str, HashRunner])
    gateways: dict[str, Gateway] = field(default_factory=dict[str, Gateway])
    cores: dict[str, CheckedScheduler] = field(default_factory=dict[str, CheckedScheduler])
    requests: dict[str, Requests] = field(default_factory=dict[str, Requests])
    loops: dict[str, StepLoop] = field(default_factory=dict[str, StepLoop])
    false_answers: list[FalseAnswerError] = field(default_factory=list[FalseAnswerError])
    disks: dict[str, Disk] = field(default_factory=dict[str, Disk])
    block_disks: dict[str, BlockDisk] = field(default_factory=dict[str, BlockDisk])
    asked: dict[str, Generate] = field(default_factory=dict[str, Generate])
    pinned: list[Pin] = field(default_factory=list[Pin])
    told_s: dict[str, set[Times]] = field(default_factory=lambda: defaultdict(set))
    workers: dict[str, Worker] = field(default_factory=dict[str, Worker])
    """The loaded worker of each host."""
    servicers: dict[str, WorkerServicer] = field(default_factory=dict[str, WorkerServicer])
    """The latest service of each worker's host."""

    def __post_init__(self) -> None:
        self.network = Network(self.world, self.layout.weather)
        self.running: dict[str, Node] = {}
        self._num_over = 0
        self.devices = Devices(self.world, self.layout.slowness)
        self.devices.loads_fail, self.devices.deadly = self.layout.loads_fail, self.layout.deadly
        self._pools: dict[str, HeldPool] = {}
        self.devices.are_slow = self.layout.preparations_are_slow
        self._started_ns: dict[str, int] = {}
        self._started_s: dict[str, float] = {}
        self._num_operators = self._num_napping = 0
        self._rivals: list[Node] = []
        self.hosts: dict[str, Supervised] = {}
        self.names: Names = {}
        self._watch = Watch(
            self.network,
            self.running,
            lambda host: f"{host}:{_SCHEDULER_PORT}",
            self.layout.gateway.failover_delay,
            3.0 + 100 * self.layout.weather.max_delay_s,
            self.loops,
            self.workers,
            self.layout.gateway.reconnect_grace,
        )
        workers = [f"worker-{number}" for number in range(self.layout.num_replicas)]
        self._workers = dict.fromkeys(workers, self.layout.worker)
        self._rendezvous = {host: Rendezvous(self.network, self.layout.worker.world_size) for host in workers}
        addresses: list[str] = []
        for number, host in enumerate(self.layout.gateways):
            # Clients resolve names by the system's own resolver, but not addresses.
            self.network.names[f"10.0.0.{number + 1}"] = host
            addresses.append(f"10.0.0.{number + 1}:{PORT}")
        self._addresses = ",".join(addresses)
        if self.layout.recording is not None:
            for host in self.layout.replicas:
                if host.startswith("scheduler"):
                    self.disks[host] = Disk(self.world, host, self.layout.recording.max_bytes)
        if self.layout.disk_blocks is not None:
            ranks = [host for worker in workers for host in self.layout.ranks(worker)]
            self.block_disks = {host: BlockDisk(self.world, host) for host in ranks}
        self._clients: dict[str, Client] = {}
        for host in self.layout.replicas:
            self._start(host, self._run_worker if host.startswith("worker") else self._run_scheduler)
        for host in self.layout.gateways:
            self._start(host, self._run_gateway)
        for host in self.layout.clients:
            self._start(host, self._run_client)

    def _start(self, host: str, main: _Main) -> None:
        def started(node: Node) -> None:
            self.running[host] = node
            self._started_ns[host], self._started_s[host] = node.unix_ns(), self.world.now
            node.on_end.append(lambda: self._forget(host))

        self.hosts[host] = Supervised(self.world, self.network, host, main, started)

    def _forget(self, host: str) -> None:
        """Drops the state of a host whose process has ended."""
        if host in self.disks:
            self.disks[host].process_ended(has_power=host not in self.network.dark)
        if host in self.block_disks:
            self.block_disks[host].process_ended(has_power=host not in self.network.dark)
        if host in self.network.dark:
            self._pools.pop(host, None)
        self.workers.pop(host, None)
        self.gateways.pop(host, None)
        self.cores.pop(host, None)
        self.requests.pop(host, None)

    def change_worker(self, host: str, change: Callable[[FakeWorkerConfig], FakeWorkerConfig]) -> None:
        """Changes the configuration of a host's worker from its next start on."""
        self._workers[worker_of(host)] = change(self._workers[worker_of(host)])

    def drain(self, host: str) -> None:
        """Begins to drain a scheduler, without a time limit."""
        self.running[host].start(partial(self.loops[host].lifecycle.drain, None))

    def forget_cached(self, host: str) -> None:
        """Makes a scheduler forget its cached blocks."""
        loop, node = self.loops.get(host), self.running[host]

        async def forget() -> None:
            assert loop is not None
            loop.replica.forget_cached()

        if loop is not None and loop.replica.scheduler is not None and not node.is_dead:
            node.start(forget)

    def start_rival(self, host: str, older_s: float) -> None:
        """Starts another scheduler with this one's worker. By its clock it started `older_s` seconds before this one.
        It ends by itself, and is not restarted."""
        node = self.world.node(f"rival-{len(self._rivals)}")
        self._rivals.append(node)
        self.world.set_back(node.host, (node.unix_ns() - self._started_ns[host]) / 1e9 + older_s)
        SimTransport.install(self.network, node)
        listen, workers = f"{node.host}:{_SCHEDULER_PORT}", self.layout.workers_of(host)
        task = node.start(lambda: serve(replace(self.layout.settings, listen=listen, workers=workers)))

        def ended(_: object) -> None:
            if (error := task.exception()) is not None and not isinstance(error, ConfigurationError):
                node.fail(error)
            node.kill()

        task.add_done_callback(ended)
        node.on_end.append(lambda: self._forget(node.host))

    def nap(self, nap: Nap) -> None:
        """Starts an operator that puts all replicas to sleep."""
        node = self.world.node(f"operator-{self._num_operators}")
        self._num_operators += 1
        self._num_napping += 1
        SimTransport.install(self.network, node)
        operator = Operator(
            HttpClient(self.network, node, self.layout.gateways, self.circumstances),
            self.circumstances,
            self.layout.worker.device != "cpu",
            lambda: self._num_napping == 1,
            lambda: [host for host, loop in self.loops.items() if host in self.requests and loop.lifecycle.is_asleep],
        )
        task = node.start(lambda: operator.nap(nap))

        def over(_: object) -> None:
            self._num_napping -= 1
            if isinstance(error := task.exception(), FalseAnswerError):
                self.false_answers.append(error)
            elif error is not None:
                node.fail(error)

        task.add_done_callback(over)

    # Queries about sleeping schedulers

    @property
    def now(self) -> float:
        return self.world.now

    def kept(self, scheduler: str, since_s: float, *, is_without_weights: bool) -> str | None:
        """Memory that a worker still has though it was released for the sleep that began then; None if there is none.
        Workers that a supervisor has started since do not count, and a rival makes workers load."""
        if self._rivals:
            return None
        for host in self.layout.ranks(scheduler.replace("scheduler", "worker")):
            worker, is_new = self.workers.get(host), self._started_s[host] > since_s and not self.hosts[host].is_anew
            if worker is None or is_new or self.servicers[host].discarded.is_set():
                continue
            if is_without_weights:
                return f"{host} has its weights"
            if self.runners[self.running[host].name].has_contents or len(worker.runner.sealed_blocks().block_ids):
                return f"{host} holds keys and values, or says so"
        return None

    def leaving(self, scheduler: str) -> str | None:
        """A worker that is about to reload; None if there is none."""
        hosts = self.layout.ranks(scheduler.replace("scheduler", "worker"))
        return next((host for host in hosts if host in self.workers and self.servicers[host].discarded.is_set()), None)

    async def _run_worker(self, node: Node) -> None:
        name, stopping, host = worker_of(node.host), threading.Event(), self.hosts[node.host]
        servicer = self.servicers[node.host] = WorkerServicer(WorkerMetrics(), stopping=stopping)
        server = await start_server(servicer, f"{node.host}:{_WORKER_PORT}")
        group: Group | None = None

        async def load() -> Worker:
            nonlocal group
            if host.is_anew:
                await self._load_anew(node, servicer)
            rank = self.layout.ranks(name).index(node.host)
            if self.layout.worker.world_size > 1:
                group = await self._rendezvous[name].meet(rank, node)
            return self._make_worker(node, rank, group)

        async def guard(worker: Worker) -> None:
            hang = end_when_hung(worker.busy_ms, STEP_TIMEOUT_S, leave=lambda _: self._hung(node))
            if group is None:
                await hang
                return
            watch = asyncio.create_task(group.watch(node, self._rendezvous[name].has, stopping))
            await asyncio.wait([watch, asyncio.create_task(hang)], return_when=asyncio.FIRST_COMPLETED)
            host.leave()

        try:
            await serve_until_discarded(
                servicer, server, load, lambda worker: node.loop.begin_task(guard(worker)), when_attached=host.is_anew
            )
        finally:
            stopping.set()
            await server.stop(grace_s=1.0)
            await servicer.stop_disk()
        host.begin_anew()

    async def _load_anew(self, node: Node, servicer: WorkerServicer) -> None:
        """Loads the model of a worker without weights when a scheduler attaches it."""
        scheduler = worker_of(node.host).replace("worker", "scheduler")
        loop = self.loops.get(scheduler)
        if loop is not None and loop.lifecycle.is_asleep and scheduler in self.requests and not self._rivals:
            node.fail(AssertionError(f"{node.name} loads its model, and {scheduler} sleeps"))
        servicer.report_loading(LoadProgress(READING, 1, 2))
        loaded = Future[None]()
        node.run_job(lambda: loaded.set_result(None), self.layout.load_s)
        await asyncio.wrap_future(loaded)

    def _hung(self, node: Node) -> None:
        """A step of a worker hangs, which ends its process."""
        if not self.circumstances.may_hang:
            self.false_answers.append(FalseAnswerError(f"{node.name} hangs, though nothing holds it up"))
        node.kill()

    def _make_worker(self, node: Node, rank: int, group: Group | None) -> Worker:
        generation = None if group is None else group.generation
        config = replace(self._workers[worker_of(node.host)], rank=rank, generation=generation)
        runner = HashRunner(
            config.num_blocks,
            config.block_size,
            config.vocab_size,
            num_host_blocks=config.num_host_blocks,
            names=self.names,
            groups=config.groups,
            rank=rank,
            group=group,
        )
        runner.model, runner.deadly = int(config.fingerprint.weights), self.circumstances.deadly
        runner.deadly_need = self.layout.deadly
        if self.layout.keeps_pools:
            pool = config.num_blocks, config.block_size, config.groups, config.state_blocks
            namespace = (config.fingerprint, *pool, rank, config.world_size)
            held = self._pools.get(node.host)
            if held is not None and held.namespace == namespace:
                runner.keep(held)
            self._pools[node.host] = runner.held(namespace)
        self.runners[node.name] = runner
        loop = SimDeviceLoop(node, runner, self.devices)
        agree = (lambda *_: None) if group is None else partial(group.agree, rank)
        adapters = SimAdapters(node, runner, self.devices) if config.info().limits.max_adapters else None
        info, blocks, disk = config.info(), runner.blocks, None
        if (slots := self.layout.disk_blocks) is not None:
            namespace = blake2b(f"{info.kv_namespace} {rank}".encode(), digest_size=32).digest()
            # Initial room in blocks; another pool may have larger blocks.
            space = 4096 + slots * (48 + self.layout.worker.block_size * 8)
            disk = open_tier(self.block_disks[node.host], node, blocks, config.num_blocks, namespace, space)
            if disk is not None and config.world_size == 1:
                disk.restore()
        worker = CheckedWorker(info, runner, loop, agree, partial(self._prepare, node), adapters, blocks, disk=disk)
        self.workers[node.host] = worker
        assert worker.transfers is not None
        worker.transfers._read = self._sent_by(node.host, worker.transfers._read)
        limits, seals = worker.info.limits, runner.checked_seals
        worker._sessions = CheckedSessions(node, worker.info.worker_generation, limits.max_steps_in_flight, seals)
        return worker

    def _sent_by(self, host: str, read: Callable[[Any], Any]) -> Any:
        """Wraps a worker's reads of its blocks: other workers receive them as the transfer leaves them."""

        def send(part: Any) -> Any:
            response = read(part)
            response.content = self.devices.on_the_way(host, response.content)
            return response

        return send

    def _prepare(self, node: Node, row_sampling: bytes) -> "Future[None] | None":
        return prepare(node, row_sampling, self.devices)

    async def _run_scheduler(self, node: Node) -> None:
        listen, workers = f"{node.host}:{_SCHEDULER_PORT}", self.layout.workers_of(node.host)
        role = self.layout.first_role
        if role != "both" and not node.host.endswith("-0"):
            role = "decode"
        settings = replace(self.layout.settings, listen=listen, workers=workers, role=role)
        if (recording := self.layout.recording) is not None:
            trace = "steps.json" if recording.traces else None
            settings = replace(settings, record=str(self.disks[node.host].recording), trace_steps=trace)
        await serve(settings)

    async def _run_gateway(self, node: Node) -> None:
        schedulers = [host for host in self.layout.replicas if host.startswith("scheduler")]
        addresses = tuple(f"{host}:{_SCHEDULER_PORT}" for host in schedulers)
        settings = settings_of(
            node.host,
            addresses,
            has_adapters=self.layout.worker.max_adapters > 0,
            drain_timeout=_DRAIN_TIMEOUT_S,
            **asdict(self.layout.gateway),
        )
        await run_gateway(settings, lambda gateway: self.gateways.update({node.host: gateway}))

    async def _run_client(self, node: Node) -> None:
        http = HttpClient(self.network, node, self.layout.gateways, self.circumstances)
        self._clients[node.host] = Client(
            self.world,
            self._addresses,
            http,
            self.circumstances,
            self.false_answers,
            lambda named: self._watch.cancelling(named, self.gateways, self.requests),
        )
        await asyncio.Event().wait()

    def ask(self, request: Request) -> None:
        """Has a client make a request."""
        story = Story(request)
        self.stories.append(story)
        if isinstance(request, Generate):
            self.asked |= request.parts
        elif isinstance(request, Pin):
            self.pinned.append(request)
        self.world.note("ask", request.number)
        node, client = self.running[request.client], self._clients[request.client]
        task = node.start(lambda: client.ask(story))

        def over(_: object) -> None:
            self._num_over += 1
            self.check_concurrency()
            if story.has_left and not self.circumstances.has_faults:
                self.world.after(_RELEASE_S, lambda: self._check_released(request))

        task.add_done_callback(over)

    def _check_released(self, request: Request) -> None:
        """Reports a request that still runs after its client has left."""
        for host, gateway in self.gateways.items():
            for live in gateway._models.default.ledger:
                is_its = isinstance(request, Generate) and live.request.request_id in request.parts
                if is_its and not live.is_over and not live.request.durable:
                    self.false_answers.append(FalseAnswerError(f"{host} runs {request}, whose client has left"))

    def check(self) -> None:
        """Raises FalseAnswerError if an answer is wrong, a device misused a block, or a process has failed."""
        where = f"(seed {self.world.seed}, second {self.world.now:.3f})"
        for node in self.world.nodes:
            if node.errors:
                raise FalseAnswerError(f"{node.name}: {node.errors[0]} {where}") from node.errors[0].get("exception")
        for error in self.false_answers:
            raise FalseAnswerError(f"{error} {where}") from error
        for runner in self.runners.values():
            if runner.faults:
                raise FalseAnswerError(f"a step misused a block {where}") from runner.faults[0]

    @property
    def has_failed(self) -> bool:
        """Whether `check` would raise, without its expensive checks. Called after each event."""
        if self.world.now >= self._watch.next_s:
            wrong = self._watch.look(self.world.now, self.gateways, self.requests)
            if wrong is not None:
                self.false_answers.append(FalseAnswerError(wrong))
        return bool(self.false_answers) or self.world.has_errors

    @property
    def num_over(self) -> int:
        """Number of requests that are over."""
        return self._num_over

    @property
    def held(self) -> list[str]:
        """State that processes hold for requests or after them; empty when the cluster is quiet."""
        return list(self._held())

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is held. Called after each event, so it stops at the first finding."""
        return next(self._held(), None) is None

    def _held(self) -> Iterator[str]:
        if len(self.gateways) < len(self.layout.gateways):
            yield "a gateway does not serve"
        for host, gateway in self.gateways.items():
            for address, link in gateway._models.default.replicas.links.items():
                if not link.is_ready:
                    yield f"{host} has no {address} that runs steps"
            if count := len(gateway._models.default.ledger):
                yield f"{host} has {count} requests"
            replicas = gateway._models.default.replicas
            if any(each.work.num_requests for each in replicas) or replicas.placements._timers:
                yield f"{host} counts requests of replicas, or has timers for them, and has none"
            yield from (f"{host} keeps {what}" for what, count in _kept_by(gateway).items() if count)
            keys = gateway.authenticator
            assert isinstance(keys, KeyRing)
            if count := sum(len(caller.account._running) for caller in keys._callers.values()):
                yield f"{host} counts {count} requests of keys"
        for rival in self._rivals:
            if not rival.is_dead:
                yield f"{rival.name} runs"
        if self._num_napping:
            yield f"{self._num_napping} operators have not woken what they put to sleep"
        for host, requests in self.requests.items():
            # Gateways acknowledge events now and then; until then the end of a plain request is kept.
            owned = (
                each for each in requests._by_handle.values() if each.durable or not (each.is_over and each.reader)
            )
            if count := sum(1 for _ in owned):
                yield f"{host} has {count} requests in its table"
        idle = list[tuple[str, CheckedScheduler]]()
        for host, core in self.cores.items():
            pool, swap = core.batch.blocks.pool, core.batch.blocks.host.pool
            if core.num_live or core.in_flight or len(core.pins):
                yield f"{host} has {core.num_live} requests, {len(core.in_flight)} steps, {len(core.pins)} pins"
            elif pool.num_used or swap.num_used or core.batch.rows.active.any():
                yield f"{host} holds blocks or rows, and has no requests"
            else:
                idle.append((host, core))
        # The expensive looks come last.
        for host, core in idle:
            yield from self._held_apart(host, core)
            yield from self._believed(host, core)
            yield from self._kept_beside(host)
            yield from (f"{host} keeps {what}, and has no requests" for what in core.kept_for_requests)

    def _held_apart(self, host: str, core: CheckedScheduler) -> Iterator[str]:
        """Contradictions between a scheduler and its worker when nothing runs."""
        for worker_host in self.layout.ranks(host.replace("scheduler", "worker")):
            worker = self.workers.get(worker_host)
            if worker is None:
                yield f"{worker_host} does not serve"
                continue
            if self.servicers[worker_host]._stopping.is_set():
                yield f"{worker_host} takes itself to be about to end, and does not hear of the end of other ranks"
            loaded = set(worker.ledger._is_loaded.nonzero()[0].tolist())
            # A slot may hold an adapter that rows may not use: its replacement is not read yet, and may never be.
            if loaded - self.runners[self.running[worker_host].name].adapters.keys():
                yield f"{worker_host} takes slots {loaded} to have adapters that it has not"
            sealed = worker.runner.sealed_blocks()
            names = dict(zip(sealed.block_ids.tolist(), map(bytes, sealed.hashes), strict=True))
            pool = core.batch.blocks.pool
            for block in range(pool.num_blocks):
                name = pool.hash_of(BlockId(block))
                if name is not None and names.get(block) != name:
                    yield f"{host} has a name for block {block}, which its worker has not sealed"
            runner = self.runners[self.running[worker_host].name]
            for block, name in enumerate(core.batch.blocks.host.pool.names(0, core.batch.blocks.host.pool.num_blocks)):
                if name is not None and runner.ends_on_host(block) != self.names[name][:2]:
                    yield f"{host} has a name for host block {block}, which does not hold that"
            if isinstance(tier := worker.disk, SimDiskTier):
                entries, names_on_disk = tier.entries, set(tier.entries.values())
                for slot, name in core.tier._by_slot.items():
                    # Slots are numbered by the first rank.
                    if name not in names_on_disk or (worker.info.rank == 0 and entries.get(slot) != name):
                        yield f"{host} takes a block to be in slot {slot} of a disk, which is not there"
                if core.tier._slots != {name: slot for slot, name in core.tier._by_slot.items()}:
                    yield f"{host} takes blocks to be on a disk that are no longer there"
                if unknown := self._on_all_disks(host) - core.tier._slots.keys() - core.forgotten:
                    yield f"{host} does not know of {len(unknown)} blocks on disks"
            elif len(core.tier):
                yield f"{host} takes blocks to be on the disk of {worker_host}, which has none"

    def _kept_beside(self, host: str) -> Iterator[str]:
        """State that a scheduler and its worker still keep for calls, streams and moves, which must release it."""
        loop = self.loops[host]
        watchers = [each.__self__ for each in loop.replica.cache._watchers if isinstance(each, MethodType)]
        told = [each for each in watchers if isinstance(each, CacheDigest)]
        kept = {
            "calls that pin": len(loop.replica.pins._waiters),
            "requests that leave": loop.replica._num_leaving,
            "streams that are over": sum(len(each._gateways) for each in told) > self.requests[host].num_connected,
        }
        yield from (f"{host} keeps {what}" for what, count in kept.items() if count)
        for worker_host in self.layout.ranks(host.replace("scheduler", "worker")):
            transfers = None if (worker := self.workers.get(worker_host)) is None else worker.transfers
            if transfers is not None and transfers._moving:
                yield f"{worker_host} keeps moves that are over"
            if transfers is not None and any(each.num_calls for each in transfers._offers.values()):
                yield f"{worker_host} counts calls that fetch"

    def _on_all_disks(self, scheduler: str) -> set[bytes]:
        """The names of the blocks that every rank has on disk."""
        ranks = self.layout.ranks(scheduler.replace("scheduler", "worker"))
        tiers = [worker.disk for host in ranks if (worker := self.workers.get(host)) is not None]
        names = [set(tier.entries.values()) for tier in tiers if isinstance(tier, SimDiskTier)]
        return set.intersection(*names) if len(names) == len(ranks) else set()

    def _believed(self, scheduler: str, core: CheckedScheduler) -> Iterator[str]:
        """Differences between the cached blocks and the gateways' knowledge of them."""
        # Gateways look for blocks of the first group. Blocks of other groups may come with unknown tokens.
        cached = {short(name) for name in core.batch.blocks.pool.sealed_hashes()}
        first = {short(name) for name in core.batch.blocks.pool.sealed_hashes() if not self.names[name][3].group}
        for host, gateway in self.gateways.items():
            link = gateway._models.default.replicas.links.get(f"{scheduler}:{_SCHEDULER_PORT}")
            if link is not None and (known := link.cached) is not None:
                if not first <= known._blocks <= cached:
                    yield f"{host} takes {len(known._blocks)} blocks of {scheduler} to be cached, not {len(cached)}"
                below = {*core.tier._slots, *core.batch.blocks.host.pool.sealed_hashes()}
                if not known._on_disk <= {short(content) for content in below}:
                    yield f"{host} takes blocks of {scheduler} to be below the pool that are not"

    def check_glitches(self) -> None:
        """Raises FalseAnswerError if more requests than rows failed because of non-finite logits."""
        failed = [story for story in self.stories if story.error and story.error.reason == "NON_FINITE_LOGITS"]
        num_spoiled = sum(runner.num_spoiled for runner in self.runners.values())
        if len(failed) > num_spoiled:
            raise FalseAnswerError(f"{len(failed)} requests fail by {num_spoiled} rows that are not finite")

    def check_left(self) -> None:
        """Raises FalseAnswerError if a service has more tasks of one kind than one for each of its peers and a few:
        requests left some behind. Call it only if nothing runs."""
        for node in self.world.nodes:
            if not (node.is_dead or node.host.startswith("client")):
                tasks = Counter(str(getattr(task.get_coro(), "__qualname__", "")) for task in node.loop.tasks)
                for name, count in tasks.items():
                    if count > _MOST_LEFT:
                        raise FalseAnswerError(f"{node.name} is quiet and has {count} tasks of {name}")

    def check_tallies(self) -> None:
        """Raises FalseAnswerError if metrics contradict the events of the world. Call it only if nothing runs."""
        wrong = [
            f"{host}: {each}" for host, core in self.cores.items() for each in core.tally.wrong(self._metrics_of(host))
        ]
        if not (self.circumstances.has_faults or self.circumstances.deadly or self.circumstances.deadly_need):
            wrong += wrong_at_gateways(self.gateways.values(), self.stories)
        wrong += filter(None, map(wrong_at, self.gateways.values()))
        seen = [(story.request, story.witness.last.usage) for story in self.stories if story.witness is not None]
        for request, usage in seen:
            if isinstance(request, Generate) and usage is not None and not request.options.stop:
                # The usage of a request that a stop string has ended has the times up to that string.
                wrong += filter(None, [misread_usage(usage, self.told_s[request.request_id])])
        if wrong:
            raise FalseAnswerError(f"metrics: {'; '.join(wrong)}")

    def _metrics_of(self, host: str) -> SchedulerMetrics:
        return self.loops[host]._metrics

    def check_concurrency(self) -> None:
        """Raises FalseAnswerError if more requests of a key run than its limit allows."""
        for host, gateway in self.gateways.items():
            running = Counter(live.request.tenant for live in gateway._models.default.ledger if not live.is_over)
            for tenant in TENANTS:
                most = tenant.max_concurrent_requests
                if most is not None and running[tenant.name] > most:
                    raise FalseAnswerError(f"{host} runs {running[tenant.name]} requests of {tenant}")

    def check_charges(self, charges: Charges) -> None:
        """Raises FalseAnswerError if tenants paid less or more than they owe: at schedulers, and by key if nothing
        breaks."""
        for host, core in self.cores.items():
            if core.config.policy is PolicyKind.FAIR and (wrong := next(core.bills.wrong(), None)) is not None:
                raise FalseAnswerError(f"{host}: {wrong}")
        if self.circumstances.has_faults or self.circumstances.deadly or self.circumstances.deadly_need:
            return
        for tenant in TENANTS:
            if tenant.tokens_per_minute is not None:
                stories = [story for story in self.stories if story.request.tenant == tenant.name]
                charges.check(self._accounts(tenant.name), stories, self.layout.num_gateways)

    def _accounts(self, tenant: str) -> Iterator[Account]:
        for gateway in self.gateways.values():
            keys = gateway.authenticator
            assert isinstance(keys, KeyRing)
            yield from (caller.account for caller in keys._callers.values() if caller.tenant == tenant)

    def check_rates(self, seconds: float) -> None:
        """Raises FalseAnswerError if all gateways together served more than the rate limits of a key allow."""
        num_gateways = sum(node.host.startswith("gateway") for node in self.world.nodes)
        for tenant in TENANTS:
            served = [
                story.request
                for story in self.stories
                if story.request.tenant == tenant.name and story.has_ended and isinstance(story.request, Generate)
            ]
            amounts = {
                "requests_per_minute": sum(len(request.parts) for request in served),
                # Generated tokens may exceed the rate: a running request is never ended for it.
                "tokens_per_minute": sum(request.num_prompt_tokens for request in served),
            }
            for name, amount in amounts.items():
                limit = tenant.limits[name]
                if limit is not None and amount > num_gateways * limit * (1 + seconds / 60):
                    raise FalseAnswerError(f"{tenant} got {amount} of {name} in {seconds:.1f} s")


def _kept_by(gateway: Gateway) -> dict[str, int]:
    """Counts that a gateway keeps for calls and requests, which must release them."""
    generator = gateway._models.default
    reads, memory, checks = generator.durable_reads, generator._answer_memory, generator.model.constraints._places
    return {
        "prompts that are prepared": generator.preparations._num_requests.total(),
        "bytes of answers": memory.num_bytes + len(memory._keys),
        "tokens of durable requests": reads._kept_tokens,
        "durable requests": len(reads._reads) + len(reads._over) + len(reads._next),
        "offers": len(generator.replicas._offers._open),
        "work of replicas": sum(each.work.num_requests + each.work.num_prompt_tokens for each in generator.replicas),
        "calls that cancel": len(generator.replicas.calls._late),
        "turns to check constraints": MAX_RUNNING - checks._num_free + len(checks._waiting),
        "turns to resume streams": 1 - reads._turns._num_free + len(reads._turns._waiting),
    }


@contextmanager
def watched_schedulers(clusters: list[Cluster]) -> Iterator[None]:
    """Inside the block, scheduler services have self-checking cores, and the latest cluster knows their parts."""

    def host() -> str:
        node = CLOCK.get()
        assert isinstance(node, Node)
        return node.host

    def make_core(config: SchedulerConfig) -> CheckedScheduler:
        cluster = clusters[-1]
        core = cluster.cores[host()] = CheckedScheduler(config, cluster.names)
        core.asked, core.pinned, core.told_s = cluster.asked, cluster.pinned, cluster.told_s
        core.num_ranks = len(cluster.layout.ranks(host().replace("scheduler", "worker")))
        return core

    def make_recorded(config: SchedulerConfig, recording: Recorder) -> RecordedScheduler:
        return RecordedScheduler(make_core(config), recording.put, recording._hider)

    def make_requests(*arguments: Any) -> CheckedRequests:
        requests = clusters[-1].requests[host()] = CheckedRequests(*arguments)
        return requests

    def make_loop(*arguments: Any) -> StepLoop:
        loop = clusters[-1].loops[host()] = StepLoop(*arguments)
        return loop

    def make_lifecycle(*arguments: Any) -> CheckedLifecycle:
        lifecycle = CheckedLifecycle(*arguments)
        lifecycle.memory = clusters[-1]
        return lifecycle

    def parent(name: BlockHash) -> BlockHash | None:
        node, cluster = CLOCK.get(), clusters[-1]
        core = cluster.cores.get(node.host) if isinstance(node, Node) else None
        return parent_of(cluster.names, name, 1 if core is None else core.config.full_groups)

    with (
        watched_errors(lambda: clusters[-1].cores[host()].is_late),
        ordered(CheckedScheduler._report, parent),
        checked_routing(),
        counted_once(),
        simulated_block_disks(),
        simulated_disks(lambda: clusters[-1].disks, make_recorded),
        patch.object(replica, "Scheduler", make_core),
        patch.object(step_loop, "Replica", CheckedReplica),
        patch.object(step_loop, "Lifecycle", make_lifecycle),
        # Recordings use no test classes.
        patch.object(Reservations, "expire_leases", expire_checked),
        patch.object(scheduler_app, "Requests", make_requests),
        patch.object(scheduler_app, "StepLoop", make_loop),
    ):
        yield


def draw_layout(draw: Random, kind: Kind) -> Layout:
    """A small cluster. In half of the worlds its pools are too small for all requests at once."""
    block_size, is_tight = draw.choice((2, 4, 16)), kind is Kind.TIGHT
    # Two or three sequences of the longest request fit, so that no request is refused.
    least = 3 * LONGEST + 68
    pool_tokens = draw.choice((2 * LONGEST + 40, least)) if is_tight else draw.choice((least, 640, 1600))
    worker = FakeWorkerConfig(
        vocab_size=VOCAB_SIZE,
        max_model_len=MAX_MODEL_LEN,
        fingerprint=fingerprint_of(0),
        block_size=block_size,
        num_blocks=pool_tokens // block_size,
        num_host_blocks=draw.choice((32, 640 // block_size)) if is_tight else draw.choice((0, 32, 128)),
        max_num_rows=draw.choice((16, 64) if is_tight else (4, 16, 64)),
        max_num_batched_tokens=draw.choice((16, 64) if is_tight else (16, 64, 512)),
    )
    settings = SchedulerSettings(
        log_level="error",
        step_timeout=STEP_TIMEOUT_S,
        drain_timeout=_DRAIN_TIMEOUT_S,
        policy=draw.choice(("fcfs", "priority", "fair")),
        preemption_mode=draw.choice(("auto", "swap", "recompute", *(("swap",) if is_tight else ()))),
        max_steps_in_flight=draw.choice((1, 2, 2, 4)),
        max_prefill_share=draw.choice((0.1, 0.5, 1.0)),
        durable_grace=draw.choice((3.0, 60.0)),
        max_waiting_requests=draw.choice((MANY, MANY, 3)),
        max_durable_requests=draw.choice((MANY, MANY, 2)),
    )
    weather = Weather(
        max_delay_s=draw.choice((0.001, 0.02, 0.1) if is_tight else (0.001, 0.001, 0.02)),
        bytes_per_s=draw.choice((1e9, 1e9, 1e5)),
        window_bytes=draw.choice((128 * 1024, 128 * 1024, 256)),
    )
    gateway = GatewayOptions(
        routing=draw.choice(("cache", "affinity", "round-robin")),
        failover_delay=draw.choice((0.5, 5.0)),
        reconnect_grace=draw.choice((1.0, 10.0)),
        max_chunk_tokens=draw.choice((1, 256)),
    )
    breaks = kind in (Kind.NETWORK, Kind.RESTARTS)
    num_replicas = draw.choice((1, 2)) if breaks else draw.choice((1, 1, 2))
    slowness = 1.0 if is_tight else draw.choice((1.0, 10.0 if breaks else 1.0, 10.0))
    return Layout(num_replicas, draw.choice((1, 2, 2)), 2, worker, settings, gateway, weather, slowness)
