"""The gateway process: builds its parts, reports its readiness, and drains before it stops."""

import asyncio
import contextlib
import dataclasses
import gc
import importlib
import logging
import resource
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Self

import grpc.aio
from starlette.types import ASGIApp

from gateway.api.body import BodyLimits
from gateway.api.field_rule import FieldRule
from gateway.api.front import Front, FrontContext
from gateway.api.grpc.servicers import open_front as open_grpc
from gateway.api.shared_routes import shared_routes
from gateway.auth.keys import Authenticator, KeyRing, NoAuthenticator, entries_of
from gateway.gen_ai_metrics import GenAiMetrics
from gateway.metrics import GatewayMetrics
from gateway.offload import FairExecutor
from gateway.replicas.ledger import Ledger
from gateway.replicas.members import Resolver
from gateway.replicas.replica_set import Replicas
from gateway.replicas.routing import RoutingPolicy
from gateway.request.adapter_names import Adapters
from gateway.request.body_memory import BodyMemory
from gateway.request.counting import EntryLimits
from gateway.request.generator import Generator, SharedBounds
from gateway.request.models import Models
from gateway.request.served_model import ServedModel
from gateway.server.connections import HttpServer
from gateway.server.grpc import AuthInterceptor, IdleCalls, SlowClientInterceptor, TraceInterceptor, add_service
from gateway.server.http import make_http_app, probe_routes
from gateway.settings import GatewaySettings
from gateway.turns import TenantTurns
from gateway.vllm_metrics import VllmMetrics
from quire.model_files.model_source import resolve_model
from quire.rpc.address import TcpAddress, is_local
from quire.rpc.errors import Unavailable
from quire.rpc.process import DaemonThreads, return_freed_memory
from quire.rpc.server import ConnectionLimits, RpcServer
from quire.rpc.tls import AUTHORITY_FILE, Role, ServerTls, TlsIdentity
from quire.runtime import clock, entropy
from quire.runtime.failpoint import failpoint
from quire.runtime.huge_pages import start_moving_heap
from quire.service.metrics import MetricsServer, register_process
from quire.service.model_flag import ModelFlag
from quire.tracing import Tracer, open_meter, open_tracer

# The time for calls that have ended to send their last message.
_STOP_GRACE_S = 1.0
_RETURN_MEMORY_EVERY_S = 2.0
# While the ports are handed over: the time in which headers of answers tell HTTP clients to open a new connection, and
# the time without gRPC calls after which all gRPC clients have opened new connections or are idle.
_HAND_OVER_S = 1.0
# Maximum age of gRPC connections to shared ports, so that busy clients leave a gateway that hands its ports over.
_SHARED_CONNECTION_AGE_S = 10.0
# A scrape includes the metrics of schedulers that answer within this time.
_SCRAPE_TIMEOUT_S = 2.0
# Maximum time that readiness waits for the constraint tables after all other parts are ready: a late gateway costs more
# than a delay of the first constrained request.
_TABLES_TIMEOUT_S = 0.2
# Open files in addition to client connections: libraries, stores, schedulers, batches.
_OTHER_FILES = 512
# Collections of objects of middle age before all objects are visited; 10 by default.
_MIDDLE_COLLECTIONS_PER_FULL_ONE = 100
_ADAPTERS_FIXED = (
    "several gateways share the ports here, and only one of them would load it; list adapters in --adapters, or start "
    "only one gateway"
)
_logger = logging.getLogger(__name__)


class Gateway:
    """A running gateway. Create it by `start`; it connects to schedulers while `run` runs.

    Attributes:
        grpc_address: Where it serves gRPC, as HOST:PORT.
        http_address: Where it serves HTTP, as HOST:PORT.
        admin_address: Where it serves channelz, as HOST:PORT; None if it does not.
        authenticator: Authenticates callers.
    """

    def __init__(self, context: FrontContext, rpc: RpcServer, http: HttpServer, idle_calls: IdleCalls) -> None:
        self.grpc_address = rpc.address
        self.http_address = http.address
        self.admin_address = None if rpc.admin is None else rpc.admin.address
        self.authenticator = context.authenticator
        self._models = context.models
        self._rpc = rpc
        self._http = http
        self._idle_calls = idle_calls
        self._context = context
        self._fronts = context.opened
        self._is_stopping = False
        self._http_task = asyncio.create_task(http.run_until_stopped(), name="http")
        self._background = [
            *(asyncio.create_task(each.replicas.run(), name="schedulers") for each in self._models),
            *(asyncio.create_task(self._report_readiness(each), name="readiness") for each in self._models),
            asyncio.create_task(self.authenticator.watch(), name="API keys"),
            asyncio.create_task(return_freed_memory(_RETURN_MEMORY_EVERY_S), name="memory"),
            *(asyncio.create_task(run(), name=name) for front in self._fronts for name, run in front.tasks.items()),
        ]

    @classmethod
    async def start(
        cls,
        settings: GatewaySettings,
        metrics: GatewayMetrics | None = None,
        resolver: Resolver | None = None,
        *,
        authenticator: Authenticator | None = None,
        around_http: Callable[[ASGIApp], ASGIApp] = lambda app: app,
        listener: socket.socket | None = None,
    ) -> Self:
        """Listens on both ports, and connects to schedulers in the background. `resolver` resolves DNS names, and
        `authenticator` replaces the one of the settings. `around_http` makes the application of the HTTP port, which
        is the port of `listener` if there is one.

        Raises:
            ConfigurationError: the model directory, a file or an address cannot be used; the message has one line.
        """
        open_fronts = import_fronts(settings.served_fronts)
        gateway_id = f"gateway-{entropy.random_hex(6)}"
        metrics = metrics or GatewayMetrics(settings.tenant_metrics)
        tls = _Tls.of(settings)
        register_process(metrics.registry, tls.files)
        tracer = open_tracer(settings.otlp_traces_endpoint, "gateway")
        sink = open_meter(settings.otlp_metrics_endpoint, "gateway")
        if sink is not None or settings.shows_gen_ai_metrics:
            metrics.count_gen_ai(GenAiMetrics(sink), shows=settings.shows_gen_ai_metrics)
        make = _GeneratorMaker(gateway_id, metrics, tls, tracer, resolver, SharedBounds(settings))
        models = Models([await make.generator(settings, model) for model in settings.served_models])
        if settings.vllm_metric_names:
            own = [(each.model.name, each.metrics.records, each.replicas) for each in models]
            vllm = VllmMetrics(own, metrics.http_answers, gateway_id)
            metrics.show(vllm, vllm.refresh)
        authenticator = authenticator or _make_authenticator(settings, metrics)
        turns = TenantTurns()
        rule = FieldRule(settings.strict_fields, metrics.count_ignored_fields)
        entries = EntryLimits(settings.max_chat_messages)
        context = FrontContext(
            settings,
            gateway_id,
            models,
            authenticator,
            metrics,
            tracer,
            BodyLimits(settings.max_message_bytes, entries, turns, rule),
            started_at_s=int(clock.unix_s()),
        )
        shared = Front(routes=[*shared_routes(context), *probe_routes(models, metrics)])
        context.opened.extend([open_grpc(context), shared])
        for open_front in open_fronts:
            context.opened.append(open_front(context))
        app = around_http(make_http_app(context))
        # The maximum of one tenant. Without key files all callers are one tenant, which needs no maximum of its own.
        share = settings.max_total_body_bytes // 2 if settings.keys_files else None
        bodies = BodyMemory(settings.max_total_body_bytes, share)
        http = HttpServer(app, settings, bodies, metrics.refused_connections.inc, tls.public, listener)
        idle_calls = IdleCalls()
        interceptors: list[grpc.aio.ServerInterceptor] = [
            # The outermost interceptor comes first.
            idle_calls,
            AuthInterceptor(authenticator, _service_names(context), metrics.count_refused_caller),
            SlowClientInterceptor(
                bodies,
                turns,
                sender_timeout_s=settings.slow_sender_timeout,
                reader_timeout_s=settings.slow_reader_timeout,
            ),
            *([] if tracer is None else [TraceInterceptor()]),
        ]
        try:
            rpc = await _start_rpc(context, entries, interceptors, tls)
        except BaseException:
            http.close()
            raise
        names = '", "'.join(each.model.name for each in models)
        _logger.info('serving "%s": gRPC on %s, HTTP on %s', names, rpc.address, http.address)
        _warn_if_open(settings, rpc.address, http.address, is_encrypted=tls.public is not None)
        return cls(context, rpc, http, idle_calls)

    @property
    def is_ready(self) -> bool:
        """Whether a request to one of the models would run at once."""
        return self._models.is_ready

    async def run(self) -> None:
        """Runs until it is cancelled or stopped, or a part of the gateway fails."""
        parts = [self._http_task, *self._background]
        await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        if self._is_stopping:
            return
        done = [task for task in parts if task.done()]
        for task in done:
            await task
        raise RuntimeError(f"{', '.join(task.get_name() for task in done)} ended")

    async def stop(self, drain_timeout_s: float) -> None:
        """Rejects new requests, or leaves its ports to gateways that share them; waits up to `drain_timeout_s` for live
        requests to finish, aborts the remaining ones and closes everything."""
        self._is_stopping = True
        for each in self._models:
            each.is_draining = True
        failpoint("gateway.drain.begun")
        self._rpc.set_serving(False)
        for each in self._models:
            each.durable_reads.close()
        for front in self._fronts:
            if front.stop_runs is not None:
                await front.stop_runs()
        if self._models.num_live:
            _logger.info("draining %d live requests", self._models.num_live)
        try:
            async with asyncio.timeout(drain_timeout_s):
                if self._context.settings.hand_over:
                    # Closes both ports, and serves the last requests of open connections.
                    self._http.hand_over()
                    await self._rpc.hand_over(_HAND_OVER_S)
                for each in self._models:
                    await each.ledger.wait_until_empty()
        except TimeoutError:
            _logger.warning("aborting %d requests that did not finish in time", self._models.num_live)
            for live in chain.from_iterable(each.ledger for each in self._models):
                live.fail(Unavailable("this gateway stopped before the request was finished", reason="DRAINING"))
        # All further calls are rejected. The connections to schedulers close afterwards.
        for each in self._models:
            each.refuse_all_calls()
        self._idle_calls.end()
        self._http.stop()
        await asyncio.gather(self._rpc.stop(_STOP_GRACE_S), self._http_task, return_exceptions=True)
        for each in self._models:
            await each.replicas.flush()
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        for front in self._fronts:
            if front.close is not None:
                front.close()
        for each in self._models:
            each.model.constraints.close()
            each.model.chat.close()
            each.model.executor.shutdown()
        if (tracer := self._context.tracer) is not None:
            await asyncio.to_thread(tracer.close)
        await asyncio.to_thread(self._context.metrics.close)

    async def _report_readiness(self, generator: Generator) -> None:
        """Reports in gRPC health whether a replica of any model is ready, when this model's have changed."""
        replicas, constraints = generator.replicas, generator.model.constraints
        if constraints.is_starting:
            starting = asyncio.create_task(constraints.wait_until_started(), name="tables of the vocabulary")
            try:
                await replicas.wait_until_ready()
                await asyncio.wait([starting], timeout=_TABLES_TIMEOUT_S)
            finally:
                starting.cancel()
                constraints.is_starting = False
        while True:
            await replicas.wait_until_ready()
            self._rpc.set_serving(self._models.is_ready)
            await replicas.wait_until_not_ready()
            self._rpc.set_serving(self._models.is_ready)


def allow_open_files(max_connections: int) -> None:
    """Raises this process's limit on open files to the number that its two ports need, or to the hard limit; logs a
    warning if that is too low. Shells and container engines often set 1,024."""
    needed = 2 * max_connections + _OTHER_FILES
    allowed, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY or allowed >= needed:
        return
    raised = needed if highest == resource.RLIM_INFINITY else min(needed, highest)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, highest))
    if raised < needed:
        _logger.warning(
            "at most %s files may be open, and --max-connections %d may need %s; raise the limit (ulimit -Hn), or lower"
            " --max-connections",
            f"{raised:,}",
            max_connections,
            f"{needed:,}",
        )


async def serve(settings: GatewaySettings, listener: socket.socket | None = None) -> None:
    """Runs a gateway until it is cancelled, then drains it. HTTP connections come from `listener` if there is one.

    Raises:
        ConfigurationError: it cannot start; the message has one line.
    """
    if listener is not None:
        host, port = listener.getsockname()[:2]
        settings = dataclasses.replace(settings, http_host=host, http_port=port)
    allow_open_files(settings.max_connections)
    metrics = GatewayMetrics(settings.tenant_metrics)
    with _metrics_server(settings, metrics):
        gateway = await Gateway.start(settings, metrics, listener=listener)
        # Loaded objects live on. A garbage collection that visits them would block the event loop for about 50 ms.
        gc.collect()
        gc.freeze()
        start_moving_heap()
        # A full collection visits 75 objects of each live request, which takes 0.1 s with a thousand of them, and by
        # default comes after a few hundred requests. It finds little, as a request that ends leaves no cycle.
        gc.set_threshold(*gc.get_threshold()[:2], _MIDDLE_COLLECTIONS_PER_FULL_ONE)
        # The only line on stdout. A process that starts a gateway with port 0 reads the port from it.
        print(f"quire-gateway: listening grpc={gateway.grpc_address} http={gateway.http_address}", flush=True)
        try:
            await gateway.run()
        finally:
            await gateway.stop(settings.drain_timeout)


@contextlib.contextmanager
def _metrics_server(settings: GatewaySettings, metrics: GatewayMetrics) -> Iterator[None]:
    """Serves this gateway's metrics on their own port, if it has one."""
    if settings.metrics_port is None:
        yield
        return
    tls = _Tls.of(settings).operators
    loop = asyncio.get_running_loop()

    def refresh() -> None:
        refreshing = asyncio.run_coroutine_threadsafe(metrics.refresh(), loop)
        with contextlib.suppress(TimeoutError):
            refreshing.result(_SCRAPE_TIMEOUT_S)

    server = MetricsServer.start(settings.metrics_host, settings.metrics_port, metrics.registry, tls, refresh)
    _logger.info("metrics on port %d", server.port)
    try:
        yield
    finally:
        server.stop()


@dataclass(frozen=True, slots=True)
class _Tls:
    """The certificates of a gateway; None means no TLS.

    Attributes:
        public: For the ports of clients.
        inner: For calls to schedulers.
        operators: For the ports of metrics and channelz.
    """

    public: ServerTls | None
    inner: TlsIdentity | None
    operators: ServerTls | None

    @classmethod
    def of(cls, settings: GatewaySettings) -> Self:
        """Reads the certificates that the settings name. Raises ConfigurationError if a file cannot be used."""
        inner = None if settings.tls_dir is None else TlsIdentity.of(settings.tls_dir, Role.GATEWAY)
        public = inner
        if settings.public_cert is not None and settings.public_key is not None:
            # Client certificates are still verified by the authority of --tls-dir.
            authority = settings.tls_dir / AUTHORITY_FILE if settings.tls_client_auth and settings.tls_dir else None
            public = TlsIdentity(settings.public_cert, settings.public_key, authority)
            public.read()
        return cls(
            None if public is None else ServerTls(public, asks_for_certificates=settings.tls_client_auth),
            inner,
            None if inner is None else ServerTls.for_operators(inner),
        )

    @property
    def files(self) -> list[Path]:
        """The certificate files in use."""
        identities = [self.inner, None if self.public is None else self.public.identity]
        files = [path for each in identities if each is not None for path in (each.certificate, each.authority)]
        return [path for path in files if path is not None]


def import_fronts(names: Sequence[str]) -> list[Callable[[FrontContext], Front]]:
    """The functions that open the fronts. Only the packages of these fronts are imported."""
    return [importlib.import_module(f"gateway.api.{name}.front").open_front for name in names]


def _service_names(context: FrontContext) -> list[str]:
    return [service.full_name for front in context.opened for service in front.servicers]


@dataclass(slots=True)
class _GeneratorMaker:
    """Makes the generators of all models of a gateway."""

    gateway_id: str
    metrics: GatewayMetrics
    tls: _Tls
    tracer: Tracer | None
    resolver: Resolver | None
    shared: SharedBounds
    last: Ledger | None = None

    async def generator(self, all_settings: GatewaySettings, model_flag: ModelFlag) -> Generator:
        """The generator of a model, with its adapters. Raises ConfigurationError."""
        settings = all_settings.of_model(model_flag)
        # In a daemon thread, since the model may be downloaded from a hub, and a signal must end the download, too.
        resolve = partial(resolve_model, model_flag.source, with_weights=False)
        path = await asyncio.get_running_loop().run_in_executor(DaemonThreads("download"), resolve)
        model = ServedModel.open(
            path,
            settings.served_model_name,
            FairExecutor(settings.tokenizer_threads),
            tool_format=settings.tool_call_parser,
            reasoning_format=settings.reasoning_parser,
            takes_templates=settings.request_chat_templates,
            pooling=settings.pooling,
            score_tokens=settings.score_tokens,
            score_template=settings.score_template,
        )
        metrics = self.metrics.of_model(model.name)
        ledger = self.last = Ledger(max_chunk_tokens=settings.max_chunk_tokens, other=self.last)
        replicas = Replicas(
            settings.schedulers,
            ledger,
            gateway_id=self.gateway_id,
            architecture=model.architecture,
            model=model.fingerprint,
            connect_timeout_s=settings.connect_timeout,
            failover_delay_s=settings.failover_delay,
            reconnect_grace_s=settings.reconnect_grace,
            routing=RoutingPolicy(settings.routing),
            long_prompt=settings.long_prompt,
            tls=self.tls.inner,
            on_tokens=metrics.count_tokens,
            on_members=metrics.records.keep,
            on_moved=metrics.moves_from_prefill.inc,
            resolver=self.resolver,
        )
        metrics.watch_schedulers(replicas.links, lambda: replicas.num_connected)
        refusal = _ADAPTERS_FIXED if settings.hand_over else None

        def slots() -> list[int]:
            return [each.max_adapters for each in replicas.welcomes]

        adapters = Adapters(model.name, path, slots, refusal, aliases=settings.served_model_aliases)
        await adapters.open(settings.adapters)
        return Generator(model, replicas, ledger, settings, metrics, self.tracer, adapters, self.shared)


def _make_authenticator(settings: GatewaySettings, metrics: GatewayMetrics) -> Authenticator:
    if not settings.requires_keys:
        return NoAuthenticator()
    keys = KeyRing(
        settings.keys_files,
        entries_of(settings.api_keys),
        on_reload_failure=metrics.keys_reload_failures.inc,
        on_refusal=metrics.count_refused_caller,
    )
    _logger.info("%d API keys are known", len(keys))
    return keys


def _warn_if_open(settings: GatewaySettings, *addresses: str, is_encrypted: bool) -> None:
    if all(map(is_local, addresses)):
        return
    if not settings.requires_keys:
        _logger.warning("this gateway accepts calls from other machines without a key; --keys-file requires keys")
    if not is_encrypted:
        _logger.warning(
            "traffic from other machines to this gateway is not encrypted; --tls-dir or --public-cert encrypts it"
        )


async def _start_rpc(
    context: FrontContext, entries: EntryLimits, interceptors: Sequence[grpc.aio.ServerInterceptor], tls: _Tls
) -> RpcServer:
    settings = context.settings

    def register(server: grpc.aio.Server) -> None:
        for front in context.opened:
            for service, servicer in front.servicers.items():
                add_service(server, service, servicer, entries)
        for front in context.opened:
            server.add_generic_rpc_handlers(tuple(front.handlers))

    return await RpcServer.start(
        str(TcpAddress(settings.grpc_host, settings.grpc_port)),
        register,
        _service_names(context),
        max_message_bytes=settings.max_message_bytes,
        reuse_port=settings.reuse_port,
        local_socket=settings.local_socket,
        admin_port=settings.admin_port,
        admin_tls=tls.operators,
        tls=tls.public,
        limits=ConnectionLimits(
            settings.max_connections,
            settings.max_streams_per_connection,
            settings.handshake_timeout,
            settings.max_connection_age or (_SHARED_CONNECTION_AGE_S if settings.hand_over else None),
        ),
        interceptors=interceptors,
        on_call_end=context.metrics.grpc_calls.add,
    )
