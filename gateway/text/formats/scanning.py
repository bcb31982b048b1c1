"""Recognises markers, headers of calls and the ends of JSON values in text that arrives in pieces of any size.

The result of every function depends on the text and not on its pieces: a function gives a result only if no further
text can change it, and otherwise reports that it needs more text.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NoReturn

SPACE = " \t\r\n"
MAX_SPACE = 256
"""Maximum length of a run of spaces. Longer ones count as text, which bounds the cost of a search."""
MARK = re.compile(r"<[^<>\s]{1,64}>|\[/?[A-Z_]{2,32}\]")
"""A mark of a format in the usual spellings."""
MAX_JSON_DEPTH = 200
"""Maximum depth of JSON values in texts, such as schemas of tools; bodies of HTTP may have a similar one."""
_JSON_STRING, _BRACKET = re.compile(r'"(?:[^"\\]|\\.)*+"?', re.DOTALL), re.compile(r"[\[\]{}]")
_STRING_ENDS = {quote: re.compile(rf"[{quote}\\]") for quote in "\"'"}


def first_marker(text: str, markers: Sequence[str]) -> tuple[int, str] | None:
    """The position and the text of the first marker in `text`; the longer one if two begin at one position."""
    found = [(position, -len(marker), marker) for marker in markers if (position := text.find(marker)) >= 0]
    if not found:
        return None
    position, _, marker = min(found)
    return position, marker


def held_length(text: str, markers: Sequence[str]) -> int:
    """The length of the longest suffix of `text` that begins a marker."""
    longest = 0
    for marker in markers:
        if marker[0] not in text[1 - len(marker) :]:
            continue
        for length in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:length]):
                longest = length
                break
    return longest


def trailing_space(text: str) -> int:
    """The number of spaces at the end of `text`, at most MAX_SPACE."""
    tail = text[-MAX_SPACE:]
    return len(tail) - len(tail.rstrip(SPACE))


def read_json(text: str) -> Any:
    """The value of JSON. Raises ValueError, also for NaN and infinities, which Python's parser would accept, and for
    values that are nested more than MAX_JSON_DEPTH deep: by the same depth on each version of Python, and far below the
    depth at which functions that follow the value reach its limit."""
    if text.count("[") + text.count("{") > MAX_JSON_DEPTH:
        depth = 0
        for bracket in _BRACKET.findall(_JSON_STRING.sub("", text)):
            depth += 1 if bracket in "[{" else -1
            if depth > MAX_JSON_DEPTH:
                raise ValueError(f"it is nested more than {MAX_JSON_DEPTH} deep")
    return json.loads(text, parse_constant=_refuse_constant)


def write_json(value: Any) -> str:
    """A value as JSON that UTF-8 can encode: halves of characters stay escaped. Raises ValueError for NaN and
    infinities, TypeError and RecursionError."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False)
    return text


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


class JsonScanner:
    """Tracks the brackets and strings of JSON text that arrives in pieces. It reads each character once.

    Attributes:
        depth: The number of open brackets.
    """

    __slots__ = ("_escaped", "_quote", "depth")

    # Outside of strings: brackets, quotes, and characters that are invalid there.
    structure = re.compile(r"[^\s0-9A-Za-z,:.+-]")
    opening = "{["
    closing = "}]"
    quotes = '"'

    def __init__(self, depth: int = 0) -> None:
        self.depth = depth
        # The quote of the open string.
        self._quote = ""
        self._escaped = False

    def end(self, text: str, start: int, depth: int) -> int | None:
        """The position after the bracket that leaves only `depth` brackets open, or the position of a character that is
        invalid in JSON; None if `text` has neither."""
        position = start
        while position < len(text):
            if self._escaped:
                self._escaped = False
                position += 1
                continue
            found = (_STRING_ENDS[self._quote] if self._quote else self.structure).search(text, position)
            if found is None:
                return None
            position, character = found.end(), found.group()
            if self._quote:
                self._escaped = character == "\\"
                self._quote = self._quote if self._escaped else ""
            elif character in self.opening:
                self.depth += 1
            elif character in self.closing:
                self.depth -= 1
                if self.depth <= depth:
                    return position
            elif character in self.quotes:
                self._quote = character
            else:
                return found.start()
        return None


class PythonScanner(JsonScanner):
    """Tracks the brackets and strings of calls in Python."""

    structure = re.compile(r"[^\s\w,:.+=-]")
    opening = "{[("
    closing = "}])"
    quotes = "\"'"


class Part(Enum):
    """The items of a pattern that are not fixed texts."""

    SPACES = "any number of spaces"
    NAME = "the name of a tool"
    KEY = "the name of a parameter"
    QUOTED = "the name of a parameter, which a quote ends"
    DETAIL = "a further word"


@dataclass(frozen=True, slots=True)
class Match:
    """A match of a pattern. `end` is the position after the matched text; `detail` is its `Part.DETAIL` word."""

    end: int
    name: str = ""
    detail: str = ""


# The characters of a word, and their maximum number. The regex accepts one more to detect longer words.
_WORDS = {
    Part.NAME: (re.compile(r"[A-Za-z0-9_.-]{1,65}"), 64),
    Part.KEY: (re.compile(r"[^<>\n]{1,129}"), 128),
    Part.QUOTED: (re.compile(r'[^"\n]{1,129}'), 128),
    Part.DETAIL: (re.compile(r'[^\s<>"]{1,129}'), 128),
}


_SHORT = re.compile(r"(\n|\{\}|\(.*? or .*?\))", re.DOTALL)


class Unmatched(Enum):
    """The reason why a pattern does not match."""

    MORE = "more text may match"
    NEVER = "no further text matches"


class Pattern:
    """A sequence of fixed texts, spaces and names. The first name is the name of the match."""

    def __init__(self, text: str, *words: Part, before: Sequence[str] = ()) -> None:
        """In `text` a line break stands for any number of spaces, each {} for the next of `words`, and (a or b) for
        alternatives: the first match counts. One of the texts `before` must follow the match and is not part of it."""
        places, self._before = iter(words), tuple(before)
        self._parts: list[tuple[str, ...] | Part] = []
        for piece in filter(None, _SHORT.split(text)):
            match piece[0], piece[-1]:
                case "\n", _:
                    self._parts.append(Part.SPACES)
                case "{", "}":
                    self._parts.append(next(places))
                case "(", ")":
                    self._parts.append(tuple(piece[1:-1].split(" or ")))
                case _:
                    self._parts.append((piece,))

    @property
    def texts(self) -> frozenset[str]:
        return frozenset(text for part in self._parts if not isinstance(part, Part) for text in part if text)

    def match(self, text: str) -> Match | Unmatched:
        position, name, detail = 0, "", ""
        for part in self._parts:
            match part:
                case Part.SPACES:
                    found = _spaces(text, position)
                case Part():
                    found = _word(text, position, part)
                    if isinstance(found, int) and part is Part.DETAIL:
                        detail = text[position:found]
                    elif isinstance(found, int):
                        name = name or text[position:found]
                case _:
                    found = _literal(text, position, part)
            if isinstance(found, Unmatched):
                return found
            position = found
        follows = _literal(text, position, self._before) if self._before else position
        return follows if isinstance(follows, Unmatched) else Match(position, name, detail)


def _spaces(text: str, position: int) -> int | Unmatched:
    end = min(position + MAX_SPACE, len(text))
    while position < end and text[position] in SPACE:
        position += 1
    # At the end of the text so far, more spaces may follow.
    return Unmatched.MORE if position == len(text) else position


def _word(text: str, position: int, part: Part) -> int | Unmatched:
    regex, longest = _WORDS[part]
    found = regex.match(text, position)
    if found is None:
        return Unmatched.MORE if position == len(text) else Unmatched.NEVER
    if found.end() - position > longest:
        return Unmatched.NEVER
    return Unmatched.MORE if found.end() == len(text) else found.end()


def _literal(text: str, position: int, alternatives: tuple[str, ...]) -> int | Unmatched:
    rest_length = len(text) - position
    for alternative in alternatives:
        if text.startswith(alternative, position):
            return position + len(alternative)
        if rest_length < len(alternative) and alternative.startswith(text[position:]):
            return Unmatched.MORE
    return Unmatched.NEVER
