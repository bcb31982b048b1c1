"""Conversations, the functions that a model may call in them, and the text that the chat template makes of both."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import jinja2

DATA = Path(__file__).parent / "data"
PAD, BOS, EOS = "<pad>", "<s>", "</s>"
SYSTEM, USER, ASSISTANT, END = "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"
SPECIAL_TOKENS = (PAD, BOS, EOS, SYSTEM, USER, ASSISTANT, END)
PAD_ID, BOS_ID, EOS_ID, END_ID = 0, 1, 2, 6
TOKEN_IDS: dict[str, Any] = {"bos_token_id": BOS_ID, "eos_token_id": [EOS_ID, END_ID], "pad_token_id": PAD_ID}

# Functions are shown by name, description and parameters, since a whole schema takes more of the context than a
# conversation does. In the file a line is a statement, and its \n a line end of the text.
_TEMPLATE_LINES = (DATA / "chat_template.jinja").read_text().splitlines()
CHAT_TEMPLATE = "".join(line.strip() for line in _TEMPLATE_LINES).replace("\\n", "\n")

PROMPT_WEIGHT = 0.1
# Texts, and the weight of their tokens in the loss. A user's text counts little, since nothing can predict it; the
# model's answer counts fully.
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
    """A tool. `notes` describe some of the parameters; a call may omit the parameters in `optional`."""

    name: str
    description: str
    parameters: Mapping[str, ParameterType]
    notes: Mapping[str, str] = field(default_factory=dict)
    optional: frozenset[str] = frozenset()

    def definition(self) -> dict[str, Any]:
        """The definition that a user of OpenAI's API sends; the chat template shows less of it."""
        properties: dict[str, dict[str, Any]] = {
            name: {"type": kind} if isinstance(kind, str) else {"type": "string", "enum": list(kind)}
            for name, kind in self.parameters.items()
        }
        for name, note in self.notes.items():
            properties[name]["description"] = note
        required = [name for name in self.parameters if name not in self.optional]
        parameters = {"type": "object", "properties": properties, "required": required}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


class Call(TypedDict):
    name: str
    arguments: Mapping[str, CallValue]


Calls = tuple[Call, ...]
# The user's text or the results of calls, and then the assistant's answer or its calls of tools.
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

    def definitions(self) -> list[dict[str, Any]] | None:
        return [tool.definition() for tool in self.tools] or None

    def last_answer(self) -> str:
        return "".join(text for text, _ in document(self)).rpartition(ASSISTANT)[2].removesuffix(END)


_ENVIRONMENT = jinja2.Environment()
# A space at the end of a text, which a server takes away, was trained on.
_ENVIRONMENT.filters |= {"tojson": to_json, "trim": str}
_TEMPLATE = _ENVIRONMENT.from_string(CHAT_TEMPLATE)
# Before each system prompt and each user's side, and after each mark of an assistant.
_SPLIT = re.compile(f"(?={re.escape(SYSTEM)}|{re.escape(USER)})|(?<={re.escape(ASSISTANT)})")


def document(conversation: Conversation, *, decision_weight: float = 1.0) -> Document:
    """The text that the chat template renders. The name of the first call, and an answer that no tool fits, have
    `decision_weight`.

    Definitions of tools do not count; a system prompt without them counts as a user's text.
    """
    system_weight = 0.0 if conversation.kind.startswith("tool") else PROMPT_WEIGHT
    text = _TEMPLATE.render(messages=conversation.messages(), tools=conversation.definitions(), bos_token=BOS)
    segments: list[tuple[str, float]] = []
    for piece in _SPLIT.split(text):
        if piece == BOS or piece.startswith(SYSTEM):
            segments.append((piece, 0.0 if piece == BOS else system_weight))
        elif piece.startswith(USER):
            segments.append((piece, PROMPT_WEIGHT))
        elif piece.startswith("<tool_call>"):
            head, rest = piece.split(ARGUMENTS_MARK, 1)
            segments += [(head, decision_weight), (ARGUMENTS_MARK + rest, 1.0)]
        else:
            segments.append((piece, decision_weight if piece == NO_TOOL_ANSWER + END else 1.0))
    return tuple(segments)
