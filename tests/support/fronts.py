"""One request over either front, so that a test need not know which: gRPC, or OpenAI's API over HTTP."""

import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import grpc.aio
import httpx

from quire.gateway.v1 import generation_pb2, generation_pb2_grpc, model_pb2, model_pb2_grpc
from quire.rpc.errors import from_rpc_error
from tests.support.gateway_process import RunningGateway


@dataclass(frozen=True)
class Answer:
    """What came back: a text, or the reason of a refusal and after how many seconds to come back."""

    text: str | None = None
    reason: str | None = None
    status: int | grpc.StatusCode | None = None
    retry_after_s: float | None = None
    message: str = ""


class GrpcFront:
    """Over gRPC."""

    refusals: Mapping[str, grpc.StatusCode] = MappingProxyType(
        {
            "UNAUTHENTICATED": grpc.StatusCode.UNAUTHENTICATED,
            "RATE": grpc.StatusCode.RESOURCE_EXHAUSTED,
            "DENIED": grpc.StatusCode.PERMISSION_DENIED,
        }
    )

    def __init__(self, channel: grpc.aio.Channel, authorizations: list[str]) -> None:
        self._metadata = [("authorization", each) for each in authorizations]
        self._generation = generation_pb2_grpc.GenerationServiceStub(channel)
        self._models = model_pb2_grpc.ModelServiceStub(channel)

    async def generate(self, text: Any = "hello", **fields: Any) -> Answer:
        """Generates `max_tokens` tokens, 4 by default. Fields are those that both fronts call alike."""
        request = generation_pb2.GenerateRequest(text=text)
        request.stopping.max_tokens = fields.pop("max_tokens", 4)
        request.stopping.ignore_eos = True
        for name in ("n", "best_of", "temperature"):
            if name in fields:
                setattr(request.sampling, name, fields.pop(name))
        request.MergeFrom(generation_pb2.GenerateRequest(**fields))
        return await self._answer(self._generation.Generate(request, timeout=60, metadata=self._metadata))

    async def tokenize(self, text: str) -> Answer:
        request = generation_pb2.TokenizeRequest(text=text)
        return await self._answer(self._generation.Tokenize(request, timeout=60, metadata=self._metadata))

    async def models(self) -> list[str]:
        response = await self._models.ListModels(model_pb2.ListModelsRequest(), metadata=self._metadata)
        return [model.name for model in response.models]

    async def _answer(self, call) -> Answer:
        try:
            response = await call
        except grpc.aio.AioRpcError as failure:
            error = from_rpc_error(failure)
            retry_after_s = None if error.retry_after_ms is None else error.retry_after_ms / 1000
            return Answer(None, error.reason, error.code, retry_after_s, error.message)
        sequences = getattr(response, "sequences", None)
        return Answer(sequences[0].text if sequences else "")


class HttpFront:
    """Over HTTP."""

    refusals: Mapping[str, int] = MappingProxyType({"UNAUTHENTICATED": 401, "RATE": 429, "DENIED": 403})

    def __init__(self, client: httpx.AsyncClient, authorizations: list[str]) -> None:
        self._client = client
        self._headers = [("authorization", each) for each in authorizations]

    async def generate(self, text: str | list[str] = "hello", **fields: Any) -> Answer:
        """As GrpcFront does."""
        if "priority" in fields:
            # Lower runs earlier in vLLM's API.
            fields["priority"] = -fields["priority"]
        return await self._post("/v1/completions", {"prompt": text, "max_tokens": 4, "ignore_eos": True} | fields)

    async def tokenize(self, text: str) -> Answer:
        return await self._post("/tokenize", {"prompt": text})

    async def models(self) -> list[str]:
        response = await self._client.get("/v1/models", headers=self._headers)
        return [model["id"] for model in response.json()["data"]]

    async def _post(self, path: str, body: dict) -> Answer:
        response = await self._client.post(path, json=body, headers=self._headers)
        if response.status_code == 200:
            return Answer(response.json().get("choices", [{"text": ""}])[0]["text"])
        error = response.json()["error"]
        retry_after = response.headers.get("retry-after")
        reason = error["code"].upper()
        return Answer(None, reason, response.status_code, float(retry_after) if retry_after else None, error["message"])


class Fronts:
    """Makes fronts of one kind, for any key, to the gateway `gateway`."""

    def __init__(self, kind: str, running: RunningGateway, client: httpx.AsyncClient) -> None:
        self.gateway = running.gateway
        self._kind = kind
        self._channel = running.channel
        self._client = client

    def showing(self, *authorizations: str) -> GrpcFront | HttpFront:
        """With these authorization headers."""
        if self._kind == "grpc":
            return GrpcFront(self._channel, list(authorizations))
        return HttpFront(self._client, list(authorizations))

    def of_key(self, key: str) -> GrpcFront | HttpFront:
        """As the holder of a key."""
        return self.showing(f"Bearer {key}")


@contextlib.asynccontextmanager
async def fronts_of(gateway: RunningGateway, kind: str) -> AsyncIterator[Fronts]:
    """`kind` is "grpc" or "http"."""
    async with httpx.AsyncClient(base_url=gateway.http_url, timeout=60) as client:
        yield Fronts(kind, gateway, client)
