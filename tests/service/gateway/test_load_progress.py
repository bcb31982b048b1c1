"""A worker's progress in loading its model, as a client of the gateway sees it through a real scheduler."""

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest

from quire.gateway.v1 import model_pb2
from quire.model_files.progress import READING, WARMING_UP, LoadProgress
from quire.rpc.errors import from_rpc_error
from quire.scheduler.v1 import scheduler_pb2
from tests.support.gateway_process import running_gateway
from tests.support.scheduler_process import running_scheduler, state_of, until, wait_attached
from tests.support.tiny_causal_lm import TinyCausalLM
from tests.support.worker_server import SMALL_WORKER
from worker_svc.device.device_loop import DeviceLoop
from worker_svc.metrics import WorkerMetrics
from worker_svc.protocol.stream import WorkerServicer, start_server
from worker_svc.startup import make_worker

QUARTER = LoadProgress(READING, 1 << 30, 1 << 32)


async def test_everybody_can_see_how_far_a_worker_is(tmp_path: Path) -> None:
    servicer = WorkerServicer(WorkerMetrics())
    servicer.report_loading(QUARTER)
    async with AsyncExitStack() as stack:
        worker = await start_server(servicer, f"unix:{tmp_path / 'worker'}")
        stack.push_async_callback(worker.stop, grace_s=0)
        socket = str(tmp_path / "scheduler")
        scheduler = await stack.enter_async_context(running_scheduler(socket, worker.address))
        gateway = await stack.enter_async_context(running_gateway(schedulers=(f"unix:{socket}",)))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=gateway.http_url, timeout=30))

        async def readiness() -> tuple[int, Any]:
            response = await http.get("/ready")
            return response.status_code, response.json()

        async def loading() -> Any:
            return (await readiness())[1].get("loading")

        await until(loading)
        status, body = await readiness()
        expected = {"phase": "reading", "done_bytes": 1 << 30, "total_bytes": 1 << 32, "percent": 25}
        assert (status, body["loading"]) == (503, [{"scheduler": f"unix:{socket}", **expected}])
        assert "reading, 1.0 of 4.0 GiB (25%)" in body["reason"]
        (state,) = (await state_of(scheduler)).workers
        assert (state.attached, LoadProgress.of(state.loading)) == (False, QUARTER)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await gateway.models.GetServerInfo(model_pb2.GetServerInfoRequest())
        error = from_rpc_error(caught.value)
        assert LoadProgress.of_metadata(error.metadata) == QUARTER
        assert "the model is being loaded: reading, 1.0 of 4.0 GiB (25%)" in error.message

        servicer.report_loading(LoadProgress(WARMING_UP))

        async def is_warming_up() -> bool:
            return (await loading())[0]["phase"] == WARMING_UP

        await until(is_warming_up)
        device_loop = DeviceLoop()
        device_loop.start()
        stack.callback(device_loop.stop, 60)
        servicer.open(make_worker(TinyCausalLM(), SMALL_WORKER, device_loop))

        await wait_attached(scheduler)
        (state,) = (await state_of(scheduler)).workers
        assert state == scheduler_pb2.WorkerState(
            address=worker.address, attached=True, worker_generation=state.worker_generation
        )
