"""The base of all parsers of tool calls: content until a call begins, and what comes after it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from gateway.text.formats.output import NOTHING, Output, ToolCallDelta, joined
from gateway.text.formats.scanning import first_marker, held_length, trailing_space


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """What a parser needs of a tool: its name, and which of its parameters are texts."""

    name: str
    text_parameters: frozenset[str] = field(default_factory=frozenset[str])


OfferedTools = Mapping[str, OfferedTool]
CallIds = Callable[[int], str]
"""The id of a call by its position."""


class OutputParser:
    """Reads the text of one sequence, which comes in pieces of any size.

    What it returns, joined, depends on the text and not on its pieces. No text is lost: what turns out not to be a call
    is content. Dropped are only the marks of the format itself and the spaces beside them.

    A subclass consumes `_rest` in `_step`.
    """

    def __init__(self) -> None:
        self._rest = ""
        self._is_last = False
        self._pieces: list[Output] = []

    def push(self, text: str) -> Output:
        """Takes the next piece of the text; returns what became certain."""
        self._rest += text
        return self._run()

    def finish(self) -> Output:
        """The rest, when no text follows."""
        self._is_last = True
        return self._run()

    def _step(self) -> bool:
        """Consumes some of the rest; returns whether to be called again at once. Consumes all of it in the end, where
        the text is at its end."""
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
        dropped: Marks around calls that say nothing.
        tokens: The special tokens that the format needs to see, besides these.
    """

    begins: Sequence[str] = ()
    dropped: Sequence[str] = ()
    tokens: Sequence[str] = ()

    def __init__(self, tools: OfferedTools, call_ids: CallIds) -> None:
        super().__init__()
        self._tools = tools
        self._call_ids = call_ids
        self._num_calls = 0
        self._marks = (*self.begins, *self.dropped)
        self._in_call = False
        # What was consumed of a call of which nothing was delivered yet.
        self._opening = ""

    @property
    def _has_more(self) -> bool:
        # At the end of the text, a call must end too.
        return bool(self._rest) or (self._is_last and self._in_call)

    def _step(self) -> bool:
        return self._call_step() if self._in_call else self._content_step()

    def _call_step(self) -> bool:
        """Like `_step`, within a call. Leaves the call in the end, where the text is at its end."""
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
        """Delivers what no marker can change any more. Spaces wait for what follows; after calls they say nothing."""
        if self._is_last:
            content = self._consume(len(self._rest))
            if self._num_calls:
                content = content[: len(content) - trailing_space(content)]
        else:
            certain = len(self._rest) - held_length(self._rest, self._marks)
            content = self._consume(certain - trailing_space(self._rest[:certain]))
        self._add(text=content)

    def _give_back(self) -> None:
        """What began is no call: what was consumed of it is content, and what follows is searched again."""
        self._in_call = False
        self._add(text=self._opening)
        self._opening = ""

    def _open_call(self, name: str) -> None:
        """Delivers the beginning of a call. From here on it cannot be taken back."""
        self._add(call=ToolCallDelta(self._num_calls, self._call_ids(self._num_calls), name))
        self._num_calls += 1
        self._opening = ""

    def _add_arguments(self, text: str) -> None:
        if text:
            self._add(call=ToolCallDelta(self._num_calls - 1, arguments=text))

    def _end_call(self) -> None:
        self._in_call = False
