"""Calls whose arguments are converted to JSON: tags of Qwen3-Coder and GLM, Gemma's notation, Python."""

import ast
import re
import warnings
from typing import Any

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

    A value is the text between its tags: unchanged for a parameter that is a string, JSON for others.

    Attributes:
        headers: The pattern between each of `begins` and the first argument.
        argument: The pattern before a value.
        value_end: The text after a value. A line break before it belongs to it.
        end: The text after the last argument.
    """

    headers: tuple[Pattern, ...]
    argument: Pattern
    value_end: str
    end: Pattern

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
        following = [pattern.match(self._rest, found.end) for pattern in (self.argument, self.end)]
        if Unmatched.MORE in following and not self._is_last:
            return False
        if found.name not in self._tools or following == [Unmatched.NEVER] * 2:
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
            self._is_text = found.name in self._tool.text_parameters
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
        else:
            # Unknown text. The call has no end, and what follows is content.
            self._end_call()
        return True

    def _gave_back(self) -> bool:
        self._give_back()
        return True

    def _read_value(self) -> bool:
        position = self._rest.find(self.value_end, max(self._num_searched - len(self.value_end), 0))
        if position >= 0:
            value = self._rest[:position].removesuffix("\n")
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
            ends = (self.value_end, "\n" + self.value_end)
            certain = self._consume(len(self._rest) - held_length(self._rest, ends))
            self._add_arguments(write_json(certain)[1:-1])
            self._num_searched = 0
        return False


class Qwen3CoderParser(TagCallParser):
    """<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>"""

    begins = ("<tool_call>", "<function=")
    tokens = ("</tool_call>",)
    headers = (Pattern(Part.SPACES, "<function=", Part.NAME, ">"), Pattern(Part.NAME, ">"))
    argument = Pattern(Part.SPACES, "<parameter=", Part.KEY, ">", ("\n", ""))
    value_end = "</parameter>"
    end = Pattern(Part.SPACES, "</function>")
    trailer = Pattern(Part.SPACES, "</tool_call>")


class GlmParser(TagCallParser):
    """<tool_call>NAME<arg_key>KEY</arg_key><arg_value>value</arg_value></tool_call>"""

    begins = ("<tool_call>",)
    tokens = ("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    headers = (Pattern(Part.SPACES, Part.NAME, Part.SPACES, before="<"),)
    argument = Pattern(Part.SPACES, "<arg_key>", Part.KEY, "</arg_key>", Part.SPACES, "<arg_value>")
    value_end = "</arg_value>"
    end = Pattern(Part.SPACES, "</tool_call>")


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


class PythonicParser(WholeCallParser):
    """[name(key="value"), ...] from the first character on, or a block of Python after ```tool_code."""

    begins = ("```tool_code",)
    header = Pattern("[", Part.NAME, before="(")
    call_end = "```"

    def __init__(self, tools: OfferedTools, call_ids: CallIds) -> None:
        super().__init__(tools, call_ids)
        self._is_block = False
        self._scanner: JsonScanner = PythonScanner()
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
        try:
            with warnings.catch_warnings(action="ignore"):
                tree = ast.parse(text.removesuffix(self.call_end).strip())
        except (SyntaxError, ValueError, RecursionError, MemoryError):
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
