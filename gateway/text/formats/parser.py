"""Base classes of the parsers: content until a call begins, the call, and content again."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, cast

from gateway.text.formats.output import NOTHING, Output, ToolCallDelta, joined
from gateway.text.formats.scanning import Match, Pattern, Unmatched, first_marker, held_length, trailing_space


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """What a parser needs to know of a tool: its name, and which of its parameters are strings."""

    name: str
    text_parameters: frozenset[str] = field(default_factory=frozenset[str])


OfferedTools = Mapping[str, OfferedTool]
CallIds = Callable[[int], str]
"""The id of a call by its position."""


class OutputParser:
    """Parses the text of one sequence, which arrives in pieces of any size.

    The joined result depends on the text and not on its pieces. Text that turns out not to be a call is content. Only
    the marks of the format itself and the spaces next to them are dropped.

    A subclass consumes `_rest` in `_step`.
    """

    def __init__(self) -> None:
        self._rest = ""
        self._is_last = False
        self._pieces: list[Output] = []

    def push(self, text: str) -> Output:
        """Takes the next piece of the text; returns the output that no later text can change."""
        self._rest += text
        return self._run()

    def finish(self) -> Output:
        """The rest of the output, after the last piece."""
        self._is_last = True
        return self._run()

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends within reasoning."""
        return False

    def _step(self) -> bool:
        """Consumes a part of `_rest`; returns whether to call it again at once. At the end of the text, the calls
        together consume all of `_rest`."""
        raise NotImplementedError

    @property
    def _has_more(self) -> bool:
        return bool(self._rest)

    def _run(self) -> Output:
        while self._has_more and self._step():
            pass
        return self._take()

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

    def _step(self) -> bool:
        self._add(text=self._consume(len(self._rest)))
        return False


class CallParser(OutputParser):
    """Content in which calls of the offered tools begin with a marker.

    A subclass reads what follows a marker in `_call_step`, until it returns to content by `_end_call` or `_give_back`.

    Attributes:
        begins: The markers with which calls begin.
        dropped: Marks around calls that carry no information.
        tokens: The further special tokens that the parser must see.
    """

    begins: Sequence[str] = ()
    dropped: Sequence[str] = ()
    tokens: Sequence[str] = ()

    @classmethod
    def with_marks(cls, *begins: str, **attributes: Any) -> type[Self]:
        """The parser of the same notation with marks of its own. `attributes` replace this class's."""
        return cast(type[Self], type(cls.__name__, (cls,), {"begins": begins} | attributes))

    def __init__(self, tools: OfferedTools, call_ids: CallIds) -> None:
        super().__init__()
        self._tools = tools
        self._call_ids = call_ids
        self._num_calls = 0
        self._marks = (*self.begins, *self.dropped)
        self._in_call = False
        # The consumed text of a call of which nothing was delivered yet.
        self._opening = ""

    @property
    def _has_more(self) -> bool:
        # The end of the text also ends a call.
        return bool(self._rest) or (self._is_last and self._in_call)

    def _step(self) -> bool:
        return self._call_step() if self._in_call else self._content_step()

    def _call_step(self) -> bool:
        """Like `_step`, within a call. At the end of the text it leaves the call."""
        raise NotImplementedError

    def _begin(self, marker: str, opening: str) -> None:
        """A call may begin after this marker; `opening` was consumed of it."""
        self._in_call = True
        self._opening = opening

    def _content_step(self) -> bool:
        found = first_marker(self._rest, self._marks)
        if found is None:
            self._release_content()
            return False
        position, marker = found
        num_spaces = trailing_space(self._rest[:position])
        self._add(text=self._consume(position - num_spaces))
        opening = self._consume(num_spaces + len(marker))
        if marker in self.begins:
            self._begin(marker, opening)
        return True

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

    def _give_back(self) -> None:
        """The text is not a call after all: what was consumed becomes content, and the rest is searched again."""
        self._in_call = False
        self._add(text=self._opening)
        self._opening = ""

    def _drop(self) -> bool:
        """The text ends within the beginning of a call, before anything of it can be delivered. Returns True."""
        self._in_call = False
        self._opening = ""
        self._consume(len(self._rest))
        return True

    def _open_call(self, name: str, call_id: str | None = None) -> None:
        """Delivers the beginning of a call, which is final. `call_id` is the id that the model wrote, if any."""
        self._add(call=ToolCallDelta(self._num_calls, call_id or self._call_ids(self._num_calls), name))
        self._num_calls += 1
        self._opening = ""

    def _add_arguments(self, text: str) -> None:
        if text:
            self._add(call=ToolCallDelta(self._num_calls - 1, arguments=text))

    def _end_call(self) -> None:
        self._in_call = False


class StagedCallParser(CallParser):
    """Calls that are read in stages. A stage is a method; `_read_header` is the first and `_read_trailer` the last one.

    Attributes:
        trailer: The optional text after a call.
    """

    trailer: Pattern = Pattern()

    def __init__(self, tools: OfferedTools, call_ids: CallIds) -> None:
        super().__init__(tools, call_ids)
        self._stage: Callable[[], bool] = self._read_header

    def _begin(self, marker: str, opening: str) -> None:
        super()._begin(marker, opening)
        self._stage = self._read_header

    def _call_step(self) -> bool:
        return self._stage()

    def _read_header(self) -> bool:
        raise NotImplementedError

    def _read_trailer(self) -> bool:
        return self._end_after(self.trailer)

    def _end_after(self, trailer: Pattern) -> bool:
        """Ends the call, and drops the text that follows it if that is `trailer`."""
        found = trailer.match(self._rest)
        if found is Unmatched.MORE and not self._is_last:
            return False
        if isinstance(found, Match):
            self._consume(found.end)
        elif found is Unmatched.MORE:
            self._consume(len(self._rest))
        self._end_call()
        return True
