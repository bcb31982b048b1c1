"""The input of a batch: a file with one request in each line, as JSON."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pydantic_core import from_json, to_json

from gateway.api.batches.store import Line
from gateway.request.counting import EntryLimits, check_values
from quire.model_files.progress import shown_bytes
from quire.rpc.errors import FieldViolation, InvalidArgument, NotFound, Unavailable

WrongModel = Callable[[str], FieldViolation | None]
"""Checks the name of a model; returns None if the caller of the batch may use it, else the violation."""
MAX_CUSTOM_ID = 512
_MAX_ERRORS = 50
_PARAMETERS = ("custom_id", "method", "url", "body")
_NOT_IN_BATCHES = {"stream": "streaming_unsupported", "background": "invalid_body", "durable": "invalid_body"}
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits of one input: number of requests, bytes of the file and of a line, and JSON entries in a line."""

    max_requests: int
    max_file_bytes: int
    max_line_bytes: int
    entries: EntryLimits


@dataclass(frozen=True, slots=True)
class LineError:
    """An error in a line, numbered from 1, or in the whole file if `line` is None."""

    line: int | None
    code: str
    message: str
    param: str | None = None

    def shown(self) -> dict[str, Any]:
        """The error in OpenAI's form."""
        return {"code": self.code, "line": self.line, "message": self.message, "param": self.param}


def read_lines(
    path: Path, endpoint: str, limits: BatchLimits, wrong_model: WrongModel = lambda _: None
) -> tuple[list[Line], list[LineError]]:
    """The requests and the errors of a file. In bodies it checks only the model, and fields that batches do not allow.
    Blank lines are skipped. Must run in a thread, since large files take long. Raises the errors of `opened`."""
    lines: list[Line] = []
    errors: list[LineError] = []
    seen: dict[str, int] = {}
    num_blank = 0
    with opened(path) as file:
        for number, first, data in _pieces(file, limits.max_line_bytes):
            if len(data) > limits.max_line_bytes:
                message = f"the line has more than {shown_bytes(limits.max_line_bytes)} (--max-message-bytes)"
                errors.append(LineError(number, "line_too_long", message))
                break
            if not data.strip():
                if (num_blank := num_blank + 1) > limits.max_requests:
                    # Skipping lines also takes time.
                    message = f"the file has more than {limits.max_requests:,} blank lines (--max-batch-requests)"
                    errors.append(LineError(number, "too_many_lines", message))
                    break
                continue
            if len(lines) >= limits.max_requests:
                message = f"the file has more than {limits.max_requests:,} requests (--max-batch-requests)"
                errors.append(LineError(number, "too_many_requests", message))
                break
            found = _read(number, data, endpoint, limits.entries, wrong_model)
            if isinstance(found, LineError):
                errors.append(found)
            elif found in seen:
                message = f"is {found!r:.100}, as in line {seen[found]:,}; it must be unique"
                errors.append(LineError(number, "duplicate_custom_id", f"custom_id {message}", "custom_id"))
            else:
                seen[found] = number
                lines.append(Line(number, found, first, len(data)))
            if len(errors) >= _MAX_ERRORS:
                break
    if not lines and not errors:
        errors.append(LineError(None, "empty_file", "the file has no request"))
    return lines, errors


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Opens the content of a file. Raises NotFound if it was removed from the directory, and Unavailable if the disk
    fails."""
    try:
        with path.open("rb") as file:
            yield file
    except FileNotFoundError as error:
        raise NotFound(
            f'the content of file "{path.name}" is gone from the directory of batches; upload it again',
            reason="FILE_NOT_FOUND",
        ) from error
    except OSError as error:
        raise Unavailable(f'file "{path.name}" cannot be read: {error.strerror}') from error


def body_of(path: Path, line: Line) -> bytes:
    """The body of a request in a file that was checked before, as JSON. Raises the errors of `opened`."""
    with opened(path) as file:
        file.seek(line.first)
        return to_json(from_json(file.read(line.size).removeprefix(_BOM), allow_inf_nan=False)["body"])


def _pieces(file: BinaryIO, max_bytes: int) -> Any:
    """Yields number, offset and bytes of each line; a line that is too long is cut off and is the last one."""
    number = first = 0
    while data := file.readline(max_bytes + 2):
        number += 1
        size = len(data)
        yield number, first, data.removesuffix(b"\n").removesuffix(b"\r")
        if size > max_bytes + 1 and not data.endswith(b"\n"):
            return
        first += size


def _read(number: int, data: bytes, endpoint: str, limits: EntryLimits, wrong_model: WrongModel) -> str | LineError:
    """The custom_id of a line, or the line's error."""

    def wrong(code: str, message: str, param: str | None = None) -> LineError:
        return LineError(number, code, message, param)

    try:
        check_values(data, limits, "the line")
        fields = from_json(data.removeprefix(_BOM) if number == 1 else data, allow_inf_nan=False)
    except InvalidArgument as error:
        return wrong("too_many_values", error.message)
    except ValueError as error:
        return wrong("invalid_json_line", f"the line is not valid JSON: {error!s:.200}")
    if not isinstance(fields, dict):
        return wrong("invalid_json_line", "the line is not an object")
    custom_id, method, url, body = (fields.get(name) for name in _PARAMETERS)
    for name in _PARAMETERS:
        if fields.get(name) is None:
            return wrong("missing_required_parameter", f"{name} is missing", name)
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID:
        return wrong("invalid_custom_id", f"custom_id must be a text of 1 to {MAX_CUSTOM_ID} characters", "custom_id")
    if method != "POST":
        return wrong("invalid_method", f"method is {method!r:.40}; it must be POST", "method")
    if url != endpoint:
        return wrong("invalid_url", f"url is {url!r:.80}; the batch is for {endpoint}", "url")
    if not isinstance(body, dict):
        return wrong("invalid_body", "body must be an object", "body")
    for name, code in _NOT_IN_BATCHES.items():
        if body.get(name):
            return wrong(code, f"body.{name} is set; answers of a batch are whole", f"body.{name}")
    model = body.get("model")
    if isinstance(model, str) and model and (violation := wrong_model(model)) is not None:
        return wrong("model_not_found", f"body.model {violation.description}", "body.model")
    return custom_id
