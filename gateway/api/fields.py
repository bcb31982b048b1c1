"""Common parts of the bodies of several APIs: parsing, tools, and conversations that record the path of each message in
the body."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError, to_json

from gateway.api.body import BodyLimits, load_json, validated
from gateway.api.field_rule import FieldRule, Part
from gateway.request.violations import Violations
from gateway.turns import Turns
from gateway.types import ChatMessage, Prompt, RequestOptions, write
from quire.common.v1.common_pb2 import OutputOptions, SamplingParameters, StoppingParameters
from quire.gateway.v1.generation_pb2 import Tool, ToolCall, ToolChoiceMode

BodyType = TypeVar("BodyType", bound="ParsedBody")
_ENTRIES_AT_ONCE = 512
AT_FIRST_USE = ConfigDict(defer_build=True)
"""The configuration of a `TypeAdapter` that is built when it is first used, not when its module is imported."""
ONLY_STREAMS = "is true; it has an effect only if stream is true"
"""The violation of `durable` without a stream."""
Salt = Annotated[str, Field(min_length=1, max_length=256)]
"""vLLM's `cache_salt`."""
# Protobuf messages of the parameters; a body has their fields at the top level.
_GROUP = re.compile(r"^(sampling\.beam_search|sampling|stopping|output|template_options)\.")
_END_OF_NAME = re.compile(r"[.\[]|\Z")
_ASSISTANT, _SYSTEM = "assistant", "system"
TOOL_CHOICES = {
    "none": ToolChoiceMode.TOOL_CHOICE_MODE_NONE,
    "auto": ToolChoiceMode.TOOL_CHOICE_MODE_AUTO,
    "required": ToolChoiceMode.TOOL_CHOICE_MODE_REQUIRED,
}
"""OpenAI's names of the modes of `tool_choice`."""


class ParsedBody(Part):
    """A body that `parse` reads.

    Attributes:
        api: The API's name in metrics.
        long_list: The name of the list that may be long: messages, or items of a conversation.
        entries: Validates a slice of that list; None if the body has no such list.
    """

    api: ClassVar[str]
    long_list: ClassVar[str] = "messages"
    entries: ClassVar[TypeAdapter[list[Any]] | None] = None

    def check(self, violations: Violations, rule: FieldRule) -> None:
        """Adds violations for values that contradict each other. `rule` decides about omitted entries of lists."""


async def parse(kind: type[BodyType], data: bytes, limits: BodyLimits) -> BodyType:
    """The body in `data`. Parses the JSON, then validates it as `parse_fields` does.

    Raises:
        InvalidArgument: it is not JSON, a field has the wrong type, `check` found a violation, or there are too many
            entries.
    """
    return await parse_fields(kind, await load_json(data, limits), limits)


async def parse_fields(kind: type[BodyType], fields: Any, limits: BodyLimits) -> BodyType:
    """The body with these fields. Validates types, a few entries at a time, so that other calls can run in between. The
    rule of `limits` decides about undeclared fields. Raises InvalidArgument as `parse` does."""
    turns = Turns()
    if kind.entries is not None and isinstance(fields, dict) and isinstance(fields.get(kind.long_list), list):
        found: list[Any] = []
        for begin in range(0, len(fields[kind.long_list]), _ENTRIES_AT_ONCE):
            some = fields[kind.long_list][begin : begin + _ENTRIES_AT_ONCE]
            try:
                found += kind.entries.validate_python(some)
            except ValidationError:
                # Entries are validated in slices, so the index in an error is relative to the slice.
                validated(kind, fields | {kind.long_list: found + some})
                raise
            await turns.pause()
        fields[kind.long_list] = found
    body = validated(kind, fields)
    await turns.pause()
    violations = Violations()
    await limits.rule.check_by_turns(violations, body, kind.api, turns)
    body.check(violations, limits.rule)
    violations.raise_if_any()
    return body


@dataclass(frozen=True, slots=True)
class Names:
    """Maps fields of the validator to their names in a body. By default a field keeps the validator's name without the
    protobuf message: "top_p" for "sampling.top_p".

    Attributes:
        begins: Names of fields. Subfields have the same path after this name.
        whole: Names of fields whose subfields do not exist in the body.
    """

    begins: Mapping[str, str]
    whole: Mapping[str, str] = field(default_factory=dict[str, str])

    def __call__(self, field: str) -> str:
        field = field.removeprefix("chat.")
        for end in reversed([match.start() for match in _END_OF_NAME.finditer(field)]):
            if (name := self.whole.get(field[:end])) is not None:
                return name
            if (name := self.begins.get(field[:end])) is not None:
                return name + field[end:]
        return _GROUP.sub("", field)


def numbered(name: str, places: Iterable[str]) -> dict[str, str]:
    """Names for the entries of a validator's list. `places` are their paths in the body, whose list may be longer."""
    return {f"{name}[{position}]": place for position, place in enumerate(places)}


def options_of(body: Part, prompt: Prompt | None, request_id: str, **own: Any) -> RequestOptions:
    """The request of a checked body with this prompt. Fields of the body with the name of a parameter are read as that
    parameter; `own` has the parameters that are read in another way."""
    groups = {"sampling": SamplingParameters(), "stopping": StoppingParameters(), "output": OutputOptions()}
    as_written: dict[str, Any] = {}
    fields = type(body).model_fields
    for group, message in groups.items():
        for name in message.DESCRIPTOR.fields_by_name:
            if name in own:
                write(message, f"{group}.{name}", own[name], as_written)
            elif name in fields:
                write(message, f"{group}.{name}", _meant(name, getattr(body, name)), as_written)
    # Some programs send an empty name if they do not know the model.
    model, cache_salt = getattr(body, "model", None) or None, getattr(body, "cache_salt", None)
    return RequestOptions(prompt, model, **groups, as_written=as_written, request_id=request_id, cache_salt=cache_salt)


def _meant(name: str, value: Any) -> Any:
    """Converts vLLM's values for "all tokens", which many of its clients send by default, "no seed" and "no limit"."""
    match name, value:
        case "top_k", -1:
            return 0
        case "seed" | "thinking_token_budget", -1:
            return None
        case "stop", str():
            return [value]
    return value


def schema_text(schema: Mapping[str, Any] | None) -> str | None:
    """A JSON schema as text, for protobuf messages."""
    return None if schema is None else to_json(schema).decode()


def make_tool(name: str, description: str | None, schema: Mapping[str, Any] | None, strict: bool | None) -> Tool:
    """A tool in a body; `schema` is the schema of its arguments."""
    tool = Tool(name=name, description=description, parameters=schema_text(schema))
    if strict is not None:
        tool.strict = strict
    return tool


def effort_arguments(effort: str | None) -> dict[str, Any]:
    """The arguments of the chat template for a reasoning effort."""
    if effort is None:
        return {}
    # Most templates that can omit reasoning read `enable_thinking`.
    return {"reasoning_effort": effort, **({"enable_thinking": False} if effort == "none" else {})}


def tag_of(value: Any, default: str | None = None) -> str | None:
    """The `type` of an object as the tag of a union. Errors omit tags from the paths of fields."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    kind = default if kind is None else kind
    return f"<{kind:.80}>" if isinstance(kind, str) else None


def as_parts(value: Any, kind: str) -> Any:
    """Converts a text to a list with one part of this kind; returns a list unchanged. For a BeforeValidator.

    Raises:
        PydanticCustomError: the value is neither.
    """
    if isinstance(value, str):
        return [{"type": kind, "text": value}]
    if not isinstance(value, list):
        raise PydanticCustomError("text_or_parts", "a string or a list of objects")
    return value


@dataclass(slots=True, eq=False)
class _Draft:
    """A message that may still grow. `path` is its path in the body."""

    path: str
    role: str
    texts: list[str] = field(default_factory=list[str])
    reasonings: list[str] = field(default_factory=list[str])
    tool_calls: list[ToolCall] = field(default_factory=list[ToolCall])
    tool_call_id: str | None = None

    def message(self) -> ChatMessage:
        return ChatMessage(
            self.role,
            "\n".join(self.texts),
            tool_calls=tuple(self.tool_calls),
            tool_call_id=self.tool_call_id,
            reasoning="\n".join(self.reasonings) or None,
        )


class Conversation:
    """Builds messages, for APIs in which a message consists of several items or blocks."""

    def __init__(
        self, earlier: Sequence[ChatMessage] = (), earlier_path: str = "", instructions: str | None = None
    ) -> None:
        """The conversation continues the `earlier` messages, to which the field `earlier_path` of the body refers.
        `instructions` precede all messages and do not count as a message."""
        self._earlier = tuple(earlier)
        self._earlier_path = earlier_path
        self._instructions = instructions
        self._drafts: list[_Draft] = []

    def add_system(self, path: str, texts: Sequence[str]) -> None:
        """Adds instructions. At the start they become one message, since many chat templates accept only one."""
        drafts = self._drafts
        if not (drafts and drafts[-1].role == _SYSTEM and len(drafts) == 1 and not self._earlier):
            drafts.append(_Draft(path, _SYSTEM))
        elif drafts[-1].texts:
            # Starts a new paragraph.
            drafts[-1].texts.append("")
        drafts[-1].texts += texts

    def add(self, path: str, role: str, texts: Sequence[str], *, joins: bool = False) -> None:
        """Adds a message. With `joins` it extends the previous message if that has the same role."""
        last = self._drafts[-1] if self._drafts else None
        if last is None or last.role != role or not joins:
            last = _Draft(path, role)
            self._drafts.append(last)
        last.texts += texts

    def add_result(self, path: str, tool_call_id: str, texts: Sequence[str]) -> None:
        """Adds the result of a tool call."""
        self._drafts.append(_Draft(path, "tool", list(texts), tool_call_id=tool_call_id))

    def add_answer(self, path: str, texts: Sequence[str], *, joins: bool = False) -> None:
        """Adds content of the assistant. After reasoning it extends the same message; after content or calls it begins
        another message, unless `joins` is set."""
        self._answer(path, joins=joins).texts += texts

    def add_reasoning(self, path: str, texts: Sequence[str], *, joins: bool = False) -> None:
        """Adds reasoning of the assistant, in the same way as `add_answer`."""
        self._answer(path, joins=joins).reasonings += texts

    def add_call(self, path: str, call: ToolCall) -> None:
        """Adds a call to the assistant's current message."""
        self._answer(path, joins=True).tool_calls.append(call)

    @property
    def messages(self) -> list[ChatMessage]:
        """All messages, without the instructions."""
        return [*self._earlier, *(draft.message() for draft in self._drafts)]

    @property
    def prompt(self) -> list[ChatMessage]:
        """All messages, with the instructions in the first one."""
        messages = self.messages
        if not self._instructions:
            return messages
        if self._joins_instructions(messages):
            return [ChatMessage(_SYSTEM, f"{self._instructions}\n\n{messages[0].content}"), *messages[1:]]
        return [ChatMessage(_SYSTEM, self._instructions), *messages]

    @property
    def ends_with_answer(self) -> bool:
        return bool(self._drafts) and self._drafts[-1].role == _ASSISTANT

    @property
    def paths(self) -> list[str]:
        """The paths in the body of the messages in `prompt`."""
        is_apart = self._instructions and not self._joins_instructions(self.messages)
        earlier = [self._earlier_path] * len(self._earlier)
        return [*(["instructions"] if is_apart else ()), *earlier, *(draft.path for draft in self._drafts)]

    def _joins_instructions(self, messages: Sequence[ChatMessage]) -> bool:
        return bool(messages) and messages[0].role == _SYSTEM

    def _answer(self, path: str, *, joins: bool) -> _Draft:
        if self.ends_with_answer:
            last = self._drafts[-1]
            if joins or not (last.texts or last.tool_calls):
                return last
        self._drafts.append(_Draft(path, _ASSISTANT))
        return self._drafts[-1]
