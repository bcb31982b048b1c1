"""OpenAI's completions and chat completions, and vLLM's API for tokens."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gateway.api.answers import OPENAI, as_json
from gateway.api.body import BodyLimits, read_body
from gateway.api.durable_streams import last_event_id
from gateway.api.field_rule import FieldRule
from gateway.api.fields import Names, numbered, parse
from gateway.api.front import CallReader, Front, FrontContext
from gateway.api.generation_fields import CompletionBody, GenerationBody
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
from gateway.api.openai.read_openai import chat_prompt
from gateway.api.openai.schemas import (
    ChatBody,
    DetokenizeBody,
    TokenizeBody,
)
from gateway.api.openapi import AnyObject, ApiRoute
from gateway.api.respond import Call, respond, resumed
from gateway.auth.caller import current_caller
from gateway.replicas.live import LiveRequest
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
_COMPLETIONS, _CHATS = "/v1/completions", "/v1/chat/completions"
_NAMES = {"text": "prompt", "input": "prompt", "token_ids": "tokens"}


def open_front(context: FrontContext) -> Front:
    """Opens the front."""
    generator, limits, rule = context.generator, context.body_limits, context.body_limits.rule
    model = generator.model.name

    async def read_completion(data: bytes) -> CompletionCall:
        body = await parse(CompletionBody, data, limits)
        _note_unlimited(generator, rule, body)
        return CompletionCall(body, body.model or model)

    async def read_chat(data: bytes) -> ChatCall:
        body = await parse(ChatBody, data, limits)
        _note_unlimited(generator, rule, body)
        body = _without_unread_switch(generator, rule, body)
        return ChatCall(body, body.model or model)

    async def answered(request: Request, read_call: CallReader, read_back: Callable[[LiveRequest], Call]) -> Response:
        if (last := last_event_id(request)) is not None:
            return resumed(generator, last, read_back, context.keep_alive_s, OPENAI)
        return respond(generator, await read_call(await read_body(request, limits)), context.keep_alive_s)

    async def completions(request: Request) -> Response:
        """Continues one or several prompts."""
        return await answered(request, read_completion, CompletionCall.read_back)

    async def chat_completions(request: Request) -> Response:
        """Answers a conversation."""
        return await answered(request, read_chat, ChatCall.read_back)

    return Front(
        routes=[
            ApiRoute(
                _COMPLETIONS,
                completions,
                method="POST",
                body=CompletionBody,
                answer=Completion,
                events=CompletionEvent,
            ),
            ApiRoute(_CHATS, chat_completions, method="POST", body=ChatBody, answer=ChatCompletion, events=ChatEvent),
            *_text_routes(generator, limits),
            *_refused_routes(model),
        ],
        call_readers={_CHATS: read_chat, _COMPLETIONS: read_completion},
    )


def _note_unlimited(generator: Generator, rule: FieldRule, body: GenerationBody) -> None:
    """Records a reasoning budget as ignored if the model's answers have no reasoning."""
    if body.thinking_token_budget is not None and generator.model.chat.reasoning_format is None:
        rule.note(body.api, "thinking_token_budget")


def _without_unread_switch(generator: Generator, rule: FieldRule, body: ChatBody) -> ChatBody:
    """Removes the switch for thinking if the chat template does not read it, and records it as ignored."""
    template = generator.model.chat.template
    if body.enable_thinking is None or body.chat_template is not None or template is None or rule.is_strict:
        return body
    if "enable_thinking" in template.variables:
        return body
    rule.note(body.api, "enable_thinking")
    return body.model_copy(update={"enable_thinking": None})


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
        body = await parse(TokenizeBody, await read_body(request, body_limits), body_limits)
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
        body = await parse(DetokenizeBody, await read_body(request, body_limits), body_limits)
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
