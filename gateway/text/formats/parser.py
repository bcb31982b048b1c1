"""Parsers of answers: the parsed parts, reasoning before the content, and content with calls in it."""

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Self, TypeVar, cast

from gateway.text.formats.scanning import SPACE, Match, Pattern, Unmatched, first_marker, held_length, trailing_space

_TOKEN = re.compile(r"<[^<>]+>")


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
    pieces = [piece for piece in pieces if piece is not NOTHING]
    if len(pieces) <= 1:
        return pieces[0] if pieces else NOTHING
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


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """The parts of a tool that a parser needs: its name, and the names of its string parameters."""

    name: str
    text_parameters: frozenset[str] = field(default_factory=frozenset[str])


OfferedTools = Mapping[str, OfferedTool]
CallIds = Callable[[int], str]
"""The id of a call by its position."""
_Result = TypeVar("_Result")
Reading = Generator[None, None, _Result]
"""A part of a parser, which yields where it needs more text."""


class OutputParser:
    """Parses the text of one sequence, which arrives in pieces of any size.

    The joined result depends on the text and not on its pieces. Text that turns out not to be a call is content. Only
    the marks of the format itself and the spaces next to them are dropped.

    A subclass consumes `_rest` in `_read`.
    """

    def __init__(self) -> None:
        self._rest = ""
        self._is_last = False
        self._pieces: list[Output] = []
        self._reading = self._read()

    def push(self, text: str) -> Output:
        """Takes the next piece of the text; returns the output that no later text can change."""
        self._rest += text
        next(self._reading, None)
        return self._take()

    def finish(self) -> Output:
        """The rest of the output, after the last piece."""
        self._is_last = True
        output = self.push("")
        self._reading.close()
        return output

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends within reasoning."""
        return False

    def _read(self) -> Reading[None]:
        """Consumes the text. After the last piece it is resumed once, and consumes all of `_rest`."""
        raise NotImplementedError

    def _matched(self, pattern: Pattern) -> Reading[Match | Unmatched]:
        """The match of `_rest` with a pattern, once no further text can change it; MORE if the text ends within it."""
        while (found := pattern.match(self._rest)) is Unmatched.MORE and not self._is_last:
            yield
        return found

    def _skip(self, pattern: Pattern) -> Reading[None]:
        """Drops the text of a pattern if it is next."""
        found = yield from self._matched(pattern)
        if found is not Unmatched.NEVER:
            self._consume(found.end if isinstance(found, Match) else len(self._rest))

    def _position(self, find: Callable[[str, int], int | None]) -> Reading[int | None]:
        """The position that `find` returns for `_rest` and the length searched before; None if the text ends."""
        num_seen = 0
        while (position := find(self._rest, num_seen)) is None and not self._is_last:
            num_seen = len(self._rest)
            yield
        return position

    def _take(self) -> Output:
        if not self._pieces:
            return NOTHING
        pieces, self._pieces = self._pieces, []
        return pieces[0] if len(pieces) == 1 else joined(pieces)

    def _consume(self, count: int) -> str:
        consumed, self._rest = self._rest[:count], self._rest[count:]
        return consumed

    def _add(self, *, text: str = "", reasoning: str = "", call: ToolCallDelta | None = None) -> None:
        if text or reasoning or call is not None:
            self._pieces.append(Output(text, reasoning, () if call is None else (call,)))


class PlainText(OutputParser):
    """All text is content."""

    def _read(self) -> Reading[None]:
        while True:
            self._add(text=self._consume(len(self._rest)))
            yield


@dataclass(frozen=True, slots=True)
class ThinkingMarks:
    """The marks around the reasoning.

    Attributes:
        label: A text that may follow the opening mark and is dropped with it.
        answer: A mark that may stand between the closing mark and the answer and is dropped.
        dropped: Marks in the answer that carry no information.
    """

    begin: str
    end: str
    label: str = ""
    answer: str = ""
    dropped: tuple[str, ...] = ()

    @property
    def opening(self) -> str:
        """The text that begins the reasoning, as templates and models write it."""
        return f"{self.begin}{self.label}\n"

    @property
    def tokens(self) -> frozenset[str]:
        """The special tokens that the parser must see."""
        return frozenset((self.begin, self.end, *self.dropped, *_TOKEN.findall(self.answer)))


class Thinking(Enum):
    """The place where an answer begins: before, in or after the reasoning."""

    MAY_BEGIN = "may_begin"
    """The answer may begin with the opening mark."""
    BEGUN = "begun"
    """In the reasoning: the prompt ends with the opening mark."""
    NONE = "none"
    """After the reasoning: the prompt ends with the closing mark."""


class ThinkingParser(OutputParser):
    """Parses reasoning up to its closing mark; another parser reads the rest. Drops the spaces next to the marks."""

    def __init__(self, marks: ThinkingMarks, begins: Thinking, content: OutputParser) -> None:
        super().__init__()
        self._marks = marks
        self._opening = Pattern(f"\n{marks.begin}({marks.label} or )")
        self._content = content
        self._state = begins

    def finish(self) -> Output:
        own = super().finish()
        return joined([own, self._content.finish()])

    @property
    def is_reasoning(self) -> bool:
        return self._state is Thinking.BEGUN

    def _read(self) -> Reading[None]:
        if self._state is Thinking.MAY_BEGIN:
            found = yield from self._matched(self._opening)
            self._state = Thinking.NONE
            if isinstance(found, Match):
                self._consume(found.end)
                self._state = Thinking.BEGUN
        if self._state is Thinking.BEGUN:
            yield from self._skip_spaces()
            yield from self._read_reasoning()
            self._state = Thinking.NONE
            yield from self._skip_spaces()
            if answer := self._marks.answer:
                while answer.startswith(self._rest) and not self._is_last:
                    yield
                self._rest = self._rest.removeprefix(answer)
                yield from self._skip_spaces()
        while True:
            self._pieces.append(self._content.push(self._consume(len(self._rest))))
            yield

    def _skip_spaces(self) -> Reading[None]:
        """Drops the spaces next to a mark."""
        while True:
            self._rest = self._rest.lstrip(SPACE)
            if self._rest or self._is_last:
                return
            yield

    def _read_reasoning(self) -> Reading[None]:
        end = self._marks.end
        while (position := self._rest.find(end)) < 0:
            certain = len(self._rest)
            if not self._is_last:
                certain -= held_length(self._rest, (end,))
                certain -= trailing_space(self._rest[:certain])
            self._add(reasoning=self._consume(certain))
            yield
        reasoning = self._consume(position)
        self._consume(len(end))
        self._add(reasoning=reasoning[: len(reasoning) - trailing_space(reasoning)])


class CallParser(OutputParser):
    """Content in which calls of the offered tools begin with a marker.

    A subclass reads what follows a marker in `_read_call`.

    Attributes:
        begins: The markers with which calls begin.
        is_bare: Whether calls may begin with the first character, without a marker.
        dropped: Marks around calls that carry no information.
        tokens: The further special tokens that the parser must see.
    """

    begins: Sequence[str] = ()
    is_bare = False
    dropped: Sequence[str] = ()
    tokens: Sequence[str] = ()

    @classmethod
    def variant(cls, **attributes: Any) -> type[Self]:
        """The parser of the same notation with attributes of its own."""
        return cast(type[Self], type(cls.__name__, (cls,), attributes))

    def __init__(self, tools: OfferedTools, call_ids: CallIds) -> None:
        super().__init__()
        self._tools = tools
        self._call_ids = call_ids
        self._num_calls = 0
        self._marks = (*self.begins, *self.dropped)
        self._written_ids: set[str] = set()
        # The consumed text of a call before any of it is delivered.
        self._opening = ""

    def _read(self) -> Reading[None]:
        if self.is_bare:
            yield from self._read_call("")
        while True:
            found = first_marker(self._rest, self._marks)
            if found is None:
                self._release_content()
                yield
                continue
            position, marker = found
            num_spaces = trailing_space(self._rest[:position])
            self._add(text=self._consume(position - num_spaces))
            opening = self._consume(num_spaces + len(marker))
            if marker in self.begins:
                self._opening = opening
                yield from self._read_call(marker)

    def _read_call(self, marker: str) -> Reading[None]:
        """Reads what follows a marker, if it is a call."""
        raise NotImplementedError

    def _release_content(self) -> None:
        """Delivers the text that cannot begin a marker. Spaces wait for the text after them; after calls they are
        dropped."""
        if self._is_last:
            content = self._consume(len(self._rest))
            if self._num_calls:
                content = content[: len(content) - trailing_space(content)]
        else:
            certain = len(self._rest) - held_length(self._rest, self._marks)
            content = self._consume(certain - trailing_space(self._rest[:certain]))
        self._add(text=content)

    def _end_unread(self, is_cut: bool) -> None:
        """Ends a call before any of it was delivered. If the text ends within the call's beginning, the text is
        dropped. Otherwise it is not a call: the consumed text becomes content, and the rest is searched again."""
        if is_cut:
            self._consume(len(self._rest))
        else:
            self._add(text=self._opening)
        self._opening = ""

    def _open_call(self, name: str, written_id: str | None = None) -> None:
        """Delivers the beginning of a call, which is final. It has the id that the model wrote, if no other call has
        it."""
        if written_id is None or written_id in self._written_ids:
            written_id = self._call_ids(self._num_calls)
        self._written_ids.add(written_id)
        self._add(call=ToolCallDelta(self._num_calls, written_id, name))
        self._num_calls += 1
        self._opening = ""

    def _add_arguments(self, text: str) -> None:
        if text:
            self._add(call=ToolCallDelta(self._num_calls - 1, arguments=text))
