"""Counts the entries of a message before anything walks it: a caller may put two million entries into 4 MiB.

Every list and map has a maximum number of entries, by the name of its field in `MAX_ENTRIES`, otherwise
`DEFAULT_MAX_ENTRIES`. The entries of a field count together over the whole message, in protobuf as in JSON. A protobuf
message is counted in its bytes, before it is parsed; a JSON body in two steps, in its bytes and as parsed. Counting
stops at the first maximum that is exceeded. The validator checks exact limits, which may be lower or depend on the
model.
"""

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from gateway.request.body_memory import count_memory
from gateway.request.limits import MAX_PROMPTS, MAX_TEXTS, MAX_TOOLS
from quire.constraints.program import MAX_CHOICES
from quire.rpc.errors import InvalidArgument, invalid_field

DEFAULT_MAX_ENTRIES = 1024
_MAX_VALUES = 1 << 17
# Long lists of texts, in which an object is an error.
_TEXTS = frozenset({"choice", "guided_choice", "texts"})
MAX_ENTRIES: Mapping[str, int] = {
    **dict.fromkeys(("bytes_contents", "content", "data", "output", "summary", "tool_calls"), 8192),
    # Log probabilities of tokens, in answers that the client sends back.
    **dict.fromkeys(("bytes", "logprobs", "top_logprobs"), _MAX_VALUES),
    **dict.fromkeys(_TEXTS, MAX_CHOICES),
    "prompt": MAX_PROMPTS,
    **dict.fromkeys(("documents", "text_1", "text_2"), MAX_TEXTS),
    "tools": MAX_TOOLS,
}
"""The maximum entries of lists and maps by name. Others may have `DEFAULT_MAX_ENTRIES`."""
MAX_VALUES_OF_OBJECTS: Mapping[str, int] = {
    **dict.fromkeys(("guided_json", "input", "input_schema", "json", "parameters", "schema"), 1 << 16),
    # OpenAI's client adds these to answers.
    **dict.fromkeys(("parsed", "parsed_arguments"), 1 << 16),
    **dict.fromkeys(("chat_template_kwargs", "documents"), 4096),
}
"""The maximum values of objects of any shape in JSON, such as schemas: values at all depths count together."""
# Lists of such objects.
_LISTS_OF_OBJECTS = frozenset({"documents", "parsed"})
MAX_VALUES_OF_TEXTS = 1 << 16
"""The maximum number of values in JSON that is the text of fields, such as the arguments of all calls of a chat."""
MAX_NUMBERS = 1 << 20
"""The maximum number of all values of a body, which may be token ids."""
_CONVERSATIONS = frozenset({"input", "messages"})
# Lists of numbers that may have MAX_NUMBERS: the tokens of a prompt, or of the whole vocabulary.
_TOKENS = frozenset({"allowed_token_ids", "ids", "input", "prompt", "stop_token_ids", "token_ids", "tokens"})
_VALUES_OF_A_MESSAGE = 8
_MAX_PATH = 256
_CONTAINERS_PER_STEP = 512
# The approximate bytes that Python takes for a value in addition to its text.
_STRING_BYTES, _OBJECT_BYTES, _LIST_BYTES, _VALUE_BYTES, _FIELD_BYTES = 64, 256, 64, 40, 128
# First UTF-8 bytes of characters beyond U+FFFF, and beyond U+00FF; and JSON escapes of the former.
_WIDE, _BROAD = bytes(range(0xF0, 256)), bytes(range(0xC4, 256))
_WIDE_ESCAPE = re.compile(rb"\\u[dD][89abAB]")

# Marks that begin an object, a list and a further value.
_MARKS = b"{", b"[", b","
_OBJECT: type = dict
_CONTAINERS: tuple[type, ...] = (dict, list)
_CONTINUES = 0x80
_CONTINUING = bytes(range(_CONTINUES, 256))
_VARINT_BYTES = re.compile(rb"[\x80-\xff]{0,9}[\x00-\x7f]")
_VARINT, _DELIMITED = 0, 2
# The bytes of a value by its wire type: fixed numbers, and the begin and the end of a group.
_WIDTHS = {1: 8, 5: 4, 3: 0, 4: 0}
_PACKED_WIDTHS = {
    **dict.fromkeys((FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FIXED64, FieldDescriptor.TYPE_SFIXED64), 8),
    **dict.fromkeys((FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_FIXED32, FieldDescriptor.TYPE_SFIXED32), 4),
}


@dataclass(frozen=True, slots=True)
class EntryLimits:
    """The limits of one gateway. `max_messages` is the maximum number of messages of a conversation."""

    max_messages: int

    @property
    def max_values(self) -> int:
        """The maximum number of all fields of a protobuf message, or strings, lists and objects of a body."""
        return _MAX_VALUES + _VALUES_OF_A_MESSAGE * self.max_messages

    def max_entries(self, name: str) -> int:
        """The maximum number of entries of the lists and maps with a name."""
        if name in _CONVERSATIONS:
            # A list of texts for embeddings has the name of a conversation of another API.
            return max(self.max_messages, MAX_TEXTS) if name == "input" else self.max_messages
        return MAX_ENTRIES.get(name, DEFAULT_MAX_ENTRIES)


NO_MESSAGES = EntryLimits(max_messages=0)
"""The limits of JSON without a conversation."""


def check_values(data: bytes, limits: EntryLimits, name: str = "the body", *, max_numbers: int = MAX_NUMBERS) -> int:
    """Counts the values of JSON in its bytes, in a tenth of the time of parsing.

    Returns:
        The approximate bytes of memory that the values take: up to 20 times the size of `data`.

    Raises:
        InvalidArgument: `name` has too many strings, lists and objects, or too many numbers.
    """
    limit = limits.max_values
    plain = _without_escapes(data)
    num_strings = plain.count(b'"') // 2
    num_objects = num_lists = num_commas = 0
    if num_strings <= limit:
        num_objects, num_lists, num_commas = map(_without_strings(plain).count, _MARKS)
    if num_strings + num_objects + num_lists > limit:
        raise InvalidArgument(
            f"{name} has more than {limit:,} strings, lists and objects, which is the max", reason="MALFORMED_MESSAGE"
        )
    if num_commas > max_numbers:
        raise InvalidArgument(
            f"{name} has {num_commas:,} values; at most {max_numbers:,} are allowed, for tokens",
            reason="MALFORMED_MESSAGE",
        )
    return (
        len(data) * _bytes_of_character(data)
        + num_strings * _STRING_BYTES
        + num_objects * _OBJECT_BYTES
        + num_lists * _LIST_BYTES
        + num_commas * _VALUE_BYTES
    )


def _bytes_of_character(data: bytes) -> int:
    """The maximum bytes that Python takes for a character of the texts in `data`: one wide character makes its whole
    text wide."""
    if data.isascii():
        return 1 if b"\\u" not in data else 4 if _WIDE_ESCAPE.search(data) else 2
    if len(data.translate(None, _WIDE)) < len(data):
        return 4
    return 2 if len(data.translate(None, _BROAD)) < len(data) or b"\\u" in data else 1


def num_values_in(text: str) -> int:
    """An upper bound of the number of values that a text has as JSON, up to the first number above the maximum."""
    data = _without_escapes(text.encode(errors="replace"))
    num_strings = data.count(b'"') // 2
    if num_strings > _MAX_VALUES:
        return num_strings
    return num_strings + sum(map(_without_strings(data).count, _MARKS))


def _without_escapes(data: bytes) -> bytes:
    """JSON without quotes in its strings. Escaped backslashes go first, so that a quote after one is not escaped."""
    return data.replace(rb"\\", b"").replace(rb"\"", b"") if b"\\" in data else data


def _without_strings(data: bytes) -> bytes:
    return b"".join(data.split(b'"')[::2])


def check_json(fields: Mapping[str, Any], limits: EntryLimits) -> None:
    """Counts the entries of a parsed body.

    Raises:
        InvalidArgument: a field has too many of them.
    """
    deque(checking_json(fields, limits), maxlen=0)


def checking_json(fields: Mapping[str, Any], limits: EntryLimits) -> Iterator[None]:
    """`check_json` in steps of less than a millisecond."""
    if len(fields) > DEFAULT_MAX_ENTRIES:
        raise InvalidArgument(f"the body has {len(fields):,} fields; the max is {DEFAULT_MAX_ENTRIES:,}")
    counts: dict[str, int] = {}
    # Containers that are still to be counted: the path, the name, and the limit of the object of any shape around them.
    waiting: list[tuple[str, str, int | None, Any]] = _containers("", fields)
    num_counted = 0
    while waiting:
        num_counted += 1
        if num_counted % _CONTAINERS_PER_STEP == 0:
            yield
        path, name, shapeless, container = waiting.pop()
        is_object = isinstance(container, _OBJECT)
        if shapeless is None and not is_object and name in _TOKENS and container and type(container[0]) is int:
            continue
        limit = limits.max_entries(name) if shapeless is None else shapeless
        count = len(container)
        # The fields of an object are not the entries of the list that has it.
        if shapeless is not None or not is_object:
            count += counts.get(path, 0)
            counts[path] = count
        if count > limit:
            raise invalid_field(path, f"has {count:,} entries; the max is {limit:,}")
        if name in _TEXTS:
            continue
        if is_object and shapeless is None:
            waiting += _containers(f"{path}.", container)
        else:
            values: Iterable[Any] = container.values() if is_object else container
            waiting += [(path, name, shapeless, each) for each in values if isinstance(each, _CONTAINERS)]


def _containers(prefix: str, fields: Mapping[str, Any]) -> list[tuple[str, str, int | None, Any]]:
    return [
        (
            (prefix + name)[:_MAX_PATH],
            name,
            MAX_VALUES_OF_OBJECTS.get(name) if isinstance(value, _OBJECT) or name in _LISTS_OF_OBJECTS else None,
            value,
        )
        for name, value in fields.items()
        if isinstance(value, _CONTAINERS)
    ]


@dataclass(frozen=True, slots=True)
class _CountedField:
    """A field of a message, as `CountedMessage` finds it in the bytes.

    Attributes:
        path: Its path in the request, without positions.
        max_entries: The maximum number of its entries; None if it is not counted.
        width: Bytes of an entry that may be packed with others; 0 for varints, None if entries cannot be packed.
        is_text: Whether each entry is a text.
        inner: The fields of its messages, by their numbers.
    """

    path: str
    max_entries: int | None
    width: int | None
    is_text: bool
    inner: dict[int, "_CountedField"] | None


class CountedMessage:
    """Parses messages of one kind, each after its entries were counted."""

    def __init__(self, kind: type[Message], limits: EntryLimits) -> None:
        self.DESCRIPTOR = cast(Descriptor, kind.DESCRIPTOR)
        self._parse = kind.FromString
        self._fields = _fields_of(self.DESCRIPTOR, limits)
        self._max_fields = limits.max_values

    def parse(self, data: bytes) -> Message:
        """The message in `data`.

        Raises:
            InvalidArgument: it has too many fields, or a list or map of it has too many entries.
            ResourceExhausted: there is no memory for it.
            google.protobuf.message.DecodeError: the bytes are no such message.
        """
        num_fields = self._check(data)
        count_memory(len(data) * _bytes_of_character(data) + num_fields * _FIELD_BYTES)
        return self._parse(data)

    def _check(self, data: bytes) -> int:
        """Follows the wire format: a tag, which is the number of a field and a wire type, and its value. Stops at bytes
        that are no message, which the parser refuses. Returns the number of fields."""
        counts: dict[str, int] = {}
        num_fields = 0
        waiting = [(0, len(data), self._fields)]
        try:
            while waiting:
                position, end, fields = waiting.pop()
                while position < end:
                    num_fields += 1
                    if num_fields > self._max_fields:
                        raise InvalidArgument(
                            f"{self.DESCRIPTOR.name} has more than {self._max_fields:,} fields and entries, which is "
                            "the max; send lists of numbers packed",
                            reason="MALFORMED_MESSAGE",
                        )
                    tag = data[position]
                    position += 1
                    if tag >= _CONTINUES:
                        # Each further byte counts: tags and sizes may be padded to ten.
                        begin = position
                        tag, position = _varint(data, begin - 1)
                        num_fields += position - begin
                    wire_type = tag & 7
                    if wire_type == _VARINT:
                        position = _end_of_varint(data, position)
                        continue
                    if wire_type != _DELIMITED:
                        # The fields of a group count as fields of the message around it.
                        position += _WIDTHS[wire_type]
                        continue
                    size = data[position]
                    position += 1
                    if size >= _CONTINUES:
                        begin = position
                        size, position = _varint(data, begin - 1)
                        num_fields += position - begin
                    begin, position = position, position + size
                    field = fields.get(tag >> 3)
                    if field is None or position > end:
                        continue
                    if field.max_entries is not None:
                        count = counts.get(field.path, 0) + _num_entries(data, begin, position, field.width)
                        if field.is_text and tag < _CONTINUES:
                            # The texts of a list follow each other. In a short one, tag and size have one byte each.
                            before = count
                            while (
                                count <= field.max_entries
                                and position < end
                                and data[position] == tag
                                and (size := data[position + 1]) < _CONTINUES
                            ):
                                position += 2 + size
                                count += 1
                            num_fields += count - before
                        counts[field.path] = count
                        if count > field.max_entries:
                            description = f"has more than {field.max_entries:,} entries, which is the max"
                            raise invalid_field(field.path, description)
                    if field.inner is not None:
                        waiting.append((position, end, fields))
                        end, position, fields = position, begin, field.inner
        except (IndexError, KeyError):
            pass
        return num_fields


def _num_entries(data: bytes, begin: int, end: int, width: int | None) -> int:
    if width is None:
        return 1
    if width:
        return (end - begin) // width
    # The last byte of each integer is the one that does not continue.
    return len(data[begin:end].translate(None, _CONTINUING))


def _end_of_varint(data: bytes, position: int) -> int:
    """The position behind a number, in the same time for one of ten bytes. Raises IndexError if it has no end."""
    if data[position] < _CONTINUES:
        return position + 1
    found = _VARINT_BYTES.match(data, position)
    if found is None:
        raise IndexError("a number of more than 10 bytes")
    return found.end()


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """The number at a position, and the position behind it. Raises IndexError if it has no end."""
    end = _end_of_varint(data, position)
    return sum((byte & 0x7F) << 7 * place for place, byte in enumerate(data[position:end])), end


@cache
def _fields_of(kind: Descriptor, limits: EntryLimits) -> dict[int, _CountedField]:
    """The fields of a message; several methods take or return the same ones."""
    return _counted_fields(kind, limits, "", {})


def _counted_fields(
    kind: Descriptor, limits: EntryLimits, prefix: str, above: Mapping[str, dict[int, _CountedField]]
) -> dict[int, _CountedField]:
    """The fields of a message that are counted, or have counted fields. `above` has the fields of the messages around
    it: a message within itself has the same fields, and their entries count together."""
    if kind.full_name in above:
        return above[kind.full_name]
    found: dict[int, _CountedField] = {}
    inner_above = {**above, kind.full_name: found}
    for field in kind.fields:
        path = prefix + field.name
        message = field.message_type
        is_text = field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
        if message is not None or field.is_repeated:
            found[field.number] = _CountedField(
                path,
                (MAX_NUMBERS if field.name in _TOKENS else limits.max_entries(field.name))
                if field.is_repeated
                else None,
                None if message is not None or is_text else _PACKED_WIDTHS.get(field.type, 0),
                is_text,
                None if message is None else _counted_fields(message, limits, f"{path}.", inner_above),
            )
    return found
