"""JSON in pieces: what is long is made and written a few entries at a time, and never held whole.

All characters beyond ASCII are escaped: some readers split lines at more of them than JSON does.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

_PIECE_CHARACTERS = 1 << 15
# So many entries of a list are written at once.
_FEW = 64
_dumps = json.JSONEncoder(separators=(",", ":")).encode


class LazyList(Iterable[Any]):
    """A list of an answer whose entries are made when they are written."""

    def __init__(self, make: Callable[[], Iterable[Any]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return iter(self._make())


def json_pieces(answer: Mapping[str, Any]) -> Iterator[bytes]:
    """An object as JSON, in pieces of about 32 KiB, each of which takes a few milliseconds to make."""
    parts: list[str] = []
    size = 0
    for part in _parts(answer):
        parts.append(part)
        size += len(part)
        if size >= _PIECE_CHARACTERS:
            yield "".join(parts).encode()
            parts, size = [], 0
    yield "".join(parts).encode()


def as_json(answer: Mapping[str, Any] | LazyList) -> bytes:
    """An object or a list as JSON. In a thread, others get their turns between the pieces of long lists."""
    return "".join(_parts(answer)).encode()


def _parts(value: Any) -> Iterator[str]:
    match value:
        case LazyList():
            yield from _list_parts(iter(value))
        case list() if len(value) > _FEW or any(map(_is_long, value)):
            yield from _list_parts(iter(value))
        case dict() if any(map(_is_long, value.values())):
            for place, (name, each) in enumerate(value.items()):
                yield f"{',' if place else '{'}{_dumps(name)}:"
                yield from _parts(each)
            yield "}"
        case _:
            yield _dumps(value)


def _list_parts(entries: Iterator[Any]) -> Iterator[str]:
    separator = "["
    while few := list(islice(entries, _FEW)):
        if any(map(_is_long, few)):
            for entry in few:
                yield separator
                yield from _parts(entry)
                separator = ","
        else:
            yield separator + _dumps(few)[1:-1]
            separator = ","
    yield "[]" if separator == "[" else "]"


def _is_long(value: Any) -> bool:
    """Whether it is, or has in it, a list that is made or written in pieces."""
    match value:
        case LazyList():
            return True
        case list():
            return len(value) > _FEW or any(map(_is_long, value))
        case dict():
            return any(map(_is_long, value.values()))
        case _:
            return False
