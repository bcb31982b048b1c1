"""Calls whose arguments are converted to JSON: tags of Qwen3-Coder and GLM, Gemma's notation, Python."""

import ast
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Self

from gateway.text.formats.parser import CallIds, CallParser, OfferedTool, OfferedTools, StagedCallParser
from gateway.text.formats.scanning import (
    SPACE,
    JsonScanner,
    Match,
    Part,
    Pattern,
    PythonScanner,
    Unmatched,
    held_length,
    read_json,
    write_json,
)

_SPACES = frozenset(SPACE)
MAX_WHOLE_CALL = 1 << 16
"""The maximum length of calls that are parsed only when they are complete; longer ones are content."""


class TagCallParser(StagedCallParser):
    """A tag with the name, then for each argument tags with its name and its value.

    A value is the text between its tags: unchanged for a parameter that is a string, JSON for others. Where a tag says
    whether its value is a string, the tag counts.

    Attributes:
        headers: The pattern between each of `begins` and the first argument.
        argument: The pattern before a value.
        value_end: The text after a value.
        padding: Optional texts before and after a value that do not belong to it.
        end: The text after the last argument.
    """

    headers: Sequence[Pattern]
    argument: Pattern
    value_end: str
    padding = ("", "")
    end: Pattern

    @classmethod
    def of_tags(
        cls,
        call: str,
        argument: str,
        value_end: str,
        end: str,
        *,
        around: Sequence[str] = (),
        padding: tuple[str, str] = ("", ""),
        dropped: Sequence[str] = (),
        tokens: Sequence[str] = (),
    ) -> type[Self]:
        """The parser of other tags.

        Args:
            call: The tag before the arguments, with a place for the name; as `Pattern.of`.
            argument: The tags before a value, with a place for the name and perhaps one for whether it is a string.
            around: The marks around all calls, which may be missing.
        """
        begin, _, rest = call.partition("{}")
        opening, _, further = argument.partition("{}")
        # Other formats begin in the same way, so that only an argument or the end may follow a name.
        named, follows = f"\n{{}}{rest}\n", (opening, end, *around[1:])
        key = Part.QUOTED if further.startswith('"') else Part.KEY
        begins = {around[0]: f"\n{begin}{named}"} if around else {}
        begins[begin] = named
        before_value = Pattern.of(f"\n{argument}", key, Part.DETAIL)
        return cls.with_marks(
            *begins,
            headers=[Pattern.of(header, Part.NAME, before=follows) for header in begins.values()],
            argument=Pattern(*before_value.parts, (padding[0], "")) if padding[0] else before_value,
            value_end=value_end,
            padding=padding,
            dropped=dropped,
            end=Pattern.of(f"\n{end}"),
            trailer=Pattern.of(f"\n{around[1]}" if around else ""),
            tokens=(*before_value.texts, *Pattern.of(rest).texts, value_end, end, *around, *tokens),
        )

    def __init__(self, tools: OfferedTools, call_ids: CallIds) -> None:
        super().__init__(tools, call_ids)
        self._header = self.headers[0]
        self._tool = OfferedTool("")
        self._is_text = False
        self._num_arguments = 0
        self._num_searched = 0

    def _begin(self, marker: str, opening: str) -> None:
        super()._begin(marker, opening)
        self._header = self.headers[self.begins.index(marker)]

    def _read_header(self) -> bool:
        found = self._header.match(self._rest)
        if found is Unmatched.MORE and not self._is_last:
            return False
        if not isinstance(found, Match):
            return self._drop() if found is Unmatched.MORE else self._gave_back()
        if found.name not in self._tools:
            return self._gave_back()
        self._consume(found.end)
        self._open_call(found.name)
        self._add_arguments("{")
        self._tool, self._num_arguments = self._tools[found.name], 0
        self._stage = self._read_argument
        return True

    def _read_argument(self) -> bool:
        found = self.argument.match(self._rest)
        end = self.end.match(self._rest)
        if isinstance(found, Match):
            self._consume(found.end)
            self._is_text = found.detail == "true" if found.detail else found.name in self._tool.text_parameters
            separator = ", " if self._num_arguments else ""
            self._add_arguments(f"{separator}{write_json(found.name)}: " + ('"' if self._is_text else ""))
            self._num_arguments += 1
            self._num_searched = 0
            self._stage = self._read_value
            return True
        if not self._is_last and Unmatched.MORE in (found, end):
            return False
        if self._is_last and not isinstance(end, Match):
            self._consume(len(self._rest) if Unmatched.MORE in (found, end) else 0)
            self._end_call()
            return True
        if isinstance(end, Match):
            self._add_arguments("}")
            self._consume(end.end)
            self._stage = self._read_trailer
            return True
        # The next mark shows that a call is over whose end is missing. Before any other text the call stays open, as
        # one that was cut: it must not run with only the arguments that were understood.
        marks = {*self.trailer.texts, *self.begins}
        rest = self._rest.lstrip(SPACE)
        if not self._is_last and any(mark.startswith(rest) for mark in marks):
            return False
        if rest.startswith(tuple(marks)):
            self._add_arguments("}")
        self._stage = self._read_trailer
        return True

    def _gave_back(self) -> bool:
        self._give_back()
        return True

    def _read_value(self) -> bool:
        position = self._rest.find(self.value_end, max(self._num_searched - len(self.value_end), 0))
        if position >= 0:
            value = self._rest[:position].removesuffix(self.padding[1])
            self._consume(position + len(self.value_end))
            self._add_arguments(write_json(value)[1:] if self._is_text else _as_json(value))
            self._stage = self._read_argument
            return True
        self._num_searched = len(self._rest)
        if self._is_last:
            value = self._consume(len(self._rest))
            self._add_arguments(write_json(value)[1:-1] if self._is_text else value)
            self._end_call()
        elif self._is_text:
            ends = (self.value_end, self.padding[1] + self.value_end)
            certain = self._consume(len(self._rest) - held_length(self._rest, ends))
            self._add_arguments(write_json(certain)[1:-1])
            self._num_searched = 0
        return False


TAGGED_CALLS: Mapping[str, type[TagCallParser]] = {
    "step3": TagCallParser.of_tags(
        'function<｜tool_sep｜><steptml:invoke name="{}">',
        '<steptml:parameter name="{}">',
        *("</steptml:parameter>", "</steptml:invoke>"),
        dropped=[f"<｜tool_{part}｜>" for part in ("calls_begin", "call_begin", "call_end", "calls_end")],
        tokens=("<｜tool_sep｜>",),
    ),
    "minicpm5": TagCallParser.of_tags(
        *('<function name="{}">', '<param name="{}">', "</param>", "</function>"),
        padding=("<![CDATA[", "]]>"),
    ),
}
"""Formats with tags that are not in a shape: with marks and spaces between them, and with optional ones."""


class WholeCallParser(CallParser):
    """Calls that are delivered when they are complete. A subclass parses them.

    Attributes:
        header: What a call begins with.
        call_end: The text after the calls.
    """

    header: Pattern
    call_end: str

    def __init__(self, tools: OfferedTools, call_ids: CallIds) -> None:
        super().__init__(tools, call_ids)
        self._num_scanned = 0

    def _begin(self, marker: str, opening: str) -> None:
        super()._begin(marker, opening)
        self._num_scanned = 0

    def _end_of_calls(self) -> int | None:
        """The position after the calls; None if more text is needed. Looks at what follows `_num_scanned`."""
        position = self._rest.find(self.call_end, max(self._num_scanned - len(self.call_end), 0))
        return None if position < 0 else position + len(self.call_end)

    def _calls_in(self, text: str) -> list[tuple[str, dict[str, Any]]] | None:
        """The name and the arguments of each call in a text; None if the text is not calls."""
        raise NotImplementedError

    def _is_begun(self, text: str) -> bool:
        """Whether a text without an end begins a call."""
        found = self.header.match(text)
        return found is Unmatched.MORE or (isinstance(found, Match) and found.name in self._tools)

    def _call_step(self) -> bool:
        end = self._end_of_calls()
        self._num_scanned = len(self._rest)
        if end is None and not self._is_last:
            return False
        if end is None and self._is_begun(self._rest):
            return self._drop()
        # Parsing a long call at once would block the event loop.
        calls = self._calls_in(self._rest[:end]) if end is not None and end <= MAX_WHOLE_CALL else None
        try:
            found = [(name, write_json(arguments)) for name, arguments in calls or ()]
        except (TypeError, ValueError, RecursionError):
            found = []
        if not found or any(name not in self._tools for name, _ in found):
            self._give_back()
            return True
        self._consume(end or 0)
        for name, arguments in found:
            self._open_call(name)
            self._add_arguments(arguments)
        self._end_call()
        return True


class GemmaParser(WholeCallParser):
    """<|tool_call>call:NAME{key:<|"|>text<|"|>,other:1}<tool_call|>"""

    begins = ("<|tool_call>",)
    tokens = ("<tool_call|>", '<|"|>')
    call_end = "<tool_call|>"
    header = Pattern(Part.SPACES, "call:", Part.NAME, before="{")
    quote = '<|"|>'

    def _calls_in(self, text: str) -> list[tuple[str, dict[str, Any]]] | None:
        found = self.header.match(text)
        if not isinstance(found, Match):
            return None
        try:
            reader = _GemmaReader(text, found.end, self.quote)
            arguments = reader.read()
        except (ValueError, RecursionError):
            return None
        return [(found.name, arguments)] if text[reader.position :].strip() == self.call_end else None


class FunctionGemmaParser(GemmaParser):
    """<start_function_call>call:NAME{key:<escape>text<escape>}<end_function_call>"""

    begins = ("<start_function_call>",)
    tokens = ("<end_function_call>", "<escape>")
    call_end = "<end_function_call>"
    quote = "<escape>"


class _GemmaReader:
    """Parses Gemma's notation of values: names of fields are bare, strings are between quote tokens, the rest is JSON.

    Raises ValueError for anything else.
    """

    def __init__(self, text: str, position: int, quote: str) -> None:
        self.position = position
        self._text = text
        self._quote = quote
        self._bare = re.compile(rf"(?:(?!{re.escape(quote)})[^,:{{}}\[\]])+")

    def read(self) -> Any:
        self._skip_spaces()
        if self._takes(self._quote):
            return self._until_quote()
        if self._takes("{"):
            return self._object()
        if self._takes("["):
            return self._list()
        bare = self._word()
        try:
            return read_json(bare)
        except ValueError:
            return _LITERALS.get(bare, bare)

    def _object(self) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        while not self._is_closed("}", bool(fields)):
            key = self._until_quote() if self._takes(self._quote) else self._word()
            if not self._takes(":"):
                raise ValueError("a field without a value")
            fields[key] = self.read()
        return fields

    def _list(self) -> list[Any]:
        values: list[Any] = []
        while not self._is_closed("]", bool(values)):
            values.append(self.read())
        return values

    def _is_closed(self, bracket: str, has_values: bool) -> bool:
        self._skip_spaces()
        if self._takes(bracket):
            return True
        if has_values and not self._takes(","):
            raise ValueError("two values without a comma")
        self._skip_spaces()
        return False

    def _until_quote(self) -> str:
        end = self._text.find(self._quote, self.position)
        if end < 0:
            raise ValueError("a text without an end")
        begin, self.position = self.position, end + len(self._quote)
        return self._text[begin:end]

    def _word(self) -> str:
        found = self._bare.match(self._text, self.position)
        if found is None:
            raise ValueError("nothing where a value was expected")
        self.position = found.end()
        return found.group().strip()

    def _takes(self, text: str) -> bool:
        takes = self._text.startswith(text, self.position)
        self.position += len(text) if takes else 0
        return takes

    def _skip_spaces(self) -> None:
        while self._text[self.position : self.position + 1] in _SPACES:
            self.position += 1


class MiniMaxM3Parser(WholeCallParser):
    """<tool_call> with an <invoke name="NAME"> for each call, in it <KEY>value</KEY> for each argument, lists as <item>
    and objects by their keys; a mark stands before every tag, so that values may have tags.
    """

    mark = "]<]minimax[>["
    begins = (f"{mark}<tool_call>",)
    tokens = (mark, "<tool_call>", "</tool_call>")
    header = Pattern(Part.SPACES, f'{mark}<invoke name="', Part.NAME, before='"')
    call_end = f"{mark}</tool_call>"

    def _calls_in(self, text: str) -> list[tuple[str, dict[str, Any]]] | None:
        # Each piece but the first is a tag and the text after it; the last one ends the calls.
        before, *pieces = text.split(self.mark)
        pieces = pieces[-2::-1]
        if before.strip():
            return None
        calls: list[tuple[str, dict[str, Any]]] = []
        try:
            while pieces:
                name = _INVOKED.fullmatch(pieces.pop())
                if name is None or name[1] not in self._tools:
                    return None
                texts = self._tools[name[1]].text_parameters
                arguments: dict[str, Any] = {}
                while pieces[-1].rstrip() != "</invoke>":
                    key, value = _element(pieces)
                    arguments[key] = value if isinstance(value, str) and key in texts else _converted(value)
                pieces.pop()
                calls.append((name[1], arguments))
        except (IndexError, ValueError, RecursionError):
            return None
        return calls


_INVOKED = re.compile(r'<invoke name="([^"]+)">\s*')
_TAG = re.compile(r"<([^<>/][^<>]*)>")


def _element(pieces: list[str]) -> tuple[str, Any]:
    """The key and the value of the next element: a text, or pairs of keys and values. Raises ValueError and IndexError
    where the tags do not fit."""
    opened = pieces.pop()
    tag = _TAG.match(opened)
    if tag is None:
        raise ValueError("no tag")
    children: list[tuple[str, Any]] = []
    while not pieces[-1].startswith("</"):
        children.append(_element(pieces))
    text = opened[tag.end() :]
    if pieces.pop().rstrip() != f"</{tag[1]}>" or (children and text.strip()):
        raise ValueError("the end of another tag, or text between tags")
    return tag[1], children or text


def _converted(value: Any) -> Any:
    if isinstance(value, str):
        return json.loads(_as_json(value))
    if all(key == "item" for key, _ in value):
        return [_converted(item) for _, item in value]
    return {key: _converted(item) for key, item in value}


class PythonicParser(WholeCallParser):
    """[name(key="value"), ...] from the first character on, or a block of Python after ```tool_code.

    Attributes:
        is_bare: Whether calls without marks are calls.
    """

    begins = ("```tool_code",)
    header = Pattern("[", Part.NAME, before="(")
    call_end = "```"
    is_bare = True

    @classmethod
    def between(cls, begin: str, end: str) -> type[Self]:
        """The parser of the same notation between two marks."""
        header = Pattern(Part.SPACES, ("[", ""), Part.SPACES, Part.NAME, before="(")
        return cls.with_marks(begin, call_end=end, header=header, tokens=(end,), is_bare=False)

    def __init__(self, tools: OfferedTools, call_ids: CallIds) -> None:
        super().__init__(tools, call_ids)
        self._is_block = False
        self._scanner: JsonScanner = PythonScanner()
        if self.is_bare:
            self._begin("", "")

    def _begin(self, marker: str, opening: str) -> None:
        super()._begin(marker, opening)
        self._is_block = bool(marker)

    def _end_of_calls(self) -> int | None:
        if self._is_block:
            return super()._end_of_calls()
        if self._rest[:1] not in ("", "["):
            return 0
        return self._scanner.end(self._rest, self._num_scanned, 0)

    def _calls_in(self, text: str) -> list[tuple[str, dict[str, Any]]] | None:
        source = text.removesuffix(self.call_end).strip()
        # LFM2.5's chat templates write line breaks in strings as they are.
        tree = _parsed(source) or _parsed(_STRING.sub(lambda found: found[0].replace("\n", "\\n"), source))
        if tree is None:
            return None
        calls: list[tuple[str, dict[str, Any]]] = []
        for statement in tree.body:
            value = statement.value if isinstance(statement, ast.Expr) else None
            for node in value.elts if isinstance(value, ast.List) else [value]:
                call = _python_call(node)
                if call is None:
                    return None
                calls.append(call)
        return calls


_STRING = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)


def _parsed(source: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings(action="ignore"):
            return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _python_call(node: ast.AST | None) -> tuple[str, dict[str, Any]] | None:
    """The call of an expression, also inside print(...)."""
    if not isinstance(node, ast.Call):
        return None
    try:
        name = ast.unparse(node.func)
    except RecursionError:
        return None
    if name == "print" and len(node.args) == 1:
        return _python_call(node.args[0])
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        return None
    try:
        return name, {
            keyword.arg or "": ast.literal_eval(_PythonNames().visit(keyword.value)) for keyword in node.keywords
        }
    except (ValueError, TypeError, RecursionError):
        return None


class _PythonNames(ast.NodeTransformer):
    """Replaces true, false and null, which models also write in Python."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(_VALUES[node.id]) if node.id in _VALUES else node


_VALUES = {"true": True, "false": False, "null": None}
# As many templates write past values, in formats that are not Python.
_LITERALS = {"True": True, "False": False, "None": None}


def _as_json(value: str) -> str:
    """A value as JSON: unchanged if it is JSON, converted if it is a literal of Python, else as a string."""
    stripped = value.strip()
    try:
        read_json(stripped)
        return stripped
    except (ValueError, RecursionError):
        pass
    if stripped in _LITERALS or (stripped[:1] in ("[", "{") and len(stripped) <= MAX_WHOLE_CALL):
        try:
            with warnings.catch_warnings(action="ignore"):
                return write_json(ast.literal_eval(stripped))
        except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
            pass
    return write_json(value)
