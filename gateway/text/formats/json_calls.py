"""Calls whose arguments are JSON: the formats of Hermes and Qwen, Llama 3, Mistral and DeepSeek, and a plain list."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Self, cast

from gateway.text.formats.parser import CallIds, OfferedTools, StagedCallParser
from gateway.text.formats.scanning import (
    MAX_SPACE,
    SPACE,
    JsonScanner,
    Match,
    Part,
    Pattern,
    Unmatched,
    read_json,
    write_json,
)

# An object with the name and the arguments of a call, up to the arguments.
_ENVELOPE = (
    *(
        "{",
        Part.SPACES,
        ('"name"', '"tool_name"'),
        Part.SPACES,
        ":",
        Part.SPACES,
        '"',
        Part.NAME,
        '"',
        Part.SPACES,
        ",",
    ),
    *(Part.SPACES, ('"arguments"', '"parameters"'), Part.SPACES, ":", Part.SPACES),
)


class JsonCallParser(StagedCallParser):
    """After a marker comes a header with the name, then the arguments as JSON, then a trailer.

    Arguments are delivered as they arrive. If the header is an object with other fields, or with fields in another
    order, the whole object is read first.

    Attributes:
        header: The pattern between the marker and the arguments.
        is_envelope: Whether the header begins an object that ends after the arguments.
        separator: The text between two calls; None where each call has a marker of its own.
    """

    header: Pattern = Pattern(Part.SPACES, *_ENVELOPE, before="{")
    is_envelope = True
    separator: Pattern | None = None

    @classmethod
    def between(cls, begin: str, end: str, **attributes: Any) -> type[Self]:
        """The parser of the same notation between two marks."""
        header: Pattern = attributes.get("header", cls.header)
        tokens = (end, *(text for text in header.texts if "<" in text))
        return cls.with_marks(begin, **({"tokens": tokens, "trailer": cls._trailer_of(end)} | attributes))

    @classmethod
    def _trailer_of(cls, end: str) -> Pattern:
        return Pattern(Part.SPACES, end)

    def __init__(self, tools: OfferedTools, call_ids: CallIds) -> None:
        super().__init__(tools, call_ids)
        self._scanner = JsonScanner()
        self._num_scanned = 0

    def _read_header(self) -> bool:
        return self._match_header(self.header)

    def _match_header(self, header: Pattern) -> bool:
        found = header.match(self._rest)
        if found is Unmatched.MORE and not self._is_last:
            return False
        if isinstance(found, Match) and found.name in self._tools:
            self._open_call(found.name, self._written_id(self._consume(found.end), found.detail))
            self._scanner = JsonScanner(depth=1 if self.is_envelope else 0)
            self._stage = self._read_arguments
        elif self.is_envelope and self._rest[: MAX_SPACE + 1].lstrip(SPACE).startswith("{"):
            self._scanner, self._num_scanned = JsonScanner(), 0
            self._stage = self._read_object
        elif found is Unmatched.MORE and self._is_begun:
            return self._drop()
        else:
            self._give_back()
        return True

    @property
    def _is_begun(self) -> bool:
        """Whether the text is the beginning of a call that does not reach the arguments yet."""
        return bool(self._opening) or '"name"' in self._rest

    def _written_id(self, header: str, detail: str) -> str | None:
        """The id that the model writes with a call; None if it writes none. `detail` is the header's further word."""
        return None

    def _read_arguments(self) -> bool:
        depth = 1 if self.is_envelope else 0
        end = self._scanner.end(self._rest, 0, depth)
        self._add_arguments(self._consume(len(self._rest) if end is None else end))
        if end is None:
            return self._end_if_last()
        is_closed = self._scanner.depth <= depth
        self._stage = self._read_envelope_end if self.is_envelope and is_closed else self._read_trailer
        return True

    def _read_envelope_end(self) -> bool:
        """Drops the fields of the object after the arguments."""
        end = self._scanner.end(self._rest, 0, 0)
        self._consume(len(self._rest) if end is None else end)
        if end is None:
            return self._end_if_last()
        self._stage = self._read_trailer
        return True

    def _read_object(self) -> bool:
        end = self._scanner.end(self._rest, self._num_scanned, 0)
        self._num_scanned = len(self._rest)
        if end is None and not self._is_last:
            return False
        if end is None and self._is_begun:
            return self._drop()
        call = None if end is None else _call_in(self._rest[:end])
        if end is None or call is None or call[0] not in self._tools:
            self._give_back()
            return True
        self._consume(end)
        self._open_call(call[0])
        self._add_arguments(call[1])
        self._stage = self._read_trailer
        return True

    def _read_trailer(self) -> bool:
        found = Unmatched.NEVER if self.separator is None else self.separator.match(self._rest)
        if found is Unmatched.MORE and not self._is_last:
            return False
        if not isinstance(found, Match):
            return super()._read_trailer()
        self._opening = self._consume(found.end)
        self._stage = self._read_header
        return True

    def _end_if_last(self) -> bool:
        if self._is_last:
            self._end_call()
        return False


class HermesParser(JsonCallParser):
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>"""

    begins = ("<tool_call>",)
    tokens = ("</tool_call>",)
    trailer = Pattern(Part.SPACES, "</tool_call>")


class DeepSeekV3Parser(JsonCallParser):
    """<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME, then the arguments in a fence of Markdown."""

    begins = ("<｜tool▁call▁begin｜>",)
    dropped = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    tokens = ("<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
    header = Pattern("function<｜tool▁sep｜>", Part.NAME, Part.SPACES, "```json", Part.SPACES, before="{")
    trailer = Pattern(Part.SPACES, ("```", ""), Part.SPACES, "<｜tool▁call▁end｜>")
    is_envelope = False


class DeepSeekV31Parser(DeepSeekV3Parser):
    """<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>"""

    header = Pattern(Part.NAME, "<｜tool▁sep｜>", Part.SPACES, before="{")
    trailer = Pattern(Part.SPACES, "<｜tool▁call▁end｜>")


class KimiK2Parser(JsonCallParser):
    """<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>

    The chat template writes past calls and their results with their ids, which are what stands before the arguments.
    """

    begins = ("<|tool_call_begin|>",)
    dropped = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    tokens = ("<|tool_call_argument_begin|>", "<|tool_call_end|>")
    header = Pattern(
        *(Part.SPACES, ("functions.", ""), Part.NAME, ":", Part.NAME, Part.SPACES, "<|tool_call_argument_begin|>"),
        Part.SPACES,
        before="{",
    )
    trailer = Pattern(Part.SPACES, "<|tool_call_end|>")
    is_envelope = False

    def __init__(self, tools: OfferedTools, call_ids: CallIds) -> None:
        super().__init__(tools, call_ids)
        self._ids: set[str] = set()

    def _written_id(self, header: str, detail: str) -> str | None:
        written = detail or header.partition("<|")[0].strip()
        if written in self._ids:
            return None
        self._ids.add(written)
        return written


class JsonListParser(JsonCallParser):
    """[{"name": ..., "arguments": {...}}, ...] and nothing else, from the first character on."""

    header = Pattern(*_ENVELOPE, before="{")
    list_begin = Pattern(Part.SPACES, "[", Part.SPACES)
    separator = Pattern(Part.SPACES, ",", Part.SPACES)
    trailer = Pattern(Part.SPACES, "]")

    @classmethod
    def _trailer_of(cls, end: str) -> Pattern:
        return Pattern(Part.SPACES, "]", Part.SPACES, (end, ""))

    def __init__(self, tools: OfferedTools, call_ids: CallIds) -> None:
        super().__init__(tools, call_ids)
        if not self.begins:
            self._begin("", "")

    def _begin(self, marker: str, opening: str) -> None:
        super()._begin(marker, opening)
        self._stage = self._read_list_begin

    def _read_list_begin(self) -> bool:
        found = self.list_begin.match(self._rest)
        if found is Unmatched.MORE and not self._is_last:
            return False
        if isinstance(found, Match):
            self._opening += self._consume(found.end)
            self._stage = self._read_header
        else:
            self._give_back()
        return True


class ListOrNamedParser(JsonListParser):
    """A list of calls, or a call whose name stands before its arguments.

    Attributes:
        named: The possible headers of a call that is not in a list.
        named_trailer: The optional text after such a call.
    """

    named: Sequence[Pattern]
    named_trailer = Pattern()

    def _begin(self, marker: str, opening: str) -> None:
        super()._begin(marker, opening)
        self._stage = self._read_kind

    def _read_kind(self) -> bool:
        for header in (self.list_begin, *self.named):
            found = header.match(self._rest)
            if found is Unmatched.MORE and not self._is_last:
                return False
            if isinstance(found, Match):
                self.is_envelope = header is self.list_begin
                self._stage = self._read_list_begin if self.is_envelope else partial(self._match_header, header)
                return True
        name = self._rest.strip()
        if any(tool.startswith(name) or name.startswith(tool) for tool in self._tools):
            return self._drop()
        self._give_back()
        return True

    def _read_trailer(self) -> bool:
        return super()._read_trailer() if self.is_envelope else self._end_after(self.named_trailer)


class MistralParser(ListOrNamedParser):
    """[TOOL_CALLS] before a list of calls, or before each NAME[ARGS]{...}."""

    begins = ("[TOOL_CALLS]",)
    tokens = ("[ARGS]", "[CALL_ID]")
    named = (
        Pattern(Part.SPACES, Part.NAME, ("[ARGS]", ""), Part.SPACES, before="{"),
        Pattern(Part.SPACES, Part.NAME, "[CALL_ID]", Part.NAME, "[ARGS]", Part.SPACES, before="{"),
    )


class HunyuanParser(ListOrNamedParser):
    """<tool_calls> before a list of calls, or before each <tool_call>NAME and a fence of Markdown with arguments."""

    begins = ("<tool_calls>", "<tool_call>")
    tokens = ("</tool_call>", "</tool_calls>")
    named = (Pattern(Part.SPACES, ("<tool_call>", ""), Part.NAME, Part.SPACES, "```json", Part.SPACES, before="{"),)
    named_trailer = Pattern(
        *(Part.SPACES, ("```", ""), Part.SPACES, ("</tool_call>", ""), Part.SPACES, ("</tool_calls>", ""))
    )
    trailer = Pattern(Part.SPACES, "]", Part.SPACES, ("</tool_calls>", ""))


class GraniteParser(JsonListParser):
    """<|tool_call|> before a list of calls."""

    begins = ("<|tool_call|>", "<tool_call>")


class Phi4MiniParser(JsonListParser):
    """functools[{"name": ..., "arguments": {...}}, ...], or such a list between marks of its own."""

    begins = ("functools", "<|tool_call|>")
    tokens = ("<|/tool_call|>",)
    trailer = Pattern(Part.SPACES, "]", Part.SPACES, ("<|/tool_call|>", ""))


class Llama3Parser(JsonCallParser):
    """{"name": ..., "parameters": {...}} from the first character on, or after <|python_tag|>; between calls a
    semicolon. Llama 4 writes <|python_start|><|python_end|> before them."""

    begins = ("<|python_tag|>", "<|python_end|>")
    dropped = ("<|python_start|>",)
    separator = Pattern(Part.SPACES, (";", ""), Part.SPACES, before="{")

    def __init__(self, tools: OfferedTools, call_ids: CallIds) -> None:
        super().__init__(tools, call_ids)
        self._begin("", "")


_WITH_ID = Pattern(
    *("{", Part.SPACES, '"tool_call_id"', Part.SPACES, ":", Part.SPACES, '"', Part.DETAIL, '"', Part.SPACES, ","),
    *(Part.SPACES, *_ENVELOPE[2:]),
    before="{",
)
_COHERE = JsonListParser.between(
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    header=_WITH_ID,
    dropped=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
)
JSON_CALLS: Mapping[str, type[JsonCallParser]] = {
    "gigachat3": HermesParser.with_marks(
        *("<|function_call|>", "function call<|role_sep|>"),
        dropped=("<|message_sep|>",),
        tokens=("<|role_sep|>",),
        trailer=Pattern(),
    ),
    # The chat template writes past calls and their results with their ids, which stand before the names.
    "solar_open": KimiK2Parser.between(
        "<|tool_call:begin|>",
        "<|tool_call:end|>",
        header=Pattern.of("{}<|tool_call:name|>{}<|tool_call:args|>\n", Part.DETAIL, Part.NAME, before="{"),
        dropped=("<|tool_calls|>", "<|calls|>"),
    ),
    "hunyuan_a13b": HunyuanParser,
    "cohere_command3": _COHERE,
    "cohere_command4": _COHERE,
    "command_r": JsonListParser.with_marks(
        "Action:",
        list_begin=Pattern(Part.SPACES, ("```json", ""), Part.SPACES, "[", Part.SPACES),
        trailer=Pattern(Part.SPACES, "]", Part.SPACES, ("```", "")),
    ),
}
"""Formats that differ by their marks."""


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
        # A number beyond all that Python has.
        return None
