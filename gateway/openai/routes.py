"""The paths of OpenAI's API, and vLLM's of the same kind."""

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse

from gateway.auth.caller import current_caller
from gateway.openai.body import BodyLimits, parse_body, read_body
from gateway.openai.calls import ChatCall, CompletionCall
from gateway.openai.errors import ErrorAnswer, HttpError, ParamNames, error_answer
from gateway.openai.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from gateway.openai.service import OpenAiService
from gateway.openai.texts import TextEndpoints, text_param_name
from gateway.requests.generator import Generator
from gateway.requests.validation import find_model
from gateway.text.text_service import TextService
from quire.rpc.errors import QuireError

_CODES = {404: "path_not_found", 405: "method_not_allowed"}
_CLIENT_LEFT = 499


def make_router(generator: Generator, body_limits: BodyLimits, *, started_at_s: int) -> APIRouter:
    """`started_at_s` is the time in seconds since the Unix epoch that models report as theirs."""
    router = APIRouter()
    _add_generation(router, generator, body_limits)
    _add_models(router, generator, started_at_s)
    _add_texts(router, TextEndpoints(TextService(generator)), body_limits)
    return router


def answer_errors(app: FastAPI) -> None:
    """Every error of the application, a wrong path or method included, is answered in OpenAI's shape."""

    async def answer(request: Request, error: Exception) -> Response:
        match error:
            case ClientDisconnect():
                return Response(status_code=_CLIENT_LEFT)
            case HTTPException():
                return _response(_of_http_exception(request, error))
        return _response(error_answer(error, _as_it_is))

    for kind in (QuireError, HttpError, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(kind, answer)


def _add_generation(router: APIRouter, generator: Generator, body_limits: BodyLimits) -> None:
    service = OpenAiService(generator)
    model = generator.model.name

    @router.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = parse_body(CompletionBody, await read_body(request, body_limits))
        return service.respond(CompletionCall(body, model))

    @router.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body = parse_body(ChatBody, await read_body(request, body_limits))
        return service.respond(ChatCall(body, model))


def _add_models(router: APIRouter, generator: Generator, started_at_s: int) -> None:
    name = generator.model.name

    def described() -> dict[str, Any]:
        lengths = [welcome.max_model_len for welcome in generator.replicas.welcomes]
        return {
            "id": name,
            "object": "model",
            "created": started_at_s,
            "owned_by": "quire",
            "root": name,
            "parent": None,
            # Unknown until a scheduler was reached.
            "max_model_len": min(lengths, default=None),
        }

    @router.get("/v1/models")
    async def models() -> JSONResponse:
        is_visible = current_caller().visible(name) is not None
        return JSONResponse({"object": "list", "data": [described()] if is_visible else []})

    @router.get("/v1/models/{model:path}")
    async def model(model: str) -> JSONResponse:
        find_model(model, current_caller().visible(name))
        return JSONResponse(described())


def _add_texts(router: APIRouter, texts: TextEndpoints, body_limits: BodyLimits) -> None:
    @router.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = parse_body(TokenizeBody, await read_body(request, body_limits))
        return await _answered(lambda: texts.tokenize(body), text_param_name)

    @router.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = parse_body(DetokenizeBody, await read_body(request, body_limits))
        return await _answered(lambda: texts.detokenize(body), text_param_name)


async def _answered(make: Callable[[], Awaitable[dict[str, Any]]], names: ParamNames) -> Response:
    try:
        return JSONResponse(await make())
    except QuireError as error:
        return _response(error_answer(error, names))


def _of_http_exception(request: Request, error: HTTPException) -> ErrorAnswer:
    shown = f"{request.method} {request.url.path[:200]}"
    message = {404: f"{shown} is not known here", 405: f"{shown} is not allowed"}.get(error.status_code, error.detail)
    code = _CODES.get(error.status_code, "http_error")
    return ErrorAnswer(error.status_code, message, code, headers=error.headers or {})


def _response(answer: ErrorAnswer) -> Response:
    return Response(answer.body, answer.status, dict(answer.headers), media_type="application/json")


def _as_it_is(field: str) -> str:
    return field
