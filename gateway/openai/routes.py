"""The paths of OpenAI's API, and vLLM's of the same kind."""

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.api.body import BodyLimits, read_parsed
from gateway.api.errors import ParamNames, error_answer, error_response
from gateway.api.openapi import ApiRoute
from gateway.auth.caller import current_caller
from gateway.openai.calls import ChatCall, CompletionCall
from gateway.openai.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from gateway.openai.service import OpenAiService
from gateway.openai.texts import TextEndpoints, text_param_name, tokenizer_info
from gateway.request.generator import Generator
from gateway.request.prompts import TextService
from gateway.request.validation import find_model
from quire.rpc.errors import QuireError


def openai_routes(
    generator: Generator, body_limits: BodyLimits, *, keep_alive_s: float, started_at_s: int
) -> list[ApiRoute]:
    """`keep_alive_s` is how long streams are silent at most; 0 sets no limit. `started_at_s` is the time in seconds
    since the Unix epoch that models report as theirs."""
    return [
        *_generation_routes(generator, body_limits, keep_alive_s),
        *_model_routes(generator, started_at_s),
        *_text_routes(generator, body_limits),
    ]


def _generation_routes(generator: Generator, body_limits: BodyLimits, keep_alive_s: float) -> list[ApiRoute]:
    service = OpenAiService(generator, keep_alive_s)
    model = generator.model.name

    async def completions(request: Request) -> Response:
        """Continues one or several prompts."""
        body = await read_parsed(CompletionBody, request, body_limits)
        return service.respond(CompletionCall(body, model))

    async def chat_completions(request: Request) -> Response:
        """Answers a conversation."""
        body = await read_parsed(ChatBody, request, body_limits)
        return service.respond(ChatCall(body, model))

    return [
        ApiRoute("/v1/completions", completions, method="POST", body=CompletionBody, streams=True),
        ApiRoute("/v1/chat/completions", chat_completions, method="POST", body=ChatBody, streams=True),
    ]


def _model_routes(generator: Generator, started_at_s: int) -> list[ApiRoute]:
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
        """The served model, if the caller may use it."""
        is_visible = current_caller().visible(name) is not None
        return JSONResponse({"object": "list", "data": [described()] if is_visible else []})

    async def model(request: Request) -> Response:
        """One model by its name."""
        find_model(request.path_params["model"], current_caller().visible(name))
        return JSONResponse(described())

    return [ApiRoute("/v1/models", models), ApiRoute("/v1/models/{model:path}", model)]


def _text_routes(generator: Generator, body_limits: BodyLimits) -> list[ApiRoute]:
    texts = TextEndpoints(TextService(generator))

    async def tokenize(request: Request) -> Response:
        """The tokens of a prompt or of a conversation."""
        body = await read_parsed(TokenizeBody, request, body_limits)
        return await _answered(lambda: texts.tokenize(body), text_param_name)

    async def detokenize(request: Request) -> Response:
        """The text of tokens."""
        body = await read_parsed(DetokenizeBody, request, body_limits)
        return await _answered(lambda: texts.detokenize(body), text_param_name)

    async def tokenizer_information(request: Request) -> Response:
        """The tokenizer's configuration and the chat template, as tokenizer_config.json has them."""
        return JSONResponse(tokenizer_info(generator.model))

    return [
        ApiRoute("/tokenize", tokenize, method="POST", body=TokenizeBody),
        ApiRoute("/detokenize", detokenize, method="POST", body=DetokenizeBody),
        ApiRoute("/tokenizer_info", tokenizer_information),
    ]


async def _answered(make: Callable[[], Awaitable[bytes]], names: ParamNames) -> Response:
    try:
        return Response(await make(), media_type="application/json")
    except QuireError as error:
        return error_response(error_answer(error, names))
