"""From the bytes of a request to its body: media type, size, JSON, types."""

import asyncio
import codecs
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.requests import Request

from gateway.openai.errors import ErrorAnswer, HttpError
from gateway.openai.schemas import UNION_TYPES, Body
from gateway.openai.unsupported import check_supported
from gateway.requests.violations import shortened
from quire.rpc.errors import InvalidArgument, invalid_field

BodyType = TypeVar("BodyType", bound=Body)

# So much of a body that is too large is read and dropped: most clients look for the answer only when they sent it all.
_MAX_DISCARDED_BYTES = 16 * 1024 * 1024
_EXPECTED = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "finite_number": "a finite number",
    "float_type": "a number",
    "int_type": "an integer",
    "int_parsing": "a token id",
    "list_type": "a list",
    "model_type": "an object",
    "string_type": "a string",
}


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """How large a body may be, and how long it may take to come."""

    max_bytes: int
    timeout_s: float


async def read_body(request: Request, limits: BodyLimits) -> bytes:
    """The whole body.

    Raises:
        HttpError: it is not JSON by its media type, is encoded, is too large or takes too long.
        starlette.requests.ClientDisconnect: the client left before all of it came.
    """
    _check_media_type(request)
    _check_announced_size(request, limits.max_bytes)
    try:
        async with asyncio.timeout(limits.timeout_s):
            return await _read_all(request, limits.max_bytes)
    except TimeoutError:
        raise _too_slow(limits.timeout_s) from None


async def _read_all(request: Request, max_bytes: int) -> bytes:
    """The whole body. Raises HttpError when it has more than `max_bytes` bytes."""
    body = bytearray()
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= max_bytes:
            body += chunk
        elif size > max_bytes + _MAX_DISCARDED_BYTES:
            break
    if size > max_bytes:
        raise _too_large(max_bytes)
    return bytes(body)


def parse_body(kind: type[BodyType], data: bytes) -> BodyType:
    """The body in `data`, all of whose fields are supported.

    Raises:
        InvalidArgument: it is not JSON, a field has the wrong type, or asks for what is not done here.
    """
    try:
        # Some programs begin whatever is UTF-8 with a byte order mark.
        body = kind.model_validate_json(data.removeprefix(codecs.BOM_UTF8))
    except ValidationError as error:
        raise _invalid(error) from error
    check_supported(body)
    return body


def _check_media_type(request: Request) -> None:
    media_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise _unsupported(f'content-type is "{shortened(media_type)}"; it must be application/json')
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise _unsupported(f'content-encoding is "{shortened(encoding)}"; send the body as it is')


def _check_announced_size(request: Request, max_bytes: int) -> None:
    """Refuses a body that the client waits to be asked for, or that is too large to be read and dropped."""
    announced = request.headers.get("content-length", "")
    size = int(announced) if announced.isdecimal() else 0
    if size > max_bytes and ("expect" in request.headers or size > max_bytes + _MAX_DISCARDED_BYTES):
        raise _too_large(max_bytes)


def _unsupported(message: str) -> HttpError:
    return HttpError(ErrorAnswer(415, message, "unsupported_media_type"))


def _too_large(max_bytes: int) -> HttpError:
    # What is left of the body is not read, so the connection cannot be used again.
    return HttpError(
        ErrorAnswer(
            413,
            f"the body is too large; the most is {max_bytes:,} bytes",
            "body_too_large",
            headers={"connection": "close"},
        )
    )


def _too_slow(timeout_s: float) -> HttpError:
    message = f"the body did not come within {timeout_s:g} s"
    return HttpError(ErrorAnswer(408, message, "slow_sender", headers={"connection": "close"}))


def _invalid(error: ValidationError) -> InvalidArgument:
    """The first thing that is wrong; an alternative of a field is of no use to the caller."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    location = first["loc"]
    if first["type"] == "json_invalid":
        return InvalidArgument(f"the body is not valid JSON: {_cause(first['msg'])}", reason="MALFORMED_MESSAGE")
    if not location:
        return InvalidArgument("the body must be a JSON object", reason="MALFORMED_MESSAGE")
    path, alternatives = _path(location)
    if alternatives is not None:
        description = f"must be {alternatives}"
    elif first["type"] == "missing":
        description = "is missing"
    else:
        description = f"must be {_EXPECTED.get(first['type'], _cause(first['msg']))}"
    return invalid_field(path, description)


def _path(location: tuple[Any, ...]) -> tuple[str, str | None]:
    """The path of the field at fault, and what it may be where it has several types.

    It ends at such a field: what follows in the location is the alternative that was tried.
    """
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step == "[key]":
            break
        elif path.endswith("logit_bias"):
            path += f"[{shortened(step)}]"
        else:
            path += f".{step}" if path else step
        if step in UNION_TYPES:
            return path, UNION_TYPES[step]
    return path, None


def _cause(message: str) -> str:
    return message.removeprefix("Invalid JSON: ").removeprefix("Input should be ")
