"""The parsed parts of an answer, in pieces: reasoning, content and tool calls."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A part of one tool call. The first part of a call has its id and its name; `arguments` are appended.

    `index` is the position of the call among the calls of its sequence.
    """

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


class Output(NamedTuple):
    """A piece of an answer: the additions to each of its parts."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.text or self.reasoning or self.tool_calls)

    @property
    def num_characters(self) -> int:
        """The number of characters of text, reasoning, and names and arguments of calls. Clients that resume an answer
        count it in the same way."""
        calls = sum(len(call.name) + len(call.arguments) for call in self.tool_calls)
        return len(self.text) + len(self.reasoning) + calls

    def without(self, num_characters: int) -> "Output":
        """The piece without its first characters, in the order reasoning, text, calls."""
        if not num_characters:
            return self
        reasoning, num_characters = _cut(self.reasoning, num_characters)
        text, num_characters = _cut(self.text, num_characters)
        calls: list[ToolCallDelta] = []
        for call in self.tool_calls:
            # A name is delivered in one part: a client that has some of it also has the call's id.
            name, num_characters = _cut(call.name, num_characters)
            arguments, num_characters = _cut(call.arguments, num_characters)
            if len(name) == len(call.name) and name:
                calls.append(ToolCallDelta(call.index, call.id, name, arguments))
            elif arguments:
                calls.append(ToolCallDelta(call.index, arguments=arguments))
        return Output(text, reasoning, tuple(calls))


NOTHING = Output()


def joined(pieces: Sequence[Output]) -> Output:
    """Consecutive pieces as one; the parts of one call as one part."""
    calls: list[tuple[ToolCallDelta, list[str]]] = []
    for piece in pieces:
        for call in piece.tool_calls:
            if calls and calls[-1][0].index == call.index:
                calls[-1][1].append(call.arguments)
            else:
                calls.append((call, [call.arguments]))
    return Output(
        "".join([piece.text for piece in pieces]),
        "".join([piece.reasoning for piece in pieces]),
        tuple(ToolCallDelta(first.index, first.id, first.name, "".join(parts)) for first, parts in calls),
    )


def _cut(text: str, num_characters: int) -> tuple[str, int]:
    """The text without its first characters, and the number of characters that are still to be cut."""
    return text[num_characters:], max(num_characters - len(text), 0)
