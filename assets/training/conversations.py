"""Conversations, the functions that a model may call in them, and the text that the chat template makes of both."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from assets.training.data import DIRECTORY

PAD, BOS, EOS = "<pad>", "<s>", "</s>"
SYSTEM, USER, ASSISTANT, END = "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"
SPECIAL_TOKENS = (PAD, BOS, EOS, SYSTEM, USER, ASSISTANT, END)
PAD_ID, BOS_ID, EOS_ID, END_ID = 0, 1, 2, 6

# Functions are shown by their signatures, since a whole schema takes more of the context than a conversation does. In
# the file a line is a statement, and its \n a line end of the text.
_TEMPLATE_LINES = (DIRECTORY / "chat_template.jinja").read_text().splitlines()
CHAT_TEMPLATE = "".join(line.strip() for line in _TEMPLATE_LINES).replace("\\n", "\n")

PROMPT_WEIGHT = 0.1


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a document; `weight` is how much its tokens count in the loss."""

    text: str
    weight: float


Document = tuple[Segment, ...]

CallValue = str | int | float | bool
# The name of a JSON type, or the values that are allowed.
ParameterType = str | tuple[str, ...]

NO_TOOL_ANSWER = "I have no tool for that."
# A token begins here, whatever the arguments are.
ARGUMENTS_MARK = '", "arguments": {'


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Tool:
    """`notes` describe some of the parameters; those in `optional` may be left out of a call."""

    name: str
    description: str
    parameters: Mapping[str, ParameterType]
    notes: Mapping[str, str] = field(default_factory=dict)
    optional: frozenset[str] = frozenset()

    def _required(self) -> list[str]:
        return [name for name in self.parameters if name not in self.optional]

    def definition(self) -> dict[str, Any]:
        """What a user of OpenAI's API sends."""
        properties: dict[str, dict[str, Any]] = {
            name: {"type": kind} if isinstance(kind, str) else {"type": "string", "enum": list(kind)}
            for name, kind in self.parameters.items()
        }
        for name, note in self.notes.items():
            properties[name]["description"] = note
        parameters = {"type": "object", "properties": properties, "required": self._required()}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

    def _shown(self, name: str) -> ParameterType:
        kind, note = self.parameters[name], self.notes.get(name)
        return f"{kind}: {note}" if note and isinstance(kind, str) else kind

    def signature(self) -> str:
        """What the model sees: schemas are long, so of each parameter only its name and its type or its values.

        A type is followed by the parameter's description. What is required is told where it is not all.
        """
        shown: dict[str, Any] = {"name": self.name}
        if self.description:
            shown["description"] = self.description
        shown["parameters"] = {name: self._shown(name) for name in self.parameters}
        if self.optional and (required := self._required()):
            shown["required"] = required
        return _json(shown)


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: Mapping[str, CallValue]

    def text(self) -> str:
        return f"<tool_call>\n{_json({'name': self.name, 'arguments': self.arguments})}\n</tool_call>"


@dataclass(frozen=True, slots=True)
class Said:
    """A user's question, or the assistant's answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Called:
    calls: tuple[Call, ...]


@dataclass(frozen=True, slots=True)
class Returned:
    results: tuple[str, ...]


# What a user's side sends, and what the assistant does then.
Exchange = tuple[Said | Returned, Said | Called]


def turn(user: str, assistant: str) -> Exchange:
    return Said(user), Said(assistant)


@dataclass(frozen=True, slots=True)
class Conversation:
    kind: str
    tools: tuple[Tool, ...]
    exchanges: tuple[Exchange, ...]
    system: str | None = None

    def messages(self) -> list[dict[str, Any]]:
        """OpenAI's form, for the chat template."""
        messages: list[dict[str, Any]] = []
        if self.system is not None:
            messages.append({"role": "system", "content": self.system})
        for asked, done in self.exchanges:
            if isinstance(asked, Said):
                messages.append({"role": "user", "content": asked.text})
            else:
                messages += [{"role": "tool", "content": result} for result in asked.results]
            if isinstance(done, Said):
                messages.append({"role": "assistant", "content": done.text})
            else:
                calls = [{"type": "function", "function": _fields(call)} for call in done.calls]
                messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        return messages

    def last_answer(self) -> str:
        return _answer_text(self.exchanges[-1][1])


def _fields(call: Call) -> dict[str, Any]:
    return {"name": call.name, "arguments": dict(call.arguments)}


def _answer_text(done: Said | Called) -> str:
    return done.text if isinstance(done, Said) else "\n".join(call.text() for call in done.calls)


def _asked_text(asked: Said | Returned) -> str:
    if isinstance(asked, Said):
        return asked.text
    return "\n".join(f"<tool_response>\n{result}\n</tool_response>" for result in asked.results)


def _system_text(system: str | None, tools: Sequence[Tool]) -> str:
    lines = [] if system is None else [system]
    if tools:
        lines += ["<tools>", *(tool.signature() for tool in tools), "</tools>"]
    return "\n".join(lines)


def _answer_segments(done: Said | Called, decision_weight: float) -> tuple[Segment, ...]:
    """The name of the first call, and what is there to say that no tool fits, have a weight of their own."""
    text = _answer_text(done) + END
    if isinstance(done, Said):
        return (Segment(text, decision_weight if done.text == NO_TOOL_ANSWER else 1.0),)
    head, rest = text.split(ARGUMENTS_MARK, 1)
    return Segment(head, decision_weight), Segment(ARGUMENTS_MARK + rest, 1.0)


def document(conversation: Conversation, *, system_weight: float = 0.0, decision_weight: float = 1.0) -> Document:
    """Exactly what the chat template writes, with an end after each answer. Definitions of tools do not count."""
    segments = [Segment(BOS, 0.0)]
    if system := _system_text(conversation.system, conversation.tools):
        segments.append(Segment(f"{SYSTEM}{system}{END}", system_weight))
    for asked, done in conversation.exchanges:
        segments.append(Segment(f"{USER}{_asked_text(asked)}{END}{ASSISTANT}", PROMPT_WEIGHT))
        segments += _answer_segments(done, decision_weight)
    return tuple(segments)
