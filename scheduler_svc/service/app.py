"""Puts a scheduler process together, runs it, and takes it apart."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from functools import partial

from quire.rpc.server import RpcServer
from quire.rpc.tls import Role, ServerTls, TlsIdentity, warn_if_open
from quire.runtime import clock
from quire.runtime.logs import configure_logging
from quire.runtime.settings import ConfigurationError
from quire.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from quire.service.metrics import MetricsServer, register_process
from quire.tracing import open_tracer
from scheduler_svc.service.cache_changes import CacheFeed
from scheduler_svc.service.kept_requests import DurableLimits
from scheduler_svc.service.metrics import SchedulerMetrics
from scheduler_svc.service.requests import Requests
from scheduler_svc.service.scheduler_servicer import SchedulerServicer
from scheduler_svc.service.step_loop import StepLoop
from scheduler_svc.service.tracing import RequestSpans
from scheduler_svc.settings import SchedulerSettings

_logger = logging.getLogger(__name__)
_SERVICE_NAME = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"].full_name


async def serve(settings: SchedulerSettings, on_attached: Callable[[], object] = lambda: None) -> None:
    """Runs until it is cancelled, then drains. `on_attached` is called whenever workers were attached and before they
    compute anything. Raises ConfigurationError if it cannot start."""
    configure_logging("scheduler", settings.log_level, settings.log_format)
    identity = None if settings.tls_dir is None else TlsIdentity.of(settings.tls_dir, Role.SCHEDULER)
    metrics = SchedulerMetrics(settings.tenant_metrics)
    spans = RequestSpans(open_tracer(settings.otlp_traces_endpoint, "scheduler"), clock.monotonic)
    limits = DurableLimits(
        settings.max_durable_requests, settings.max_durable_tokens, settings.durable_grace, settings.tenant_overflow
    )
    requests = Requests(lambda key: loop.replica.abort(key), lambda key: loop.replica.progress(key), limits)

    def report_readiness(is_ready: bool) -> None:
        server.set_serving(is_ready)
        if is_ready:
            on_attached()

    loop = StepLoop(settings, requests, metrics, spans, report_readiness, identity)
    metrics.watch(lambda: loop.replica.scheduler, requests, lambda: loop.replica.block_bytes)

    operators = None if identity is None else ServerTls.for_operators(identity)
    register_process(metrics.registry, () if identity is None else (identity.certificate, identity.authority))
    async with _kv_events(settings, loop.replica.cache):
        server = await _start_server(settings, SchedulerServicer(loop, requests), metrics, identity, operators)
        try:
            with contextlib.ExitStack() as stack:
                if (port := settings.metrics_port) is not None:
                    scrapes = MetricsServer.start(
                        settings.metrics_host, port, metrics.registry, operators, model=settings.metrics_model
                    )
                    stack.callback(scrapes.stop)
                _logger.info("listening on %s, workers at %s", server.address, ", ".join(settings.workers))
                await _run_and_drain(loop, requests, settings.drain_timeout)
        finally:
            await server.stop(grace_s=1.0)
            loop.trace.close()
            if loop.replica.recorder is not None:
                await asyncio.to_thread(loop.replica.recorder.close)
            await asyncio.to_thread(spans.close)


@contextlib.asynccontextmanager
async def _kv_events(settings: SchedulerSettings, cache: CacheFeed) -> AsyncIterator[None]:
    """Publishes changes of the prefix cache, if `--kv-events` is given."""
    if settings.kv_events is None:
        yield
        return
    try:
        from scheduler_svc.service.kv_events import KvEventPublisher
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"--kv-events needs {error.name}, which is not installed; install quire-llm[events]"
        ) from error
    async with KvEventPublisher.open(settings) as publisher:
        cache.watch(publisher.publish)
        yield


async def _start_server(
    settings: SchedulerSettings,
    servicer: SchedulerServicer,
    metrics: SchedulerMetrics,
    identity: TlsIdentity | None,
    operators: ServerTls | None,
) -> RpcServer:
    """Gateways submit requests; operators read the state, and drain."""
    tls = None if identity is None else ServerTls(identity, roles=frozenset({Role.GATEWAY, Role.OPERATOR}))
    server = await RpcServer.start(
        settings.listen,
        partial(scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server, servicer),
        [_SERVICE_NAME],
        tls=tls,
        admin_port=settings.admin_port,
        admin_tls=operators,
        on_call_end=metrics.grpc_calls.add,
    )
    warn_if_open(server.address, tls)
    return server


async def _run_and_drain(loop: StepLoop, requests: Requests, drain_timeout_s: float) -> None:
    """Drives the steps until cancelled, and then until the live requests are done, the time is over or the steps have
    ended by themselves."""
    driver = asyncio.create_task(loop.run())
    try:
        await asyncio.shield(driver)
    except asyncio.CancelledError:
        ending = asyncio.create_task(requests.forget_abandoned())
        draining = asyncio.create_task(loop.lifecycle.drain(drain_timeout_s))
        try:
            await asyncio.wait([driver, draining], return_when=asyncio.FIRST_COMPLETED)
            if driver.done() and (error := driver.exception()) is not None:
                _logger.warning("draining ends early: %s", error)
        finally:
            ending.cancel()
            draining.cancel()
        raise
    finally:
        driver.cancel()
        await asyncio.wait([driver])
