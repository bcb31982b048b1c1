"""Derives how a chat template writes tool calls, by rendering two calls of known names and arguments.

The text of the calls is cut into parts that repeat:

    section_open  call_open CALL call_close  separator  call_open CALL call_close  section_close

CALL is the variable part, in one of the layouts of `Layout`.
"""

import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple, cast

from gateway.text.formats.scanning import MARK, SPACE

ID, INDEX = "\ue000", "\ue001"
"""Characters in a text of a shape that mark the place of a call's id, and of its position among the calls."""
_CONTENT = "Quire answers 7"
_FIRST, _LAST = "Aq1 b", "Cq2\nDq3"
_KEY: dict[str, Any] = {"quire_key": {"type": "boolean", "description": "d"}}
_OBJECT = {"type": "object", "properties": _KEY, "required": [], "additionalProperties": {"type": "boolean"}}
# Values and schemas in the order of their names, since some templates sort them; a string begins and ends.
_PARAMETERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "quire_a": (_FIRST, {"type": "string"}),
    "quire_b": (70417, {"type": "integer"}),
    "quire_c": (True, {"type": "boolean"}),
    "quire_d": (None, {"type": "string"}),
    "quire_e": ([1, "Eq4"], {"type": "array", "items": {"type": "string"}}),
    "quire_f": ({"quire_key": False}, _OBJECT),
    "quire_g": (_LAST, {"type": "string"}),
}
_VALUES = {name: value for name, (value, _) in _PARAMETERS.items()}
# Marks are compared whole: <a_begin> and <a_end> have no common beginning.
_ATOM = re.compile(f"{MARK.pattern}|.", re.DOTALL)
# The marks of reasoning without text, which some templates write before calls.
_NO_REASONING = re.compile(r"(\s*<[^<>\s]*think[^<>\s]*>){1,2}", re.IGNORECASE)
_MARK = re.compile(r"<[^<>\s]{1,64}>")
_BEGIN_OF_MARK = re.compile(r"<[^<>\s]{0,64}\Z")
# Mistral's templates accept only ids of nine letters and digits; Kimi K2's template writes an id in place of a name.
_PLAIN_ID, _ID_WITH_NAME = "quireId0{1}", "functions.{0}:{1}"


class Layout(Enum):
    """The arrangement of a call's name and arguments."""

    ENVELOPE = "one JSON object with both"
    NAMED = "the name, a text, and the arguments as JSON"
    TAGS = "the name, then marks around the name and the value of each argument"
    PYTHON = "name(key=value, ...)"
    BRACED = "name{key:value,...}"


class Slot(Enum):
    """The kinds of fields of an envelope."""

    NAME = "the name of the tool"
    ARGUMENTS = "the arguments"
    ID = "the id of the call"
    INDEX = "the position of the call"


class ProbeCall(NamedTuple):
    """A call that is rendered to see how the template writes it."""

    name: str
    arguments: dict[str, Any]
    id: str


PROBE_TOOLS = ("quire_tool_a", "quire_tool_b")
PROBE_TEXTS = frozenset(("quire_a", "quire_g"))
"""The parameters of the tools that are strings."""
PROBE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {name: schema | {"description": "d"} for name, (_, schema) in _PARAMETERS.items()},
    "required": [],
}
"""The schema of both tools."""
# Some templates refuse or damage arguments that are not strings.
_PROBE_ARGUMENTS = (_VALUES, {name: _VALUES[name] for name in sorted(PROBE_TEXTS)})


Render = Callable[[str, Sequence[ProbeCall]], str | None]
"""Renders a user's message and an assistant's with a content and calls; None if the template refuses."""


@dataclass(frozen=True, slots=True)
class TagShape:
    """The texts between the parts of a call that has marks around each argument. Between `name_close` and the
    arguments, and after them, stands nothing else.

    Attributes:
        open: Before the name of an argument.
        key_close: Between the name and a value that is a string.
        other_close: Between the name and any other value.
        close: After a value.
        separator: Between two arguments.
        quote: Around strings; part of neither `key_close` nor `close`.
        constants: The texts of true and null.
    """

    open: str
    key_close: str
    other_close: str
    close: str
    separator: str = ""
    quote: str = ""
    constants: tuple[str, str] = ("true", "null")

    @property
    def spelled(self) -> Mapping[str, str]:
        """The constants of JSON as the template writes them."""
        true, null = self.constants
        return {"true": true, "false": {"True": "False"}.get(true, "false"), "null": null}


@dataclass(frozen=True, slots=True)
class CallShape:
    """How calls are written. The texts are exact, with the places of ID and INDEX.

    Attributes:
        fields: The fields of an envelope in their order: a key and its slot, or a key and a fixed value as JSON.
        name_close: Between the name and the arguments, or before the first argument.
        tags: For TAGS, PYTHON and BRACED.
        is_parallel: Whether the template writes several calls in one message.
    """

    layout: Layout
    section_open: str = ""
    call_open: str = ""
    call_close: str = ""
    separator: str = ""
    section_close: str = ""
    fields: tuple[tuple[str, Slot | str], ...] = ()
    name_close: str = ""
    tags: TagShape | None = None
    is_parallel: bool = True


@dataclass(frozen=True, slots=True)
class RenderedCalls:
    """The text that a template renders for calls.

    Attributes:
        text: From the beginning of the answer to its end, where both can be seen.
        shape: None if the calls are in no known layout.
    """

    text: str
    calls: tuple[ProbeCall, ...]
    shape: CallShape | None


def written_calls(shape: CallShape, calls: Sequence[tuple[str, str, str]]) -> str:
    """The text of calls, each given by a name, arguments as JSON and an id. Arguments that are not an object are
    written unchanged."""
    texts = [
        f"{shape.call_open}{_written(shape, name, arguments, index)}{shape.call_close}".replace(ID, call_id).replace(
            INDEX, str(index)
        )
        for index, (name, arguments, call_id) in enumerate(calls)
    ]
    return f"{shape.section_open}{shape.separator.join(texts)}{shape.section_close}"


def _written(shape: CallShape, name: str, arguments: str, index: int) -> str:
    arguments = arguments or "{}"
    if shape.layout is Layout.ENVELOPE:
        slots = {Slot.NAME: json.dumps(name), Slot.ARGUMENTS: arguments, Slot.ID: f'"{ID}"', Slot.INDEX: str(index)}
        fields = ((key or name, slots[slot] if isinstance(slot, Slot) else slot) for key, slot in shape.fields)
        return f"{{{', '.join(f'{json.dumps(key)}: {value}' for key, value in fields)}}}"
    tags = shape.tags
    if tags is None:
        return f"{name}{shape.name_close}{arguments}"
    try:
        values: Any = json.loads(arguments)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        return f"{name}{shape.name_close}{arguments}"
    pairs: list[str] = []
    for key, value in cast(dict[str, Any], values).items():
        text = json.dumps(value, ensure_ascii=False)
        if not isinstance(value, str):
            text = tags.spelled.get(text, text)
        elif shape.layout is not Layout.PYTHON:
            text = f"{tags.quote}{value}{tags.quote}"
        key_close = tags.key_close if isinstance(value, str) else tags.other_close
        pairs.append(f"{tags.open}{key}{key_close}{text}{tags.close}")
    return f"{name}{shape.name_close}{tags.separator.join(pairs)}"


def rendered_calls(render: Render) -> RenderedCalls | None:
    """Renders calls by a template; None if it leaves them out."""
    plain = render(_CONTENT, ())
    without_names = None
    for arguments in _PROBE_ARGUMENTS:
        for count in (2, 1):
            for made in (_PLAIN_ID, _ID_WITH_NAME):
                names = enumerate(PROBE_TOOLS[:count])
                calls = tuple(ProbeCall(name, arguments, made.format(name, index)) for index, name in names)
                whole = render("", calls)
                if whole is None or _FIRST not in whole:
                    continue
                text = _cut(whole, plain)
                if all(call.name in text for call in calls):
                    shape, end = _shape(text, calls)
                    return RenderedCalls(text[:end], calls, shape)
                without_names = without_names or RenderedCalls(text, calls, None)
    return without_names


def _cut(whole: str, plain: str | None) -> str:
    """The calls in a rendering, by comparison with the rendering of a message without calls."""
    atoms = _ATOM.findall(whole)
    if plain is None:
        return whole
    others = _ATOM.findall(plain)
    begin = num_common(atoms, others)
    end = num_common(atoms[begin:][::-1], others[begin:][::-1])
    text = "".join(atoms[begin : len(atoms) - end])
    if (cut := _BEGIN_OF_MARK.search(text)) is not None:
        text = text[: cut.start()]
    if (reasoning := _NO_REASONING.match(text)) is not None:
        text = text[reasoning.end() :]
    return text


def num_common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """The length of the common beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((count for count, (left, right) in pairs if left != right), min(len(one), len(other)))


class _Core(NamedTuple):
    """The variable part of one call: its position, and its part of the shape."""

    begin: int
    end: int
    shape: CallShape


def _shape(rendered: str, calls: Sequence[ProbeCall]) -> tuple[CallShape | None, int]:
    """The shape of the calls, and the position of their end: marks that end the turn may follow."""
    text = rendered
    for index, call in enumerate(calls):
        if call.id != _ID_WITH_NAME.format(call.name, index):
            text = text.replace(call.id, ID)
    cores: list[_Core] = []
    for index, call in enumerate(calls):
        after = cores[-1].end if cores else 0
        before = text.find(calls[index + 1].name) if index + 1 < len(calls) else len(text)
        core = _envelope(text, after, call, index) or _named(text, after, call, index)
        core = core or _tagged(text, after, before, call)
        if core is None:
            return None, len(rendered)
        cores.append(core)
    first, last = cores[0], cores[-1]
    head, tail = text[: first.begin].lstrip(SPACE), text[last.end :].rstrip(SPACE)
    section_open = separator = section_close = ""
    if len(calls) == 1:
        call_open, call_close = head, _as_many_marks(tail, head)
    else:
        between = text[first.end : last.begin]
        call_open = _common_end(head, between)
        call_close = _common_beginning(between[: len(between) - len(call_open)], tail)
        separator = between[len(call_close) : len(between) - len(call_open)]
        section_open = head[: len(head) - len(call_open)]
        section_close = _as_many_marks(tail[len(call_close) :], section_open) if section_open else ""
    end = len(rendered) - (len(text) - last.end) + len(call_close) + len(section_close)
    around = CallShape(first.shape.layout, section_open, call_open, call_close, separator, section_close)
    if first.shape != last.shape or "quire" in repr((around, replace(first.shape, fields=()))):
        # A part repeats what varies, or the calls are written in different ways.
        return None, end
    own = {name: getattr(first.shape, name) for name in ("fields", "name_close", "tags")}
    return replace(around, **own, is_parallel=len(calls) > 1), end


def _as_many_marks(close: str, opening: str) -> str:
    """A closing text without the following marks that end the turn: it has no more marks than the opening text."""
    count = len(_MARK.findall(opening))
    further = [found.start() for found in _MARK.finditer(close)][count:]
    return (close[: further[0]] if further else close).rstrip(SPACE)


def _common_beginning(one: str, other: str) -> str:
    atoms = _ATOM.findall(one)
    return "".join(atoms[: num_common(atoms, _ATOM.findall(other))])


def _common_end(one: str, other: str) -> str:
    atoms = _ATOM.findall(one)
    return "".join(atoms[len(atoms) - num_common(atoms[::-1], _ATOM.findall(other)[::-1]) :])


def _objects(text: str, begin: int, end: int) -> list[tuple[int, int, dict[str, Any]]]:
    """The JSON objects that begin in a part of a text."""
    objects: list[tuple[int, int, dict[str, Any]]] = []
    for found in re.finditer(r"\{", text[begin:end]):
        with contextlib.suppress(ValueError, RecursionError):
            value, after = json.JSONDecoder().raw_decode(text, begin + found.start())
            objects.append((begin + found.start(), after, value))
    return objects


def _envelope(text: str, after: int, call: ProbeCall, index: int) -> _Core | None:
    place = text.find(call.name, after)
    for begin, end, value in reversed(_objects(text, after, place)):
        if call.arguments not in value.values() or end < place:
            continue
        fields: list[tuple[str, Slot | str]] = []
        for key, held in value.items():
            slot: Slot | str = json.dumps(held)
            if held == call.arguments:
                slot = Slot.ARGUMENTS
                key = "" if key == call.name else key
            elif held in (call.name, ID):
                slot = Slot.NAME if held == call.name else Slot.ID
            elif str(held) == str(index):
                slot = Slot.INDEX
            fields.append((key, slot))
        return _Core(begin, end, CallShape(Layout.ENVELOPE, fields=tuple(fields)))
    return None


def _named(text: str, after: int, call: ProbeCall, index: int) -> _Core | None:
    begin = text.find(call.name, after)
    name_end = begin + len(call.name)
    for place, end, value in _objects(text, name_end, name_end + 256)[:1]:
        if value == call.arguments:
            name_close = re.sub(rf"(?<!\w){index}(?!\w)", INDEX, text[name_end:place])
            return _Core(begin, end, CallShape(Layout.NAMED, name_close=name_close))
    return None


def _tagged(text: str, after: int, before: int, call: ProbeCall) -> _Core | None:
    """A call with marks around each argument, in a text up to `before`."""
    begin = text.find(call.name, after)
    before_first, *parts = re.split(f"({'|'.join(call.arguments)})", text[begin + len(call.name) : before])
    # The text after each key up to the next one. Some templates leave out nulls.
    values = dict(zip(parts[::2], parts[1::2], strict=True))
    if (
        list(values) != parts[::2]
        or [*values][:1] + [*values][1:][-1:] != [*call.arguments][:: len(call.arguments) - 1]
    ):
        return None
    key_close, is_first, until_next = values["quire_a"].partition(_FIRST)
    before_last, is_last, tail = values["quire_g"].partition(_LAST.partition("\n")[2])
    if not is_first or not is_last or not before_last.startswith(key_close + _LAST[:3]):
        return None
    other_close = key_close.rstrip("\"'")
    if "quire_b" in values:
        other_close = values["quire_b"].partition(str(_VALUES["quire_b"]))[0]
    quote = key_close.removeprefix(other_close) if key_close.startswith(other_close) else ""
    if not until_next.startswith(quote):
        return None
    until_next, tail = until_next[len(quote) :], tail[len(quote) :]
    close = _common_beginning(until_next, tail)
    opened = _common_end(until_next[len(close) :], before_first)
    name_close = before_first[: len(before_first) - len(opened)]
    constants: list[str] = []
    for key, usual in (("quire_c", "true"), ("quire_d", "null")):
        constant, is_next, _ = values.get(key, "")[len(other_close) :].partition(until_next or usual)
        constants.append(constant if is_next and until_next and len(constant) <= len("False") else usual)
    separator = until_next[len(close) : len(until_next) - len(opened)]
    tags = TagShape(
        opened, key_close.removesuffix(quote), other_close, close, separator, quote, (constants[0], constants[1])
    )
    layout = _LAYOUTS.get((name_close.strip(), other_close.strip()), Layout.TAGS)
    return _Core(begin, before - len(tail) + len(close), CallShape(layout, name_close=name_close, tags=tags))


_LAYOUTS = {("(", "="): Layout.PYTHON, ("{", ":"): Layout.BRACED}
