"""The paths of OpenAI's API, and vLLM's of the same kind."""

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

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


def openai_routes(generator: Generator, body_limits: BodyLimits, *, started_at_s: int) -> list[Route]:
    """`started_at_s` is the time in seconds since the Unix epoch that models report as theirs."""
    return [
        *_generation_routes(generator, body_limits),
        *_model_routes(generator, started_at_s),
        *_text_routes(TextEndpoints(TextService(generator)), body_limits),
    ]


def error_handlers() -> dict[Any, Callable[[Request, Exception], Awaitable[Response]]]:
    """By kind of error. Every error, a wrong path or method included, is answered in OpenAI's shape."""

    async def answer(request: Request, error: Exception) -> Response:
        match error:
            case ClientDisconnect():
                return Response(status_code=_CLIENT_LEFT)
            case HTTPException():
                return _response(_of_http_exception(request, error))
        return _response(error_answer(error, _as_it_is))

    return dict.fromkeys((QuireError, HttpError, HTTPException, ClientDisconnect, Exception), answer)


def _generation_routes(generator: Generator, body_limits: BodyLimits) -> list[Route]:
    service = OpenAiService(generator)
    model = generator.model.name

    async def completions(request: Request) -> Response:
        body = parse_body(CompletionBody, await read_body(request, body_limits))
        return service.respond(CompletionCall(body, model))

    async def chat_completions(request: Request) -> Response:
        body = parse_body(ChatBody, await read_body(request, body_limits))
        return service.respond(ChatCall(body, model))

    return [
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    ]


def _model_routes(generator: Generator, started_at_s: int) -> list[Route]:
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

    async def models(request: Request) -> Response:
        is_visible = current_caller().visible(name) is not None
        return JSONResponse({"object": "list", "data": [described()] if is_visible else []})

    async def model(request: Request) -> Response:
        find_model(request.path_params["model"], current_caller().visible(name))
        return JSONResponse(described())

    return [Route("/v1/models", models), Route("/v1/models/{model:path}", model)]


def _text_routes(texts: TextEndpoints, body_limits: BodyLimits) -> list[Route]:
    async def tokenize(request: Request) -> Response:
        body = parse_body(TokenizeBody, await read_body(request, body_limits))
        return await _answered(lambda: texts.tokenize(body), text_param_name)

    async def detokenize(request: Request) -> Response:
        body = parse_body(DetokenizeBody, await read_body(request, body_limits))
        return await _answered(lambda: texts.detokenize(body), text_param_name)

    return [Route("/tokenize", tokenize, methods=["POST"]), Route("/detokenize", detokenize, methods=["POST"])]


async def _answered(make: Callable[[], Awaitable[bytes]], names: ParamNames) -> Response:
    try:
        return Response(await make(), media_type="application/json")
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
