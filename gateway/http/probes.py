"""What load balancers, supervisors and Prometheus ask over HTTP: health, readiness, version and metrics."""

from http import HTTPStatus

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.metrics import GatewayMetrics
from gateway.requests.generator import Generator
from quire.version import VERSION


def probe_routes(generator: Generator, metrics: GatewayMetrics) -> list[Route]:
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
        return JSONResponse({"version": VERSION})

    async def prometheus_metrics(request: Request) -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return [
        Route("/health", health),
        Route("/ready", ready),
        Route("/version", version),
        Route("/metrics", prometheus_metrics),
    ]


def _reason_not_ready(generator: Generator) -> str:
    if generator.is_draining:
        return "draining"
    if generator.replicas.num_connected:
        return "no scheduler has its worker"
    return "no scheduler is connected"
