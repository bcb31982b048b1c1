"""Anthropic's Messages API. Fields are read in the same way with any anthropic-version and anthropic-beta
header; with anthropic-version, errors and lists of models have Anthropic's form on all paths."""

import dataclasses
from collections.abc import Iterable, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any, Self

from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from gateway.api.answer_parts import Block, BlockEvent, BlockKind, Blocks, Step, blocks_of, output_of
from gateway.api.answers import Dialect, ErrorAnswer
from gateway.api.anthropic import answers
from gateway.api.anthropic.read_message import MessageBody, TokensBody, conversation_of, names_of, options_of, prompt_of
from gateway.api.body import read_body, validated
from gateway.api.field_rule import FieldRule
from gateway.api.fields import Names, parse
from gateway.api.front import Front, FrontContext
from gateway.api.openapi import ApiRoute
from gateway.api.respond import Call, FrontEnd, last_event_id, respond, resumed
from gateway.replicas.events import Chunk, Finished, FinishReason, Usage
from gateway.replicas.live import LiveRequest
from gateway.request.generator import Generator, Result
from gateway.request.text_service import TextService
from gateway.request.violations import renaming
from gateway.text.formats.scanning import write_json
from gateway.types import ModelKind, RequestOptions
from quire.runtime import entropy

_PATH = "/v1/messages"
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_STOP_REASONS = {FinishReason.LENGTH: "max_tokens", FinishReason.TOOL_CALLS: "tool_use"}


def _error(answer: ErrorAnswer) -> answers.AnthropicError:
    other = "invalid_request_error" if answer.status < HTTPStatus.INTERNAL_SERVER_ERROR else "api_error"
    kind = _ERROR_TYPES.get(answer.status, other)
    error: answers.AnthropicErrorDetail = {"type": kind, "message": answer.message}
    # With `thread`, Anthropic's tool runner requests that the server stores the conversation. After this error it sends
    # all messages by itself; after any other error it fails.
    if answer.param == "thread":
        error["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return {"type": "error", "error": error}


ANTHROPIC = Dialect(_error, names_events=True, id_headers=("x-request-id", "request-id"))


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


class MessageShaper:
    """Writes one message. See gateway.api.respond.Shaper."""

    def __init__(self, message_id: str, model: str, live: LiveRequest, *, shows_thinking: bool) -> None:
        """Without `shows_thinking`, thinking blocks are empty."""
        self._id = message_id
        self._model = model
        self._prompt_tokens = len(live.request.prompt_token_ids)
        self._shows_thinking = shows_thinking
        self._blocks = Blocks(keeps_content=False)
        self._finished: Finished | None = None

    def whole(self, results: Sequence[Result]) -> answers.AnsweredMessage:
        (((sequence,), usage),) = results
        content = [self._block(each, each.content) for each in blocks_of(sequence)]
        return self._message(content, _usage(usage), _stop_fields(sequence.finished))

    def begin(self) -> Iterable[answers.Event]:
        # The number of cached prompt tokens is known only at the end.
        usage = _usage(Usage(self._prompt_tokens, 0))
        yield {"type": "message_start", "message": self._message([], usage, _stop_fields(None))}
        yield {"type": "ping"}

    def event(self, position: int, event: Chunk | Finished) -> Iterable[answers.Event]:
        match event:
            case Chunk():
                for each in self._blocks.push(output_of(event)):
                    yield from self._block_event(each)
            case Finished():
                self._finished = event
                for each in self._blocks.end():
                    yield from self._block_event(each)

    def repeats_form(self, sequence_index: int) -> bool:
        return False

    def end(self, usages: Sequence[Usage]) -> Iterable[answers.Event]:
        yield {"type": "message_delta", "delta": _stop_fields(self._finished), "usage": _usage(usages[0])}
        yield {"type": "message_stop"}

    def _block_event(self, event: BlockEvent) -> Iterable[answers.Event]:
        step, block, text = event
        match step:
            case Step.BEGIN:
                content = self._block(block, "")
                yield {"type": "content_block_start", "index": block.position, "content_block": content}
            case Step.ADD:
                if (delta := self._delta(block.kind, text)) is not None:
                    yield {"type": "content_block_delta", "index": block.position, "delta": delta}
            case Step.END:
                yield {"type": "content_block_stop", "index": block.position}

    def _delta(self, kind: BlockKind, text: str) -> answers.Delta | None:
        match kind:
            case BlockKind.TEXT:
                return {"type": "text_delta", "text": text}
            case BlockKind.REASONING:
                return {"type": "thinking_delta", "thinking": text} if self._shows_thinking else None
            case BlockKind.TOOL_CALL:
                return {"type": "input_json_delta", "partial_json": text}

    def _block(self, block: Block, content: str) -> answers.Block:
        match block.kind:
            case BlockKind.TEXT:
                return {"type": "text", "text": content}
            case BlockKind.REASONING:
                return {"type": "thinking", "thinking": content if self._shows_thinking else "", "signature": ""}
            case BlockKind.TOOL_CALL:
                return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": _arguments(content)}

    def _message(
        self, content: list[answers.Block], usage: answers.MessageUsage, stop: answers.StopFields
    ) -> answers.AnsweredMessage:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            **stop,
            "usage": usage,
        }


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
        kept = FrontEnd.of(live.request.front_end, MessageBody.api, live.request.request_id)
        call = cls(validated(MessageBody, kept.body), kept.model, rule)
        call.id = kept.id
        return call

    def _front_end(self) -> bytes:
        if not self._body.durable:
            return b""
        body = self._body.model_copy(update={"messages": [], "system": None, "tools": None, "tool_choice": None})
        fields = body.model_dump(mode="json", by_alias=True, exclude_none=True)
        return FrontEnd(MessageBody.api, self.id, 0, self._model, fields, {}).to_bytes()

    def names(self, position: int) -> Names:
        return names_of(self._body, self._conversation)

    async def shaper(self, generator: Generator, live: Sequence[LiveRequest]) -> MessageShaper:
        thinking = self._body.thinking
        shows_thinking = thinking is None or thinking.display != "omitted"
        return MessageShaper(self.id, self._model, live[0], shows_thinking=shows_thinking)


def open_front(context: FrontContext) -> Front:
    """Opens the front."""
    models, body_limits, keep_alive_s = context.models, context.body_limits, context.keep_alive_s
    texts = TextService(models)

    async def create(request: Request) -> Response:
        """Answers a conversation."""
        if (last := last_event_id(request)) is not None:
            read_back = partial(MessageCall.read_back, rule=body_limits.rule)
            return resumed(models, last, read_back, keep_alive_s, ANTHROPIC)
        body = await parse(MessageBody, await read_body(request, body_limits), body_limits)
        generator = models.of(body.model, ModelKind.TEXT)
        call = MessageCall(body, body.model or generator.model.name, body_limits.rule)
        return respond(generator, call, keep_alive_s)

    async def count_tokens(request: Request) -> answers.MessageTokens:
        """The number of tokens of a conversation's prompt."""
        body = await parse(TokensBody, await read_body(request, body_limits), body_limits)
        conversation = conversation_of(body)
        is_told = _is_told_to_think(models.of(body.model, ModelKind.TEXT), body_limits.rule, body)
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
            answer=answers.AnsweredMessage,
            events=answers.MessageEvent,
            names_events=True,
            error=answers.AnthropicError,
        ),
        ApiRoute(f"{_PATH}/count_tokens", count_tokens, method="POST", body=TokensBody, error=answers.AnthropicError),
    ]
    return Front(routes=routes, dialect_of=dialect_of)


def _arguments(text: str) -> dict[str, Any]:
    """The arguments of a call as an object, completed if max_tokens cut them off. Arguments that are not an object
    (possible if `strict` is false), or that have numbers beyond the range of floats, become a string in `arguments`."""
    try:
        found = from_json(text or "{}", allow_partial=True)
        write_json(found)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"arguments": text}


def _stop_fields(finished: Finished | None) -> answers.StopFields:
    if finished is None:
        return {"stop_reason": None, "stop_sequence": None}
    if finished.stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": finished.stop_string}
    return {"stop_reason": _STOP_REASONS.get(finished.reason, "end_turn"), "stop_sequence": None}


def _usage(usage: Usage) -> answers.MessageUsage:
    """Anthropic's usage counts cached and other prompt tokens separately."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.generated_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }
