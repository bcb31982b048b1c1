"""HTTP answers: JSON that is made and written in pieces, server-sent events, and errors.

Long lists are made a few entries at a time and are never in memory as a whole. All non-ASCII characters are escaped,
because some readers split lines at characters that JSON allows. Errors have a status and OpenAI's body,
{"error": {message, type, param, code}}.
"""

import asyncio
import json
import logging
import math
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping, Set
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass, field
from difflib import get_close_matches
from http import HTTPStatus
from itertools import islice
from typing import Any, Protocol, TypeVar

import grpc
import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Receive, Scope, Send
from typing_extensions import TypedDict

from gateway.request.generator import REFUSAL_S
from gateway.request.violations import shortened
from gateway.turns import Turns
from quire.rpc.errors import QuireError
from quire.runtime import entropy
from quire.runtime.logs import REQUEST_ID

_logger = logging.getLogger(__name__)
Entry = TypeVar("Entry")

_STATUSES = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.FAILED_PRECONDITION: 400,
    grpc.StatusCode.UNIMPLEMENTED: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.ABORTED: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.CANCELLED: 499,
    grpc.StatusCode.INTERNAL: 500,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
HTTP_STATUSES = frozenset(_STATUSES.values()) | {408, 413, 415}
"""HTTP statuses of errors of requests with a body: Quire's errors, and a slow, too large or non-JSON body."""
_RETRY_AFTER_UNAVAILABLE_S = "1"
_TYPES = {403: "permission_error", 429: "rate_limit_error"}
# As in OpenAI's API, a model that is not served is 404, and cancelling a batch that is done is 409; as in vLLM, a
# directory without an adapter is 404.
_STATUSES_BY_REASON = {"MODEL_NOT_FOUND": 404, "BATCH_DONE": 409, "NO_ADAPTER_IN_DIRECTORY": 404}
_CODES = {404: "path_not_found", 405: "method_not_allowed"}
_CLIENT_LEFT = 499
client_request_id: ContextVar[str | None] = ContextVar("request id of the client", default=None)
"""The id that the client sent with the current request, in the task of the request."""
_EVENT_STREAM = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    # Without this header, proxies would buffer the stream.
    "x-accel-buffering": "no",
}
_JSON = {"content-type": "application/json"}
_COMMENT = b": keep-alive\n"
STREAM_PART = "quire.stream_part"
"""The extension of a request's scope with which the server takes parts of a stream: a `PartWriter`."""
_PIECE_BYTES = 1 << 16
_PIECE_CHARACTERS = 1 << 15
# Number of list entries that are written at once.
_FEW = 64
_SHORT = frozenset((str, int, float, bool, type(None)))
_dumps = json.JSONEncoder(separators=(",", ":")).encode
_encode = msgspec.json.Encoder().encode
# Characters that end a line for some readers of server-sent events, such as programs with `str.splitlines`.
_LINE_ENDS = re.compile(rb"\xe2\x80[\xa8\xa9]|\xc2\x85")


class PartWriter(Protocol):
    """Writes parts of one stream at once, past the layers that do not change them."""

    @property
    def takes_parts(self) -> bool:
        """Whether `write_part` may be called; otherwise the next part must be sent in the ordinary way."""
        ...

    def write_part(self, data: bytes) -> None: ...


class ErrorDetail(TypedDict):
    """`param` is the path of the invalid field, `code` is a constant for programs."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(TypedDict):
    """An error in OpenAI's shape."""

    error: ErrorDetail


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """An error response. `param` is the path of the invalid field, `code` is a constant for programs."""

    status: int
    message: str
    code: str
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Dialect:
    """The form of errors and streams in an API.

    Attributes:
        error: Makes the object of an error.
        names_events: Whether each event of a stream has the `type` of its object as its name, as in OpenAI's responses
            and Anthropic's messages. Otherwise events have no names, and [DONE] is the last one.
        error_event: Makes the object of an error in a stream; None if `error` makes it.
        id_headers: The response headers with the id of the call.
        says_done: Whether [DONE] ends a stream without names.
    """

    error: Callable[[ErrorAnswer], Mapping[str, Any]]
    names_events: bool = False
    error_event: Callable[[ErrorAnswer], Mapping[str, Any]] | None = None
    id_headers: tuple[str, ...] = ("x-request-id",)
    says_done: bool = True

    def error_body(self, answer: ErrorAnswer) -> bytes:
        return as_json(self.error(answer))

    def event(self, value: Mapping[str, Any]) -> bytes:
        """A server-sent event."""
        name = f"event: {value['type']}\n".encode() if self.names_events else b""
        return b"".join((name, b"data: ", as_json(value), b"\n\n"))

    @property
    def end_of_stream(self) -> bytes:
        return b"data: [DONE]\n\n" if self.says_done and not self.names_events else b""


def openai_error(answer: ErrorAnswer) -> ErrorBody:
    kind = _TYPES.get(answer.status, "invalid_request_error" if answer.status < 500 else "server_error")
    return {"error": {"message": answer.message, "type": kind, "param": answer.param, "code": answer.code}}


OPENAI = Dialect(openai_error)
"""The dialect of OpenAI's completions and chat completions, and of all paths without their own dialect."""


class HttpError(Exception):
    """An error that occurs only over HTTP, such as a wrong media type."""

    def __init__(self, answer: ErrorAnswer) -> None:
        super().__init__(answer.message)
        self.answer = answer


def error_answer(error: Exception, request_id: str | None = None) -> ErrorAnswer:
    """The response to any error. For an unexpected error it has no details, only the id under which they are logged:
    the client's own id, `request_id`, or a new id."""
    match error:
        case HttpError(answer=answer):
            return answer
        case QuireError():
            return _of_quire_error(error)
    found = client_request_id.get() or request_id or entropy.random_hex(16)
    _logger.error("request %s failed unexpectedly", shortened(found), exc_info=error, extra={REQUEST_ID: found})
    message = f"an unexpected error; the server's log has details under the request id {shortened(found)}"
    return ErrorAnswer(500, message, "unexpected", headers={"x-request-id": found, "x-should-retry": "false"})


def _of_quire_error(error: QuireError) -> ErrorAnswer:
    status = _STATUSES_BY_REASON.get(error.reason) or _STATUSES.get(error.code, 500)
    headers: dict[str, str] = {}
    if not error.is_retryable and _is_retried(status):
        headers["x-should-retry"] = "false"
    if error.retry_after_ms is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_ms / 1000)))
    elif status == HTTPStatus.SERVICE_UNAVAILABLE:
        headers["retry-after"] = _RETRY_AFTER_UNAVAILABLE_S
    return ErrorAnswer(
        status=status,
        message=error.message,
        code=error.reason.lower(),
        param=error.violations[0].field if error.violations else None,
        headers=headers,
    )


def _is_retried(status: int) -> bool:
    """Whether the clients of OpenAI and Anthropic retry a request with this status, unless x-should-retry is false."""
    return status in {408, 409, 429} or status >= 500


def error_handlers(
    dialect_of: Callable[[Scope], Dialect],
) -> dict[Any, Callable[[Request, Exception], Awaitable[Response]]]:
    """Starlette's error handlers by type, including wrong paths and methods. `dialect_of` returns the dialect of a
    call."""

    async def answer(request: Request, error: Exception) -> Response:
        match error:
            case ClientDisconnect():
                return Response(status_code=_CLIENT_LEFT)
            case HTTPException():
                found = _of_http_exception(request, error)
            case _:
                found = error_answer(error)
        body = dialect_of(request.scope).error_body(found)
        return Response(body, found.status, dict(found.headers), media_type="application/json")

    return dict.fromkeys((QuireError, HttpError, HTTPException, ClientDisconnect), answer)


def _of_http_exception(request: Request, error: HTTPException) -> ErrorAnswer:
    path: str = request.url.path
    shown = f"{shortened(request.method)} {path[:200]}"
    message = error.detail
    code = _CODES.get(error.status_code, "http_error")
    headers = dict(error.headers or {})
    if error.status_code == HTTPStatus.NOT_FOUND:
        message = f"{shown} is not known here{_suggestion(request)}; /docs lists all paths"
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        # Starlette lists only the methods of the first route of the path.
        path = next(each.path for each in request.app.routes if each.matches(request.scope)[0] is not Match.NONE)
        methods = {method for each in request.app.routes if each.path == path for method in each.methods}
        headers["Allow"] = ", ".join(sorted(methods))
        message = f"{shown} is not allowed; the path allows {headers['Allow']}"
    return ErrorAnswer(error.status_code, message, code, headers=headers)


def _suggestion(request: Request) -> str:
    """The path that the client probably meant: clients often omit /v1, repeat it, or misspell a word."""
    path = request.url.path[:200].rstrip("/")
    paths = sorted({each.path for each in request.app.routes if "{" not in each.path})
    meant = (f"/v1{path}", path.replace("/v1/v1/", "/v1/"), *get_close_matches(path, paths, 1, 0.85))
    found = next((each for each in meant if each != path and each in paths), None)
    return "" if found is None else f"; did you mean {found}?"


class LazyList(Iterable[Entry]):
    """A list whose entries are made while it is written."""

    def __init__(self, make: Callable[[], Iterable[Entry]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._make())


def few_or_lazy(make: Callable[[], Iterable[Entry]], length: int) -> list[Entry] | LazyList[Entry]:
    """A list, lazy if it is long."""
    return list(make()) if length <= _FEW else LazyList(make)


def json_pieces(answer: Mapping[str, Any] | LazyList[Any]) -> Iterator[bytes]:
    """An object or a list as JSON, in pieces of about 32 KiB. Each takes a few milliseconds."""
    parts: list[str] = []
    size = 0
    for part in _parts(answer):
        parts.append(part)
        size += len(part)
        if size >= _PIECE_CHARACTERS:
            yield "".join(parts).encode()
            parts, size = [], 0
    yield "".join(parts).encode()


def as_json(answer: Mapping[str, Any] | LazyList[Any] | str) -> bytes:
    """A value as JSON. If called in a thread, other threads run between the pieces of lazy lists."""
    try:
        encoded = _encode(answer)
    except (TypeError, ValueError, OverflowError):
        # It has a lazy list, half a surrogate pair, or a number of more than 64 bits.
        return "".join(_parts(answer)).encode()
    return "".join(_parts(answer)).encode() if _LINE_ENDS.search(encoded) else encoded


def _parts(value: Any) -> Iterator[str]:
    long = set[int]()
    _find_long(value, long)
    return _parts_with(value, long)


def _parts_with(value: Any, long: Set[int]) -> Iterator[str]:
    """The parts of a value. `long` has the ids that `_find_long` found in it; all other values are written whole."""
    match value:
        case LazyList():
            yield from _list_parts(iter(value))
        case list() if len(value) > _FEW:
            yield from _list_parts(iter(value))
        case list() | dict() if id(value) in long:
            yield from _container_parts(value, long)
        case _:
            yield _dumps(value)


def _container_parts(value: dict[str, Any] | list[Any], long: Set[int]) -> Iterator[str]:
    """The parts of an object or a list that has a long entry. Consecutive short entries are one part."""
    separator, end = "{}" if isinstance(value, dict) else "[]"
    short: list[tuple[Any, Any]] = []

    def short_part() -> str:
        part = dict(short) if isinstance(value, dict) else [each for _, each in short]
        short.clear()
        return _dumps(part)[1:-1]

    for name, each in value.items() if isinstance(value, dict) else enumerate(value):
        if id(each) not in long:
            short.append((name, each))
            continue
        if short:
            yield separator + short_part()
            separator = ","
        yield f"{separator}{_dumps(name)}:" if isinstance(value, dict) else separator
        yield from _parts_with(each, long)
        separator = ","
    yield separator + short_part() + end if short else end


def _list_parts(entries: Iterator[Any]) -> Iterator[str]:
    separator = "["
    while few := list(islice(entries, _FEW)):
        long = set[int]()
        if _find_all_long(few, long):
            for entry in few:
                yield separator
                yield from _parts_with(entry, long)
                separator = ","
        else:
            yield separator + _dumps(few)[1:-1]
            separator = ","
    yield "[]" if separator == "[" else "]"


def _find_long(value: Any, long: set[int]) -> bool:
    """Whether the value is or contains a list that is written in pieces; adds the ids of these lists and of their
    containers to `long`. Each value is visited once at any depth, except entries of these lists, which are visited when
    they are written."""
    match value:
        case LazyList():
            is_long = True
        case list():
            is_long = len(value) > _FEW or _find_all_long(value, long)
        case dict():
            is_long = _find_all_long(value.values(), long)
        case _:
            return False
    if is_long:
        long.add(id(value))
    return is_long


def _find_all_long(values: Iterable[Any], long: set[int]) -> bool:
    """Calls `_find_long` for each value that may be long; returns whether one of them is."""
    found = [_find_long(each, long) for each in values if type(each) not in _SHORT]
    return True in found


class WatchedResponse(Response):
    """A response that is cancelled, with its requests, when the client disconnects."""

    def __init__(self, headers: Mapping[str, str], dialect: Dialect) -> None:
        self.background = None
        self._more_headers = headers
        self._dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        making = asyncio.create_task(self._make_or_fail(send))
        leaving = asyncio.create_task(_until_disconnect(receive))
        leaving.add_done_callback(lambda _: making.cancel())
        try:
            await asyncio.wait([making])
        finally:
            leaving.cancel()
            if not making.done():
                await asyncio.wait([making])
        if not making.cancelled():
            making.result()

    async def _make_or_fail(self, send: Send) -> None:
        try:
            await self._make(send)
        except Exception as error:
            await self._send_error(send, error_answer(error, self._more_headers.get("x-request-id")))

    async def _make(self, send: Send) -> None:
        raise NotImplementedError

    async def _send_error(self, send: Send, answer: ErrorAnswer) -> None:
        await send_answer(send, answer, self._more_headers, self._dialect)


class WholeResponse(WatchedResponse):
    """One JSON object. A long object is made and sent in pieces."""

    def __init__(
        self,
        make: Callable[[], AsyncGenerator[bytes, None]],
        headers: Mapping[str, str],
        dialect: Dialect = OPENAI,
    ) -> None:
        """`make` yields the pieces of the body."""
        super().__init__(headers, dialect)
        self._make_pieces = make
        self._has_started = False

    async def _make(self, send: Send) -> None:
        async with aclosing(self._make_pieces()) as pieces:
            body = b""
            async for piece in pieces:
                body += piece
                if len(body) > _PIECE_BYTES:
                    break
            else:
                await _start(send, 200, _json_headers(body) | dict(self._more_headers))
                await send({"type": "http.response.body", "body": body})
                return
            self._has_started = True
            await _start(send, 200, _JSON | dict(self._more_headers))
            await _send_piece(send, body)
            turns = Turns()
            async for piece in pieces:
                await _send_piece(send, piece)
                await turns.pause()
        await send({"type": "http.response.body", "body": b""})

    async def _send_error(self, send: Send, answer: ErrorAnswer) -> None:
        # If a part of the body was already sent, the connection is closed instead.
        if not self._has_started:
            await super()._send_error(send, answer)


class StreamedResponse(WatchedResponse):
    """Server-sent events.

    The headers are sent with the first event, or some time after the submission to a scheduler. A scheduler rejects
    requests at once, so a rejection is still an ordinary error response. A later error is the last event of the stream.
    Between events, comments prevent proxies from closing the connection. If events have ids, a comment is a line of the
    next event: clients that store ids, such as OpenAI's for Python, parse a block without data as an event with empty
    data. In other streams a comment is a block, which clients that parse only data lines skip.
    """

    def __init__(
        self,
        make: Callable[["StreamedResponse"], AsyncGenerator[bytes, None]],
        is_submitted: Callable[[], bool],
        keep_alive_s: float,
        headers: Mapping[str, str],
        dialect: Dialect,
    ) -> None:
        """`make` yields one or more events of this response at a time. `is_submitted` returns whether a scheduler has
        the request. A comment is sent after `keep_alive_s` without an event; 0 disables comments."""
        super().__init__(headers, dialect)
        self._make_events = make
        self._is_submitted = is_submitted
        self._keep_alive_s = keep_alive_s
        self._parts: PartWriter | None = None
        self._has_started = False
        self._has_ids = False
        # Found once: `write_now` runs for each event.
        self._now = asyncio.get_running_loop().time
        self._written_at = 0.0
        # Held during each write.
        self._lock = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._parts = scope.get("extensions", {}).get(STREAM_PART)
        await super().__call__(scope, receive, send)

    @property
    def is_ready(self) -> bool:
        """Whether `write_now` may be called: the stream has begun, and neither another part nor the client has to be
        waited for."""
        return self._has_started and not self._lock.locked() and self._parts is not None and self._parts.takes_parts

    def write_now(self, data: bytes) -> None:
        """Writes the next events, which `make` does not yield."""
        assert self._parts is not None
        self._written_at = self._now()
        self._parts.write_part(data)

    def use(self, dialect: Dialect) -> None:
        """Sets the dialect of later errors."""
        self._dialect = dialect

    async def _make(self, send: Send) -> None:
        silence = asyncio.create_task(self._keep_alive(send))
        try:
            async with aclosing(self._make_events(self)) as events:
                async for each in events:
                    self._has_ids = self._has_ids or each.startswith(b"id: ")
                    await self._write(send, each)
            await self._write(send, self._dialect.end_of_stream, is_last=True)
        finally:
            silence.cancel()

    async def _keep_alive(self, send: Send) -> None:
        times_submitted = 0
        while times_submitted < 2:
            await asyncio.sleep(REFUSAL_S / 2)
            times_submitted = times_submitted + 1 if self._is_submitted() else 0
        await self._write(send, b"")
        while self._keep_alive_s:
            silent_s = self._now() - self._written_at
            if silent_s >= self._keep_alive_s:
                await self._write(send, self._comment)
            else:
                await asyncio.sleep(self._keep_alive_s - silent_s)

    @property
    def _comment(self) -> bytes:
        return _COMMENT if self._has_ids else _COMMENT + b"\n"

    async def _write(self, send: Send, data: bytes, *, is_last: bool = False) -> None:
        """Sends `data`, after the headers if they were not sent."""
        async with self._lock:
            if not self._has_started:
                await _start(send, 200, _EVENT_STREAM | dict(self._more_headers))
                self._has_started = True
            self._written_at = self._now()
            if not is_last and 0 < len(data) <= _PIECE_BYTES and self._parts is not None and self._parts.takes_parts:
                self._parts.write_part(data)
            elif data or is_last:
                await send({"type": "http.response.body", "body": data, "more_body": not is_last})

    async def _send_error(self, send: Send, answer: ErrorAnswer) -> None:
        async with self._lock:
            has_started = self._has_started
        if not has_started:
            return await super()._send_error(send, answer)
        say = self._dialect.error_event or self._dialect.error
        return await self._write(send, self._dialect.event(say(answer)), is_last=True)


async def send_answer(
    send: Send, answer: ErrorAnswer, headers: Mapping[str, str] | None = None, dialect: Dialect = OPENAI
) -> None:
    """Sends an error. `headers` are added unless the error has its own."""
    body = dialect.error_body(answer)
    await _start(send, answer.status, _json_headers(body) | {**(headers or {}), **answer.headers})
    await send({"type": "http.response.body", "body": body})


def _json_headers(body: bytes) -> dict[str, str]:
    return _JSON | {"content-length": str(len(body))}


async def _start(send: Send, status: int, headers: Mapping[str, str]) -> None:
    encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})


async def _send_piece(send: Send, body: bytes) -> None:
    """Sends a part of a body in small pieces, each after the previous one is written. With TLS, data counts as sent as
    soon as it is passed on, so a large piece could be cut off."""
    for begin in range(0, len(body), _PIECE_BYTES):
        await send({"type": "http.response.body", "body": body[begin : begin + _PIECE_BYTES], "more_body": True})


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
