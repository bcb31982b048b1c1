"""Reasoning between two marks at the beginning of an answer."""

import re
from dataclasses import dataclass
from enum import Enum

from gateway.text.formats.output import Output, joined
from gateway.text.formats.parser import OutputParser
from gateway.text.formats.scanning import SPACE, Match, Part, Pattern, Unmatched, held_length, trailing_space

_TOKEN = re.compile(r"<[^<>]+>")


@dataclass(frozen=True, slots=True)
class ThinkingMarks:
    """The marks around the reasoning.

    Attributes:
        label: It may follow the opening mark and is dropped with it.
        answer: It may stand between the closing mark and the answer and is dropped.
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
    """Whether an answer begins before, in or after the reasoning."""

    MAY_BEGIN = "may_begin"
    """The answer may begin with the opening mark."""
    BEGUN = "begun"
    """In the reasoning: the prompt ends with the opening mark."""
    NONE = "none"
    """After the reasoning: the prompt ends with the closing mark."""


class ThinkingParser(OutputParser):
    """Reasoning up to its closing mark; another parser reads the rest. Spaces next to the marks are dropped."""

    def __init__(self, marks: ThinkingMarks, begins: Thinking, content: OutputParser) -> None:
        super().__init__()
        self._marks = marks
        self._opening = Pattern(Part.SPACES, marks.begin, (marks.label, "") if marks.label else "")
        self._content = content
        self._state = begins
        self._before_answer = marks.answer
        # Spaces at this point are next to a mark.
        self._after_mark = begins is Thinking.BEGUN

    def finish(self) -> Output:
        own = super().finish()
        return joined([own, self._content.finish()])

    @property
    def is_reasoning(self) -> bool:
        return self._state is Thinking.BEGUN

    def _step(self) -> bool:
        if self._after_mark:
            self._rest = self._rest.lstrip(SPACE)
            if self._state is Thinking.NONE and self._before_answer:
                if self._before_answer.startswith(self._rest) and not self._is_last:
                    return False
                self._rest = self._rest.removeprefix(self._before_answer).lstrip(SPACE)
                self._before_answer = ""
            self._after_mark = not self._rest
            return bool(self._rest)
        match self._state:
            case Thinking.MAY_BEGIN:
                return self._read_opening()
            case Thinking.BEGUN:
                return self._read_reasoning()
            case Thinking.NONE:
                self._pieces.append(self._content.push(self._consume(len(self._rest))))
                return False

    def _read_opening(self) -> bool:
        found = self._opening.match(self._rest)
        if found is Unmatched.MORE and not self._is_last:
            return False
        if isinstance(found, Match):
            self._consume(found.end)
            self._state, self._after_mark = Thinking.BEGUN, True
        else:
            self._state = Thinking.NONE
        return True

    def _read_reasoning(self) -> bool:
        position = self._rest.find(self._marks.end)
        if position >= 0:
            reasoning = self._consume(position)
            self._consume(len(self._marks.end))
            self._state, self._after_mark = Thinking.NONE, True
            self._add(reasoning=reasoning[: len(reasoning) - trailing_space(reasoning)])
            return True
        certain = len(self._rest)
        if not self._is_last:
            certain -= held_length(self._rest, (self._marks.end,))
            certain -= trailing_space(self._rest[:certain])
        self._add(reasoning=self._consume(certain))
        return False
