"""The routes of OpenAI's API, and of vLLM's API for tokens."""

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gateway.api.answers import OPENAI, as_json
from gateway.api.body import BodyLimits
from gateway.api.durable_streams import last_event_id
from gateway.api.field_rule import FieldRule
from gateway.api.fields import Names, numbered
from gateway.api.front import FrontContext
from gateway.api.generation_fields import CompletionBody
from gateway.api.openai.answers import (
    ChatCompletion,
    ChatEvent,
    Completion,
    CompletionEvent,
    DetokenizedText,
    Tokens,
)
from gateway.api.openai.completion_calls import ChatCall, CompletionCall
from gateway.api.openai.conversation import kept_tools
from gateway.api.openai.read_openai import chat_prompt, read_request
from gateway.api.openai.schemas import (
    ChatBody,
    DetokenizeBody,
    TokenizeBody,
)
from gateway.api.openapi import AnyObject, ApiRoute
from gateway.api.respond import respond, resumed
from gateway.auth.caller import current_caller
from gateway.request.generator import Generator
from gateway.request.served_model import ServedModel
from gateway.request.text_service import TextService
from gateway.request.validation import check_model
from gateway.request.violations import renaming
from gateway.types import ChatPrompt, TextPrompt
from quire.rpc.errors import NotFound, Unimplemented, invalid_field

# Number of tokens that are written in less than a millisecond.
_FEW = 4096
# The tokenizer class that transformers uses for a tokenizer.json without a tokenizer_config.json.
_TOKENIZER_CLASS = "PreTrainedTokenizerFast"
# Paths on the machine where the model was made, and fields that Quire adds when it reads the model directory.
_NOT_SHOWN = frozenset(
    {"vocab_file", "merges_file", "tokenizer_file", "special_tokens_map_file", "name_or_path", "added_tokens"}
)
_NAMES = {"text": "prompt", "input": "prompt", "token_ids": "tokens"}


def openai_routes(context: FrontContext) -> list[ApiRoute]:
    """The routes."""
    generator, body_limits = context.generator, context.body_limits
    return [
        *_generation_routes(generator, body_limits, context.keep_alive_s),
        *_text_routes(generator, body_limits),
        *_refused_routes(generator.model.name),
    ]


def note_unlimited(generator: Generator, rule: FieldRule, api: str, budget: int | None) -> None:
    """Records a reasoning budget as ignored if the model's answers have no reasoning."""
    if budget is not None and generator.model.chat.reasoning_format is None:
        rule.note(api, "thinking_token_budget")


def _without_unread_switch(generator: Generator, rule: FieldRule, body: ChatBody) -> ChatBody:
    """Removes the switch for thinking if the chat template does not read it, and records it as ignored."""
    template = generator.model.chat.template
    if body.enable_thinking is None or body.chat_template is not None or template is None or rule.is_strict:
        return body
    if "enable_thinking" in template.variables:
        return body
    rule.note(body.api, "enable_thinking")
    return body.model_copy(update={"enable_thinking": None})


def _generation_routes(generator: Generator, body_limits: BodyLimits, keep_alive_s: float) -> list[ApiRoute]:
    model = generator.model.name

    async def completions(request: Request) -> Response:
        """Continues one or several prompts."""
        if (last := last_event_id(request)) is not None:
            return resumed(generator, last, CompletionCall.read_back, keep_alive_s, OPENAI)
        body = await read_request(CompletionBody, request, body_limits)
        note_unlimited(generator, body_limits.rule, body.api, body.thinking_token_budget)
        return respond(generator, CompletionCall(body, body.model or model), keep_alive_s)

    async def chat_completions(request: Request) -> Response:
        """Answers a conversation."""
        if (last := last_event_id(request)) is not None:
            return resumed(generator, last, ChatCall.read_back, keep_alive_s, OPENAI)
        body = await read_request(ChatBody, request, body_limits)
        note_unlimited(generator, body_limits.rule, body.api, body.thinking_token_budget)
        body = _without_unread_switch(generator, body_limits.rule, body)
        return respond(generator, ChatCall(body, body.model or model), keep_alive_s)

    return [
        ApiRoute(
            "/v1/completions",
            completions,
            method="POST",
            body=CompletionBody,
            answer=Completion,
            events=CompletionEvent,
        ),
        ApiRoute(
            "/v1/chat/completions",
            chat_completions,
            method="POST",
            body=ChatBody,
            answer=ChatCompletion,
            events=ChatEvent,
        ),
    ]


def _refused_routes(model: str) -> list[ApiRoute]:
    """Routes for other kinds of models. Their error gives the reason why they are not served, unlike a 404."""

    def route(path: str, what: str) -> ApiRoute:
        async def refuse(request: Request) -> Response:
            raise Unimplemented(
                f'model "{model}" generates text and gives no {what}; send this to a server with a model that does',
                reason="WRONG_KIND_OF_MODEL",
            )

        refuse.__doc__ = f"Refused: the model gives no {what}."
        return ApiRoute(path, refuse, method="POST", refuses=True)

    kinds = {"embeddings": "embeddings", "rerank": "scores of documents", "score": "scores of texts"}
    return [route(f"/v1/{path}", what) for path, what in kinds.items()]


def _text_routes(generator: Generator, body_limits: BodyLimits) -> list[ApiRoute]:
    texts = TextService(generator)

    async def tokenize(request: Request) -> Response:
        """The tokens of a prompt or a conversation."""
        body = await read_request(TokenizeBody, request, body_limits)
        with renaming(lambda: Names(_NAMES | numbered("tools", kept_tools(body)))):
            tokenized = await texts.tokenize(
                body.model or None, _tokenize_input(body), add_special_tokens=body.add_special_tokens is not False
            )
        answer: Tokens = {
            "count": len(tokenized.token_ids),
            "max_model_len": tokenized.max_model_len,
            "tokens": tokenized.token_ids,
            "token_strs": tokenized.tokens if body.return_token_strs else None,
        }
        return await _json_response(answer, len(tokenized.token_ids))

    async def detokenize(request: Request) -> Response:
        """The text of tokens."""
        body = await read_request(DetokenizeBody, request, body_limits)
        with renaming(lambda: Names(_NAMES)):
            text = await texts.detokenize(body.model or None, body.tokens, include_special_tokens=True)
        answer: DetokenizedText = {"prompt": text}
        return await _json_response(answer, len(body.tokens))

    async def tokenizer_info(request: Request) -> AnyObject:
        """The tokenizer's configuration and the chat template, in the form of tokenizer_config.json."""
        return _tokenizer_info(generator.model)

    return [
        ApiRoute("/tokenize", tokenize, method="POST", body=TokenizeBody, answer=Tokens),
        ApiRoute("/detokenize", detokenize, method="POST", body=DetokenizeBody, answer=DetokenizedText),
        ApiRoute("/tokenizer_info", tokenizer_info),
    ]


async def _json_response(answer: Mapping[str, Any], num_tokens: int) -> Response:
    """Writes an answer with many tokens in a thread, so that other calls continue."""
    data = as_json(answer) if num_tokens <= _FEW else await asyncio.to_thread(as_json, answer)
    return Response(data, media_type="application/json")


def _tokenizer_info(model: ServedModel) -> dict[str, Any]:
    """The tokenizer's configuration with its chat template; tokens are written as texts.

    Raises:
        NotFound: the caller may not use the model.
    """
    check_model(model.name, current_caller().visible(model.name), NotFound)
    config = {name: _plain(value) for name, value in model.tokenizer_config.items() if name not in _NOT_SHOWN}
    config.setdefault("tokenizer_class", _TOKENIZER_CLASS)
    return config if model.chat.template is None else config | {"chat_template": model.chat.template.source}


def _plain(value: Any) -> Any:
    """A value of tokenizer_config.json, in which tokens that are objects are replaced by their texts."""
    match value:
        case {"content": str(content)}:
            return content
        case Mapping():
            return {name: _plain(each) for name, each in value.items()}
        case list():
            return [_plain(each) for each in value]
    return value


def _tokenize_input(body: TokenizeBody) -> TextPrompt | ChatPrompt:
    if body.prompt is not None and body.messages is not None:
        raise invalid_field("prompt", "is set together with messages; set exactly one of them")
    if body.messages is not None:
        return chat_prompt(body.messages, body)
    if body.prompt is None:
        raise invalid_field("prompt", "is missing; set prompt or messages")
    return TextPrompt(body.prompt)
