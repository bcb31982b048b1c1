"""Base classes of the parsers: content until a call begins, the call, and content again."""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar, cast

from gateway.text.formats.output import NOTHING, Output, ToolCallDelta, joined
from gateway.text.formats.scanning import Match, Pattern, Unmatched, first_marker, held_length, trailing_space


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
