"""A worker without a model: the real service with `FakeRunner` where the model would be.

The token at position p of a sequence with seed s is `token_at(s, p)`, so tests know every output in any batch.
Each step takes `step_seconds`. Steps are checked as in any worker.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

from quire.messages.layer_groups import ONE_GROUP, LayerGroups
from quire.rpc.server import RpcServer
from quire.runtime import clock
from quire.service.compatibility import UNKNOWN_MODEL, ModelFingerprint
from tests.support.fake_pool import BlockError
from tests.support.fake_runner import FakeRunner, Switch
from worker_svc.device.device_loop import DeviceLoop
from worker_svc.device.disk_tier import BlockFile, DiskTier
from worker_svc.metrics import WorkerMetrics
from worker_svc.protocol.stream import HEARTBEAT_INTERVAL_S, Worker, WorkerServicer, start_server
from worker_svc.step import ModelGeometry, PoolGeometry, WorkerInfo, WorkerLimits

_DEVICE_STOP_S = 60.0


@dataclass(frozen=True, slots=True)
class FakeWorkerConfig:
    """Geometry and behaviour."""

    num_blocks: int = 256
    num_host_blocks: int = 0
    device: str = "cpu"
    block_size: int = 16
    vocab_size: int = 1000
    max_model_len: int = 1024
    max_num_rows: int = 256
    max_num_batched_tokens: int = 2048
    max_steps_in_flight: int = 2
    step_seconds: float = 0.0
    failing_seeds: frozenset[int] = frozenset()
    """Rows with these seeds fail when they sample, and compute no chunk that is finite."""
    script: tuple[int, ...] = ()
    """Output of every sequence; empty: outputs follow the seeds."""
    fingerprint: ModelFingerprint = UNKNOWN_MODEL
    max_adapters: int = 0
    max_drafts: int = 0
    fixed_tokens: int = 0
    max_passes: int = 1
    rank: int = 0
    world_size: int = 1
    generation: int | None = None
    """The generation; None gives each incarnation another one."""
    disk: Path | None = None
    """The file of its blocks on disk, with room for 64."""
    full_groups: int = 1
    windowed_groups: int = 0
    window: int = 0
    state_blocks: int = 0

    @property
    def groups(self) -> LayerGroups:
        """Groups of layers. Each has blocks of its own."""
        return LayerGroups(self.full_groups, self.windowed_groups, self.window)

    def with_groups(self, groups: LayerGroups) -> "FakeWorkerConfig":
        """The same worker, with its layers in these groups."""
        return replace(self, full_groups=groups.num_full, windowed_groups=groups.num_windowed, window=groups.window)

    def info(self) -> WorkerInfo:
        """A new incarnation of this worker."""
        pool = PoolGeometry(
            block_size=self.block_size,
            num_gpu_blocks=self.num_blocks,
            num_host_blocks=self.num_host_blocks,
            num_layers=1,
            num_kv_heads=1,
            head_dim=1,
            dtype="float32",
            block_bytes=8 * self.block_size,
            groups=self.groups,
            state_blocks=self.state_blocks,
        )
        model = ModelGeometry("FakeForCausalLM", "float32", self.vocab_size, self.max_model_len, self.device, "a fake")
        limits = WorkerLimits(
            self.max_num_rows,
            self.max_num_batched_tokens,
            self.max_steps_in_flight,
            max_logprobs=20,
            max_adapters=self.max_adapters,
            max_drafts=self.max_drafts,
            fixed_tokens=self.fixed_tokens,
            max_passes=self.max_passes,
        )
        generation = self.generation or clock.unix_ns()
        weights, namespace = self.fingerprint.weights, ""
        if weights:
            namespace = f"fake {weights} {self.block_size} {self.world_size}"
            if self.groups != ONE_GROUP:
                namespace += f" {self.groups}"
            if self.state_blocks:
                namespace += f" {self.state_blocks} blocks of a state"
        return WorkerInfo(generation, self.rank, self.world_size, pool, model, limits, self.fingerprint, namespace)


class FakeWorker:
    """Serves WorkerService from `start` to `stop`."""

    def __init__(
        self, config: FakeWorkerConfig | None = None, *, heartbeat_interval_s: float = HEARTBEAT_INTERVAL_S
    ) -> None:
        self._heartbeat_interval_s = heartbeat_interval_s
        self._make_service()
        self._server: RpcServer | None = None
        self.prepare: Callable[[bytes], Future[None] | None] = lambda row_sampling: None
        """Compiles the constraint of a row; None at once."""
        self.address = ""
        """The address, once it listens."""
        self.config = config or FakeWorkerConfig()

    def _make_service(self) -> None:
        self._servicer = WorkerServicer(WorkerMetrics(), heartbeat_interval_s=self._heartbeat_interval_s)
        self._device_loop = DeviceLoop()

    @property
    def config(self) -> FakeWorkerConfig:
        """May be replaced only before a scheduler attaches: the worker is another one then."""
        return self._config

    @config.setter
    def config(self, config: FakeWorkerConfig) -> None:
        self._config = config
        self._runner = FakeRunner(
            config.num_blocks,
            config.block_size,
            config.vocab_size,
            num_host_blocks=config.num_host_blocks,
            step_seconds=config.step_seconds,
            failing_seeds=config.failing_seeds,
            script=config.script,
            groups=config.groups,
        )
        self._device_loop.use(self._runner)
        info, blocks, disk = config.info(), self._runner.blocks, None
        if config.disk is not None:
            self.file = file = BlockFile(
                config.disk, 4096 + 64 * (64 + blocks.block_bytes), bytes(32), blocks.block_bytes
            )
            disk = DiskTier(file, blocks, config.num_blocks)
        worker = Worker(
            info,
            self._runner,
            self._device_loop,
            prepare=lambda sent: self.prepare(sent),
            blocks=blocks,
            disk=disk,
        )
        self._servicer.open(worker)

    def on_disk(self) -> set[int]:
        """Blocks in its file, as KV events name them."""
        return {int.from_bytes(name[-8:], "big") for _, name in self.file.entries()}

    @property
    def num_steps(self) -> int:
        """How many steps were begun."""
        return self._runner.num_steps

    @property
    def hang(self) -> Switch:
        """While it is set, the device makes no progress."""
        return self._runner.hang

    @property
    def faults(self) -> list[BlockError]:
        """Faults of steps with blocks; `stop` raises the first that is still here."""
        return self._runner.faults

    async def start(self, address: str = "127.0.0.1:0") -> str:
        """Listens and returns the address."""
        self._device_loop.start()
        self._server = await start_server(self._servicer, address)
        self._server.set_serving(True)
        self.address = self._server.address
        return self.address

    async def stop(self) -> None:
        """Ends the service. Raises if a step misused a block, which a scheduler that retries would hide."""
        self.hang.clear()
        assert self._server is not None
        await self._server.stop(grace_s=0)
        await self._servicer.stop_disk()
        assert await asyncio.to_thread(self._device_loop.stop, _DEVICE_STOP_S)
        if self.faults:
            raise self.faults[0]

    async def restart(self, config: FakeWorkerConfig | None = None) -> None:
        """Stops, and starts a new worker in its place, perhaps with another configuration."""
        await self.stop()
        self._make_service()
        self.config = config or self.config
        await self.start(self.address)
