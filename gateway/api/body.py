"""Reads the body of an HTTP request: checks media type and size, parses JSON, and validates types."""

import codecs
import re
import zlib
from collections.abc import AsyncGenerator, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from pydantic import BeforeValidator, ValidationError
from pydantic_core import PydanticCustomError, from_json
from starlette.requests import Request

from gateway.api.answers import ErrorAnswer, HttpError
from gateway.api.field_rule import FieldRule, Part
from gateway.auth.caller import current_tenant
from gateway.request.body_memory import count_memory
from gateway.request.counting import EntryLimits, check_json, check_values, checking_json
from gateway.request.violations import shortened
from gateway.turns import LONG_BYTES, TenantTurns, Turns
from quire.model_files.progress import shown_bytes
from quire.rpc.errors import InvalidArgument, invalid_field

Model = TypeVar("Model", bound=Part)

_JSON = re.compile(r"application/json|[\w.-]+/[\w.-]+\+json", re.ASCII)
_DONE = object()
# zlib's window size for each content encoding; deflate has zlib's header.
_WINDOWS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
_PIECE_BYTES = 1 << 16
# Tags of the alternatives of a union, by the `type` of an object.
_TAG = re.compile(r"<.*>", re.DOTALL)

_EXPECTED = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "finite_number": "a finite number",
    "float_type": "a number",
    "int_type": "an integer",
    "int_parsing": "a token id",
    "int_parsing_size": "a token id",
    "list_type": "a list",
    "model_type": "an object",
    "string_type": "a string",
}


def max_entries(limit: int) -> BeforeValidator:
    """Rejects an object with more entries than `limit` before any of them is validated."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(cast(dict[Any, Any], value)) > limit:
            raise PydanticCustomError("too_long", "an object of at most {max_length} entries", {"max_length": limit})
        return value

    return BeforeValidator(check)


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Limits of the size of a body, in bytes and in entries. `IncomingBody` limits the time. Long bodies are parsed in
    `turns`, and `rule` decides about fields that their types do not declare."""

    max_bytes: int
    entries: EntryLimits
    turns: TenantTurns = field(default_factory=TenantTurns)
    rule: FieldRule = field(default_factory=FieldRule)


async def read_body(request: Request, limits: BodyLimits, *, media_types: Collection[str] = ()) -> bytes:
    """The whole body, decompressed: JSON, or one of `media_types`, which browsers send only after a preflight request.

    Raises:
        HttpError: the media type or the encoding is not supported, or the body is too large or too slow.
        QuireError: the gateway has no memory for the body.
        starlette.requests.ClientDisconnect: the client disconnected before the end of the body.
    """
    _check_media_type(request, media_types)
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limits.max_bytes:
        raise _too_large(limits.max_bytes)
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    body = bytearray()
    async for chunk in request.stream() if encoding == "identity" else _inflated(request, encoding):
        body += chunk
        if len(body) > limits.max_bytes:
            raise _too_large(limits.max_bytes)
    return bytes(body)


async def _inflated(request: Request, encoding: str) -> AsyncGenerator[bytes]:
    """Decompresses a body in small pieces, since a kilobyte may expand to a megabyte. The body may consist of several
    compressed parts, as gzip allows. Raises InvalidArgument for malformed data, and ResourceExhausted without memory.
    """
    stream, turns = zlib.decompressobj(_WINDOWS[encoding]), Turns()
    async for data in request.stream():
        while data:
            if stream.eof:
                stream = zlib.decompressobj(_WINDOWS[encoding])
            try:
                piece = stream.decompress(data, _PIECE_BYTES)
            except zlib.error as error:
                raise _malformed(f"it cannot be unpacked: {error}") from error
            data = stream.unconsumed_tail or stream.unused_data
            count_memory(len(piece))
            yield piece
            await turns.pause()
    if not stream.eof:
        raise _malformed(f"its {encoding} ends too early")


async def read_model(kind: type[Model], request: Request, limits: BodyLimits) -> Model:
    """The body of a request as `kind`. Raises the errors of `read_body`, `load_json` and `validated`."""
    return validated(kind, await load_json(await read_body(request, limits), limits))


def validated(kind: type[Model], fields: object) -> Model:
    """`fields` as `kind`. Raises InvalidArgument if a field has the wrong type."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _invalid(error, kind.union_types) from error


async def load_json(data: bytes, limits: BodyLimits) -> Any:
    """The JSON value in `data`, whose entries are counted first.

    Raises:
        InvalidArgument: it is not JSON, or has too many entries.
        ResourceExhausted: the gateway has no memory for its values.
    """
    if len(data) <= LONG_BYTES:
        count_memory(check_values(data, limits.entries))
        value = _parsed(data)
        if isinstance(value, dict):
            check_json(cast(dict[str, Any], value), limits.entries)
        return value
    tenant, turns = current_tenant(), limits.turns
    count_memory(await turns.call(tenant, check_values, data, limits.entries))
    value = await turns.call(tenant, _parsed, data)
    if isinstance(value, dict):
        steps = checking_json(cast(dict[str, Any], value), limits.entries)
        await turns.do(tenant, lambda: next(steps, _DONE) is _DONE)
    return value


def _parsed(data: bytes) -> Any:
    try:
        return from_json(data.removeprefix(codecs.BOM_UTF8))
    except ValueError as error:
        raise _malformed(str(error)) from error


def _check_media_type(request: Request, others: Collection[str]) -> None:
    """Requires JSON as the media type, since browsers let pages of other sites send other media types, or none, without
    a preflight request. Programs may omit the media type; requests of pages have the header `origin`."""
    stated = request.headers.get("content-type")
    if stated is None and "origin" in request.headers:
        raise _unsupported("content-type is missing; from a page it must be application/json")
    media_type = "application/json" if stated is None else stated.partition(";")[0].strip().lower()
    if _JSON.fullmatch(media_type) is None and media_type not in others:
        raise _unsupported(f'content-type is "{shortened(media_type)}"; it must be application/json')
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity" and encoding not in _WINDOWS:
        raise _unsupported(f'content-encoding is "{shortened(encoding)}"; send gzip or deflate, or the body as it is')


def _unsupported(message: str) -> HttpError:
    return HttpError(ErrorAnswer(415, message, "unsupported_media_type"))


def _too_large(max_bytes: int) -> HttpError:
    return HttpError(ErrorAnswer(413, f"the body is too large; the max is {shown_bytes(max_bytes)}", "body_too_large"))


def _invalid(error: ValidationError, union_types: Mapping[str, str]) -> InvalidArgument:
    """The first validation error; its path omits the alternatives of unions."""
    first = error.errors(include_url=False, include_context=True, include_input=False)[0]
    location = first["loc"]
    if not location:
        return InvalidArgument("the body must be a JSON object", reason="MALFORMED_MESSAGE")
    path, alternatives = _path(location, union_types)
    if first["type"] == "too_long" and (limit := first.get("ctx", {}).get("max_length")) is not None:
        description = f"has more than {limit:,} entries, which is the max"
    elif alternatives is not None:
        description = f"must be {alternatives}"
    elif first["type"] in ("string_too_short", "string_too_long"):
        (name, limit), *_ = first.get("ctx", {}).items()
        bound = "least" if name == "min_length" else "most"
        description = f"must have at {bound} {limit:,} character{'s' if limit > 1 else ''}"
    elif first["type"] == "union_tag_invalid":
        path, description = f"{path}.type", _wrong_tag(**first.get("ctx", {}))
    elif first["type"] == "union_tag_not_found":
        description = "must be an object with a type"
    elif first["type"] == "missing":
        description = "is missing"
    elif first["type"] == "extra_forbidden":
        description = "is not a field of this request"
    else:
        description = f"must be {_EXPECTED.get(first['type'], first['msg'].removeprefix('Input should be '))}"
    return invalid_field(path, description)


def _wrong_tag(tag: str, expected_tags: str, **_: str) -> str:
    known = re.sub("['<>]", "", expected_tags).split(", ")
    return f'is "{shortened(tag.strip("<>"))}"; it must be {" or ".join(known)}'


def _malformed(cause: str) -> InvalidArgument:
    return InvalidArgument(f"the body is not valid JSON: {cause}", reason="MALFORMED_MESSAGE")


def _path(location: tuple[Any, ...], union_types: Mapping[str, str]) -> tuple[str, str | None]:
    """The path of the invalid field, and its types if it accepts several. The path ends at such a field, because the
    rest of the location names an alternative of the union."""
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step == "[key]":
            break
        elif _TAG.fullmatch(step):
            continue
        elif path.endswith("logit_bias"):
            path += f"[{shortened(step)}]"
        else:
            path += f".{step}" if path else step
        if isinstance(step, str) and step in union_types:
            return path, union_types[step]
    return path, None
