"""Conversations, the functions that a model may call in them, and the text that the chat template makes of both."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict

from assets.training.data import DIRECTORY

PAD, BOS, EOS = "<pad>", "<s>", "</s>"
SYSTEM, USER, ASSISTANT, END = "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"
SPECIAL_TOKENS = (PAD, BOS, EOS, SYSTEM, USER, ASSISTANT, END)
PAD_ID, BOS_ID, EOS_ID, END_ID = 0, 1, 2, 6
TOKEN_IDS: dict[str, Any] = {"bos_token_id": BOS_ID, "eos_token_id": [EOS_ID, END_ID], "pad_token_id": PAD_ID}

# Functions are shown by their signatures, since a whole schema takes more of the context than a conversation does. In
# the file a line is a statement, and its \n a line end of the text.
_TEMPLATE_LINES = (DIRECTORY / "chat_template.jinja").read_text().splitlines()
CHAT_TEMPLATE = "".join(line.strip() for line in _TEMPLATE_LINES).replace("\\n", "\n")

PROMPT_WEIGHT = 0.1
# Texts, and how much the tokens of each count in the loss. What a user says counts little, since nothing can foretell
# it; what the model should answer counts fully.
Document = tuple[tuple[str, float], ...]

CallValue = str | int | float | bool
# The name of a JSON type, or the values that are allowed.
ParameterType = str | tuple[str, ...]

NO_TOOL_ANSWER = "I have no tool for that."
# A token begins here, whatever the arguments are.
ARGUMENTS_MARK = '", "arguments": {'


def to_json(value: Any, separators: tuple[str, str] = (", ", ": ")) -> str:
    return json.dumps(value, ensure_ascii=False, separators=separators)


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
        described = {"description": self.description} if self.description else {}
        shown = {"name": self.name, **described, "parameters": {name: self._shown(name) for name in self.parameters}}
        required = self._required() if self.optional else []
        return to_json({**shown, "required": required} if required else shown)


class Call(TypedDict):
    name: str
    arguments: Mapping[str, CallValue]


Calls = tuple[Call, ...]
# What a user's side sends, a text or the results of calls, and what the assistant does then: it answers, or it calls
# tools.
Exchange = tuple[str | tuple[str, ...], str | Calls]


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
            if isinstance(asked, str):
                messages.append({"role": "user", "content": asked})
            else:
                messages += [{"role": "tool", "content": text} for text in asked]
            if isinstance(done, str):
                messages.append({"role": "assistant", "content": done})
            else:
                calls = [{"type": "function", "function": call} for call in done]
                messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        return messages

    def last_answer(self) -> str:
        return _answer(self.exchanges[-1][1])


def _tagged(tag: str, texts: list[str] | tuple[str, ...]) -> str:
    return "\n".join(f"<{tag}>\n{text}\n</{tag}>" for text in texts)


def _answer(done: str | Calls) -> str:
    return done if isinstance(done, str) else _tagged("tool_call", [to_json(call) for call in done])


def _answer_segments(done: str | Calls, decision_weight: float) -> Document:
    """The name of the first call, and what is there to say that no tool fits, have a weight of their own."""
    text = _answer(done) + END
    if isinstance(done, str):
        return ((text, decision_weight if done == NO_TOOL_ANSWER else 1.0),)
    head, rest = text.split(ARGUMENTS_MARK, 1)
    return (head, decision_weight), (ARGUMENTS_MARK + rest, 1.0)


def document(conversation: Conversation, *, decision_weight: float = 1.0) -> Document:
    """Exactly what the chat template writes, with an end after each answer.

    Definitions of tools do not count; a system prompt without them counts as what a user says.
    """
    system_weight = 0.0 if conversation.kind.startswith("tool") else PROMPT_WEIGHT
    segments = [(BOS, 0.0)]
    lines = [] if conversation.system is None else [conversation.system]
    if conversation.tools:
        lines += ["<tools>", *(tool.signature() for tool in conversation.tools), "</tools>"]
    if system := "\n".join(lines):
        segments.append((f"{SYSTEM}{system}{END}", system_weight))
    for asked, done in conversation.exchanges:
        text = asked if isinstance(asked, str) else _tagged("tool_response", asked)
        segments += [(f"{USER}{text}{END}{ASSISTANT}", PROMPT_WEIGHT), *_answer_segments(done, decision_weight)]
    return tuple(segments)
