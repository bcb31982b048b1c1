"""Writes a response as an object and as a stream of events.

Each block of the answer is an item of `output`. A stream has events for a new item, its parts, its deltas and its end;
the last event has the whole response.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from gateway.api.answer_parts import (
    Block,
    BlockEvent,
    BlockKind,
    Blocks,
    ChatTokenLogprob,
    Step,
    blocks_of,
    chat_logprobs,
    output_of,
    output_tokens_details,
)
from gateway.api.answers import ErrorAnswer, openai_error
from gateway.api.custom_tools import InputPieces, custom_input
from gateway.api.responses import answers
from gateway.api.responses.read_response import ResponseBody
from gateway.replicas.events import Chunk, Finished, FinishReason, PositionLogprobs, Usage
from gateway.replicas.live import LiveRequest
from gateway.request.generator import Result
from gateway.text.tokenizer import TokenTexts
from gateway.types import ChatMessage
from quire.gateway.v1.generation_pb2 import ToolCall
from quire.runtime import clock

QUEUED = "queued"
_IN_PROGRESS, _COMPLETED, _INCOMPLETE = "in_progress", "completed", "incomplete"
_DELTAS = (
    "output_text.delta",
    "reasoning_text.delta",
    "function_call_arguments.delta",
    "custom_tool_call_input.delta",
)
_CALL_TEXTS = {"function_call": "arguments", "custom_tool_call": "input"}
_PREFIXES = {BlockKind.REASONING: "rs", BlockKind.TEXT: "msg", BlockKind.TOOL_CALL: "fc"}


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """The fields of a response that are known before it runs. `created` is in seconds since the Unix epoch."""

    id: str
    created: int
    model: str
    is_stored: bool = False
    is_background: bool = False


def response_head(head: ResponseHead, status: str) -> answers.CancelledResponse:
    """A response without the fields of its request."""
    return {
        "id": head.id,
        "object": "response",
        "created_at": head.created,
        "completed_at": None,
        "status": status,
        "background": head.is_background,
        "error": None,
        "incomplete_details": None,
        "model": head.model,
        "store": head.is_stored,
        "output": [],
        "usage": None,
    }


def output_so_far(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The items in the events of a stream. Items without an end are incomplete."""
    items: list[dict[str, Any]] = []
    pieces: dict[int, list[str]] = {}
    for event in events:
        match event["type"].removeprefix("response."):
            case "output_item.added":
                pieces[len(items)] = []
                items.append(event["item"] | {"status": _INCOMPLETE})
            case "content_part.added":
                items[event["output_index"]]["content"] = [event["part"]]
            case kind if kind in _DELTAS:
                pieces[event["output_index"]].append(event["delta"])
            case "output_item.done":
                del pieces[event["output_index"]]
                items[event["output_index"]] = event["item"]
            case _:
                """The event has nothing new."""
    for index, deltas in pieces.items():
        item = items[index]
        if item["type"] in _CALL_TEXTS:
            item[_CALL_TEXTS[item["type"]]] = "".join(deltas)
        else:
            # An item without parts has no text yet.
            item["content"] = [part | {"text": "".join(deltas)} for part in item["content"]]
    return items


def error_event(answer: ErrorAnswer, number: int) -> answers.ResponseErrorEvent:
    """The event of an error that ends a stream, with its number."""
    return {
        "type": "error",
        "sequence_number": number,
        "code": answer.code,
        "message": answer.message,
        "param": answer.param,
        "error": openai_error(answer)["error"],
    }


def answer_message(blocks: Iterable[Block]) -> ChatMessage:
    """An answer as a message of the conversation, for later requests."""
    parts: dict[BlockKind, list[str]] = {kind: [] for kind in BlockKind}
    calls: list[ToolCall] = []
    for block in blocks:
        parts[block.kind].append(block.content)
        if block.kind is BlockKind.TOOL_CALL:
            calls.append(ToolCall(id=block.call_id, name=block.name, arguments=block.content))
    reasoning = "\n".join(parts[BlockKind.REASONING]) or None
    return ChatMessage("assistant", "\n".join(parts[BlockKind.TEXT]), tool_calls=tuple(calls), reasoning=reasoning)


class ResponseShaper:
    """Writes one response. See gateway.api.respond.Shaper.

    Attributes:
        dialect: The form of errors: in a stream they are numbered like its other events.
    """

    def __init__(
        self,
        head: ResponseHead,
        body: ResponseBody,
        live: LiveRequest,
        texts: TokenTexts,
        keep: Callable[[Mapping[str, Any], ChatMessage], None],
        *,
        generates: bool = True,
    ) -> None:
        """`keep` is called with the finished response, without log probabilities, and its answer. Without `generates` a
        stream has no output."""
        self._head = head
        self._body = body
        self._live = live
        self._texts = texts
        self._keep = keep
        self._generates = generates
        self._blocks = Blocks()
        self._reason = FinishReason.STOP
        self._num_events = 0
        # Names of custom tools, and the inputs of their unfinished calls, by the positions of their blocks.
        self._custom = frozenset(tool.name for tool in body.custom_tools)
        self._inputs: dict[int, InputPieces] = {}
        # Log probabilities of tokens without text, which are sent with the next text or at the end.
        self._untold: list[Iterable[PositionLogprobs]] = []

    def whole(self, results: Sequence[Result]) -> answers.ResponseObject:
        (((sequence,), usage),) = results
        blocks = blocks_of(sequence) or [Block(0, BlockKind.TEXT)]
        return self._ended(blocks, sequence.finished.reason, usage, sequence.logprobs)

    def begin(self) -> Iterable[answers.ResponseEvent]:
        """The first events. A background response is queued first; `under_way` has the next events."""
        if self._head.is_background:
            yield {"type": "response.created", **self._numbered(), "response": self.state(QUEUED)}
            yield {"type": "response.queued", **self._numbered(), "response": self.state(QUEUED)}
            return
        yield {"type": "response.created", **self._numbered(), "response": self.state(_IN_PROGRESS)}
        yield from self.under_way()

    def under_way(self) -> Iterable[answers.ResponseEvent]:
        yield {"type": "response.in_progress", **self._numbered(), "response": self.state(_IN_PROGRESS)}

    def event(self, position: int, event: Chunk | Finished) -> Iterable[answers.ResponseEvent]:
        if not self._generates:
            return
        match event:
            case Chunk():
                output = output_of(event)
                if self._body.shows_logprobs and not output:
                    self._untold.append(event.logprobs)
                for each in self._blocks.push(output):
                    yield from self._block_event(each, event.logprobs)
            case Finished():
                self._reason = event.reason
                if not self._blocks.all:
                    for each in self._blocks.begin(BlockKind.TEXT):
                        yield from self._block_event(each)
                last = self._blocks.all[-1]
                if self._untold and last.kind is BlockKind.TEXT:
                    yield from self._block_event((Step.ADD, last, ""))
                for each in self._blocks.end():
                    yield from self._block_event(each)

    def repeats_form(self, sequence_index: int) -> bool:
        return False

    def end(self, usages: Sequence[Usage]) -> Iterable[answers.ResponseStateEvent]:
        response = self._ended(self._blocks.all, self._reason, usages[0])
        kind = "response.incomplete" if response["status"] == _INCOMPLETE else "response.completed"
        yield {"type": kind, **self._numbered(), "response": response}

    def error_event(self, answer: ErrorAnswer) -> answers.ResponseErrorEvent:
        """The event of an error that ends the stream."""
        return error_event(answer, self._numbered()["sequence_number"])

    def _numbered(self) -> answers.Numbered:
        """The number of the next event."""
        self._num_events += 1
        return {"sequence_number": self._num_events - 1}

    def _at_item(self, block: Block) -> answers.AtItem:
        return {**self._numbered(), "output_index": block.position}

    def _in_item(self, block: Block) -> answers.InItem:
        return {**self._at_item(block), "item_id": self._item_id(block)}

    def _in_part(self, block: Block) -> answers.InPart:
        return {**self._in_item(block), "content_index": 0}

    def _block_event(
        self, event: BlockEvent, logprobs: Iterable[PositionLogprobs] = ()
    ) -> Iterator[answers.ResponseEvent]:
        step, block, text = event
        match step, block.kind:
            case Step.BEGIN, kind:
                item = self._item(block, _IN_PROGRESS)
                yield {"type": "response.output_item.added", **self._at_item(block), "item": item}
                if kind is not BlockKind.TOOL_CALL:
                    yield {"type": "response.content_part.added", **self._in_part(block), "part": self._part(block)}
            case Step.ADD, BlockKind.TEXT:
                untold, self._untold = self._untold, []
                shown = self._logprobs(chain(*untold, logprobs)) if self._body.shows_logprobs else []
                yield {"type": "response.output_text.delta", **self._in_part(block), "delta": text, "logprobs": shown}
            case Step.ADD, BlockKind.REASONING:
                yield {"type": "response.reasoning_text.delta", **self._in_part(block), "delta": text}
            case Step.ADD, BlockKind.TOOL_CALL if self._is_custom(block):
                if delta := self._inputs.setdefault(block.position, InputPieces()).push(text):
                    yield {"type": "response.custom_tool_call_input.delta", **self._in_item(block), "delta": delta}
            case Step.END, BlockKind.TOOL_CALL if self._is_custom(block):
                whole, pieces = custom_input(block.content), self._inputs.pop(block.position, None)
                if rest := "" if pieces is None else pieces.rest:
                    yield {"type": "response.custom_tool_call_input.delta", **self._in_item(block), "delta": rest}
                yield {"type": "response.custom_tool_call_input.done", **self._in_item(block), "input": whole}
            case Step.ADD, BlockKind.TOOL_CALL:
                yield {"type": "response.function_call_arguments.delta", **self._in_item(block), "delta": text}
            case Step.END, BlockKind.TOOL_CALL:
                yield {
                    "type": "response.function_call_arguments.done",
                    **self._in_item(block),
                    "name": block.name,
                    "arguments": block.content,
                }
            case Step.END, BlockKind.TEXT:
                text = block.content
                yield {"type": "response.output_text.done", **self._in_part(block), "text": text, "logprobs": []}
            case Step.END, BlockKind.REASONING:
                yield {"type": "response.reasoning_text.done", **self._in_part(block), "text": block.content}
        if step is Step.END:
            if block.kind is not BlockKind.TOOL_CALL:
                yield {"type": "response.content_part.done", **self._in_part(block), "part": self._part(block)}
            item = self._item(block, _status(self._reason))
            yield {"type": "response.output_item.done", **self._at_item(block), "item": item}

    def _item(self, block: Block, status: str, logprobs: Iterable[ChatTokenLogprob] = ()) -> answers.OutputItem:
        """A block as an item. An item in progress has no content yet."""
        item: answers.ItemHead = {"id": self._item_id(block), "status": status}
        call: answers.CallHead = {**item, "call_id": block.call_id, "name": block.name}
        is_empty, text = status == _IN_PROGRESS, block.content
        match block.kind:
            case BlockKind.TOOL_CALL if self._is_custom(block):
                return {"type": "custom_tool_call", **call, "input": "" if is_empty else custom_input(text)}
            case BlockKind.TOOL_CALL:
                return {"type": "function_call", **call, "arguments": text}
            case BlockKind.REASONING:
                shown = [] if is_empty else [reasoning_text(text)]
                return {"type": "reasoning", **item, "summary": [], "content": shown}
            case BlockKind.TEXT:
                content: list[answers.MessagePart] = [] if is_empty else [output_text(text, logprobs)]
                return {"type": "message", **item, "role": "assistant", "content": content}

    def _is_custom(self, block: Block) -> bool:
        return block.kind is BlockKind.TOOL_CALL and block.name in self._custom

    def _part(self, block: Block) -> answers.OutputText | answers.ReasoningText:
        return (reasoning_text if block.kind is BlockKind.REASONING else output_text)(block.content)

    def _item_id(self, block: Block) -> str:
        prefix = "ctc" if self._is_custom(block) else _PREFIXES[block.kind]
        return f"{prefix}_{self._head.id.removeprefix('resp_')}{block.position}"

    def _logprobs(self, logprobs: Iterable[PositionLogprobs]) -> Iterable[ChatTokenLogprob]:
        return chat_logprobs(self._texts, logprobs)["content"]

    def _ended(
        self,
        blocks: Sequence[Block],
        reason: FinishReason,
        usage: Usage,
        logprobs: Iterable[PositionLogprobs] = (),
    ) -> answers.ResponseObject:
        """The finished response, which may be stored."""
        status = _status(reason)
        completed_at = int(clock.unix_s()) if status == _COMPLETED else None

        def response(shown: Iterable[ChatTokenLogprob]) -> answers.ResponseObject:
            # Only the last block can be incomplete.
            items = [self._item(block, _COMPLETED, shown) for block in blocks[:-1]]
            items += [self._item(block, status, shown) for block in blocks[-1:]]
            ended = self.state(status, items)
            ended["completed_at"], ended["usage"] = completed_at, _usage_fields(usage)
            if status == _INCOMPLETE:
                ended["incomplete_details"] = {"reason": "max_output_tokens"}
            return ended

        kept = response([])
        self._keep(kept, answer_message(blocks))
        return response(self._logprobs(logprobs)) if self._body.shows_logprobs else kept

    def state(self, status: str, output: Sequence[answers.OutputItem] = ()) -> answers.ResponseObject:
        """The response; before its end it has no output."""
        body, sampling = self._body, self._live.request.sampling
        asked_format = body.text.format if body.text is not None else None
        shown_format = {"type": "text"} if asked_format is None else _dumped(asked_format)
        return {
            **response_head(self._head, status),
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "output": list(output),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning is not None else None, "summary": None},
            "temperature": sampling.temperature if body.temperature is None else body.temperature,
            "presence_penalty": sampling.presence_penalty if body.presence_penalty is None else body.presence_penalty,
            "frequency_penalty": (
                sampling.frequency_penalty if body.frequency_penalty is None else body.frequency_penalty
            ),
            "text": {"format": shown_format},
            "tool_choice": _tool_choice(body),
            "tools": [
                {"description": None, "parameters": None, "strict": None} | _dumped(each) for each in body.tools or ()
            ],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": sampling.top_p if body.top_p is None else body.top_p,
            "truncation": "auto" if body.truncation == "auto" else "disabled",
            "max_tool_calls": body.max_tool_calls,
            # There is only one tier, so the requested tier is returned.
            "service_tier": "default" if body.service_tier in (None, "auto") else body.service_tier,
            "safety_identifier": body.safety_identifier,
            "prompt_cache_key": body.prompt_cache_key,
            "user": body.user,
        }


def output_text(text: str, logprobs: Iterable[ChatTokenLogprob] = ()) -> answers.OutputText:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs or []}


def reasoning_text(text: str) -> answers.ReasoningText:
    return {"type": "reasoning_text", "text": text}


def _status(reason: FinishReason) -> str:
    return _INCOMPLETE if reason is FinishReason.LENGTH else _COMPLETED


def _dumped(part: Any) -> dict[str, Any]:
    return part.model_dump(by_alias=True, exclude_unset=True)


def _tool_choice(body: ResponseBody) -> Any:
    match body.tool_choice:
        case None:
            return "auto"
        case str(mode):
            return mode
        case named:
            return _dumped(named)


def _usage_fields(usage: Usage) -> answers.ResponseUsage:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.generated_tokens,
        "output_tokens_details": output_tokens_details([usage]),
        "total_tokens": usage.prompt_tokens + usage.generated_tokens,
    }
