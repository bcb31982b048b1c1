"""The body of a response: its fields, and their conversion to a request.

`input` is a list of items. An answer of a model is one message in a chat but several items here: its reasoning, its
content and its calls.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BeforeValidator, Discriminator, Field, Tag, TypeAdapter
from pydantic_core import PydanticCustomError

from gateway.api.body import BodyLimits, max_entries
from gateway.api.fields import (
    TOOL_CHOICES,
    Conversation,
    LongList,
    Part,
    as_parts,
    check_fields,
    effort_arguments,
    make_tool,
    parse,
    schema_text,
    tag_of,
    without_group,
)
from gateway.request.violations import Violations, shortened
from gateway.types import ChatMessage, ChatPrompt, RequestOptions, write
from quire.common.v1.common_pb2 import AnyJsonObject, Constraint, OutputOptions, SamplingParameters, StoppingParameters
from quire.gateway.v1.generation_pb2 import TemplateOptions, ToolCall, ToolChoice

LOGPROBS = "message.output_text.logprobs"
# Reasoning is never encrypted: its items have the text, and can be sent back as they are.
_INCLUDED = frozenset({LOGPROBS, "reasoning.encrypted_content"})
# Most chat templates have the role "system" only.
_SYSTEM_ROLES = frozenset({"system", "developer"})
_MAX_METADATA = 16
# A limit of the list; OpenAI has fewer names.
_MAX_INCLUDE = 32
_RENAMED = {
    "stopping.max_tokens": "max_output_tokens",
    "output.logprobs": "top_logprobs",
    "messages": "input",
    "tool_choice.mode": "tool_choice",
}
_ALLOWED = "tool_choice.allowed"
_UNION_TYPES = {"tool_choice": 'a string, {"type": "function", "name": ...} or {"type": "allowed_tools", ...}'}


class TextItemPart(Part):
    """The model does not see annotations and log probabilities of an earlier answer."""

    hints: ClassVar[frozenset[str]] = frozenset({"annotations", "logprobs", "prompt_cache_breakpoint"})

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
    """Texts have several types, which mean the same."""
    tag = tag_of(value)
    return "<input_text>" if tag in ("<output_text>", "<reasoning_text>", "<summary_text>", "<text>") else tag


def _texts(value: Any) -> Any:
    return as_parts(value, "input_text")


Texts = Annotated[list[ItemPart], BeforeValidator(_texts, json_schema_input_type=str | list[ItemPart])]


class _Item(Part):
    """Items of earlier answers have ids and states."""

    hints: ClassVar[frozenset[str]] = frozenset({"id", "status", "phase", "encrypted_content"})


class MessageItem(_Item):
    type: Literal["message"] = "message"
    role: str
    content: Texts


class FunctionCallItem(_Item):
    """A call of an earlier answer; `arguments` is the text of a JSON object."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionCallOutputItem(_Item):
    hints: ClassVar[frozenset[str]] = _Item.hints | {"name"}

    type: Literal["function_call_output"]
    call_id: str
    output: Texts


class ReasoningItem(_Item):
    """Reasoning of an earlier answer: its text, else its summary."""

    type: Literal["reasoning"]
    summary: Annotated[list[ItemPart], Field(fail_fast=True, default_factory=list)]
    content: Annotated[list[ItemPart] | None, Field(fail_fast=True)] = None


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[FunctionCallOutputItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")],
    Discriminator(lambda value: tag_of(value, "message")),
]


def _items(value: Any) -> Any:
    if isinstance(value, str):
        return [MessageItem(role="user", content=_texts(value))]
    if not isinstance(value, list):
        raise PydanticCustomError("text_or_items", "a string or a list of items")
    return value


class FunctionTool(Part):
    """`parameters` is a JSON schema that calls match; with `strict: false` only required calls do."""

    harmless: ClassVar[Mapping[str, tuple[Any, ...]]] = {"defer_loading": (False,), "async": (False,)}

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoiceObject(Part):
    """`type` is function, with a name, or allowed_tools: of `tools` alone, with the `mode` auto or required."""

    type: str
    name: str | None = None
    mode: str | None = None
    tools: Annotated[list[FunctionTool] | None, Field(fail_fast=True)] = None


class Reasoning(Part):
    """`effort` goes to the chat template. The reasoning itself is shown, so there is no summary of it."""

    hints: ClassVar[frozenset[str]] = frozenset({"summary", "generate_summary", "context"})
    harmless: ClassVar[Mapping[str, tuple[Any, ...]]] = {"mode": ("standard",)}

    effort: str | None = None


class TextFormat(Part):
    """The model does not see `name` and `description`. The schema is enforced with and without `strict`."""

    type: str
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextConfig(Part):
    hints: ClassVar[frozenset[str]] = frozenset({"verbosity"})

    format: TextFormat | None = None


class StreamOptions(Part):
    hints: ClassVar[frozenset[str]] = frozenset({"include_obfuscation"})


class InputBody(Part):
    """What the prompt of a response is made of."""

    harmless: ClassVar[Mapping[str, tuple[Any, ...]]] = {"conversation": (), "personality": ()}

    input: Annotated[list[Item], BeforeValidator(_items, json_schema_input_type=str | list[Item])]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Annotated[list[FunctionTool] | None, Field(fail_fast=True)] = None
    tool_choice: str | ToolChoiceObject | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    truncation: str | None = None


class ResponseBody(InputBody):
    hints: ClassVar[frozenset[str]] = frozenset(
        {
            # A limit of tools that run at the server, of which there are none.
            "max_tool_calls",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "safety_identifier",
            "service_tier",
            "user",
        }
    )
    harmless: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "background": (False,),
        "context_management": ([],),
        **dict.fromkeys(("access_programs", "conversation", "image", "moderation", "prompt"), ()),
    }

    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    include: Annotated[list[str] | None, Field(fail_fast=True)] = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    metadata: Annotated[dict[str, str] | None, max_entries(_MAX_METADATA)] = None

    @property
    def shows_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())


InputBodyType = TypeVar("InputBodyType", bound=InputBody)
_ITEMS = LongList("input", TypeAdapter(list[Item]))


async def parse_body(kind: type[InputBodyType], data: bytes, limits: BodyLimits) -> InputBodyType:
    """The body in `data`. Raises InvalidArgument as `parse` does, also for values that contradict each other."""
    return await parse(kind, data, limits, _ITEMS, _check, _UNION_TYPES)


def _check(violations: Violations, body: InputBody) -> None:
    check_fields(violations, body)
    if not body.input:
        violations.add("input", "is empty; at least one item is needed")
    if body.truncation not in (None, "disabled"):
        violations.add(
            "truncation",
            f'is "{shortened(body.truncation)}"; only "disabled" is supported: nothing of the input is left out',
        )
    if body.text is not None and body.text.format is not None:
        _check_format(violations, body.text.format)
    _check_tool_choice(violations, body.tool_choice, [tool.name for tool in body.tools or ()])
    if isinstance(body, ResponseBody):
        _check_output(violations, body)


def _check_output(violations: Violations, body: ResponseBody) -> None:
    include = body.include or []
    for position, name in enumerate(include if violations.check_count("include", include, _MAX_INCLUDE) else ()):
        if name not in _INCLUDED:
            violations.add(
                f"include[{position}]", f'is "{shortened(name)}"; only {" and ".join(sorted(_INCLUDED))} are supported'
            )
    if body.top_logprobs and not body.shows_logprobs:
        violations.add("top_logprobs", f"is set; it has a meaning only where include has {LOGPROBS}")
    metadata = body.metadata or {}
    for name, value in metadata.items():
        if len(name) > 64 or len(value) > 512:
            violations.add(
                "metadata", "has a name of more than 64 characters, or a value of more than 512, which are the max"
            )
            break


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
        case ToolChoiceObject(type="function"):
            if choice.name is None:
                violations.add("tool_choice.name", "is missing")
            elif choice.name not in names:
                violations.add("tool_choice.name", f'is "{shortened(choice.name)}", which is none of the tools')
        case ToolChoiceObject(type="allowed_tools"):
            if choice.mode not in ("auto", "required"):
                shown = "is missing" if choice.mode is None else f'is "{shortened(choice.mode)}"'
                violations.add("tool_choice.mode", f"{shown}; it must be auto or required")
            if not choice.tools:
                violations.add("tool_choice.tools", "is empty; at least one tool is needed")
        case _:
            violations.add("tool_choice.type", f'is "{shortened(choice.type)}"; it must be function or allowed_tools')


def conversation_of(body: InputBody, earlier: Sequence[ChatMessage]) -> Conversation:
    """The messages of a response, after those of the earlier response that the body names."""
    conversation = Conversation(earlier, "previous_response_id", body.instructions)
    for position, item in enumerate(body.input):
        path = f"input[{position}]"
        match item:
            case MessageItem(role="assistant"):
                conversation.add_answer(path, _texts_of(item.content))
            case MessageItem(role=role) if role in _SYSTEM_ROLES:
                conversation.add_system(path, _texts_of(item.content))
            case MessageItem():
                conversation.add(path, item.role, _texts_of(item.content))
            case ReasoningItem():
                conversation.add_reasoning(path, _texts_of(item.content or item.summary))
            case FunctionCallItem():
                conversation.add_call(path, ToolCall(id=item.call_id, name=item.name, arguments=item.arguments))
            case FunctionCallOutputItem():
                conversation.add_result(path, item.call_id, _texts_of(item.output))
    return conversation


def _texts_of(parts: Sequence[TextItemPart | RefusalPart]) -> list[str]:
    return [part.text for part in parts]


def options_of(body: ResponseBody, messages: Sequence[ChatMessage], request_id: str) -> RequestOptions:
    """The request of a checked body with these messages."""
    as_written: dict[str, Any] = {}
    sampling, stopping, output = SamplingParameters(), StoppingParameters(), OutputOptions()
    write(sampling, "sampling.temperature", body.temperature, as_written)
    write(sampling, "sampling.top_p", body.top_p, as_written)
    write(stopping, "stopping.max_tokens", body.max_output_tokens, as_written)
    if body.shows_logprobs:
        write(output, "output.logprobs", body.top_logprobs or 0, as_written)
    return RequestOptions(
        prompt_of(body, messages),
        body.model or None,
        sampling,
        stopping,
        output,
        as_written=as_written,
        request_id=request_id,
    )


def prompt_of(body: InputBody, messages: Sequence[ChatMessage]) -> ChatPrompt:
    """The chat of a checked body with these messages."""
    return ChatPrompt(
        messages,
        tools=[make_tool(each.name, each.description, each.parameters, each.strict) for each in body.tools or ()],
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        response_format=_constraint(body.text),
        template_options=_template_options(body.reasoning),
    )


def param_name(conversation: Conversation, field: str) -> str:
    """The name in the body of a field of the validator."""
    if (path := conversation.path_of(field)) is not None:
        return path
    if field.startswith(("response_format", "sampling.constraint")):
        return "text.format"
    if field.startswith("template_options"):
        return "reasoning.effort"
    if field.startswith(_ALLOWED):
        return f"tool_choice.tools{field.removeprefix(_ALLOWED)}"
    return _RENAMED.get(field) or without_group(field)


def _tool_choice(choice: str | ToolChoiceObject | None) -> ToolChoice | None:
    match choice:
        case str():
            return ToolChoice(mode=TOOL_CHOICES[choice])
        case ToolChoiceObject(type="function", name=str(name)):
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
