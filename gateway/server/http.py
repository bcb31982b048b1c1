"""The HTTP application: its routes, the middleware before them, and the endpoints for load balancers, supervisors,
operators and Prometheus."""

import asyncio
import ipaddress
from collections.abc import Callable, Sequence, Set
from functools import lru_cache
from http import HTTPStatus
from typing import Literal, NotRequired, cast

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from typing_extensions import TypedDict

from gateway.api.answers import (
    OPENAI,
    Dialect,
    ErrorAnswer,
    client_request_id,
    error_answer,
    error_handlers,
    send_answer,
)
from gateway.api.field_rule import IGNORED_HEADER, begin_call
from gateway.api.front import Front, FrontContext, PageAccess
from gateway.api.openapi import METRICS_PATH, OPEN_PATHS, ApiRoute, description_routes
from gateway.auth.caller import OWN_SITES, Caller, check_is_operator, current_caller, set_caller
from gateway.auth.keys import Authenticator
from gateway.auth.quota import Account
from gateway.metrics import GatewayMetrics, HttpAnswer, HttpAnswers
from gateway.request.generator import Generator
from gateway.request.models import Models
from gateway.request.spans import set_incoming_context
from gateway.request.violations import shortened
from gateway.server.grpc_web import EXPOSED_HEADERS, GrpcWebMiddleware
from gateway.settings import GatewaySettings
from quire.rpc.address import TcpAddress, is_local
from quire.rpc.errors import QuireError, Unauthenticated, invalid_field
from quire.runtime import clock
from quire.version import VERSION

_ANY_HOST = "*"
# The facts about a replica in /server_info.
_SIZES = (
    *("max_model_len", "block_size", "num_gpu_blocks", "num_host_blocks"),
    *("max_num_seqs", "max_num_batched_tokens"),
)
# Media types that browsers let pages of any site send without a preflight request.
_WITHOUT_PREFLIGHT = frozenset({"", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"})
_REQUEST_ID = b"x-request-id"
_METHODS = frozenset({"GET", "HEAD", "POST", "DELETE", "OPTIONS"})
_HOSTS_KEPT = 64
_UNCOUNTED_PATHS = OPEN_PATHS | {METRICS_PATH}


def make_http_app(context: FrontContext) -> Starlette:
    """The application with the routes of all open fronts."""
    settings, metrics = context.settings, context.metrics
    routes = [each for front in context.opened for each in front.routes]
    app = Starlette(
        # The first route that matches is taken: the frequent ones, which generate text, come first.
        routes=[*sorted(routes, key=_generates_no_text), *description_routes(routes)],
        # The outermost middleware comes first.
        middleware=[
            *_cross_origin(settings.allowed_origins),
            Middleware(
                EnvelopeMiddleware,
                answers=metrics.http_answers,
                is_draining=lambda: context.models.is_draining,
                reads_traces=settings.otlp_traces_endpoint is not None,
            ),
            *_host_check(settings),
            # If keys are required, a page of another site has no key to send.
            *([] if settings.requires_keys else [Middleware(SiteMiddleware, allowed_origins=settings.allowed_origins)]),
            Middleware(
                GrpcWebMiddleware,
                servicers={service: each for front in context.opened for service, each in front.servicers.items()},
                authenticator=context.authenticator,
                limits=context.body_limits,
                on_refusal=metrics.count_refused_caller,
                on_call_end=metrics.grpc_calls.add,
            ),
            Middleware(
                AuthMiddleware,
                authenticator=context.authenticator,
                accesses=[front.access for front in context.opened if front.access is not None],
                on_refusal=metrics.count_refused_caller,
                open_metrics=settings.open_metrics,
            ),
        ],
        exception_handlers=error_handlers(_dialect_of),
    )
    app.state.fronts = context.opened
    return app


def _generates_no_text(route: BaseRoute) -> bool:
    return not (isinstance(route, ApiRoute) and route.events is not None)


def _host_check(settings: GatewaySettings) -> list[Middleware]:
    """The check of host names, if --allowed-hosts is set or only the loopback address protects the gateway."""
    is_open_on_loopback = is_local(str(TcpAddress(settings.http_host, 0))) and not settings.requires_keys
    if _ANY_HOST in settings.allowed_hosts or not (settings.allowed_hosts or is_open_on_loopback):
        return []
    return [Middleware(HostMiddleware, allowed_hosts=settings.allowed_hosts)]


def _cross_origin(allowed_origins: Sequence[str]) -> list[Middleware]:
    """Answers preflight requests of browsers, for pages of other origins (CORS)."""
    if not allowed_origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=allowed_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=("x-request-id", "retry-after", IGNORED_HEADER.decode(), *EXPOSED_HEADERS),
        )
    ]


class EnvelopeMiddleware:
    """Rules for every request, independent of its path and its answer.

    - The trace context in its headers is read.
    - The client's X-Request-Id is returned with the answer, in place of the gateway's own id.
    - The answer names the fields of the body that were ignored.
    - While the gateway drains, the answer has the header `connection: close`, and the connection closes after it. A
      client that reuses connections then opens a new one, and does not send a request while the old one closes.
    - Answers are counted, except the frequent answers to load balancers and Prometheus.
    - If the application fails, the answer is 500. Starlette's own error handler runs outside of all middleware, so its
      answer would lack these headers, and its log line would lack the request id.
    """

    def __init__(
        self, app: ASGIApp, *, answers: HttpAnswers, is_draining: Callable[[], bool], reads_traces: bool
    ) -> None:
        self._app = app
        self._answers = answers
        self._is_draining = is_draining
        self._reads_traces = reads_traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._reads_traces:
            set_incoming_context((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
        request_id = next((value for name, value in scope["headers"] if name == _REQUEST_ID), None)
        if request_id is not None:
            client_request_id.set(request_id.decode("latin-1"))
        ignored = begin_call()
        has_started = False
        kind: HttpAnswer | None = None
        came_at = clock.monotonic()

        async def send_with_headers(message: Message) -> None:
            nonlocal has_started, kind
            has_started = True
            if message["type"] == "http.response.start":
                kind = _kind_of(scope, message["status"])
                if kind is not None:
                    self._answers.counts[kind] += 1
                own = {} if request_id is None else {_REQUEST_ID: request_id}
                if ignored.count:
                    own[IGNORED_HEADER] = ignored.names.encode()
                if self._is_draining():
                    own[b"connection"] = b"close"
                others = [header for header in message.get("headers", ()) if header[0] not in own]
                message = {**message, "headers": [*others, *own.items()]}
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        except Exception as error:
            answer = error_answer(error)
            if not has_started:
                await send_answer(send_with_headers, answer, dialect=_dialect_of(scope))
        finally:
            if kind is not None:
                self._answers.durations[kind.route, kind.method].add(clock.monotonic() - came_at)


def _kind_of(scope: Scope, status: int) -> HttpAnswer | None:
    """The labels with which an answer is counted; None for frequent requests of load balancers and Prometheus."""
    if scope["path"] in _UNCOUNTED_PATHS:
        return None
    # Starlette sets the route if it finds one. All unknown paths are one series.
    route = scope.get("route")
    method = scope["method"] if scope["method"] in _METHODS else "other"
    return HttpAnswer("other" if route is None else route.path_format, method, status)


class HostMiddleware:
    """Rejects requests whose Host header names another host.

    After it was loaded, a page of any site can make its own host name resolve to 127.0.0.1 (DNS rebinding). The browser
    then treats this server as a part of that site: the page may call it, and read the answers. Only the `Host` header
    shows that. Load balancers and supervisors are always answered.
    """

    def __init__(self, app: ASGIApp, allowed_hosts: Sequence[str]) -> None:
        """Loopback names are allowed in addition to `allowed_hosts`."""
        self._app = app
        self._allowed = frozenset(name.lower() for name in allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in OPEN_PATHS:
            return await self._app(scope, receive, send)
        # Browsers always send a Host header.
        host = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), "")
        name = _host_name(host)
        if not name or name in self._allowed or _is_loopback(name):
            return await self._app(scope, receive, send)
        shown = shortened(name)
        message = (
            f'host is "{shown}"; this gateway answers only to loopback names and to the names in --allowed-hosts, so '
            f"that pages of other sites cannot call it; --allowed-hosts {shown} allows it"
        )
        return await send_answer(send, ErrorAnswer(403, message, "host_not_allowed"), dialect=_dialect_of(scope))


class SiteMiddleware:
    """Rejects requests of other sites that need no preflight request: a POST without a media type, or of a form, and
    the upgrade to a WebSocket, whose messages any page could read.

    Paths with a JSON body reject such requests by themselves. Without this check, paths without a body, such as /sleep,
    and uploads would obey any page that is open in a browser that can reach this gateway.
    """

    def __init__(self, app: ASGIApp, allowed_origins: Sequence[str]) -> None:
        self._app = app
        self._allowed = frozenset(allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        if (scope["method"] == "POST" or "upgrade" in headers) and self._is_of_other_site(headers):
            message = (
                "a page of another site may call this path only as application/json, or if --allowed-origins names its "
                "origin"
            )
            answer = ErrorAnswer(415, message, "unsupported_media_type")
            return await send_answer(send, answer, dialect=_dialect_of(scope))
        return await self._app(scope, receive, send)

    def _is_of_other_site(self, headers: Headers) -> bool:
        media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if media_type not in _WITHOUT_PREFLIGHT or _ANY_HOST in self._allowed or origin in self._allowed:
            return False
        if site is not None:
            return site not in OWN_SITES
        # Browsers that do not send Sec-Fetch-Site, as for addresses without TLS, send the origin.
        return origin is not None and origin.partition("://")[2].lower() != headers.get("host", "").lower()


def _host_name(host: str) -> str:
    """The host of a `Host` header, without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].strip().rstrip(".").lower()


@lru_cache(_HOSTS_KEPT)
def _is_loopback(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class AuthMiddleware:
    """Rejects requests without a valid key before their body is read, and sets the caller of all others.

    Metrics cover all tenants: only operators may read them, or every client if `open_metrics` is set.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        authenticator: Authenticator,
        accesses: Sequence[PageAccess],
        on_refusal: Callable[[str], None],
        open_metrics: bool,
    ) -> None:
        self._app = app
        self._authenticator = authenticator
        self._accesses = accesses
        self._on_refusal = on_refusal
        self._open_paths = OPEN_PATHS.union(*(each.open_paths for each in accesses))
        if open_metrics:
            self._open_paths |= {METRICS_PATH}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in self._open_paths:
            try:
                caller = self._caller_of(scope)
                set_caller(caller)
                send = _with_rates(send, caller.account)
            except QuireError as error:
                self._on_refusal(error.reason)
                for access in self._accesses:
                    if (page := access.refusal(scope, error)) is not None:
                        return await page(scope, receive, send)
                extra = {"www-authenticate": "Bearer"} if isinstance(error, Unauthenticated) else {}
                return await send_answer(send, error_answer(error), extra, _dialect_of(scope))
        return await self._app(scope, receive, send)

    def _caller_of(self, scope: Scope) -> Caller:
        shown = [value for name, value in scope["headers"] if name == b"authorization"]
        if not shown:
            # Anthropic's header for keys.
            shown = [b"Bearer " + value for name, value in scope["headers"] if name == b"x-api-key"]
        for access in self._accesses:
            shown = shown or access.keys_shown(scope)
        caller = self._authenticator.authenticate(shown)
        for access in self._accesses:
            access.check(scope, caller)
        if scope["path"] == METRICS_PATH:
            check_is_operator(caller, "metrics")
        return caller


def _with_rates(send: Send, account: Account) -> Send:
    """Adds OpenAI's rate limit headers to answers, with the key's rates when the answer begins."""

    async def send_with_rates(message: Message) -> None:
        if message["type"] == "http.response.start":
            own: list[tuple[bytes, bytes]] = []
            for name, limit, left, seconds in account.rates():
                values = {"limit": str(limit), "remaining": str(left), "reset": f"{seconds:.3f}s"}
                own += [(f"x-ratelimit-{kind}-{name}".encode(), value.encode()) for kind, value in values.items()]
            message = {**message, "headers": [*message.get("headers", ()), *own]} if own else message
        await send(message)

    return send_with_rates


class Health(TypedDict):
    """The answer of /health; `reason` says why no replica can serve."""

    status: Literal["ok", "failing"]
    reason: NotRequired[str]


class ServerLoad(TypedDict):
    server_load: int


class ForgottenBlocks(TypedDict):
    forgotten_blocks: int


class Sleeping(TypedDict):
    is_sleeping: bool


class ReplicaInfo(TypedDict):
    model: str
    max_model_len: int
    block_size: int
    num_gpu_blocks: int
    num_host_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int


class ServerInfo(TypedDict):
    version: str
    model: str
    architecture: str
    replicas: list[ReplicaInfo]


class ReplicaLoading(TypedDict):
    """The progress of a scheduler's workers in loading their model."""

    scheduler: str
    phase: str
    done_bytes: int
    total_bytes: int
    percent: int | None


class GatewayReadiness(TypedDict):
    """The answer of /ready; `reason` says why no request would run, `loading` which replicas load their models."""

    status: str
    reason: NotRequired[str]
    loading: NotRequired[list[ReplicaLoading]]


class GatewayVersion(TypedDict):
    version: str


def probe_routes(models: Models, metrics: GatewayMetrics) -> list[ApiRoute]:
    """Routes for probes, with GET and HEAD: some load balancers send HEAD, and uvicorn then sends only the headers."""
    routes = _ProbeRoutes(models, metrics)
    return [
        *(
            ApiRoute(path, routes.health, answer=Health, statuses=[HTTPStatus.SERVICE_UNAVAILABLE])
            for path in ("/health", "/ping")
        ),
        ApiRoute("/live", routes.live),
        ApiRoute("/load", routes.load),
        ApiRoute("/server_info", routes.server_info),
        ApiRoute("/reset_prefix_cache", routes.reset_prefix_cache, method="POST", errors=[400, 503]),
        ApiRoute("/sleep", routes.sleep, method="POST", errors=[400, 503, 504]),
        ApiRoute("/wake_up", routes.wake_up, method="POST", errors=[400, 503, 504]),
        ApiRoute("/is_sleeping", routes.is_sleeping, errors=[503]),
        ApiRoute("/ready", routes.ready, answer=GatewayReadiness, statuses=[HTTPStatus.SERVICE_UNAVAILABLE]),
        ApiRoute("/version", routes.version),
        ApiRoute(METRICS_PATH, routes.prometheus_metrics, media_type="text/plain"),
    ]


class _ProbeRoutes:
    def __init__(self, models: Models, metrics: GatewayMetrics) -> None:
        self._models = models
        self._metrics = metrics

    async def health(self, request: Request) -> Response:
        """Whether a replica of any model can serve requests."""
        if self._models.has_replica:
            return JSONResponse(Health(status="ok"))
        answer = Health(status="failing", reason=_reasons_not_ready(self._models))
        return JSONResponse(answer, HTTPStatus.SERVICE_UNAVAILABLE)

    async def live(self, request: Request) -> Health:
        """Whether this process is up, independent of the replicas."""
        return {"status": "ok"}

    async def load(self, request: Request) -> ServerLoad:
        """The number of live requests at this gateway, including queued requests."""
        return {"server_load": self._models.num_live}

    async def server_info(self, request: Request) -> ServerInfo:
        """The version, the model and the replicas, for operators."""
        check_is_operator(current_caller(), "facts about the server")
        return {
            "version": VERSION,
            "model": self._models.default.model.name,
            "architecture": self._models.default.model.architecture,
            "replicas": [
                cast(ReplicaInfo, {name: getattr(each, name) for name in _SIZES} | {"model": generator.model.name})
                for generator in self._models
                for each in generator.replicas.welcomes
            ],
        }

    async def reset_prefix_cache(self, request: Request) -> ForgottenBlocks:
        """Clears the prefix caches of all replicas, or only of a `model`, except blocks that requests or pins use; for
        operators."""
        check_is_operator(current_caller(), "resets of the prefix cache")
        counts = [await each.replicas.calls.reset_prefix_cache() for each in self._asked(request)]
        return {"forgotten_blocks": sum(counts)}

    async def sleep(self, request: Request) -> Sleeping:
        """Frees the memory of the KV pools of all replicas, or only of a `model`, and at level 2 also of the weights;
        for operators. Requests wait until /wake_up."""
        check_is_operator(current_caller(), "sleep and wake-up")
        _check_values(request, "level", {"1", "2"}, "at level 1 the weights stay loaded, at 2 they are discarded")
        _check_values(request, "mode", {"keep"}, "running requests continue after /wake_up; cancel them yourself")
        discards = "2" in request.query_params.getlist("level")
        await asyncio.gather(*(each.replicas.calls.sleep(discard_weights=discards) for each in self._asked(request)))
        return {"is_sleeping": True}

    async def wake_up(self, request: Request) -> Sleeping:
        """Ends the sleep of all replicas, or of the replicas of `model`, for operators."""
        check_is_operator(current_caller(), "sleep and wake-up")
        _check_values(request, "tags", {"weights", "kv_cache"}, "only these parts sleep")
        tags = request.query_params.getlist("tags")
        if not tags or "kv_cache" in tags:
            await asyncio.gather(*(each.replicas.calls.wake_up() for each in self._asked(request)))
        return await self.is_sleeping(request)

    async def is_sleeping(self, request: Request) -> Sleeping:
        """Whether all replicas sleep, or the replicas of `model`, for operators."""
        check_is_operator(current_caller(), "sleep and wake-up")
        asleep = await asyncio.gather(*(each.replicas.calls.are_asleep() for each in self._asked(request)))
        return {"is_sleeping": all(asleep)}

    def _asked(self, request: Request) -> Sequence[Generator]:
        """The generators of the models that the query names, else of all. Raises NotFound."""
        return [self._models.named(each) for each in request.query_params.getlist("model")] or list(self._models)

    async def ready(self, request: Request) -> Response:
        """Whether a request to one of the models would run at once."""
        if self._models.is_ready:
            return JSONResponse(GatewayReadiness(status="ready"))
        answer: GatewayReadiness = {
            "status": "not ready",
            "reason": _reasons_not_ready(self._models),
            "loading": [
                {
                    "scheduler": address,
                    "phase": loading.phase,
                    "done_bytes": loading.done_bytes,
                    "total_bytes": loading.total_bytes,
                    "percent": loading.percent,
                }
                for address, link in self._models.links.items()
                if (loading := link.loading) is not None
            ],
        }
        return JSONResponse(answer, HTTPStatus.SERVICE_UNAVAILABLE)

    async def version(self, request: Request) -> GatewayVersion:
        """The version of the gateway."""
        return {"version": VERSION}

    async def prometheus_metrics(self, request: Request) -> Response:
        """The metrics of this gateway, in Prometheus' format."""
        await self._metrics.refresh()
        return Response(generate_latest(self._metrics.registry), media_type=CONTENT_TYPE_LATEST)


def _dialect_of(scope: Scope) -> Dialect:
    """The dialect of the errors of a call, including errors before a route is found."""
    fronts: Sequence[Front] = scope["app"].state.fronts
    return next((found for each in fronts if (found := each.dialect_of(scope)) is not None), OPENAI)


def _check_values(request: Request, name: str, known: Set[str], why: str) -> None:
    """Raises InvalidArgument for an unknown value of a query parameter."""
    for value in request.query_params.getlist(name):
        if value not in known:
            raise invalid_field(name, f'is "{shortened(value)}"; it must be {" or ".join(sorted(known))}: {why}')


def _reasons_not_ready(models: Models) -> str:
    if not models.are_several:
        return _reason_not_ready(models.default)
    return "; ".join(f"{each.model.name}: {_reason_not_ready(each)}" for each in models)


def _reason_not_ready(generator: Generator) -> str:
    if generator.is_draining:
        return "draining"
    if generator.replicas.is_ready:
        return "the tables for checks of constraints are not ready yet"
    if generator.replicas.num_connected:
        loading = [
            f"{address}: {link.loading}"
            for address, link in generator.replicas.links.items()
            if link.loading is not None
        ]
        return "; ".join(["no scheduler has its worker", *loading])
    return "; ".join(["no scheduler is connected", *generator.replicas.problems])
