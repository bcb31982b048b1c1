"""The worker process: listen, load, serve, drain."""

import asyncio
import logging
import os
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from quire.model_files.model_source import check_local_model
from quire.model_files.progress import ASLEEP_WITHOUT_WEIGHTS, STARTING, LoadProgress
from quire.rpc.process import imports_that_stay, stand_by
from quire.rpc.server import RpcServer
from quire.rpc.tls import Role, ServerTls, TlsIdentity, warn_if_open
from quire.runtime.failpoint import failpoint
from quire.runtime.huge_pages import start_moving_heap
from quire.runtime.logs import configure_logging
from quire.service.metrics import MetricsServer, register_process
from quire.tracing import open_tracer
from worker_svc.device.device_loop import DeviceLoop, end_when_hung
from worker_svc.metrics import WorkerMetrics
from worker_svc.protocol.stream import FETCH_BLOCKS, Worker, WorkerServicer, start_server
from worker_svc.settings import WorkerSettings
from worker_svc.thread_binding import placed_threads

# The scheduler owns all requests, so only the steps in flight have to finish.
_GRACE_S = 1.0
_DEVICE_STOP_S = 5.0
_FETCH_S = 15.0
"""Seconds that an ending worker waits for other replicas to fetch the blocks offered to them: a lease and some more."""
_logger = logging.getLogger(__name__)


def _import_startup(settings: WorkerSettings) -> None:
    """Imports all that a start needs, torch above all; for the thread that loads the model, which OpenMP then knows."""
    with imports_that_stay(), placed_threads(settings):
        import worker_svc.startup  # noqa: F401


async def serve(settings: WorkerSettings) -> None:
    """Serves until it is cancelled, a sleep discards the weights, or the device hangs, which ends the process. Listens
    from the start, and reports the progress of loading; health says SERVING when the model is loaded.

    Raises:
        ConfigurationError: an address is in use, or the model, the device or the memory is not available.
    """
    configure_logging("worker", settings.log_level, settings.log_format)
    device_loop = DeviceLoop()
    device_loop.start()
    await stand_by(os.environ, lambda: asyncio.wrap_future(device_loop.call(partial(_import_startup, settings))))
    check_local_model(settings.model)
    metrics = WorkerMetrics()
    stopping = threading.Event()
    tracer = open_tracer(settings.otlp_traces_endpoint, "worker")
    servicer = WorkerServicer(metrics, tracer, stopping=stopping)
    server, operators = await _start_server(settings, servicer, metrics)
    metrics_server = None
    try:
        if settings.metrics_port is not None:
            metrics_server = MetricsServer.start(
                settings.metrics_host, settings.metrics_port, metrics.registry, operators, model=settings.metrics_model
            )

        def load() -> Worker:
            # torch takes seconds to import. Errors that need no torch come before, and the event loop answers health
            # checks meanwhile.
            _import_startup(settings)
            from worker_svc.startup import build_worker

            start_moving_heap()
            failpoint("worker.load.begun")
            return build_worker(settings, device_loop, stopping, servicer.report_loading)

        async def load_in_device_thread() -> Worker:
            worker = await asyncio.wrap_future(device_loop.call(load))
            metrics.describe(worker.info, worker.busy_ms, worker.adapter_bytes)
            return worker

        await serve_until_discarded(
            servicer,
            server,
            load_in_device_thread,
            lambda worker: asyncio.create_task(end_when_hung(worker.busy_ms, settings.step_timeout)),
            when_attached=settings.load == "when-attached",
        )
    finally:
        stopping.set()
        await servicer.wait_until_fetched(_FETCH_S)
        await server.stop(grace_s=_GRACE_S)
        if metrics_server is not None:
            metrics_server.stop()
        # It does not finish if the process was stopped while it loads or hangs.
        if has_finished := await asyncio.to_thread(device_loop.stop, _DEVICE_STOP_S):
            await servicer.stop_disk()
        else:
            _logger.warning("the device did not finish within %.0f s", _DEVICE_STOP_S)
        if tracer is not None:
            await asyncio.to_thread(tracer.close)
        if not has_finished:
            # An interpreter that ends under a thread in torch's code crashes now and then.
            logging.shutdown()
            os._exit(0)


async def serve_until_discarded(
    servicer: WorkerServicer,
    server: RpcServer,
    load: Callable[[], Awaitable[Worker]],
    guard: Callable[[Worker], asyncio.Task[None]],
    *,
    when_attached: bool,
) -> None:
    """Loads the model, and serves it until a sleep discards its weights.

    Args:
        guard: Starts the background tasks, and ends the process if its device hangs.
        when_attached: loads the model when a scheduler attaches this worker, and not before.
    """
    if when_attached:
        servicer.report_loading(LoadProgress(ASLEEP_WITHOUT_WEIGHTS))
        _logger.info("the model is loaded when a scheduler attaches this worker")
        await servicer.wanted.wait()
        servicer.report_loading(LoadProgress(STARTING))
    worker = await load()
    servicer.open(worker)
    server.set_serving(True)
    _logger.info("ready on %s, generation %d", server.address, worker.info.worker_generation)
    watching = guard(worker)
    try:
        await servicer.discarded.wait()
    finally:
        watching.cancel()
    _logger.info("the weights are discarded; this process begins anew, without them")


async def _start_server(
    settings: WorkerSettings, servicer: WorkerServicer, metrics: WorkerMetrics
) -> tuple[RpcServer, ServerTls | None]:
    """The listening server, and the TLS of the other ports, which are for operators."""
    identity = None if settings.tls_dir is None else TlsIdentity.of(settings.tls_dir, Role.WORKER)
    # Only a scheduler commands a worker, and only workers fetch blocks.
    tls = None
    if identity is not None:
        scheduler, worker = frozenset({Role.SCHEDULER}), frozenset({Role.WORKER})
        tls = ServerTls(identity, roles=scheduler, roles_of_methods={FETCH_BLOCKS: worker})
    operators = None if identity is None else ServerTls.for_operators(identity)
    register_process(metrics.registry, () if identity is None else (identity.certificate, identity.authority))
    address, local_socket = settings.listen, None
    if settings.transfer_listen is not None:
        address, local_socket = settings.transfer_listen, Path(settings.listen.removeprefix("unix:"))
    server = await start_server(
        servicer,
        address,
        local_socket=local_socket,
        tls=tls,
        admin_port=settings.admin_port,
        admin_tls=operators,
        on_call_end=metrics.grpc_calls.add,
    )
    warn_if_open(server.address, tls)
    return server, operators
