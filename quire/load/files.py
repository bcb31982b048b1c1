"""Loads from users' files: JSON lines, each a request."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quire.load.arrivals import Trace
from quire.load.requests import LoadRequest, Message, Prompt, frozen

_FIELDS = ("prompt", "messages", "output_len", "arrival_s")
_MAX_TOKEN_ID = 2**31 - 1
_MAX_OUTPUT_LEN = 1 << 24
_MAX_TRACE_S = 7 * 86_400


def read_requests(path: Path, default_output_len: int | None = None) -> list[LoadRequest]:
    """The requests of a file of JSON lines; blank lines do not count.

    Each line is an object with `prompt` (a text or token ids) or `messages` (objects with `role` and `content`), and
    may have `output_len` (tokens to generate) and `arrival_s` (seconds, which all lines have or none, in order).

    Raises:
        OSError: the file cannot be read.
        ValueError: one line that names the file, the line and the error.
    """
    requests: list[LoadRequest] = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from None
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                requests.append(_request(len(requests), json.loads(line), default_output_len))
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}, is no JSON: {error.msg} at column {error.colno}") from None
            except RecursionError:
                raise ValueError(f"{path}, line {number}: it is nested too deeply") from None
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
    if not requests:
        raise ValueError(f"{path} holds no request")
    _check_times(path, requests)
    return requests


def recorded_times(requests: Sequence[LoadRequest]) -> Trace | None:
    """The times of arrival in a file; None if it has none."""
    times = [request.arrival_s for request in requests if request.arrival_s is not None]
    return Trace(tuple(times)) if times else None


def _request(index: int, line: Any, default_output_len: int | None) -> LoadRequest:
    if not isinstance(line, dict):
        raise ValueError(f"is {_kind(line)}, must be an object with prompt or messages")
    if unknown := [name for name in line if name not in _FIELDS]:
        raise ValueError(f"has {unknown[0]!r:.40}; known are {', '.join(_FIELDS)}")
    if ("prompt" in line) == ("messages" in line):
        raise ValueError("has both prompt and messages" if "prompt" in line else "has neither prompt nor messages")
    output_len = line.get("output_len", default_output_len)
    if output_len is not None and not (_is_int(output_len) and 1 <= output_len <= _MAX_OUTPUT_LEN):
        raise ValueError(f"output_len is {output_len!r:.40}, must be a whole number in [1, {_MAX_OUTPUT_LEN:,}]")
    arrival_s = line.get("arrival_s")
    if arrival_s is not None and not (_is_number(arrival_s) and 0 <= arrival_s <= sys.float_info.max):
        raise ValueError(f"arrival_s is {arrival_s!r:.40}, must be a number of seconds of at least 0")
    prompt = _prompt(line["prompt"]) if "prompt" in line else _messages(line["messages"])
    return LoadRequest(index, prompt, output_len, arrival_s=None if arrival_s is None else float(arrival_s))


def _prompt(value: Any) -> Prompt:
    if value and _is_text(value):
        return value
    if isinstance(value, list) and value and all(_is_int(each) and 0 <= each <= _MAX_TOKEN_ID for each in value):
        return frozen(np.array(value, np.int32))
    raise ValueError(f"prompt is {value!r:.40}, must be a text or a list of token ids, not empty")


def _messages(value: Any) -> Prompt:
    if not isinstance(value, list) or not value:
        raise ValueError(f"messages is {value!r:.40}, must be a list of objects with role and content, not empty")
    for each in value:
        is_message = isinstance(each, dict) and set(each) == {"role", "content"}
        if not is_message or not all(_is_text(part) for part in each.values()):
            raise ValueError(f"a message is {each!r:.60}, must be an object with the texts role and content")
    return tuple(Message(each["role"], each["content"]) for each in value)


def _check_times(path: Path, requests: Sequence[LoadRequest]) -> None:
    without = [request.index for request in requests if request.arrival_s is None]
    if without and len(without) < len(requests):
        raise ValueError(f"{path}: request {without[0] + 1} has no arrival_s and others have; all need one, or none")
    try:
        trace = recorded_times(requests)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if trace is not None and (length := trace.recorded[-1] - trace.recorded[0]) > _MAX_TRACE_S:
        raise ValueError(f"{path}: the last request comes {length:g} s after the first; a trace has at most 7 days")


def _is_text(value: Any) -> bool:
    """Whether it can be sent: JSON has escapes of characters that UTF-8 does not have."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a text", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), "null")
