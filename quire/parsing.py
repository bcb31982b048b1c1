"""Text to values, for flags and environment variables. Every function raises ValueError that says what was expected."""

import math
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Union, get_args, get_origin

_TRUE = frozenset({"true", "1", "yes", "on"})
_FALSE = frozenset({"false", "0", "no", "off"})
_BYTES_PATTERN = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[KMGT]iB|[KMGT]B|B|)")
_BYTES_UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for suffix, base in (("B", 1000), ("iB", 1024))
    for power, letter in enumerate("KMGT", start=1)
}


def parser_of(hint: Any) -> Callable[[str], Any]:
    """The parser for a type: int, float, str, bool, Path, each of them `| None`, and tuple[X, ...] with commas."""
    kind = without_none(hint)
    if get_origin(kind) is tuple:
        parse_item = _PARSERS[get_args(kind)[0]]
        return lambda text: tuple(parse_item(item.strip()) for item in text.split(",") if item.strip())
    return _PARSERS[kind]


def without_none(hint: Any) -> Any:
    """`X` of `X | None`; any other type as it is."""
    if get_origin(hint) in (Union, types.UnionType):
        (kind,) = (member for member in get_args(hint) if member is not type(None))
        return kind
    return hint


def parse_bytes(text: str) -> int:
    """Bytes from "512MiB", "1.5GiB", "2GB" or "1000000". Raises ValueError."""
    match = _BYTES_PATTERN.fullmatch(text.strip())
    if match is None:
        raise ValueError("expected a size such as 512MiB, 4GiB or 1000000")
    number, unit = match["number"], _BYTES_UNITS[match["unit"]]
    return int(float(number) * unit) if "." in number else int(number) * unit


def parse_int(text: str) -> int:
    """A whole number. Raises ValueError."""
    try:
        return int(text)
    except ValueError:
        raise ValueError("expected a whole number") from None


def parse_float(text: str) -> float:
    """A finite number. Raises ValueError."""
    try:
        value = float(text)
    except ValueError:
        raise ValueError("expected a number") from None
    if not math.isfinite(value):
        raise ValueError("expected a finite number")
    return value


def parse_bool(text: str) -> bool:
    """True or false, as flags and variables say it. Raises ValueError."""
    lowered = text.strip().lower()
    if lowered not in _TRUE | _FALSE:
        raise ValueError("expected true or false")
    return lowered in _TRUE


_PARSERS: dict[Any, Callable[[str], Any]] = {
    int: parse_int,
    float: parse_float,
    bool: parse_bool,
    str: str,
    Path: Path,
}
