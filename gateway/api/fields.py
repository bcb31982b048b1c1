"""What the bodies of several APIs have in common: how they are parsed, parts that know their fields, and conversations
that know where in the body each message came from.

A part declares the fields that are read. Of all others, `hints` have no effect, and `harmless` has the values that
change nothing; a null field is absent. Everything else is refused by name.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter
from pydantic_core import PydanticCustomError

from gateway.api.body import BodyLimits, load_json, validated, validated_by_turns
from gateway.request.limits import MAX_TOOLS
from gateway.request.types import ChatMessage
from gateway.request.validation import Violations
from gateway.turns import Turns
from quire.gateway.v1.generation_pb2 import ToolCall
from quire.rpc.errors import InvalidArgument

_MESSAGE = re.compile(r"messages\[(\d+)\].*")
_MAX_FIELDS = 1024
# Of all entries of a conversation together.
_MAX_PARTS = 8192
_ASSISTANT, _SYSTEM = "assistant", "system"


class Part(BaseModel):
    """An object in a body, strict about types: no text is taken for a number, and no number is NaN or infinite."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="allow", allow_inf_nan=False, hide_input_in_errors=True, protected_namespaces=()
    )

    hints: ClassVar[frozenset[str]] = frozenset()
    harmless: ClassVar[Mapping[str, tuple[Any, ...]]] = {}


PartType = TypeVar("PartType", bound=Part)


@dataclass(frozen=True, slots=True)
class LongList:
    """The list in a body that may be long: messages, or items of a conversation.

    Attributes:
        name: Its field.
        entries: Validates some of its entries.
        parts: The fields of an entry that are lists themselves.
    """

    name: str
    entries: TypeAdapter[list[Any]]
    parts: Sequence[str]


async def parse(
    kind: type[PartType],
    data: bytes,
    limits: BodyLimits,
    long_list: LongList,
    check_values: Callable[[Violations, PartType], None],
    union_types: Mapping[str, str] | None = None,
) -> PartType:
    """The body in `data`: first the JSON, then its types, a few entries at a time, so that other calls run between.

    Raises:
        InvalidArgument: it is not JSON, a field has the wrong type or is not supported, `check_values` found something,
            or there are too many entries.
    """
    turns, types = Turns(), union_types or {}
    fields = await load_json(data, limits.max_values)
    await turns.pause()
    if isinstance(fields, dict):
        if len(fields) > _MAX_FIELDS:
            raise InvalidArgument(f"the body has {len(fields):,} fields; the max is {_MAX_FIELDS:,}")
        _check_counts(fields, long_list, limits.max_messages)
        name = long_list.name
        if isinstance(fields.get(name), list):
            fields[name] = await validated_by_turns(kind, fields, name, long_list.entries, types, turns)
    body = validated(kind, fields, types)
    await turns.pause()
    violations = Violations()
    check_fields(violations, body)
    check_values(violations, body)
    violations.raise_if_any()
    return body


def _check_counts(fields: Mapping[str, Any], long_list: LongList, max_entries: int) -> None:
    """Raises InvalidArgument where there are too many entries, parts or tools to validate them."""
    violations = Violations()
    entries, tools = fields.get(long_list.name), fields.get("tools")
    if isinstance(entries, list) and violations.check_count(long_list.name, entries, max_entries):
        lists = [entry.get(name) for entry in entries if isinstance(entry, dict) for name in long_list.parts]
        num_parts = sum(len(each) for each in lists if isinstance(each, list))
        if num_parts > _MAX_PARTS:
            violations.add(long_list.name, f"has {num_parts:,} parts in its entries; the max is {_MAX_PARTS:,}")
    if isinstance(tools, list):
        violations.check_count("tools", tools, MAX_TOOLS)
    violations.raise_if_any()


def check_fields(violations: Violations, part: Part, path: str = "") -> None:
    """Adds a violation for each field that is not supported, of the part and of the parts in it."""
    for name, value in (part.model_extra or {}).items():
        if value is None or name in part.hints:
            continue
        place = f"{path}.{name[:80]}" if path else name[:80]
        harmless = part.harmless.get(name)
        if harmless is None:
            violations.add(place, "is not a field of this request" if not path else "is not a field that is known here")
        # `in` alone would take 1 for true.
        elif not any(type(value) is type(each) and value == each for each in harmless):
            violations.add(place, "is not supported by this version")
    for name, declared in type(part).model_fields.items():
        value = getattr(part, name)
        name = declared.alias or name
        place = f"{path}.{name}" if path else name
        if isinstance(value, Part):
            check_fields(violations, value, place)
        elif isinstance(value, list):
            _check_entries(violations, value, place)


def _check_entries(violations: Violations, entries: list[Any], path: str) -> None:
    for position, entry in enumerate(entries):
        if violations.are_enough:
            return
        if isinstance(entry, Part):
            check_fields(violations, entry, f"{path}[{position}]")


def tag_of(value: Any, default: str | None = None) -> str | None:
    """The kind of an object by its `type`, as the tag of a union. Errors leave tags out of the path of a field."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    kind = default if kind is None else kind
    return f"<{kind:.80}>" if isinstance(kind, str) else None


def as_parts(value: Any, kind: str) -> Any:
    """A text as a list with one part of this kind; a list as it is. For a BeforeValidator.

    Raises:
        PydanticCustomError: it is neither.
    """
    if isinstance(value, str):
        return [{"type": kind, "text": value}]
    if not isinstance(value, list):
        raise PydanticCustomError("text_or_parts", "a string or a list of objects")
    return value


@dataclass(slots=True, eq=False)
class _Draft:
    """A message to which more can be added. `path` is where it is in the body."""

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
    """Messages in the making, for APIs in which a message is made of several items or blocks."""

    def __init__(
        self, earlier: Sequence[ChatMessage] = (), earlier_path: str = "", instructions: str | None = None
    ) -> None:
        """It goes on from `earlier` messages, which the body names at `earlier_path`. `instructions` stand before all
        messages, and are none of them."""
        self._earlier = tuple(earlier)
        self._earlier_path = earlier_path
        self._instructions = instructions
        self._drafts: list[_Draft] = []

    def add_system(self, path: str, texts: Sequence[str]) -> None:
        """Instructions. Those at the beginning become one message: many chat templates know no more than one."""
        drafts = self._drafts
        if not (drafts and drafts[-1].role == _SYSTEM and len(drafts) == 1 and not self._earlier):
            drafts.append(_Draft(path, _SYSTEM))
        elif drafts[-1].texts:
            # A paragraph of its own.
            drafts[-1].texts.append("")
        drafts[-1].texts += texts

    def add(self, path: str, role: str, texts: Sequence[str], *, joins: bool = False) -> None:
        """A message; with `joins`, more of the message before it if that has the same role."""
        last = self._drafts[-1] if self._drafts else None
        if last is None or last.role != role or not joins:
            last = _Draft(path, role)
            self._drafts.append(last)
        last.texts += texts

    def add_result(self, path: str, tool_call_id: str, texts: Sequence[str]) -> None:
        """The result of a tool call."""
        self._drafts.append(_Draft(path, "tool", list(texts), tool_call_id=tool_call_id))

    def add_answer(self, path: str, texts: Sequence[str], *, joins: bool = False) -> None:
        """Content of the assistant. It follows the reasoning before it; after content or calls it begins another
        message, unless it `joins` them."""
        self._answer(path, joins=joins).texts += texts

    def add_reasoning(self, path: str, texts: Sequence[str], *, joins: bool = False) -> None:
        """Reasoning of the assistant; like `add_answer`."""
        self._answer(path, joins=joins).reasonings += texts

    def add_call(self, path: str, call: ToolCall) -> None:
        """A call of the assistant, in the message that it is writing."""
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

    def path_of(self, field: str) -> str | None:
        """Where in the body a message of the prompt is, by one of its fields, such as "messages[3].content"; None if it
        is no such field."""
        match = _MESSAGE.fullmatch(field)
        if match is None:
            return None
        position = int(match[1])
        if self._instructions and not self._joins_instructions(self.messages):
            position -= 1
        if position < 0:
            return "instructions"
        position -= len(self._earlier)
        return self._earlier_path if position < 0 else self._drafts[position].path

    @property
    def last_path(self) -> str:
        return self._drafts[-1].path

    def _joins_instructions(self, messages: Sequence[ChatMessage]) -> bool:
        return bool(messages) and messages[0].role == _SYSTEM

    def _answer(self, path: str, *, joins: bool) -> _Draft:
        if self.ends_with_answer:
            last = self._drafts[-1]
            if joins or not (last.texts or last.tool_calls):
                return last
        self._drafts.append(_Draft(path, _ASSISTANT))
        return self._drafts[-1]
