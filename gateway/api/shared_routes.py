"""The paths that every gateway serves, whichever fronts it has: models, adapters, and the end of running requests."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from typing_extensions import TypedDict

from gateway.api.body import read_model
from gateway.api.field_rule import Part
from gateway.api.front import FrontContext
from gateway.api.openapi import ApiRoute
from gateway.auth.caller import current_caller
from gateway.request.generator import Generator
from gateway.request.limits import shown_model_len
from quire.rpc.errors import NotFound


class CancelledRequest(TypedDict):
    id: str
    object: Literal["request"]
    cancelled: Literal[True]


class ServedModelShape(TypedDict):
    """A served model. `parent` is an adapter's base model. `max_model_len` is null until a scheduler is reached."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None


class ServedModels(TypedDict):
    object: Literal["list"]
    data: list[ServedModelShape]


class LoadAdapterBody(Part):
    """An adapter to load, as in vLLM's API, whose further fields have no effect."""

    lora_name: str
    lora_path: str
    load_inplace: bool | None = None


class UnloadAdapterBody(Part):
    """An adapter to unload, as in vLLM's API, whose further fields have no effect."""

    lora_name: str


def _is_of_anthropic(request: Request) -> bool:
    """Whether the request comes from a client of Anthropic's API, which lists models at the same path."""
    return "anthropic-version" in request.headers


def _as_anthropic(model: ServedModelShape) -> dict[str, Any]:
    """A model in the form of Anthropic's API."""
    return {
        "type": "model",
        "id": model["id"],
        "display_name": model["id"],
        "created_at": datetime.fromtimestamp(model["created"], UTC).isoformat().replace("+00:00", "Z"),
        "max_input_tokens": model["max_model_len"],
        "max_tokens": model["max_model_len"],
    }


def shared_routes(context: FrontContext) -> list[ApiRoute]:
    """The routes."""
    served = context.models

    async def cancel(request: Request) -> CancelledRequest:
        """Ends a running request of any gateway, by its id or its answer's id. Its own call ends with an error."""
        asked = request.path_params["request_id"]
        prefix, _, rest = asked.partition("-")
        ids = [asked, rest] if prefix in ("chatcmpl", "cmpl") and rest else [asked]
        for position, request_id in enumerate(ids):
            try:
                await served.cancel(request_id)
                break
            except NotFound:
                if position == len(ids) - 1:
                    raise
        return {"id": asked, "object": "request", "cancelled": True}

    def described(generator: Generator, name: str) -> ServedModelShape:
        welcomes, kind = generator.replicas.welcomes, generator.model.kind
        lengths = [shown_model_len(kind, welcome.max_model_len) for welcome in welcomes]
        return {
            "id": name,
            "object": "model",
            "created": context.started_at_s,
            "owned_by": "quire",
            "root": generator.model.name,
            "parent": generator.adapters.parent_of(name),
            # None before the first connection to a scheduler.
            "max_model_len": min(lengths, default=None),
        }

    async def models(request: Request) -> Response:
        """The served model and its adapters that the caller may use."""
        caller = current_caller()
        found = [described(each, name) for each in served for name in each.adapters.names(caller)]
        names = [each["id"] for each in found]
        if _is_of_anthropic(request):
            ends = {"first_id": names[0] if names else None, "last_id": names[-1] if names else None}
            return JSONResponse({"data": [_as_anthropic(each) for each in found], "has_more": False, **ends})
        listed: ServedModels = {"object": "list", "data": found}
        return JSONResponse(listed)

    async def model(request: Request) -> Response:
        """One model by its name."""
        name = request.path_params["model"]
        found = described(served.named(name), name)
        return JSONResponse(_as_anthropic(found) if _is_of_anthropic(request) else found)

    async def load_adapter(request: Request) -> Response:
        """Serves a LoRA adapter under a name, for operators."""
        body = await read_model(LoadAdapterBody, request, context.body_limits)
        fields = {"name_field": "lora_name", "directory_field": "lora_path"}
        adapters = served.for_adapter(body.lora_name, "lora_name").adapters
        await adapters.load(body.lora_name, body.lora_path, replace=bool(body.load_inplace), **fields)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload_adapter(request: Request) -> Response:
        """Stops serving a LoRA adapter under its name, for operators. Running requests continue."""
        body = await read_model(UnloadAdapterBody, request, context.body_limits)
        served.with_adapter(body.lora_name).adapters.unload(body.lora_name, name_field="lora_name")
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    def changing(path: str, endpoint: Callable[..., Any], body: type[BaseModel]) -> ApiRoute:
        return ApiRoute(path, endpoint, method="POST", body=body, media_type="text/plain")

    return [
        ApiRoute("/v1/requests/{request_id}/cancel", cancel, method="POST"),
        ApiRoute("/v1/models", models, answer=ServedModels),
        ApiRoute("/v1/models/{model:path}", model, answer=ServedModelShape),
        changing("/v1/load_lora_adapter", load_adapter, LoadAdapterBody),
        changing("/v1/unload_lora_adapter", unload_adapter, UnloadAdapterBody),
    ]
