"""From the bytes of a request to its body: media type, size, JSON, types."""

import codecs
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import from_json
from starlette.requests import Request

from gateway.api.errors import ErrorAnswer, HttpError
from gateway.openai.schemas import UNION_TYPES, Body, Message
from gateway.openai.unsupported import check_supported
from gateway.request.limits import MAX_PROMPTS
from gateway.request.violations import Violations, shortened
from gateway.turns import Turns
from quire.rpc.errors import InvalidArgument, invalid_field

BodyType = TypeVar("BodyType", bound=Body)
Model = TypeVar("Model", bound=BaseModel)

_JSON = re.compile(r"application/json|[\w.-]+/[\w.-]+\+json", re.ASCII)
# So much is parsed within some milliseconds, whatever it is.
_INLINE_BYTES = 64 * 1024
_MAX_FIELDS = 1024
_MESSAGES_AT_ONCE = 512
# Of all messages of a conversation together.
_MAX_PARTS = 8192
# Of strings, lists and objects in a body, besides those of messages. Each becomes a Python object in one call that
# nothing interrupts; so many take 20 ms. A message has fewer than so many, besides its parts.
_MAX_VALUES = 1 << 17
_VALUES_OF_A_MESSAGE = 8
_MESSAGES = TypeAdapter(list[Message])

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
    """How large a body may be. `IncomingBody` limits how long it may take.

    Attributes:
        max_bytes: Of all of it.
        max_messages: Of a conversation. More of them are refused before they are looked at.
    """

    max_bytes: int
    max_messages: int

    @property
    def max_values(self) -> int:
        """Of strings, lists and objects in a body."""
        return _MAX_VALUES + _VALUES_OF_A_MESSAGE * self.max_messages


async def read_body(request: Request, limits: BodyLimits) -> bytes:
    """The whole body.

    Raises:
        HttpError: it is not JSON by its media type, is encoded, is too large or takes too long.
        QuireError: it was given up for the bodies of others.
        starlette.requests.ClientDisconnect: the client left before all of it came.
    """
    _check_media_type(request)
    _check_announced_size(request, limits.max_bytes)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limits.max_bytes:
            raise _too_large(limits.max_bytes)
    return bytes(body)


def parse_body(kind: type[BodyType], data: bytes) -> BodyType:
    """The body in `data`, all of whose fields are supported.

    Raises:
        InvalidArgument: it is not JSON, a field has the wrong type, or asks for what is not done here.
    """
    body = parse_json(kind, data, UNION_TYPES)
    check_supported(body)
    return body


def body_of(kind: type[BodyType], fields: Mapping[str, Any]) -> BodyType:
    """As `parse_body`, of fields that came otherwise than as JSON."""
    try:
        body = kind.model_validate(fields)
    except ValidationError as error:
        raise _invalid(error, UNION_TYPES) from error
    check_supported(body)
    return body


def parse_json(kind: type[Model], data: bytes, union_types: Mapping[str, str]) -> Model:
    """The object in `data`. `union_types` are the types of fields with several, as errors show them.

    Raises:
        InvalidArgument: it is not JSON, or a field has the wrong type.
    """
    try:
        # Some programs begin whatever is UTF-8 with a byte order mark.
        return kind.model_validate_json(data.removeprefix(codecs.BOM_UTF8))
    except ValidationError as error:
        raise _invalid(error, union_types) from error


async def read_model(kind: type[Model], request: Request, limits: BodyLimits, union_types: Mapping[str, str]) -> Model:
    """The object that is the body of a request. Raises as `read_body`, `load_json` and `parse_json` do."""
    fields = await load_json(await read_body(request, limits), limits.max_values)
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _invalid(error, union_types) from error


async def read_parsed(kind: type[BodyType], request: Request, limits: BodyLimits) -> BodyType:
    """The body of a request. What is long lets others run in between. Raises as `read_body` and `parse_body` do."""
    data = await read_body(request, limits)
    if len(data) <= _INLINE_BYTES:
        return parse_body(kind, data)
    return await parse_long_body(kind, data, limits)


async def load_json(data: bytes, max_values: int) -> Any:
    """The JSON value in `data`.

    Raises:
        InvalidArgument: it is not JSON, or has more than `max_values` strings, lists and objects.
    """
    turns = Turns()
    await _check_values(data, max_values, turns)
    try:
        return from_json(data.removeprefix(codecs.BOM_UTF8))
    except ValueError as error:
        raise _malformed(str(error)) from error
    finally:
        await turns.pause()


async def _check_values(data: bytes, max_values: int, turns: Turns) -> None:
    """Counts quotes and brackets, which takes a tenth of what parsing takes."""
    if len(data) <= 2 * max_values:
        return
    if b"\\" in data:
        # First escaped backslashes, so that a quote behind one is not taken for an escaped quote.
        data = data.replace(rb"\\", b"").replace(rb"\"", b"")
        await turns.pause()
    num_strings = data.count(b'"') // 2
    num_brackets = data.count(b"[") + data.count(b"{")
    if num_strings <= max_values < num_strings + num_brackets:
        await turns.pause()
        # Some of the brackets may be text.
        outside = b"".join(data.split(b'"')[::2])
        num_brackets = outside.count(b"[") + outside.count(b"{")
    if num_strings + num_brackets > max_values:
        raise InvalidArgument(
            f"the body has more than {max_values:,} strings, lists and objects, which is the max",
            reason="MALFORMED_MESSAGE",
        )
    await turns.pause()


async def parse_long_body(kind: type[BodyType], data: bytes, limits: BodyLimits) -> BodyType:
    """As `parse_body`: first what JSON it is, then what that means, messages a few at a time."""
    turns = Turns()
    fields = await load_json(data, limits.max_values)
    if isinstance(fields, dict) and len(fields) > _MAX_FIELDS:
        raise InvalidArgument(f"the body has {len(fields):,} fields; the most is {_MAX_FIELDS:,}")
    if isinstance(fields, dict):
        _check_counts(fields, limits.max_messages)
    try:
        if isinstance(fields, dict) and isinstance(fields.get("messages"), list) and "messages" in kind.model_fields:
            fields["messages"] = await _messages(kind, fields, turns)
        body = kind.model_validate(fields)
    except ValidationError as error:
        raise _invalid(error, UNION_TYPES) from error
    await turns.pause()
    check_supported(body)
    return body


def _check_counts(fields: Mapping[str, Any], max_messages: int) -> None:
    """Raises InvalidArgument where there are more messages, parts of messages or prompts than are looked at."""
    violations = Violations()
    prompts, messages = fields.get("prompt"), fields.get("messages")
    if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int):
        violations.check_count("prompt", prompts, MAX_PROMPTS)
    if isinstance(messages, list) and violations.check_count("messages", messages, max_messages):
        contents = [each.get("content") for each in messages if isinstance(each, dict)]
        num_parts = sum(len(content) for content in contents if isinstance(content, list))
        if num_parts > _MAX_PARTS:
            violations.add("messages", f"have {num_parts:,} parts of content together; the most is {_MAX_PARTS:,}")
    violations.raise_if_any()


async def _messages(kind: type[BodyType], fields: dict[str, Any], turns: Turns) -> list[Any]:
    """The messages among the fields, each a Message. Raises ValidationError as the body would for the first bad one."""
    asked = fields["messages"]
    messages: list[Any] = []
    for begin in range(0, len(asked), _MESSAGES_AT_ONCE):
        some = asked[begin : begin + _MESSAGES_AT_ONCE]
        try:
            messages += _MESSAGES.validate_python(some)
        except ValidationError:
            # Those before it are not looked at again, and the error counts from the first one.
            kind.model_validate(fields | {"messages": messages + some})
            raise
        await turns.pause()
    return messages


def _check_media_type(request: Request) -> None:
    """Browsers let a page of another site send other media types, or none, without asking this server first. Some
    programs send none; what comes from a page has `origin`."""
    stated = request.headers.get("content-type")
    if stated is None and "origin" in request.headers:
        raise _unsupported("content-type is missing; from a page it must be application/json")
    media_type = "application/json" if stated is None else stated.partition(";")[0].strip().lower()
    if _JSON.fullmatch(media_type) is None:
        raise _unsupported(f'content-type is "{shortened(media_type)}"; it must be application/json')
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise _unsupported(f'content-encoding is "{shortened(encoding)}"; send the body as it is')


def _check_announced_size(request: Request, max_bytes: int) -> None:
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise _too_large(max_bytes)


def _unsupported(message: str) -> HttpError:
    return HttpError(ErrorAnswer(415, message, "unsupported_media_type"))


def _too_large(max_bytes: int) -> HttpError:
    return HttpError(ErrorAnswer(413, f"the body is too large; the most is {max_bytes:,} bytes", "body_too_large"))


def _invalid(error: ValidationError, union_types: Mapping[str, str]) -> InvalidArgument:
    """The first thing that is wrong; an alternative of a field is of no use to the caller."""
    first = error.errors(include_url=False, include_context=True, include_input=False)[0]
    location = first["loc"]
    if first["type"] == "json_invalid":
        return _malformed(_cause(first["msg"]))
    if not location:
        return InvalidArgument("the body must be a JSON object", reason="MALFORMED_MESSAGE")
    path, alternatives = _path(location, union_types)
    if first["type"] == "too_long" and (most := first.get("ctx", {}).get("max_length")) is not None:
        description = f"has more than {most:,} entries, which is the most"
    elif alternatives is not None:
        description = f"must be {alternatives}"
    elif first["type"] == "missing":
        description = "is missing"
    elif first["type"] == "extra_forbidden":
        description = "is not a field of this request"
    else:
        description = f"must be {_EXPECTED.get(first['type'], _cause(first['msg']))}"
    return invalid_field(path, description)


def _malformed(cause: str) -> InvalidArgument:
    return InvalidArgument(f"the body is not valid JSON: {cause}", reason="MALFORMED_MESSAGE")


def _path(location: tuple[Any, ...], union_types: Mapping[str, str]) -> tuple[str, str | None]:
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
        if isinstance(step, str) and step in union_types:
            return path, union_types[step]
    return path, None


def _cause(message: str) -> str:
    return message.removeprefix("Invalid JSON: ").removeprefix("Input should be ")
