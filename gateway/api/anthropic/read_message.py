"""The request bodies of Anthropic's Messages API, and their conversion to requests of the gateway.

A message of the user may contain tool results in addition to its text; each becomes a separate message of the chat.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, TypeAdapter
from pydantic_core import to_json

from gateway.api import field_rule, fields
from gateway.api.field_rule import FieldRule, Part, Unread
from gateway.api.fields import (
    AT_FIRST_USE,
    ONLY_STREAMS,
    TOOL_CHOICES,
    Conversation,
    Names,
    ParsedBody,
    Salt,
    as_parts,
    make_tool,
    numbered,
    schema_text,
    tag_of,
)
from gateway.request.violations import Violations, shortened
from gateway.types import ChatPrompt, Clamp, RequestOptions
from quire.common.v1.common_pb2 import Constraint
from quire.gateway.v1.generation_pb2 import TemplateOptions, ToolCall, ToolChoice


class TextBlock(Part):
    unread: ClassVar[Unread] = field_rule.TEXT_BLOCK

    type: Literal["text"]
    text: str


_blocks = partial(as_parts, kind="text")
Texts = Annotated[
    list[Annotated[Annotated[TextBlock, Tag("<text>")], Discriminator(tag_of)]],
    BeforeValidator(_blocks, json_schema_input_type=str | list[TextBlock]),
]


class ThinkingBlock(Part):
    """Reasoning of an earlier answer, which Quire does not sign."""

    unread: ClassVar[Unread] = field_rule.THINKING_BLOCK

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Part):
    """Reasoning that only Anthropic can read. It is omitted."""

    unread: ClassVar[Unread] = field_rule.CALL_BLOCK

    type: Literal["redacted_thinking"]
    data: str | None = None


class ToolUseBlock(Part):
    """A call of an earlier answer."""

    unread: ClassVar[Unread] = field_rule.CALL_BLOCK

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolReferenceBlock(Part):
    """A deferred tool that a client's search found: the model sees it from then on. Its text is the tool's name."""

    unread: ClassVar[Unread] = field_rule.BLOCK

    type: Literal["tool_reference"]
    tool_name: str

    @property
    def text(self) -> str:
        return self.tool_name


ResultPart = Annotated[
    Annotated[TextBlock, Tag("<text>")] | Annotated[ToolReferenceBlock, Tag("<tool_reference>")],
    Discriminator(tag_of),
]


class ToolResultBlock(Part):
    """The result of a call. `is_error` has no effect, because chat templates have no such field."""

    unread: ClassVar[Unread] = field_rule.RESULT_BLOCK

    type: Literal["tool_result"]
    tool_use_id: str
    content: (
        Annotated[list[ResultPart], BeforeValidator(_blocks, json_schema_input_type=str | list[ResultPart])] | None
    ) = None


class ToolDefinition(Part):
    """A tool. Calls match the JSON schema `input_schema`; with `strict: false` only required calls do. With
    `defer_loading` the model sees the tool only after a block names it."""

    unread: ClassVar[Unread] = field_rule.MESSAGES_TOOL

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    defer_loading: bool | None = None


class ServerTool(Part):
    """A tool that Anthropic's server would run. It is omitted, and only its type is read."""

    type: str

    @property
    def undeclared(self) -> Mapping[str, Any]:
        return {}


Tool = Annotated[
    Annotated[ToolDefinition, Tag("<custom>")] | Annotated[ServerTool, Tag("<server>")],
    Discriminator(lambda value: "<custom>" if tag_of(value, "custom") in (None, "<custom>") else "<server>"),
]


class ToolName(Part):
    type: Literal["tool_reference"]
    name: str


class NewTool(Part):
    type: Literal["tool_definition"]
    definition: Tool


class ToolAdditionBlock(Part):
    """Adds a deferred or removed tool by its name, or a new tool, in a system message."""

    unread: ClassVar[Unread] = field_rule.BLOCK

    type: Literal["tool_addition"]
    tool: Annotated[
        Annotated[ToolName, Tag("<tool_reference>")] | Annotated[NewTool, Tag("<tool_definition>")],
        Discriminator(tag_of),
    ]


class ToolRemovalBlock(Part):
    unread: ClassVar[Unread] = field_rule.BLOCK

    type: Literal["tool_removal"]
    tool: ToolName


Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")]
    | Annotated[ToolAdditionBlock, Tag("<tool_addition>")]
    | Annotated[ToolRemovalBlock, Tag("<tool_removal>")],
    Discriminator(tag_of),
]
# The only role whose messages may have the block; all roles have text.
_ROLES: dict[type[Part], str] = {
    ThinkingBlock: "assistant",
    RedactedThinkingBlock: "assistant",
    ToolUseBlock: "assistant",
    ToolResultBlock: "user",
    ToolAdditionBlock: "system",
    ToolRemovalBlock: "system",
}


class Message(Part):
    role: Literal["user", "assistant", "system"]
    content: Annotated[list[Block], BeforeValidator(_blocks, json_schema_input_type=str | list[Block])]


class ToolChoiceFields(Part):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Part):
    """Thinking. The chat template decides whether the model reasons; the budget limits the reasoning tokens."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted", "updates"] | None = None


class OutputFormat(Part):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Part):
    """Options of the output. `effort` is an argument of the chat template."""

    effort: str | None = None
    format: OutputFormat | None = None


class TokensBody(ParsedBody):
    """The fields from which a prompt is made."""

    api: ClassVar[str] = "messages"
    unread: ClassVar[Unread] = field_rule.MESSAGES
    entries = TypeAdapter(list[Message], config=AT_FIRST_USE)

    messages: Annotated[list[Message], Field(fail_fast=True)]
    model: str | None = None
    system: Texts | None = None
    tools: Annotated[list[Tool] | None, Field(fail_fast=True)] = None
    tool_choice: ToolChoiceFields | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None

    def check(self, violations: Violations, rule: FieldRule) -> None:
        _check(violations, self)
        if isinstance(self, MessageBody) and self.durable and not self.stream:
            violations.add("durable", ONLY_STREAMS)
        tools = enumerate(self.tools or ())
        left_out = {f"tools[{place}].type": tool.type for place, tool in tools if isinstance(tool, ServerTool)}
        rule.leave_out(violations, self.api, left_out)


class MessageBody(TokensBody):
    """A body of /v1/messages. It has the sampling parameters of Anthropic's older models; `top_k` is as in Quire."""

    max_tokens: int
    stop_sequences: Annotated[list[str] | None, Field(fail_fast=True)] = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    # An extension of vLLM.
    cache_salt: Salt | None = None
    # An extension of Quire: the stream outlives its reader, and its events have ids.
    durable: bool | None = None


def _check(violations: Violations, body: TokensBody) -> None:
    for position, message in enumerate(body.messages):
        for number, block in enumerate(message.content):
            if violations.are_enough:
                return
            if message.role != (role := _ROLES.get(type(block), message.role)):
                description = f'is "{getattr(block, "type", None)}", which only messages of the role {role} have'
                violations.add(f"messages[{position}].content[{number}].type", description)
    if body.messages and (last := body.messages[-1]).role == "assistant":
        for number, block in enumerate(last.content):
            if isinstance(block, ToolUseBlock):
                path = f"messages[{len(body.messages) - 1}].content[{number}].type"
                problem = "in the last message, which the answer would continue; send the call's result after it"
                violations.add(path, f'is "tool_use" {problem}')
                break
    known = set[str]()
    for position, tool in enumerate(body.tools or ()):
        if violations.are_enough:
            return
        if isinstance(tool, ToolDefinition):
            if tool.name in known:
                shown = f'is "{shortened(tool.name)}", like an earlier tool\'s name; names must be unique'
                violations.add(f"tools[{position}].name", shown)
            known.add(tool.name)
    choice, names = body.tool_choice, [tool.name for tool in _shown_tools(body).values()]
    if choice is None:
        return
    if choice.type in ("any", "tool") and not names:
        violations.add("tool_choice", f"is {choice.type}, and there are no tools to choose from; set tools")
    elif choice.type == "tool" and choice.name not in names:
        shown = "is missing" if choice.name is None else f'is "{shortened(choice.name)}", which is not one of the tools'
        violations.add("tool_choice.name", shown)


def _blocks_of(body: TokensBody) -> Iterator[tuple[str, Block]]:
    """All blocks with their paths in the body."""
    for position, message in enumerate(body.messages):
        for number, block in enumerate(message.content):
            yield f"messages[{position}].content[{number}]", block


def _shown_tools(body: TokensBody) -> dict[str, ToolDefinition]:
    """The tools that the model sees, by their paths in the body. A chat template has only one list of tools, so these
    are the tools at the end of the conversation."""
    tools = enumerate(body.tools or ())
    known = {tool.name: (f"tools[{place}]", tool) for place, tool in tools if isinstance(tool, ToolDefinition)}
    shown = {name: True for name, (_, tool) in known.items() if not tool.defer_loading}
    for place, block in _blocks_of(body):
        match block:
            case ToolResultBlock(content=list(parts)):
                shown |= {part.tool_name: True for part in parts if isinstance(part, ToolReferenceBlock)}
            case ToolAdditionBlock(tool=ToolName(name=name)):
                shown[name] = True
            case ToolAdditionBlock(tool=NewTool(definition=ToolDefinition() as tool)):
                known[tool.name], shown[tool.name] = (f"{place}.tool.definition", tool), True
            case ToolRemovalBlock():
                shown[block.tool.name] = False
            case _:
                """The block does not change the tools."""
    return {place: tool for name, (place, tool) in known.items() if shown.get(name)}


def conversation_of(body: TokensBody) -> Conversation:
    """The messages of a body. Consecutive messages of one role are joined."""
    conversation = Conversation()
    if body.system:
        conversation.add_system("system", _texts(body.system))
    for position, message in enumerate(body.messages):
        path = f"messages[{position}]"
        if message.role == "system" and (texts := _texts(message.content)):
            conversation.add_system(path, texts)
        for block in () if message.role == "system" else message.content:
            match block:
                case TextBlock() if message.role == "assistant":
                    conversation.add_answer(path, [block.text], joins=True)
                case TextBlock():
                    conversation.add(path, message.role, [block.text], joins=True)
                case ThinkingBlock():
                    conversation.add_reasoning(path, [block.thinking], joins=True)
                case RedactedThinkingBlock():
                    pass
                case ToolUseBlock():
                    arguments = to_json(block.input).decode()
                    conversation.add_call(path, ToolCall(id=block.id, name=block.name, arguments=arguments))
                case ToolResultBlock():
                    conversation.add_result(path, block.tool_use_id, _texts(block.content or ()))
    return conversation


def _texts(blocks: Sequence[Part]) -> list[str]:
    return [block.text for block in blocks if isinstance(block, TextBlock | ToolReferenceBlock)]


def prompt_of(body: TokensBody, conversation: Conversation, *, is_told_to_think: bool) -> ChatPrompt:
    """The prompt of a checked body. If the last message is of the assistant, the answer continues it. With
    `is_told_to_think`, enabled thinking is an argument of the template."""
    choice = body.tool_choice
    return ChatPrompt(
        conversation.prompt,
        tools=[
            make_tool(each.name, each.description, each.input_schema, each.strict)
            for each in _shown_tools(body).values()
        ],
        tool_choice=_tool_choice(choice),
        parallel_tool_calls=choice is None or not choice.disable_parallel_tool_use,
        response_format=_constraint(body.output_config),
        template_options=_template_options(
            body, continues=conversation.ends_with_answer, is_told_to_think=is_told_to_think
        ),
    )


def options_of(body: MessageBody, prompt: ChatPrompt, request_id: str) -> RequestOptions:
    """The request of a checked body with its prompt."""
    thinking = body.thinking
    options = fields.options_of(
        body,
        prompt,
        request_id,
        top_k=body.top_k,
        stop=body.stop_sequences,
        thinking_token_budget=thinking.budget_tokens if thinking is not None and thinking.type == "enabled" else None,
    )
    # Agents send the maximum output of Anthropic's models as max_tokens.
    return dataclasses.replace(options, clamp=Clamp.ALWAYS)


def names_of(body: TokensBody, conversation: Conversation) -> Names:
    """The names that fields of the validator have in the body."""
    tools = numbered("tools", _shown_tools(body))
    begins = {
        "stopping.stop": "stop_sequences",
        "sampling.thinking_token_budget": "thinking.budget_tokens",
        "tool_choice.mode": "tool_choice.type",
        **tools,
        **{f"{tool}.parameters": f"{place}.input_schema" for tool, place in tools.items()},
    }
    whole = {
        "response_format": "output_config.format",
        "sampling.constraint": "output_config.format",
        "template_options.arguments.enable_thinking": "thinking",
        "template_options.arguments.reasoning_effort": "output_config.effort",
        "template_options.continue_final_message": conversation.paths[-1] if conversation.paths else "messages",
    }
    return Names(begins, whole | numbered("messages", conversation.paths))


def _tool_choice(choice: ToolChoiceFields | None) -> ToolChoice | None:
    if choice is None:
        return None
    if choice.type == "tool":
        return ToolChoice(name=choice.name)
    return ToolChoice(mode=TOOL_CHOICES["required" if choice.type == "any" else choice.type])


def _constraint(config: OutputConfig | None) -> Constraint | None:
    if config is None or config.format is None:
        return None
    return Constraint(json_schema=schema_text(config.format.schema_))


def _template_options(body: TokensBody, *, continues: bool, is_told_to_think: bool) -> TemplateOptions:
    options = TemplateOptions()
    if continues:
        options.continue_final_message, options.add_generation_prompt = True, False
    match body.thinking:
        case ThinkingConfig(type="disabled"):
            options.arguments.update({"enable_thinking": False})
        case ThinkingConfig(type="enabled") if is_told_to_think:
            options.arguments.update({"enable_thinking": True})
    if body.output_config is not None and body.output_config.effort is not None:
        options.arguments.update({"reasoning_effort": body.output_config.effort})
    return options
