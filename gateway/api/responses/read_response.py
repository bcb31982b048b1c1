"""The request bodies of OpenAI's Responses API, and their conversion to requests of the gateway.

`input` is a list of items. An answer of a model is one message in a chat, but several items here: reasoning, content
and calls.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, TypeAdapter
from pydantic_core import PydanticCustomError

from gateway.api import field_rule, fields
from gateway.api.body import max_entries
from gateway.api.constraint_fields import (
    ConstraintFields,
    StructuredOutputs,
    check_constraints,
    constraint_of,
)
from gateway.api.custom_tools import CustomDefinition, check_custom, custom_call, custom_tool
from gateway.api.field_rule import FieldRule, Part, Unread
from gateway.api.fields import (
    AT_FIRST_USE,
    ONLY_STREAMS,
    TOOL_CHOICES,
    Conversation,
    Names,
    ParsedBody,
    as_parts,
    effort_arguments,
    make_tool,
    numbered,
    schema_text,
    tag_of,
)
from gateway.api.generation_fields import SharedFields, check_prediction
from gateway.auth.caller import HIGHEST_PRIORITY
from gateway.request.violations import Violations, shortened
from gateway.types import ChatMessage, ChatPrompt, Clamp, RequestOptions
from quire.common.v1.common_pb2 import AnyJsonObject, Constraint
from quire.gateway.v1.generation_pb2 import TemplateOptions, Tool, ToolCall, ToolChoice

LOGPROBS = "message.output_text.logprobs"
# Reasoning is never encrypted: its items have the text, and can be sent back unchanged.
_INCLUDED = frozenset({LOGPROBS, "reasoning.encrypted_content"})
# Most chat templates only have the role "system".
_SYSTEM_ROLES = frozenset({"system", "developer"})
_MAX_METADATA = 16
# Maximum entries of `include`; OpenAI has fewer names.
_MAX_INCLUDE = 32
_MAX_EFFORT = 64


class TextItemPart(Part):
    """A text. The model does not see annotations and log probabilities of an earlier answer."""

    unread: ClassVar[Unread] = field_rule.RESPONSE_PART

    type: Literal["input_text", "output_text", "reasoning_text", "summary_text", "text"]
    text: str


class RefusalPart(Part):
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


ItemPart = Annotated[
    Annotated[TextItemPart, Tag("<input_text>")] | Annotated[RefusalPart, Tag("<refusal>")],
    Discriminator(lambda value: _part_tag(value)),
]


def _part_tag(value: Any) -> str | None:
    """The tag of a part. The types of text are equivalent."""
    tag = tag_of(value)
    return "<input_text>" if tag in ("<output_text>", "<reasoning_text>", "<summary_text>", "<text>") else tag


_texts = partial(as_parts, kind="input_text")
Texts = Annotated[list[ItemPart], BeforeValidator(_texts, json_schema_input_type=str | list[ItemPart])]


class _Item(Part):
    """An item. Items of earlier answers also have ids and states."""

    unread: ClassVar[Unread] = field_rule.RESPONSE_ITEM


class MessageItem(_Item):
    type: Literal["message"] = "message"
    role: str
    content: Texts | None = None


class FunctionCallItem(_Item):
    """A call in an earlier answer; `arguments` is a JSON object as text."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str | None = None


class CustomCallItem(_Item):
    """A call of a custom tool in an earlier answer."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str


class FunctionCallOutputItem(_Item):
    unread: ClassVar[Unread] = field_rule.RESPONSE_RESULT

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Texts


class ReasoningItem(_Item):
    """Reasoning of an earlier answer: its text, else its summary."""

    type: Literal["reasoning"]
    summary: Annotated[list[ItemPart], Field(fail_fast=True, default_factory=list)]
    content: Annotated[list[ItemPart] | None, Field(fail_fast=True)] = None


class CompactionItem(_Item):
    """An earlier conversation in short: what `/v1/responses/compact` wrote, as plain text."""

    unread: ClassVar[Unread] = Unread(frozenset({"created_by"}))

    type: Literal["compaction"]
    id: str | None = None
    encrypted_content: str


class ItemReference(_Item):
    """An item of a stored response of the same tenant, by its id. Its type may be absent or null."""

    unread: ClassVar[Unread] = field_rule.NOTHING

    type: Literal["item_reference"] | None = None
    id: str


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[FunctionCallOutputItem, Tag("<function_call_output>")]
    | Annotated[CustomCallItem, Tag("<custom_tool_call>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[CompactionItem, Tag("<compaction>")]
    | Annotated[ItemReference, Tag("<item_reference>")],
    Discriminator(lambda value: _item_tag(value)),
]
ITEM: TypeAdapter[Item] = TypeAdapter(Item, config=AT_FIRST_USE)


def _item_tag(value: Any) -> str | None:
    """The tag of an item. AI SDKs omit the type of references."""
    is_untyped = isinstance(value, dict) and value.get("type") is None and value.keys() - {"type"} == {"id"}
    if is_untyped or isinstance(value, ItemReference):
        return "<item_reference>"
    tag = tag_of(value, "message")
    return "<function_call_output>" if tag == "<custom_tool_call_output>" else tag


def _items(value: Any) -> Any:
    if isinstance(value, str):
        return [MessageItem(role="user", content=_texts(value))]
    if not isinstance(value, list):
        raise PydanticCustomError("text_or_items", "a string or a list of items")
    return value


class FunctionTool(Part):
    """A function. Calls match the JSON schema `parameters`; with `strict: false` only required calls do."""

    unread: ClassVar[Unread] = field_rule.RESPONSE_TOOL

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomTool(CustomDefinition):
    """A tool whose input is a text; see `custom_tools`."""

    unread: ClassVar[Unread] = field_rule.RESPONSE_TOOL

    type: Literal["custom"]


class OtherTool(Part):
    """A tool that OpenAI's server or a special client would run. It is omitted, and only its type is read."""

    type: str

    @property
    def undeclared(self) -> Mapping[str, Any]:
        return {}


ToolDefinition = Annotated[
    Annotated[FunctionTool, Tag("<function>")]
    | Annotated[CustomTool, Tag("<custom>")]
    | Annotated[OtherTool, Tag("<other>")],
    Discriminator(lambda value: _tool_tag(value)),
]


def _tool_tag(value: Any) -> str | None:
    tag = tag_of(value)
    return tag if tag in (None, "<function>", "<custom>") else "<other>"


class AllowedTool(Part):
    """An allowed tool by its name."""

    unread: ClassVar[Unread] = Unread(frozenset({"description", "parameters", "strict", "format"}))

    type: Literal["function", "custom"]
    name: str


class ToolChoiceObject(Part):
    """A tool choice. `type` is function or custom with a name, or allowed_tools, which restricts calls to `tools`, with
    the `mode` auto or required."""

    type: str
    name: str | None = None
    mode: str | None = None
    tools: Annotated[list[AllowedTool] | None, Field(fail_fast=True)] = None


class Reasoning(Part):
    """Options of reasoning. The chat template gets `effort`. The reasoning itself is shown, so there is no summary."""

    unread: ClassVar[Unread] = field_rule.RESPONSE_REASONING

    effort: str | None = None


class TextFormat(Part):
    """The format of the text. The model does not see `name` and `description`. `strict` has no effect on the schema."""

    type: str
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextConfig(Part):
    unread: ClassVar[Unread] = field_rule.RESPONSE_TEXT

    format: TextFormat | None = None


class StreamOptions(Part):
    unread: ClassVar[Unread] = field_rule.STREAM_OPTIONS


class InputBody(ParsedBody):
    """The fields from which the prompt of a response is made."""

    api: ClassVar[str] = "responses"
    unread: ClassVar[Unread] = field_rule.RESPONSE_INPUT
    union_types: ClassVar[Mapping[str, str]] = {
        "tool_choice": 'a string, {"type": "function", "name": ...} or {"type": "allowed_tools", ...}'
    }
    long_list: ClassVar[str] = "input"
    entries = TypeAdapter(list[Item], config=AT_FIRST_USE)

    input: Annotated[list[Item], BeforeValidator(_items, json_schema_input_type=str | list[Item])]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Annotated[list[ToolDefinition] | None, Field(fail_fast=True)] = None
    tool_choice: str | ToolChoiceObject | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    truncation: str | None = None

    @property
    def custom_tools(self) -> list[CustomDefinition]:
        return [tool for tool in self.tools or () if isinstance(tool, CustomTool)]

    def check(self, violations: Violations, rule: FieldRule) -> None:
        _check(violations, self)
        tools = enumerate(self.tools or ())
        left_out = {f"tools[{place}].type": tool.type for place, tool in tools if isinstance(tool, OtherTool)}
        if isinstance(self, ResponseBody):
            # Parts of answers that Quire does not have.
            include = enumerate((self.include or ())[:_MAX_INCLUDE])
            left_out |= {f"include[{place}]": name for place, name in include if name not in _INCLUDED}
        rule.leave_out(violations, self.api, left_out)


class CompactBody(InputBody):
    """The fields of `/v1/responses/compact`, which have the same meaning as for a response. The conversation is in
    `previous_response_id`, `input`, or both."""

    unread: ClassVar[Unread] = field_rule.RESPONSE_COMPACT

    input: Annotated[
        list[Item],
        BeforeValidator(_items, json_schema_input_type=str | list[Item]),
        Field(default_factory=list),
    ]


class ResponseBody(InputBody, SharedFields):
    unread: ClassVar[Unread] = field_rule.RESPONSE

    store: bool | None = None
    stream_options: StreamOptions | None = None
    include: Annotated[list[str] | None, Field(fail_fast=True)] = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    structured_outputs: StructuredOutputs | None = None
    metadata: Annotated[dict[str, str] | None, max_entries(_MAX_METADATA)] = None
    background: bool | None = None
    # Labels and hints, which every state of the response repeats.
    max_tool_calls: int | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    user: str | None = None

    @property
    def shows_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())


def _check(violations: Violations, body: InputBody) -> None:
    if not body.input and not (isinstance(body, CompactBody) and body.previous_response_id):
        violations.add("input", "is empty; at least one item is needed")
    if body.truncation not in (None, "auto", "disabled"):
        violations.add("truncation", f'is "{shortened(body.truncation)}"; it must be auto or disabled')
    if body.reasoning is not None and len(body.reasoning.effort or "") > _MAX_EFFORT:
        # Limited, since each state of the response repeats it.
        violations.add(
            "reasoning.effort", f"has {len(body.reasoning.effort or ''):,} characters; the max is {_MAX_EFFORT}"
        )
    if body.text is not None and body.text.format is not None:
        _check_format(violations, body.text.format)
    _check_tool_choice(violations, body.tool_choice, [tool.name for tool in _kept_tools(body).values()])
    for position, tool in enumerate(body.tools or ()):
        if isinstance(tool, CustomTool):
            check_custom(violations, f"tools[{position}]", tool, is_forced=_requires_call(body.tool_choice))
    if isinstance(body, ResponseBody):
        _check_output(violations, body)


def _kept_tools(body: InputBody) -> dict[str, FunctionTool | CustomTool]:
    """The tools that the model sees, by their paths in the body."""
    tools = enumerate(body.tools or ())
    return {f"tools[{position}]": tool for position, tool in tools if not isinstance(tool, OtherTool)}


def _requires_call(choice: str | ToolChoiceObject | None) -> bool:
    if isinstance(choice, ToolChoiceObject):
        return choice.mode in (None, "required")
    return choice == "required"


def _check_output(violations: Violations, body: ResponseBody) -> None:
    include = body.include or []
    if body.durable and not body.stream:
        violations.add("durable", ONLY_STREAMS)
    if body.background:
        _check_background(violations, body)
    violations.check_count("include", include, _MAX_INCLUDE)
    if body.top_logprobs and not body.shows_logprobs:
        violations.add("top_logprobs", f"is set; it has an effect only if include has {LOGPROBS}")
    violations.check_range("priority", body.priority, -HIGHEST_PRIORITY, HIGHEST_PRIORITY)
    if body.structured_outputs is not None:
        check_constraints(violations, ConstraintFields(structured_outputs=body.structured_outputs))
        if _constraint(body.text) is not None:
            violations.add("structured_outputs", "is set, and so is text.format; an answer can match only one of them")
    check_prediction(violations, body.prediction)
    metadata = body.metadata or {}
    for name, value in metadata.items():
        if len(name) > 64 or len(value) > 512:
            violations.add(
                "metadata", "has a name of more than 64 characters, or a value of more than 512, which are the max"
            )
            break


def _check_background(violations: Violations, body: ResponseBody) -> None:
    if body.store is False:
        violations.add("store", "is false; a response that runs in the background is stored")
    if body.durable:
        violations.add("durable", "is true; a response that runs in the background outlives its readers without it")
    if body.shows_logprobs:
        violations.add("include", f"has {LOGPROBS}; a response that runs in the background has no log probabilities")


def _check_format(violations: Violations, format: TextFormat) -> None:
    if format.type not in ("text", "json_object", "json_schema"):
        violations.add(
            "text.format.type", f'is "{shortened(format.type)}"; it must be text, json_object or json_schema'
        )
    if format.type == "json_schema" and format.schema_ is None:
        violations.add("text.format.schema", "is missing")


def _check_tool_choice(violations: Violations, choice: str | ToolChoiceObject | None, names: Sequence[str]) -> None:
    match choice:
        case None:
            return
        case str():
            if choice not in TOOL_CHOICES:
                known = ", ".join(TOOL_CHOICES)
                violations.add("tool_choice", f'is "{shortened(choice)}"; it must be {known}, or an object')
            elif choice == "required" and not names:
                violations.add("tool_choice", "is required, and there are no tools to choose from; set tools")
        case ToolChoiceObject(type="function" | "custom"):
            if choice.name is None:
                violations.add("tool_choice.name", "is missing")
            elif choice.name not in names:
                violations.add("tool_choice.name", f'is "{shortened(choice.name)}", which is not one of the tools')
        case ToolChoiceObject(type="allowed_tools"):
            if choice.mode not in ("auto", "required"):
                shown = "is missing" if choice.mode is None else f'is "{shortened(choice.mode)}"'
                violations.add("tool_choice.mode", f"{shown}; it must be auto or required")
            if not choice.tools:
                violations.add("tool_choice.tools", "is empty; at least one tool is needed")
        case _:
            violations.add(
                "tool_choice.type", f'is "{shortened(choice.type)}"; it must be function, custom or allowed_tools'
            )


def references(body: InputBody) -> dict[str, str]:
    """The ids of the items of stored responses, by the paths of their references."""
    items = enumerate(body.input)
    return {f"input[{position}].id": item.id for position, item in items if isinstance(item, ItemReference)}


def conversation_of(
    body: InputBody, earlier: Sequence[ChatMessage], referred: Mapping[str, Item] | None = None
) -> Conversation:
    """The conversation of a response: `earlier` messages, of the response that the body names, and the body's items.
    `referred` has the items of `references` by their ids."""
    conversation = Conversation(earlier, "previous_response_id", body.instructions)
    for position, item in enumerate(body.input):
        path = f"input[{position}]"
        if isinstance(item, ItemReference):
            item = (referred or {})[item.id]
        match item:
            case MessageItem(role="assistant"):
                conversation.add_answer(path, _texts_of(item.content or ()))
            case MessageItem(role=role) if role in _SYSTEM_ROLES:
                conversation.add_system(path, _texts_of(item.content or ()))
            case MessageItem():
                conversation.add(path, item.role, _texts_of(item.content or ()))
            case ReasoningItem():
                conversation.add_reasoning(path, _texts_of(item.content or item.summary))
            case CompactionItem():
                conversation.add_answer(path, [item.encrypted_content])
            case FunctionCallItem():
                conversation.add_call(path, ToolCall(id=item.call_id, name=item.name, arguments=item.arguments or ""))
            case CustomCallItem():
                conversation.add_call(path, custom_call(item.call_id, item.name, item.input))
            case FunctionCallOutputItem():
                conversation.add_result(path, item.call_id, _texts_of(item.output))
            case ItemReference():
                raise AssertionError("stored items are no references")
    return conversation


def _texts_of(parts: Sequence[TextItemPart | RefusalPart]) -> list[str]:
    return [part.text for part in parts]


def options_of(body: ResponseBody, messages: Sequence[ChatMessage], request_id: str) -> RequestOptions:
    """The request of a checked body with these messages."""
    options = fields.options_of(
        body,
        prompt_of(body, messages),
        request_id,
        seed=None if body.seed in (None, -1) else body.seed % 2**64,
        max_tokens=body.max_output_tokens,
        ignore_eos=bool(body.ignore_eos),
        logprobs=(body.top_logprobs or 0) if body.shows_logprobs else None,
        prediction=body.prediction and body.prediction.text,
    )
    if body.structured_outputs is not None:
        constraint = constraint_of(ConstraintFields(structured_outputs=body.structured_outputs))
        assert constraint is not None, "a checked body has one"
        options.sampling.constraint.CopyFrom(constraint)
    priority = None if body.priority is None else -body.priority
    return dataclasses.replace(options, priority=priority, priority_sign=-1, clamp=Clamp.AS_SET)


def prompt_of(body: InputBody, messages: Sequence[ChatMessage]) -> ChatPrompt:
    """The chat of a checked body with these messages."""
    return ChatPrompt(
        messages,
        tools=[_tool_of(each) for each in _kept_tools(body).values()],
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        response_format=_constraint(body.text),
        template_options=_template_options(body.reasoning),
        drops_turns=body.truncation == "auto",
    )


def _tool_of(tool: FunctionTool | CustomTool) -> Tool:
    if isinstance(tool, CustomTool):
        return custom_tool(tool)
    return make_tool(tool.name, tool.description, tool.parameters, tool.strict)


def names_of(body: InputBody, conversation: Conversation) -> Names:
    """The names that fields of the validator have in the body."""
    begins = {
        "messages": "input",
        "output.logprobs": "top_logprobs",
        "output.prediction": "prediction.content",
        "stopping.max_tokens": "max_output_tokens",
        "tool_choice.allowed": "tool_choice.tools",
        "tool_choice.mode": "tool_choice",
    }
    whole = {
        "response_format": "text.format",
        "sampling.constraint": "structured_outputs",
        "template_options": "reasoning.effort",
    }
    return Names(begins | numbered("tools", _kept_tools(body)), whole | numbered("messages", conversation.paths))


def _tool_choice(choice: str | ToolChoiceObject | None) -> ToolChoice | None:
    match choice:
        case str():
            return ToolChoice(mode=TOOL_CHOICES[choice])
        case ToolChoiceObject(type="function" | "custom", name=str(name)):
            return ToolChoice(name=name)
        case ToolChoiceObject(mode=str(mode), tools=list(tools)):
            return ToolChoice(mode=TOOL_CHOICES[mode], allowed=[each.name for each in tools])
    return None


def _constraint(text: TextConfig | None) -> Constraint | None:
    match text:
        case TextConfig(format=TextFormat(type="json_schema", schema_=schema)):
            return Constraint(json_schema=schema_text(schema))
        case TextConfig(format=TextFormat(type="json_object")):
            return Constraint(json_object=AnyJsonObject())
    return None


def _template_options(reasoning: Reasoning | None) -> TemplateOptions:
    options = TemplateOptions()
    if reasoning is not None and (arguments := effort_arguments(reasoning.effort)):
        options.arguments.update(arguments)
    return options
