"""Writes messages as objects and as streams of events, and errors in Anthropic's form."""

from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import Any

from pydantic_core import from_json

from gateway.api.answer_parts import Block, BlockEvent, BlockKind, Blocks, Step, blocks_of, output_of
from gateway.api.answers import Dialect, ErrorAnswer
from gateway.api.anthropic import answers
from gateway.replicas.events import Chunk, Finished, FinishReason, Usage
from gateway.replicas.live import LiveRequest
from gateway.request.generator import Result
from gateway.text.formats.scanning import write_json

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
