"""Quire's own gRPC API, which every gateway serves."""

from gateway.api.front import Front, FrontContext
from gateway.api.grpc.servicers import GenerationServicer, ModelServicer, PrefixServicer
from gateway.request.text_service import TextService
from quire.gateway.v1 import generation_pb2, model_pb2, prefix_pb2

_GENERATION = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"]
_MODEL = model_pb2.DESCRIPTOR.services_by_name["ModelService"]
_PREFIX = prefix_pb2.DESCRIPTOR.services_by_name["PrefixService"]


def open_front(context: FrontContext) -> Front:
    """Opens the front."""
    generator = context.generator
    texts = TextService(generator)
    return Front(
        servicers={
            _GENERATION: GenerationServicer(generator, texts),
            _MODEL: ModelServicer(generator, context.gateway_id),
            _PREFIX: PrefixServicer(texts),
        }
    )
