"""gRPC-Web on the HTTP port: pages in browsers, and other clients without HTTP/2, call the gRPC services.

A request is a POST to /SERVICE/METHOD with one message in a frame; the answer has frames of messages and, as its last
frame, the status with its details. Calls are run here, by the same servicers and under the same limits as other HTTP
requests: of bodies, of connections and of slow readers. Methods that take a stream of requests need gRPC itself.
"""

import asyncio
import base64
import binascii
import functools
import logging
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as AsgiMessage

from gateway.api.answers import OPENAI, HttpError, WatchedResponse
from gateway.api.body import BodyLimits, read_body
from gateway.auth.caller import current_tenant, set_caller
from gateway.auth.keys import Authenticator
from gateway.request.body_memory import count_answer
from gateway.request.counting import CountedMessage
from gateway.request.violations import shortened
from gateway.server.grpc import OPEN_METHODS
from gateway.turns import LONG_BYTES
from quire.rpc.errors import (
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    QuireError,
    ResourceExhausted,
    Unimplemented,
    to_rpc_status,
)
from quire.rpc.interceptors import OTHER_METHODS, decoder

_logger = logging.getLogger(__name__)
_MEDIA_TYPE = re.compile(r"(application/grpc-web(-text)?)(\+proto)?")
_TIMEOUT = re.compile(r"([0-9]{1,8})([HMSmun])")
_SECONDS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_HEAD_BYTES = 5
_COMPRESSED, _TRAILERS = 0x01, 0x80
EXPOSED_HEADERS = ("quire-request-id", "grpc-status", "grpc-message", "grpc-status-details-bin")
"""Headers of answers that pages of other origins may read."""

Metadata = Sequence[tuple[str, str | bytes]]
Report = Callable[[str, grpc.StatusCode], None]


class CallContext:
    """The part of a call's context that servicers use."""

    def __init__(self, metadata: Metadata, ends_at: float | None, start: Callable[[Metadata], Awaitable[None]]) -> None:
        self._metadata = metadata
        self._ends_at = ends_at
        self._start = start

    def invocation_metadata(self) -> Metadata:
        return self._metadata

    def time_remaining(self) -> float | None:
        """Seconds until the call's deadline; None if it has none."""
        return None if self._ends_at is None else max(0.0, self._ends_at - asyncio.get_running_loop().time())

    async def send_initial_metadata(self, metadata: Metadata) -> None:
        await self._start(metadata)


@dataclass(frozen=True, slots=True)
class _Method:
    """A method of a servicer. `decode` raises QuireError for bytes that are no request."""

    name: str
    behavior: Callable[[Any, Any], Any]
    decode: Callable[[bytes], Any]
    streams_requests: bool
    streams_responses: bool

    async def responses(self, request: Any, context: CallContext) -> AsyncGenerator[Message]:
        if not self.streams_responses:
            yield await self.behavior(request, context)
            return
        async with aclosing(self.behavior(request, context)) as responses:
            async for response in responses:
                yield response


class GrpcWebMiddleware:
    """Answers calls of gRPC-Web, which their media type marks, and passes on all other requests."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        servicers: Mapping[ServiceDescriptor, object],
        authenticator: Authenticator,
        limits: BodyLimits,
        on_refusal: Callable[[str], None],
        on_call_end: Report,
    ) -> None:
        """`on_refusal` gets the reason of each rejection of a caller, `on_call_end` method and status of each call."""
        self._app = app
        self._authenticator = authenticator
        self._limits = limits
        self._on_refusal = on_refusal
        self._on_call_end = on_call_end
        self._methods = {
            f"/{service.full_name}/{method.name}": self._method(service, method, servicer)
            for service, servicer in servicers.items()
            for method in service.methods
        }

    def _method(self, service: ServiceDescriptor, method: MethodDescriptor, servicer: object) -> _Method:
        return _Method(
            f"{service.full_name}/{method.name}",
            getattr(servicer, method.name),
            decoder(CountedMessage(GetMessageClass(method.input_type), self._limits.entries).parse),
            method.client_streaming,
            method.server_streaming,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        match = _MEDIA_TYPE.fullmatch(media_type)
        if match is None or scope["method"] != "POST":
            return await self._app(scope, receive, send)
        is_text = match[2] is not None
        method = self._methods.get(scope["path"])
        report = functools.partial(self._on_call_end, OTHER_METHODS if method is None else method.name)
        try:
            responses, ends_at = await self._begin(method, request, media_type, is_text=is_text)
        except ClientDisconnect:
            return report(grpc.StatusCode.CANCELLED)
        except (QuireError, HttpError) as error:
            responses, ends_at = functools.partial(_fail, _as_status(error)), None
        answer = _Answer(f"{match[1]}+proto", responses, ends_at, request, report, is_text=is_text)
        return await answer(scope, receive, send)

    async def _begin(
        self, method: _Method | None, request: Request, media_type: str, *, is_text: bool
    ) -> tuple[Callable[[CallContext], AsyncGenerator[Message]], float | None]:
        """Reads a call: a function that runs it, and the time at which it is over. Raises QuireError and HttpError."""
        if request.url.path not in OPEN_METHODS:
            try:
                set_caller(self._authenticator.authenticate(request.headers.getlist("authorization")))
            except QuireError as error:
                self._on_refusal(error.reason)
                raise
        if method is None:
            shown = shortened(request.url.path)
            raise Unimplemented(f"this server has no method {shown}", reason="UNKNOWN_METHOD")
        if method.streams_requests:
            raise Unimplemented(f"{method.name} takes a stream of requests, which needs gRPC; call the gRPC port")
        ends_at = _ends_at(request.headers.get("grpc-timeout"))
        body = await read_body(request, self._limits, media_types=(media_type,))
        data = _message(_decoded(body) if is_text else body)
        if len(data) <= LONG_BYTES:
            message = method.decode(data)
        else:
            message = await self._limits.turns.call(current_tenant(), method.decode, data)
        return functools.partial(method.responses, message), ends_at


class _Answer(WatchedResponse):
    """The answer to one call, which ends when its client leaves or its deadline passes."""

    def __init__(
        self,
        media_type: str,
        responses: Callable[[CallContext], AsyncGenerator[Message]],
        ends_at: float | None,
        request: Request,
        report: Callable[[grpc.StatusCode], None],
        *,
        is_text: bool,
    ) -> None:
        super().__init__({}, OPENAI)
        self._media_type = media_type
        self._responses = responses
        self._ends_at = ends_at
        self._request = request
        self._report = report
        self._is_text = is_text
        self._has_started = False

    async def _make(self, send: Send) -> None:
        code = grpc.StatusCode.CANCELLED
        try:
            error = await self._run(send)
            code = grpc.StatusCode.OK if error is None else error.code
            await self._send_frame(send, _trailers(error), _TRAILERS, is_last=True)
        finally:
            self._report(code)

    async def _run(self, send: Send) -> QuireError | None:
        """Sends all responses. Returns the error that ended them."""
        context = CallContext(self._request.headers.items(), self._ends_at, functools.partial(self._start, send))
        limit = asyncio.timeout_at(self._ends_at)
        try:
            async with limit, aclosing(self._responses(context)) as responses:
                async for response in responses:
                    data = response.SerializeToString()
                    if len(data) > LONG_BYTES:
                        count_answer(len(data))
                    await self._send_frame(send, data)
        except QuireError as error:
            return error
        except Exception as error:
            if isinstance(error, TimeoutError) and limit.expired():
                return DeadlineExceeded("the deadline of the call has passed")
            _logger.exception("%s failed unexpectedly", self._request.url.path)
            return Internal("an unexpected error; see the server's log", reason="UNEXPECTED")
        return None

    async def _start(self, send: Send, metadata: Metadata) -> None:
        if self._has_started:
            return
        self._has_started = True
        own = [(name.encode(), value.encode() if isinstance(value, str) else value) for name, value in metadata]
        # Without the last header, proxies would buffer the stream.
        own += [(b"content-type", self._media_type.encode()), (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": HTTPStatus.OK, "headers": own})

    async def _send_frame(self, send: Send, data: bytes, flags: int = 0, *, is_last: bool = False) -> None:
        await self._start(send, ())
        frame = bytes([flags]) + len(data).to_bytes(_HEAD_BYTES - 1, "big") + data
        body = base64.b64encode(frame) if self._is_text else frame
        message: AsgiMessage = {"type": "http.response.body", "body": body, "more_body": not is_last}
        await send(message)


async def _fail(error: QuireError, context: CallContext) -> AsyncGenerator[Message]:
    raise error
    yield


def _as_status(error: QuireError | HttpError) -> QuireError:
    """The error of a body as a status."""
    if isinstance(error, QuireError):
        return error
    message = error.answer.message
    match error.answer.status:
        case HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
            return ResourceExhausted(message, reason="BODY_TOO_LARGE")
        case HTTPStatus.REQUEST_TIMEOUT:
            return DeadlineExceeded(message, reason="SLOW_SENDER")
        case HTTPStatus.UNSUPPORTED_MEDIA_TYPE:
            return Unimplemented(message, reason="UNSUPPORTED_ENCODING")
        case _:
            return InvalidArgument(message, reason="MALFORMED_MESSAGE")


def _ends_at(timeout: str | None) -> float | None:
    """The deadline of a call in the time of the event loop. Raises InvalidArgument if the header is malformed."""
    if timeout is None:
        return None
    match = _TIMEOUT.fullmatch(timeout)
    if match is None:
        raise InvalidArgument.of_field(
            "grpc-timeout", f'is "{shortened(timeout)}"; it must be at most eight digits and one of H, M, S, m, u, n'
        )
    return asyncio.get_running_loop().time() + int(match[1]) * _SECONDS[match[2]]


def _decoded(body: bytes) -> bytes:
    try:
        return base64.b64decode(body, validate=True)
    except binascii.Error as error:
        raise InvalidArgument(f"the body is not base64: {error}", reason="MALFORMED_MESSAGE") from error


def _message(body: bytes) -> bytes:
    """The message in the only frame of a request. Raises InvalidArgument and Unimplemented."""
    if body and body[0] & _COMPRESSED:
        raise Unimplemented("the message is compressed; send it as it is")
    size = int.from_bytes(body[1:_HEAD_BYTES], "big")
    if len(body) < _HEAD_BYTES or body[0] != 0 or len(body) != _HEAD_BYTES + size:
        raise InvalidArgument(
            f"the body has {len(body)} bytes that are not one frame with one message", reason="MALFORMED_MESSAGE"
        )
    return body[_HEAD_BYTES:]


def _trailers(error: QuireError | None) -> bytes:
    """The status of a call, as lines of headers."""
    if error is None:
        return b"grpc-status: 0\r\n"
    status = to_rpc_status(error)
    number: int = status.code.value[0]
    lines = [f"grpc-status: {number}", f"grpc-message: {quote(status.details, safe=' !#$&()*+,/:;<=>?@[]^`{|}~')}"]
    for name, value in status.trailing_metadata or ():
        assert isinstance(value, bytes), "details are bytes"
        lines.append(f"{name}: {base64.b64encode(value).decode()}")
    return "".join(f"{line}\r\n" for line in lines).encode()
