"""The fields of a serialized message as they are on the wire: protobuf's parser does not tell what it refuses."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

# What comes after so many fields of a malformed message is not looked at.
_MAX_FIELDS_LOOKED_AT = 4096
_MAX_VARINT_BYTES = 10


@dataclass(frozen=True, slots=True)
class WireField:
    """One field. `content` are its bytes where it is a text, bytes or a message; of other types it is None."""

    number: int
    content: memoryview | None


def wire_fields(data: bytes | memoryview) -> Iterator[WireField]:
    """The fields at the top level of a message, in the order of the wire, up to the first that is none of proto3."""
    view = memoryview(data)
    position = 0
    while position < len(view):
        tag, position = _varint(view, position)
        content = None
        match tag & 7:
            case 0:
                _, position = _varint(view, position)
            case 1:
                position += 8
            case 2:
                length, start = _varint(view, position)
                position = start + length
                content = view[start:position]
            case 5:
                position += 4
            case _:  # groups, which proto3 does not have
                return
        if position > len(view):
            return
        yield WireField(tag >> 3, content)


def malformed_field(kind: type[Message], data: bytes) -> tuple[str, str]:
    """What is at fault with bytes that protobuf refused, and how: the path of a text that is not UTF-8, else the
    message's name."""
    for path, text in islice(
        _fields_with_paths(kind.DESCRIPTOR.fields_by_number, memoryview(data), ""), _MAX_FIELDS_LOOKED_AT
    ):
        if text is not None and not _is_utf8(text):
            return path, "is not valid UTF-8"
    return kind.DESCRIPTOR.full_name, "cannot be parsed: the bytes are damaged, cut off or of another message"


def _fields_with_paths(
    fields: Mapping[int, Any], data: memoryview, prefix: str
) -> Iterator[tuple[str, memoryview | None]]:
    """The path of every field, those of inner messages included, and its bytes where it is a text.

    `fields` are the descriptors of the message's fields by number: protobuf's own kind or that of its C library.
    """
    counts: dict[int, int] = {}
    for wire_field in wire_fields(data):
        field = fields.get(wire_field.number)
        content = wire_field.content
        if field is None or content is None:
            yield prefix, None
            continue
        position = counts.get(field.number, 0)
        counts[field.number] = position + 1
        path = f"{prefix}{field.name}[{position}]" if field.is_repeated else f"{prefix}{field.name}"
        yield path, content if field.type == FieldDescriptor.TYPE_STRING else None
        if field.message_type is not None:
            yield from _fields_with_paths(field.message_type.fields_by_number, content, f"{path}.")


def _is_utf8(data: memoryview) -> bool:
    try:
        str(data, "utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    """The number at `position`, and the position after it: beyond the data when the number has no end."""
    value = 0
    for count, byte in enumerate(data[position : position + _MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * count)
        if byte < 0x80:
            return value, position + count + 1
    return value, len(data) + 1
