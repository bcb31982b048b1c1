"""Anthropic's Messages API. Fields are read in the same way with any anthropic-version and anthropic-beta
header; with anthropic-version, errors and lists of models have Anthropic's form on all paths."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Self

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from gateway.api.answers import Dialect
from gateway.api.anthropic.answers import AnsweredMessage, AnthropicError, MessageEvent, MessageTokens
from gateway.api.anthropic.read_message import (
    MessageBody,
    TokensBody,
    conversation_of,
    names_of,
    options_of,
    prompt_of,
)
from gateway.api.anthropic.write_message import ANTHROPIC, MessageShaper
from gateway.api.body import read_body, validated
from gateway.api.field_rule import FieldRule
from gateway.api.fields import Names, parse
from gateway.api.front import Front, FrontContext
from gateway.api.openapi import ApiRoute
from gateway.api.respond import Call, FrontEnd, last_event_id, respond, resumed
from gateway.replicas.live import LiveRequest
from gateway.request.generator import Generator
from gateway.request.text_service import TextService
from gateway.request.violations import renaming
from gateway.types import RequestOptions
from quire.runtime import entropy

_PATH = "/v1/messages"
_API = "messages"


def dialect_of(scope: Scope) -> Dialect | None:
    """Anthropic's dialect for its own paths, and for requests of its clients to other paths; None for other calls."""
    path = scope["path"]
    is_own = path == _PATH or path.startswith(f"{_PATH}/")
    return ANTHROPIC if is_own or any(name == b"anthropic-version" for name, _ in scope["headers"]) else None


def _is_told_to_think(generator: Generator, rule: FieldRule, body: TokensBody) -> bool:
    """Whether the chat template gets the switch for thinking. A model that always reasons needs none. A model that
    never reasons answers without reasoning, and the field counts as ignored; in strict mode its template rejects it."""
    chat = generator.model.chat
    if chat.template is not None and "enable_thinking" in chat.template.variables:
        return True
    if chat.reasoning_format is None and body.thinking is not None and body.thinking.type == "enabled":
        if rule.is_strict:
            return True
        rule.note("messages", "thinking")
    return False


class MessageCall(Call):
    """One message."""

    dialect = ANTHROPIC

    def __init__(self, body: MessageBody, model: str, rule: FieldRule) -> None:
        self.id = f"msg_{entropy.random_hex(16)}"
        self.streams = bool(body.stream)
        self._body = body
        self._model = model
        self._rule = rule
        self._conversation = conversation_of(body)

    async def requests(self, generator: Generator) -> list[RequestOptions]:
        is_told = _is_told_to_think(generator, self._rule, self._body)
        prompt = prompt_of(self._body, self._conversation, is_told_to_think=is_told)
        options = options_of(self._body, prompt, self.id)
        return [dataclasses.replace(options, durable=bool(self._body.durable), front_end=self._front_end())]

    @classmethod
    def read_back(cls, live: LiveRequest, rule: FieldRule) -> Self:
        """The call that began a durable stream. Raises NotFound if the stream belongs to another API."""
        kept = FrontEnd.of(live.request.front_end, _API, live.request.request_id)
        call = cls(validated(MessageBody, kept.body), kept.model, rule)
        call.id = kept.id
        return call

    def _front_end(self) -> bytes:
        if not self._body.durable:
            return b""
        body = self._body.model_copy(update={"messages": [], "system": None, "tools": None, "tool_choice": None})
        fields = body.model_dump(mode="json", by_alias=True, exclude_none=True)
        return FrontEnd(_API, self.id, 0, self._model, fields, {}).to_bytes()

    def names(self, position: int) -> Names:
        return names_of(self._body, self._conversation)

    async def shaper(self, generator: Generator, live: Sequence[LiveRequest]) -> MessageShaper:
        thinking = self._body.thinking
        shows_thinking = thinking is None or thinking.display != "omitted"
        return MessageShaper(self.id, self._model, live[0], shows_thinking=shows_thinking)


def open_front(context: FrontContext) -> Front:
    """Opens the front."""
    generator, body_limits, keep_alive_s = context.generator, context.body_limits, context.keep_alive_s
    model, texts = generator.model.name, TextService(generator)

    async def create(request: Request) -> Response:
        """Answers a conversation."""
        if (last := last_event_id(request)) is not None:
            read_back = partial(MessageCall.read_back, rule=body_limits.rule)
            return resumed(generator, last, read_back, keep_alive_s, ANTHROPIC)
        body = await parse(MessageBody, await read_body(request, body_limits), body_limits)
        return respond(generator, MessageCall(body, body.model or model, body_limits.rule), keep_alive_s)

    async def count_tokens(request: Request) -> MessageTokens:
        """The number of tokens of a conversation's prompt."""
        body = await parse(TokensBody, await read_body(request, body_limits), body_limits)
        conversation = conversation_of(body)
        is_told = _is_told_to_think(generator, body_limits.rule, body)
        prompt = prompt_of(body, conversation, is_told_to_think=is_told)
        with renaming(lambda: names_of(body, conversation)):
            tokenized = await texts.tokenize(body.model or None, prompt, add_special_tokens=False)
        return {"input_tokens": len(tokenized.token_ids)}

    routes = [
        ApiRoute(
            _PATH,
            create,
            method="POST",
            body=MessageBody,
            answer=AnsweredMessage,
            events=MessageEvent,
            names_events=True,
            error=AnthropicError,
        ),
        ApiRoute(f"{_PATH}/count_tokens", count_tokens, method="POST", body=TokensBody, error=AnthropicError),
    ]
    return Front(routes=routes, dialect_of=dialect_of)
