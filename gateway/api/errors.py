"""Errors over HTTP: {"error": {message, type, param, code}} with a status, as OpenAI's API has them."""

import logging
import math
import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import grpc
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Send

from gateway.request.violations import renamed, shortened
from quire.rpc.errors import QuireError

_logger = logging.getLogger(__name__)

ParamNames = Callable[[str], str]
"""The name of a field of the validator in the caller's request."""

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
"""Of errors of requests with a body: errors of Quire, and a body that is slow, too large or of another media type."""
_RETRY_AFTER_UNAVAILABLE_S = "1"
_TYPES = {403: "permission_error", 429: "rate_limit_error"}
# A request that names a model that is not served is not found, as OpenAI has it.
_STATUSES_BY_REASON = {"MODEL_NOT_FOUND": 404}
_CODES = {404: "path_not_found", 405: "method_not_allowed"}
_CLIENT_LEFT = 499
_client_request_id: ContextVar[str | None] = ContextVar("request id of the client", default=None)


class ErrorDetail(BaseModel):
    """`param` names the field at fault, `code` is for programs."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(BaseModel):
    """An error in OpenAI's shape."""

    error: ErrorDetail


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """An error as it is sent. `param` names the field at fault, `code` is for programs."""

    status: int
    message: str
    code: str
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def body(self) -> bytes:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        detail = ErrorDetail(message=self.message, type=kind, param=self.param, code=self.code)
        return ErrorBody(error=detail).model_dump_json().encode()


class HttpError(Exception):
    """An error that only HTTP has, such as a wrong media type."""

    def __init__(self, answer: ErrorAnswer) -> None:
        super().__init__(answer.message)
        self.answer = answer


def error_answer(error: Exception, names: ParamNames, request_id: str | None = None) -> ErrorAnswer:
    """The answer to any error. Of an unexpected one it says only that it happened, with the id under which the log has
    the rest: the client's own, or `request_id`, or a new one."""
    match error:
        case HttpError(answer=answer):
            return answer
        case QuireError():
            return _of_quire_error(renamed(error, names))
    found = _client_request_id.get() or request_id or secrets.token_hex(16)
    _logger.error("request %s failed unexpectedly", shortened(found), exc_info=error)
    message = f"an unexpected error; the server's log has the request id {shortened(found)} and tells more"
    return ErrorAnswer(500, message, "unexpected", headers={"x-request-id": found})


def _of_quire_error(error: QuireError) -> ErrorAnswer:
    status = _STATUSES_BY_REASON.get(error.reason) or _STATUSES.get(error.code, 500)
    headers = {}
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


def error_response(answer: ErrorAnswer) -> Response:
    return Response(answer.body, answer.status, dict(answer.headers), media_type="application/json")


def error_handlers() -> dict[Any, Callable[[Request, Exception], Awaitable[Response]]]:
    """Starlette's handlers by kind of error, a wrong path or method included."""

    async def answer(request: Request, error: Exception) -> Response:
        match error:
            case ClientDisconnect():
                return Response(status_code=_CLIENT_LEFT)
            case HTTPException():
                return error_response(_of_http_exception(request, error))
        return error_response(error_answer(error, str))

    return dict.fromkeys((QuireError, HttpError, HTTPException, ClientDisconnect), answer)


def _of_http_exception(request: Request, error: HTTPException) -> ErrorAnswer:
    shown = f"{request.method} {request.url.path[:200]}"
    message = {404: f"{shown} is not known here", 405: f"{shown} is not allowed"}.get(error.status_code, error.detail)
    code = _CODES.get(error.status_code, "http_error")
    return ErrorAnswer(error.status_code, message, code, headers=error.headers or {})


async def send_answer(send: Send, answer: ErrorAnswer, headers: Mapping[str, str] | None = None) -> None:
    """Sends an error from outside of the application's routes, with `headers` besides its own."""
    fields = {"content-type": "application/json", "content-length": str(len(answer.body))}
    fields |= {**answer.headers, **(headers or {})}
    encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": answer.status, "headers": encoded})
    await send({"type": "http.response.body", "body": answer.body})


def set_client_request_id(request_id: str) -> None:
    """The id that the client sent with the current request. It belongs to the task of the request."""
    _client_request_id.set(request_id)
