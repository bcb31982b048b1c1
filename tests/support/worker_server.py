"""The real worker service around a small model, in this process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from quire.service.compatibility import UNKNOWN_MODEL, ModelFingerprint
from tests.support.tiny_causal_lm import TinyCausalLM
from worker_svc.device.device_loop import DeviceLoop
from worker_svc.metrics import WorkerMetrics
from worker_svc.protocol.stream import WorkerServicer, start_server
from worker_svc.settings import WorkerSettings
from worker_svc.startup import make_worker

SMALL_WORKER = WorkerSettings(
    device="cpu", block_size=4, num_gpu_blocks=40, swap_space=1 << 13, max_num_seqs=8, max_num_batched_tokens=64
)


@asynccontextmanager
async def running_worker(
    directory: Path,
    model: TinyCausalLM | None = None,
    settings: WorkerSettings = SMALL_WORKER,
    *,
    heartbeat_interval_s: float = 0.5,
    metrics: WorkerMetrics | None = None,
    fingerprint: ModelFingerprint = UNKNOWN_MODEL,
) -> AsyncIterator[str]:
    """Serves until the block ends; yields the address, a socket in `directory`."""
    servicer = WorkerServicer(metrics or WorkerMetrics(), heartbeat_interval_s=heartbeat_interval_s)
    device_loop = DeviceLoop()
    device_loop.start()
    servicer.open(make_worker(model or TinyCausalLM(), settings, device_loop, fingerprint))
    server = await start_server(servicer, f"unix:{directory / 'worker'}")
    server.set_serving(True)
    try:
        yield server.address
    finally:
        await server.stop(grace_s=0)
        assert await asyncio.to_thread(device_loop.stop, 60)
        await servicer.stop_disk()
