"""Calls whose arguments are JSON: an object with the name and the arguments, a list of these, or a name before JSON."""

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
    Unmatched,
    read_json,
    write_json,
)

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
