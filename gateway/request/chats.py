"""Prepares chats: the prompt, the format of the answer, and the constraint from tools and response format."""

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gateway.auth.caller import current_tenant
from gateway.offload import FairExecutor
from gateway.text.chat import Chat
from gateway.text.formats.answer import HARMONY, HARMONY_REASONING, THINKING_MARKS, AnswerFormat
from gateway.text.formats.grammars import (
    CallGrammar,
    ModelText,
    calls_or_answer,
    check_arguments,
    constrained_calls,
    format_of_forced_calls,
)
from gateway.text.formats.harmony import AFTER_ANALYSIS, ANALYSIS, FINAL
from gateway.text.formats.notations import text_parameters
from gateway.text.formats.parser import OfferedTool, Thinking
from gateway.text.tokenizer import Tokenizer
from gateway.types import ChatPrompt
from quire.common.v1.common_pb2 import Constraint, StructuralTag
from quire.constraints.json_schema import ConstraintError, read_schema
from quire.gateway.v1.generation_pb2 import (
    TOOL_CHOICE_MODE_NONE,
    TOOL_CHOICE_MODE_REQUIRED,
    Tool,
    ToolChoice,
)
from quire.rpc.errors import InvalidArgument, invalid_field

# Larger schemas are read in a thread.
_INLINE_BYTES = 8192


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A prepared chat. `constraint` is None if only `sampling.constraint` applies, or no constraint at all."""

    token_ids: list[int]
    answer_format: AnswerFormat
    constraint: Constraint | None


async def prepare_chat(
    prompt: ChatPrompt, chat: Chat, tokenizer: Tokenizer, executor: FairExecutor, *, is_constrained: bool
) -> PreparedChat:
    """The prompt and the constraint of a checked chat. `is_constrained`: the caller gave a constraint of all text.

    Raises:
        InvalidArgument: the template refuses the conversation, or the model does not support these tools and format.
        ResourceExhausted: too much long work waits for `executor`.
    """
    text = await chat.render(prompt)
    thinking = chat.thinking_after(prompt, text)
    offered = _Offered.from_prompt(prompt)
    answer_format = AnswerFormat(
        _tool_format(chat, offered), chat.reasoning_format, thinking, offered.parsed if offered else ()
    )
    constraint = None
    if not is_constrained:
        size = sum(len(tool.parameters) for tool in prompt.tools)
        size += 0 if prompt.response_format is None else prompt.response_format.ByteSize()
        try:
            if size <= _INLINE_BYTES:
                constraint = _constraint(prompt, offered, chat, tokenizer)
            else:
                constraint = await executor.run(current_tenant(), size, _constraint, prompt, offered, chat, tokenizer)
        except RecursionError as error:
            # The depth of JSON in a text is only limited by its parser, for values of keywords without schemas.
            raise invalid_field("tools", "have a schema with values that are nested too deeply") from error
    if constraint is not None and not constraint.HasField("begins_after"):
        must_match = prompt.response_format is not None or (offered is not None and offered.is_forced)
        opening = _set_beginning(constraint, answer_format, must_match=must_match)
        if opening:
            # The prompt fixes whether the model reasons: reasoning is unconstrained, and the text after it must match.
            text += opening
            answer_format = replace(answer_format, thinking=Thinking.BEGUN)
    return PreparedChat(await chat.encode_text(text), answer_format, constraint)


@dataclass(frozen=True, slots=True)
class _Offered:
    """The tools that may be called. `is_forced`: at least one call is required; `is_single`: at most one is allowed."""

    tools: Sequence[tuple[int, Tool]]
    is_forced: bool
    is_single: bool

    @classmethod
    def from_prompt(cls, prompt: ChatPrompt) -> "_Offered | None":
        choice = prompt.tool_choice or ToolChoice()
        if not prompt.tools or choice.mode == TOOL_CHOICE_MODE_NONE:
            return None
        allowed = frozenset(choice.allowed) or {tool.name for tool in prompt.tools}
        tools = [(place, tool) for place, tool in enumerate(prompt.tools) if tool.name in allowed]
        if choice.WhichOneof("choice") == "name":
            return cls([(place, tool) for place, tool in tools if tool.name == choice.name], True, True)
        return cls(tools, choice.mode == TOOL_CHOICE_MODE_REQUIRED, not prompt.parallel_tool_calls)

    @property
    def parsed(self) -> tuple[OfferedTool, ...]:
        return tuple(OfferedTool(tool.name, text_parameters(tool.parameters)) for _, tool in self.tools)

    def grammars(self, tool_format: str | None) -> list[CallGrammar]:
        """The grammars of calls in a format. Raises InvalidArgument if a schema must be enforced and cannot be."""
        return [self._grammar(place, tool, tool_format) for place, tool in self.tools]

    def _grammar(self, place: int, tool: Tool, tool_format: str | None) -> CallGrammar:
        if not tool.parameters:
            return CallGrammar(tool.name, '{"type": "object", "properties": {}, "additionalProperties": false}')
        if tool.HasField("strict") and not tool.strict and not self.is_forced:
            return CallGrammar(tool.name)
        field = f"tools[{place}].parameters"
        try:
            schema = tool.parameters
            if "type" not in read_schema(field, schema):
                # Arguments are an object, even if the schema does not require it.
                schema = json.dumps({"type": "object"} | json.loads(schema))
            check_arguments(format_of_forced_calls(tool_format) if self.is_forced else tool_format, schema)
        except ConstraintError as error:
            if self.is_forced or tool.strict:
                raise invalid_field(field, error.description) from error
            # A schema that cannot be enforced is left to the model, unless `strict` requires it.
            return CallGrammar(tool.name)
        return CallGrammar(tool.name, schema)


def _tool_format(chat: Chat, offered: _Offered | None) -> str | None:
    if offered is None:
        return None
    if offered.is_forced:
        return format_of_forced_calls(chat.tool_format)
    if chat.tool_format is None:
        raise InvalidArgument(
            "tools cannot be used: the format of this model's calls cannot be derived from its chat template; set "
            "tool_choice to required or to a tool, or start the gateway with --tool-call-parser",
            reason="NO_TOOL_FORMAT",
        )
    return chat.tool_format


def _constraint(prompt: ChatPrompt, offered: _Offered | None, chat: Chat, tokenizer: Tokenizer) -> Constraint | None:
    answer = prompt.response_format
    if offered is None:
        return copy.deepcopy(answer)
    model = ModelText(chat.call_shape, tokenizer.special_tokens)
    grammars = offered.grammars(chat.tool_format)
    calls = constrained_calls(
        chat.tool_format, grammars, model, is_forced=offered.is_forced, is_single=offered.is_single
    )
    if offered.is_forced or answer is None:
        return calls
    if answer.HasField("json_schema"):
        try:
            read_schema("response_format.json_schema", answer.json_schema)
        except ConstraintError as error:
            raise invalid_field(error.field, error.description) from error
    if chat.tool_format == HARMONY and calls is not None and answer.WhichOneof("kind") == "json_schema":
        calls.structural_tags.tags.append(StructuralTag(begin=FINAL, json_schema=answer.json_schema))
        calls.structural_tags.required = True
        if answer.no_white_space:
            calls.no_white_space = True
        return calls
    if calls is not None:
        both = calls_or_answer(chat.tool_format, grammars, model, answer, is_single=offered.is_single)
        if both is not None:
            return both
    raise invalid_field(
        "response_format", "cannot be combined with tools that the model may call; leave one of the two out"
    )


def _set_beginning(constraint: Constraint, answer_format: AnswerFormat, *, must_match: bool) -> str:
    """Sets where a constraint begins; returns the text that the prompt must end with.

    If the model were free to reason or not, either the constraint or the reasoning would be lost.
    """
    if answer_format.reasoning_format == HARMONY_REASONING:
        if constraint.WhichOneof("kind") != "structural_tags":
            constraint.begins_after = FINAL
        elif constraint.structural_tags.no_free_text:
            constraint.begins_after = AFTER_ANALYSIS
            return ANALYSIS
        return ""
    marks = THINKING_MARKS.get(answer_format.reasoning_format or "")
    if marks is None or answer_format.thinking is Thinking.NONE:
        return ""
    has_begun = answer_format.thinking is Thinking.BEGUN
    if has_begun or must_match:
        constraint.begins_after = marks.end
    return marks.opening if must_match and not has_begun else ""
