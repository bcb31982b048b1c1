"""The Open Inference Protocol of KServe, over gRPC and HTTP."""

from starlette.types import Scope

from gateway.api.answers import Dialect
from gateway.api.front import Front, FrontContext
from gateway.api.kserve.inference_servicer import KServeServicer, UnservedMethods
from gateway.api.kserve.rest import DIALECT, ROOT, kserve_routes
from quire.inference import open_inference_pb2

_SERVICE = open_inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]


def open_front(context: FrontContext) -> Front:
    """Opens the front."""
    servicer = KServeServicer(context.generator, context.body_limits.rule)
    return Front(
        routes=kserve_routes(context, servicer),
        servicers={_SERVICE: servicer},
        handlers=[UnservedMethods(_SERVICE)],
        dialect_of=_dialect_of,
    )


def _dialect_of(scope: Scope) -> Dialect | None:
    path = scope["path"]
    return DIALECT if path == ROOT or path.startswith(f"{ROOT}/") else None
