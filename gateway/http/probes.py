"""What load balancers, supervisors and Prometheus ask over HTTP: health, readiness, version and metrics."""

from http import HTTPStatus

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.http.api_route import ApiRoute
from gateway.metrics import GatewayMetrics
from gateway.requests.generator import Generator
from quire.version import VERSION


def probe_routes(generator: Generator, metrics: GatewayMetrics) -> list[ApiRoute]:
    """Routes of GET and HEAD, by which some load balancers ask; uvicorn sends the headers of the answer then."""

    async def health(request: Request) -> Response:
        """The process is up."""
        return JSONResponse({"status": "ok"})

    async def ready(request: Request) -> Response:
        """A request would run at once."""
        if generator.is_ready:
            return JSONResponse({"status": "ready"})
        return JSONResponse(
            {"status": "not ready", "reason": _reason_not_ready(generator)}, HTTPStatus.SERVICE_UNAVAILABLE
        )

    async def version(request: Request) -> Response:
        """The version of the gateway."""
        return JSONResponse({"version": VERSION})

    async def prometheus_metrics(request: Request) -> Response:
        """Metrics of this gateway, as Prometheus reads them."""
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return [
        ApiRoute("/health", health),
        ApiRoute("/ready", ready, statuses=[HTTPStatus.SERVICE_UNAVAILABLE]),
        ApiRoute("/version", version),
        ApiRoute("/metrics", prometheus_metrics, media_type="text/plain"),
    ]


def _reason_not_ready(generator: Generator) -> str:
    if generator.is_draining:
        return "draining"
    if generator.replicas.num_connected:
        return "no scheduler has its worker"
    problems = [
        f"{address}: {link.problem}" for address, link in generator.replicas.links.items() if link.problem is not None
    ]
    return "; ".join(["no scheduler is connected", *problems])
