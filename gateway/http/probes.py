"""What load balancers, supervisors and Prometheus ask over HTTP: health, readiness, version and metrics."""

from fastapi import APIRouter, Response, status
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from gateway.metrics import GatewayMetrics
from gateway.requests.generator import Generator
from quire.version import VERSION

# Some load balancers ask by HEAD. uvicorn sends the headers of the answer then, and no body.
_METHODS = ["GET", "HEAD"]


def make_probes_router(generator: Generator, metrics: GatewayMetrics) -> APIRouter:
    router = APIRouter()

    @router.api_route("/health", methods=_METHODS)
    async def health() -> dict[str, str]:
        """The process is up."""
        return {"status": "ok"}

    @router.api_route("/ready", methods=_METHODS)
    async def ready() -> JSONResponse:
        """A request would run at once."""
        if generator.is_ready:
            return JSONResponse({"status": "ready"})
        return JSONResponse(
            {"status": "not ready", "reason": _reason_not_ready(generator)}, status.HTTP_503_SERVICE_UNAVAILABLE
        )

    @router.api_route("/version", methods=_METHODS)
    async def version() -> dict[str, str]:
        return {"version": VERSION}

    @router.api_route("/metrics", methods=_METHODS)
    async def prometheus_metrics() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return router


def _reason_not_ready(generator: Generator) -> str:
    if generator.is_draining:
        return "draining"
    if generator.replicas.num_connected:
        return "no scheduler has its worker"
    return "no scheduler is connected"
