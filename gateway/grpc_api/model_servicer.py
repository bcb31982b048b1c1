"""quire.gateway.v1.ModelService."""

import grpc.aio

from gateway.auth.caller import current_caller
from gateway.grpc_api import convert
from gateway.request.generator import Generator
from gateway.request.validation import find_model
from quire.gateway.v1.model_pb2 import (
    GetModelRequest,
    GetModelResponse,
    GetServerInfoRequest,
    GetServerInfoResponse,
    ListModelsRequest,
    ListModelsResponse,
    Model,
    Replica,
)
from quire.version import VERSION

Context = grpc.aio.ServicerContext
_PATIENCE_S = 2.0
"""Who asks how things are wants an answer soon."""


class ModelServicer:
    """See protos/quire/gateway/v1/model.proto for what each method promises."""

    def __init__(self, generator: Generator, gateway_id: str) -> None:
        self._generator = generator
        self._model = generator.model
        self._gateway_id = gateway_id

    async def ListModels(self, request: ListModelsRequest, context: Context) -> ListModelsResponse:
        is_visible = current_caller().visible(self._model.name) is not None
        return ListModelsResponse(models=[await self._describe()] if is_visible else [])

    async def GetModel(self, request: GetModelRequest, context: Context) -> GetModelResponse:
        find_model(request.model, current_caller().visible(self._model.name))
        return GetModelResponse(model=await self._describe())

    async def GetServerInfo(self, request: GetServerInfoRequest, context: Context) -> GetServerInfoResponse:
        limits = await self._generator.limits(_PATIENCE_S)
        return GetServerInfoResponse(
            version=VERSION,
            gateway_id=self._gateway_id,
            replicas=self._replicas() if current_caller().access.is_operator else [],
            limits=convert.limits_message(limits),
        )

    def _replicas(self) -> list[Replica]:
        return [
            convert.replica_message(address, link.is_connected, link.welcome)
            for address, link in self._generator.replicas.links.items()
        ]

    async def _describe(self) -> Model:
        limits = await self._generator.limits(_PATIENCE_S)
        welcome = self._generator.replicas.welcomes[0]
        return Model(
            name=self._model.name,
            architecture=self._model.architecture,
            dtype=welcome.dtype,
            vocab_size=limits.vocab_size,
            max_model_len=limits.max_model_len,
            eos_token_ids=self._model.eos_token_ids,
            has_chat_template=self._model.chat.template is not None,
        )
