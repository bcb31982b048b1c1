"""How a chat template writes tool calls: derived from what it renders for two calls of known names and arguments.

The text of the calls is cut into parts that repeat:

    section_open  call_open CALL call_close  separator  call_open CALL call_close  section_close

CALL is the variable part, in one of the layouts of `Layout`.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, cast

from gateway.text.formats.scanning import MARK, SPACE

ID, INDEX = "\ue000", "\ue001"
"""In a text of a shape: the place of a call's id, and of its position among the calls."""
_CONTENT = "Quire answers 7"
_FIRST, _LAST = "Aq1 b", "Cq2\nDq3"
# In the order of their names, since some templates sort them; a string begins and ends.
_VALUES: dict[str, Any] = {
    "quire_a": _FIRST,
    "quire_b": 70417,
    "quire_c": True,
    "quire_d": None,
    "quire_e": [1, "Eq4"],
    "quire_f": {"quire_key": False},
    "quire_g": _LAST,
}
_KEY: dict[str, Any] = {"quire_key": {"type": "boolean", "description": "d"}}
_TYPES: tuple[dict[str, Any], ...] = (
    {"type": "string"},
    {"type": "integer"},
    {"type": "boolean"},
    {"type": "string"},
    {"type": "array", "items": {"type": "string"}},
    {"type": "object", "properties": _KEY, "required": [], "additionalProperties": {"type": "boolean"}},
    {"type": "string"},
)
# Marks are compared whole: <a_begin> and <a_end> have no common beginning.
_ATOM = re.compile(f"{MARK.pattern}|.", re.DOTALL)
# The marks of reasoning without text, which some templates write before calls.
_NO_REASONING = re.compile(r"(\s*<[^<>\s]*think[^<>\s]*>){1,2}", re.IGNORECASE)
_MARK = re.compile(r"<[^<>\s]{1,64}>")
_BEGIN_OF_MARK = re.compile(r"<[^<>\s]{0,64}\Z")
_ID_WITH_NAME = "functions.{}:{}"


class Layout(Enum):
    """How a call has its name and its arguments."""

    ENVELOPE = "one JSON object with both"
    NAMED = "the name, a text, and the arguments as JSON"
    TAGS = "the name, then marks around the name and the value of each argument"
    PYTHON = "name(key=value, ...)"
    BRACED = "name{key:value,...}"


class Slot(Enum):
    """What a field of an envelope is."""

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
    "properties": {name: kind | {"description": "d"} for name, kind in zip(_VALUES, _TYPES, strict=True)},
    "required": [],
}
"""The schema of both tools."""
# Some templates refuse or spoil arguments that are no strings.
_PROBE_ARGUMENTS = (_VALUES, {name: _VALUES[name] for name in sorted(PROBE_TEXTS)})


class Render(NamedTuple):
    """Renders a user's message and an assistant's with this content and these calls, or only the user's message if both
    are None. Its answer is None if the template refuses."""

    with_calls: Callable[[Sequence[ProbeCall]], str | None]
    with_content: Callable[[str], str | None]


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


_NO_TAGS = TagShape("", "", "", "")


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
    """What a template renders for calls.

    Attributes:
        text: From the beginning of the answer to its end, where both can be seen.
        shape: None if the calls are in no known layout.
    """

    text: str
    calls: tuple[ProbeCall, ...]
    shape: CallShape | None


def written_calls(shape: CallShape, calls: Sequence[tuple[str, str, str]]) -> str:
    """The text of calls, each of a name, of arguments as JSON and of an id. Arguments that are no object are written as
    they are."""
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
    """What a template renders for calls; None if it leaves them out."""
    plain = render.with_content(_CONTENT)
    without_names = None
    for arguments in _PROBE_ARGUMENTS:
        for count in (2, 1):
            for made in (_with_plain_ids, _with_named_ids):
                calls = tuple(made(name, arguments, index) for index, name in enumerate(PROBE_TOOLS[:count]))
                whole = render.with_calls(calls)
                if whole is None or _FIRST not in whole:
                    continue
                text = _cut(whole, plain)
                if all(call.name in text for call in calls):
                    shape, end = _shape(text, calls)
                    return RenderedCalls(text[:end], calls, shape)
                without_names = without_names or RenderedCalls(text, calls, None)
    return without_names


def _with_plain_ids(name: str, arguments: dict[str, Any], index: int) -> ProbeCall:
    # Mistral's templates accept only ids of nine letters and digits.
    return ProbeCall(name, arguments, f"quireId0{index}")


def _with_named_ids(name: str, arguments: dict[str, Any], index: int) -> ProbeCall:
    """For templates that write an id in the place of a name, as that of Kimi K2 does."""
    return ProbeCall(name, arguments, _ID_WITH_NAME.format(name, index))


def _cut(whole: str, plain: str | None) -> str:
    """The calls in a rendering, by comparison with that of a message without any."""
    atoms = _ATOM.findall(whole)
    if plain is None:
        return whole
    others = _ATOM.findall(plain)
    begin = _num_common(atoms, others)
    end = _num_common(atoms[begin:][::-1], others[begin:][::-1])
    text = "".join(atoms[begin : len(atoms) - end])
    if (cut := _BEGIN_OF_MARK.search(text)) is not None:
        text = text[: cut.start()]
    if (reasoning := _NO_REASONING.match(text)) is not None:
        text = text[reasoning.end() :]
    return text


def _num_common(one: Sequence[str], other: Sequence[str]) -> int:
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return count


class _Core(NamedTuple):
    """The variable part of one call: where it is, and how it is written."""

    begin: int
    end: int
    layout: Layout
    fields: tuple[tuple[str, Slot | str], ...] = ()
    name_close: str = ""
    tags: TagShape | None = None


def _shape(rendered: str, calls: Sequence[ProbeCall]) -> tuple[CallShape | None, int]:
    """The shape of the calls, and where they end: marks that end the turn may follow."""
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
    texts = section_open, call_open, call_close, separator, section_close, first.name_close
    repeats = any("quire" in each for each in (*texts, *dataclasses.astuple(first.tags or _NO_TAGS)))
    if repeats or first[2:] != last[2:]:
        # A part repeats what varies, or the calls are written in different ways.
        return None, end
    shape = CallShape(
        first.layout,
        section_open,
        call_open,
        call_close,
        separator,
        section_close,
        first.fields,
        first.name_close,
        first.tags,
        is_parallel=len(calls) > 1,
    )
    return shape, end


def _as_many_marks(close: str, opening: str) -> str:
    """A closing text without the marks behind it that end the turn: it has no more marks than the opening one."""
    count = len(_MARK.findall(opening))
    further = [found.start() for found in _MARK.finditer(close)][count:]
    return (close[: further[0]] if further else close).rstrip(SPACE)


def _common_beginning(one: str, other: str) -> str:
    atoms = _ATOM.findall(one)
    return "".join(atoms[: _num_common(atoms, _ATOM.findall(other))])


def _common_end(one: str, other: str) -> str:
    atoms = _ATOM.findall(one)
    return "".join(atoms[len(atoms) - _num_common(atoms[::-1], _ATOM.findall(other)[::-1]) :])


def _objects(text: str, begin: int, end: int) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """The JSON objects that begin in a part of a text, from the last to the first."""
    for found in reversed(list(re.finditer(r"\{", text[begin:end]))):
        try:
            value, after = json.JSONDecoder().raw_decode(text, begin + found.start())
        except (ValueError, RecursionError):
            continue
        yield begin + found.start(), after, value


def _envelope(text: str, after: int, call: ProbeCall, index: int) -> _Core | None:
    place = text.find(call.name, after)
    for begin, end, value in _objects(text, after, place):
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
        return _Core(begin, end, Layout.ENVELOPE, tuple(fields))
    return None


def _named(text: str, after: int, call: ProbeCall, index: int) -> _Core | None:
    begin = text.find(call.name, after)
    name_end = begin + len(call.name)
    for found in re.finditer(r"\{", text[name_end : name_end + 256]):
        try:
            value, end = json.JSONDecoder().raw_decode(text, name_end + found.start())
        except (ValueError, RecursionError):
            continue
        if value != call.arguments:
            return None
        name_close = text[name_end : name_end + found.start()]
        return _Core(begin, end, Layout.NAMED, name_close=re.sub(rf"(?<!\w){index}(?!\w)", INDEX, name_close))
    return None


def _tagged(text: str, after: int, before: int, call: ProbeCall) -> _Core | None:
    """A call with marks around each argument, in a text up to `before`."""
    begin = text.find(call.name, after)
    places: dict[str, int] = {}
    position = begin + len(call.name)
    for key in call.arguments:
        if (place := text.find(key, position, before)) >= 0:
            places[key] = place
            position = place + len(key)
    # The text around the first value, and after the last one.
    keys = list(places)
    if len(keys) < 2 or [*call.arguments][:: len(call.arguments) - 1] != [keys[0], keys[-1]]:
        return None
    value = text.find(_FIRST, places[keys[0]])
    value_end = value + len(_FIRST)
    last = text.find(_LAST.partition("\n")[2], places[keys[-1]], before)
    if not places[keys[0]] < value < places[keys[1]] or last < 0:
        return None
    key_close, other_close = text[places[keys[0]] + len(keys[0]) : value], ""
    if not text.startswith(key_close + _LAST[:3], places[keys[-1]] + len(keys[-1])):
        return None
    if "quire_b" in places:
        number = places["quire_b"] + len("quire_b")
        other_close = text[number : text.find(str(_VALUES["quire_b"]), number)]
    else:
        other_close = key_close.rstrip("\"'")
    quote = key_close.removeprefix(other_close) if key_close.startswith(other_close) else ""
    if quote and not text.startswith(quote, value_end):
        return None
    until_next = text[value_end + len(quote) : places[keys[1]]]
    last += len(_LAST.partition("\n")[2]) + len(quote)
    tail = text[last:before]
    before_first = text[begin + len(call.name) : places[keys[0]]]
    close = _common_beginning(until_next, tail)
    opened = _common_end(until_next[len(close) :], before_first)
    name_close = before_first[: len(before_first) - len(opened)]
    constants: list[str] = []
    for key, usual in (("quire_c", "true"), ("quire_d", "null")):
        start = places.get(key, -1) + len(key) + len(other_close)
        end = text.find(until_next, start) if until_next else -1
        constants.append(text[start:end] if key in places and 0 <= end <= start + len("False") else usual)
    shape = TagShape(
        opened,
        key_close.removesuffix(quote),
        other_close,
        close,
        until_next[len(close) : len(until_next) - len(opened)],
        quote,
        (constants[0], constants[1]),
    )
    layout = Layout.TAGS
    if name_close.strip() == "(" and other_close.strip() == "=":
        layout = Layout.PYTHON
    elif name_close.strip() == "{" and other_close.strip() == ":":
        layout = Layout.BRACED
    return _Core(begin, last + len(close), layout, name_close=name_close, tags=shape)
