"""Errors as OpenAI's API answers them: {"error": {message, type, param, code}} with an HTTP status."""

import logging
import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

import grpc
from pydantic import BaseModel

from gateway.openai.request_ids import sent_request_id
from gateway.requests.field_names import renamed
from gateway.requests.violations import shortened
from quire.rpc.errors import QuireError

_logger = logging.getLogger(__name__)

# What a field of the validator is called in the caller's request.
ParamNames = Callable[[str], str]

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
"""What a request with a body may be answered besides 200: errors of Quire, and of a body that is slow, too large or of
another media type."""
# In seconds.
_RETRY_AFTER_UNAVAILABLE = "1"
_TYPES = {403: "permission_error", 429: "rate_limit_error"}
# Found only when a model is named that is not served: a request to generate is then not found, as OpenAI has it.
_STATUSES_BY_REASON = {"MODEL_NOT_FOUND": 404}


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
    """An error as it goes out. `param` names the field at fault, `code` is for programs."""

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
    """What only HTTP knows: a wrong media type, too large a body."""

    def __init__(self, answer: ErrorAnswer) -> None:
        super().__init__(answer.message)
        self.answer = answer


def error_answer(error: Exception, names: ParamNames, request_id: str | None = None) -> ErrorAnswer:
    """The answer to any error. Of an unexpected one nothing but that it happened goes out, with an id by which the log
    has the rest: the client's own, or `request_id`, or a new one."""
    match error:
        case HttpError(answer=answer):
            return answer
        case QuireError():
            return _of_quire_error(renamed(error, names))
    found = sent_request_id() or request_id or secrets.token_hex(16)
    _logger.error("request %s failed unexpectedly", shortened(found), exc_info=error)
    message = f"an unexpected error; the server's log has the request id {shortened(found)} and tells more"
    return ErrorAnswer(500, message, "unexpected", headers={"x-request-id": found})


def _of_quire_error(error: QuireError) -> ErrorAnswer:
    status = _STATUSES_BY_REASON.get(error.reason) or _STATUSES.get(error.code, 500)
    headers = {}
    if error.retry_after_ms is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_ms / 1000)))
    elif status == HTTPStatus.SERVICE_UNAVAILABLE:
        headers["retry-after"] = _RETRY_AFTER_UNAVAILABLE
    return ErrorAnswer(
        status=status,
        message=error.message,
        code=error.reason.lower(),
        param=error.violations[0].field if error.violations else None,
        headers=headers,
    )
