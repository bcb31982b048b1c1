"""Parsers of calls in each notation: JSON, and tags, Gemma's notation and Python, which are converted to JSON."""

import ast
import contextlib
import json
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

from gateway.text.formats.parser import CallParser, Reading
from gateway.text.formats.scanning import (
    MAX_SPACE,
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

MAX_WHOLE_CALL = 1 << 16
"""The maximum length of calls that are parsed only when they are complete; longer ones are content."""
# Errors of parsing a text that is no call.
_PROBLEMS = SyntaxError, TypeError, ValueError, LookupError, RecursionError, MemoryError
_FIELDS = '("name" or "tool_name")\n:\n"{}"\n,\n("arguments" or "parameters")\n:\n'
ENVELOPE = Pattern(f"\n{{\n{_FIELDS}", Part.NAME, before="{")
"""The header of an object with the name and the arguments of a call, up to the arguments."""
ENVELOPE_WITH_ID = Pattern(f'\n{{\n"tool_call_id"\n:\n"{{}}"\n,\n{_FIELDS}', Part.DETAIL, Part.NAME, before="{")
LIST_BEGIN = Pattern("\n[\n")
_LIST_SEPARATOR = Pattern("\n,\n")


class JsonCallParser(CallParser):
    """After a marker comes a header with the name, then the arguments as JSON, then a trailer.

    A header with { begins an object that ends after the arguments, and one with [ a list of such objects. Arguments are
    delivered as they arrive. If an object has other fields, or fields in another order, the whole object is read first.

    Attributes:
        headers: The possible texts between a marker and the arguments, or the objects of a list.
        item: The header of an object in a list.
        list_end: The optional text after a list.
        separator: The text between two calls that are not in a list; None if each call has a marker of its own.
        trailer: The optional text after such calls.
        has_ids: Whether the text up to the first mark is the id of the call.
    """

    headers: Sequence[Pattern] = (ENVELOPE,)
    item = ENVELOPE
    list_end = Pattern("\n]")
    separator: Pattern | None = None
    trailer = Pattern("")
    has_ids = False

    def _read_call(self, marker: str) -> Reading[None]:
        header, found, is_cut = self.headers[0], Unmatched.NEVER, False
        for header in self.headers:
            found = yield from self._matched(header)
            if isinstance(found, Match):
                break
            is_cut = is_cut or found is Unmatched.MORE
        separator, end = self.separator, self.trailer
        if "[" in header.texts and isinstance(found, Match):
            self._opening += self._consume(found.end)
            header, separator, end = self.item, _LIST_SEPARATOR, self.list_end
            found = yield from self._matched(header)
        elif "[" in self.headers[0].texts and not isinstance(found, Match):
            # The marker may be a word of a text, which ends here.
            name = self._rest.strip()
            names = self._tools if is_cut and len(self.headers) > 1 else ()
            self._end_unread(any(tool.startswith(name) or name.startswith(tool) for tool in names))
            return
        while (yield from self._read_one(header, found)):
            more = Unmatched.NEVER if separator is None else (yield from self._matched(separator))
            if not isinstance(more, Match):
                yield from self._skip(end)
                return
            self._opening = self._consume(more.end)
            found = yield from self._matched(header)

    def _read_one(self, header: Pattern, found: Match | Unmatched) -> Reading[bool]:
        """Reads a call from its header on; returns whether it is complete."""
        if isinstance(found, Match) and found.name in self._tools:
            written = self._consume(found.end).partition("<|")[0].strip()
            self._open_call(found.name, written if self.has_ids else None)
            depth = 1 if "{" in header.texts else 0
            scanner = JsonScanner(depth)
            if not (yield from self._read_json(scanner, depth, self._add_arguments)):
                return False
            # Fields after the arguments are dropped.
            return scanner.depth > depth or not depth or (yield from self._read_json(scanner, 0, lambda _: None))
        end, is_cut = None, found is Unmatched.MORE
        if "{" in header.texts and self._rest[: MAX_SPACE + 1].lstrip(SPACE).startswith("{"):
            scanner = JsonScanner()
            end = yield from self._position(lambda text, start: scanner.end(text, start, 0))
            is_cut = end is None
        call = None if end is None else _call_in(self._rest[:end])
        if end is None or call is None or call[0] not in self._tools:
            self._end_unread(is_cut and (bool(self._opening) or '"name"' in self._rest))
            return False
        self._consume(end)
        self._open_call(call[0])
        self._add_arguments(call[1])
        return True

    def _read_json(self, scanner: JsonScanner, depth: int, use: Callable[[str], None]) -> Reading[bool]:
        """Passes text to `use` until only `depth` brackets are open; returns whether the text reaches that point."""
        while True:
            end = scanner.end(self._rest, 0, depth)
            use(self._consume(len(self._rest) if end is None else end))
            if end is not None or self._is_last:
                return end is not None
            yield


def _call_in(text: str) -> tuple[str, str] | None:
    """The name and the arguments, as JSON, of an object that is a call; None if it is not one."""
    try:
        value: Any = read_json(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    fields = cast(dict[str, Any], value)
    if isinstance(function := fields.get("function"), dict):
        fields = cast(dict[str, Any], function)
    name = fields.get("name", fields.get("tool_name"))
    arguments = fields.get("arguments", fields.get("parameters"))
    if isinstance(arguments, str):
        # Some models write the arguments as a string that contains JSON.
        try:
            arguments = read_json(arguments)
        except (ValueError, RecursionError):
            return None
    if arguments is None:
        arguments = {}
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    try:
        return name, write_json(arguments)
    except (ValueError, RecursionError):
        # A number beyond Python's range.
        return None


class TagCallParser(CallParser):
    """A tag with the name, then for each argument tags with its name and its value.

    A value is the text between its tags: unchanged for a parameter that is a string, JSON for others. Where a tag says
    whether its value is a string, the tag counts.

    Attributes:
        headers: The pattern between each of `begins` and the first argument.
        argument: The pattern before a value.
        value_end: The text after a value.
        padding: An optional text after a value that does not belong to it.
        end: The text after the last argument.
        trailer: The optional text after a call.
    """

    headers: Sequence[Pattern]
    argument: Pattern
    value_end: str
    padding: str
    end: Pattern
    trailer: Pattern

    def _read_call(self, marker: str) -> Reading[None]:
        found = yield from self._matched(self.headers[self.begins.index(marker)])
        if not isinstance(found, Match) or found.name not in self._tools:
            self._end_unread(found is Unmatched.MORE)
            return
        self._consume(found.end)
        self._open_call(found.name)
        self._add_arguments("{")
        texts, separator = self._tools[found.name].text_parameters, ""
        while True:
            found, end = self.argument.match(self._rest), self.end.match(self._rest)
            if isinstance(found, Match):
                self._consume(found.end)
                is_text = found.detail == "true" if found.detail else found.name in texts
                self._add_arguments(f"{separator}{write_json(found.name)}: " + ('"' if is_text else ""))
                separator = ", "
                if not (yield from self._read_value(is_text)):
                    return
            elif Unmatched.MORE in (found, end) and not self._is_last:
                yield
            elif isinstance(end, Match):
                self._add_arguments("}")
                self._consume(end.end)
                break
            elif self._is_last:
                self._consume(len(self._rest) if Unmatched.MORE in (found, end) else 0)
                return
            else:
                # The next mark ends a call whose end is missing. Before any other text the call stays open, as if it
                # was cut off: it must not run with only the arguments that were understood.
                marks, rest = (*self.trailer.texts, *self.begins), self._rest.lstrip(SPACE)
                if not any(mark.startswith(rest) for mark in marks):
                    self._add_arguments("}" if rest.startswith(marks) else "")
                    break
                yield
        yield from self._skip(self.trailer)

    def _read_value(self, is_text: bool) -> Reading[bool]:
        """Delivers a value; returns whether it is complete."""
        num_searched = 0
        while (position := self._rest.find(self.value_end, max(num_searched - len(self.value_end), 0))) < 0:
            num_searched = len(self._rest)
            if self._is_last:
                value = self._consume(num_searched)
                self._add_arguments(write_json(value)[1:-1] if is_text else value)
                return False
            if is_text:
                ends = (self.value_end, self.padding + self.value_end)
                certain = self._consume(num_searched - held_length(self._rest, ends))
                self._add_arguments(write_json(certain)[1:-1])
                num_searched = 0
            yield
        value = self._rest[:position].removesuffix(self.padding)
        self._consume(position + len(self.value_end))
        self._add_arguments(write_json(value)[1:] if is_text else _as_json(value))
        return True


class WholeCallParser(CallParser):
    """Calls that are delivered when they are complete. A subclass parses them.

    Attributes:
        header: The pattern with which a call begins.
        call_end: The text after the calls.
    """

    header: Pattern
    call_end: str

    def _find_end(self, marker: str) -> Callable[[str, int], int | None]:
        """Finds the position after the calls in a text whose first characters were searched before; None if more text
        is needed."""
        end = self.call_end

        def find(text: str, num_seen: int) -> int | None:
            position = text.find(end, max(num_seen - len(end), 0))
            return None if position < 0 else position + len(end)

        return find

    def _calls_in(self, text: str) -> list[tuple[str, dict[str, Any]]]:
        """The name and the arguments of each call in a text. Raises one of _PROBLEMS if the text is not calls."""
        raise NotImplementedError

    def _read_call(self, marker: str) -> Reading[None]:
        end = yield from self._position(self._find_end(marker))
        begun = self.header.match(self._rest) if end is None else Unmatched.NEVER
        calls: list[tuple[str, str]] = []
        # Parsing a long call at once would block the event loop.
        # The end may be missing after whole calls: a model may end its turn in its place.
        length = len(self._rest) if end is None else end
        if length <= MAX_WHOLE_CALL:
            with contextlib.suppress(*_PROBLEMS):
                calls = [(name, write_json(arguments)) for name, arguments in self._calls_in(self._rest[:length])]
        if not calls or any(name not in self._tools for name, _ in calls):
            is_known = isinstance(begun, Match) and begun.name in self._tools
            self._end_unread(begun is Unmatched.MORE or is_known)
            return
        self._consume(length)
        for name, arguments in calls:
            self._open_call(name)
            self._add_arguments(arguments)


class BracedParser(WholeCallParser):
    """call:NAME{key:"text",other:1}: names of fields are bare, strings are between quotes of the format, and the rest
    is JSON. Further calls may follow, after spaces or a comma.

    Attributes:
        quote: The quote around strings.
    """

    header = Pattern("\ncall:{}", Part.NAME, before="{")
    quote: str

    def _calls_in(self, text: str) -> list[tuple[str, dict[str, Any]]]:
        quote = re.escape(self.quote)
        parts = re.compile(
            rf"{quote}(?P<text>.*?){quote}|(?P<bare>(?:(?!{quote})[^,:{{}}\[\]])+)|[,:{{}}\[\]]", re.DOTALL
        )
        rest, calls = text.rstrip(SPACE).removesuffix(self.call_end), list[tuple[str, dict[str, Any]]]()
        while rest.strip():
            found = self.header.match(rest)
            if not isinstance(found, Match):
                raise ValueError("no call")
            written, end = self._read_object(rest, found.end, parts)
            calls.append((found.name, read_json(written)))
            rest = rest[end:].lstrip().removeprefix(",")
        return calls

    def _read_object(self, text: str, position: int, parts: re.Pattern[str]) -> tuple[str, int]:
        """The object that begins at a position, as JSON, and the position after it."""
        written, depth = list[str](), 0
        while depth or not written:
            part = parts.match(text, position)
            if part is None:
                raise ValueError("a text without an end")
            position = part.end()
            bare = (part["bare"] or "").strip()
            if part["text"] is not None or (bare and text.startswith(":", position)):
                written.append(json.dumps(bare or part["text"]))
            elif bare:
                written.append(_as_json(bare))
            elif part["bare"] is None:
                depth += (part[0] in "{[") - (part[0] in "}]")
                written.append(part[0])
        return "".join(written), position


class MiniMaxM3Parser(WholeCallParser):
    """<tool_call> with an <invoke name="NAME"> for each call, in it <KEY>value</KEY> for each argument, lists as <item>
    and objects by their keys; a mark stands before every tag, so that values may have tags.
    """

    mark = "]<]minimax[>["
    begins = (f"{mark}<tool_call>",)
    tokens = (mark, "<tool_call>", "</tool_call>")
    header = Pattern(f'\n{mark}<invoke name="{{}}', Part.NAME, before='"')
    call_end = f"{mark}</tool_call>"

    def _calls_in(self, text: str) -> list[tuple[str, dict[str, Any]]]:
        # Each piece but the first is a tag and the text after it; the last one ends the calls.
        before, *pieces = text.split(self.mark)
        pieces = pieces[-2::-1]
        if before.strip():
            raise ValueError("text before the calls")
        calls: list[tuple[str, dict[str, Any]]] = []
        while pieces:
            name = _INVOKED.fullmatch(pieces.pop())
            if name is None:
                raise ValueError("no call")
            texts = self._tools[name[1]].text_parameters
            arguments: dict[str, Any] = {}
            while pieces[-1].rstrip() != "</invoke>":
                key, value = _element(pieces)
                arguments[key] = value if isinstance(value, str) and key in texts else _converted(value)
            pieces.pop()
            calls.append((name[1], arguments))
        return calls


_INVOKED = re.compile(r'<invoke name="([^"]+)">\s*')
_TAG = re.compile(r"<([^<>/][^<>]*)>")


def _element(pieces: list[str]) -> tuple[str, Any]:
    """The key and the value of the next element: a text, or pairs of keys and values. Raises ValueError and IndexError
    if the tags do not match."""
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
    """[name(key="value"), ...] from the first character on, or a block of Python after ```tool_code."""

    begins = ("```tool_code",)
    header = Pattern("[{}", Part.NAME, before="(")
    call_end = "```"
    is_bare = True

    def _find_end(self, marker: str) -> Callable[[str, int], int | None]:
        if marker:
            return super()._find_end(marker)
        scanner = PythonScanner()
        return lambda text, num_seen: scanner.end(text, num_seen, 0) if text[:1] in ("", "[") else 0

    def _calls_in(self, text: str) -> list[tuple[str, dict[str, Any]]]:
        source = text.removesuffix(self.call_end).strip()
        with warnings.catch_warnings(action="ignore"):
            try:
                tree = ast.parse(source)
            except (SyntaxError, ValueError, RecursionError, MemoryError):
                # LFM2.5's chat templates write line breaks in strings as they are.
                tree = ast.parse(_STRING.sub(lambda found: found[0].replace("\n", "\\n"), source))
        values = [statement.value if isinstance(statement, ast.Expr) else None for statement in tree.body]
        return [
            _python_call(node) for value in values for node in (value.elts if isinstance(value, ast.List) else [value])
        ]


_STRING = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)


def _python_call(node: ast.AST | None) -> tuple[str, dict[str, Any]]:
    """The call of an expression, also inside print(...). Raises one of _PROBLEMS if it is not one."""
    match node:
        case ast.Call(ast.Name("print"), [inner]):
            return _python_call(inner)
        case ast.Call(function, [], keywords) if all(keyword.arg for keyword in keywords):
            values = (ast.literal_eval(_PythonNames().visit(keyword.value)) for keyword in keywords)
            return ast.unparse(function), dict(zip((keyword.arg or "" for keyword in keywords), values, strict=True))
        case _:
            raise ValueError("no call")


class _PythonNames(ast.NodeTransformer):
    """Replaces true, false and null, which models also write in Python."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(_VALUES[node.id]) if node.id in _VALUES else node


_VALUES = {"true": True, "false": False, "null": None}
# Python's constants, which many templates write in past values, in formats that are not Python.
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
