"""Sets fields of messages; an error says what a field holds."""

from collections.abc import Mapping, MutableMapping, MutableSequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from quire.rpc.errors import invalid_field

_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
_KINDS = {
    FieldDescriptor.CPPTYPE_STRING: "a str that UTF-8 can encode",
    FieldDescriptor.CPPTYPE_BOOL: "True or False",
    FieldDescriptor.CPPTYPE_FLOAT: "a number",
    FieldDescriptor.CPPTYPE_DOUBLE: "a number",
}


def fill(message: Message, **values: Any) -> None:
    """Sets the fields that are not None; raises as `put`."""
    for name, value in values.items():
        if value is not None:
            put(message, name, value)


def put(message: Message, name: str, value: Any, path: str | None = None) -> None:
    """Sets a field; one str is a sequence of one.

    Args:
        path: What the caller knows the field by; its name when absent.

    Raises:
        InvalidArgument: the value does not fit the field.
    """
    try:
        _set(message, name, value)
    except (ValueError, TypeError, OverflowError) as error:
        raise invalid_field(path or name, f"is {value!r:.80}; it must be {_limit(message, name)}") from error


def _set(message: Message, name: str, value: Any) -> None:
    """ValueError, TypeError or OverflowError where the value does not fit."""
    held = getattr(message, name)
    is_map = isinstance(held, MutableMapping)
    if is_map != isinstance(value, Mapping):
        raise TypeError("only a mapping fits a map")
    if is_map:
        held.update(value)
    elif isinstance(held, MutableSequence):
        held.extend([value] if isinstance(value, str | bytes) else value)
    else:
        setattr(message, name, value)


def _limit(message: Message, name: str) -> str:
    """What a field holds, in words."""
    field: Any = message.DESCRIPTOR.fields_by_name[name]
    held = getattr(message, name)
    if isinstance(held, MutableMapping):
        key, value = (_kind(field.message_type.fields_by_name[part]) for part in ("key", "value"))
        return f"a mapping, each key {key} and each value {value}"
    if isinstance(held, MutableSequence):
        one = "a str or " if field.cpp_type == FieldDescriptor.CPPTYPE_STRING else ""
        return f"{one}a sequence, each entry {_kind(field)}"
    return _kind(field)


def _kind(field: Any) -> str:
    if field.cpp_type not in _INTEGERS:
        return _KINDS[field.cpp_type]
    low, high = _INTEGERS[field.cpp_type]
    return f"a whole number in [{low:,}, {high:,}]"
