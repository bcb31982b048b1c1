"""Reasoning between two marks at the beginning of an answer."""

import re
from dataclasses import dataclass
from enum import Enum

from gateway.text.formats.output import Output, joined
from gateway.text.formats.parser import OutputParser, Reading
from gateway.text.formats.scanning import SPACE, Match, Pattern, held_length, trailing_space

_TOKEN = re.compile(r"<[^<>]+>")


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
