"""Domain errors that know their gRPC status, on both ends of a call.

    QuireError
    ├── InvalidArgument      a field is missing, contradictory or out of range
    ├── NotFound             no such model, request, prefix
    ├── AlreadyExists        the request id is in use
    ├── Aborted              another caller took over
    ├── ResourceExhausted    a queue or a limit is full; retry later
    ├── FailedPrecondition   not in this state (stale epoch, no Hello yet)
    ├── Unimplemented        known to the contract, not supported by this version
    ├── Unavailable          no server reached; safe to retry
    ├── Cancelled            the caller cancelled
    ├── DeadlineExceeded     the call took longer than its timeout
    ├── Unauthenticated      no valid credentials
    ├── PermissionDenied     valid credentials that do not suffice
    └── Internal             the request itself failed

On the wire an error is a status with google.rpc details: ErrorInfo (domain "quire"), BadRequest where fields are at
fault, RetryInfo where a retry makes sense.
"""

# ruff: noqa: N818  (named as the status codes that they stand for)

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self, cast

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

DOMAIN = "quire"

# A client with default options drops headers beyond 8 KiB, and the message travels twice. So texts are cut to this
# number of bytes; gRPC writes three for each byte of a message that is not printable ASCII.
_MAX_MESSAGE_BYTES = 1000
_MAX_VIOLATIONS = 5
_MAX_VIOLATION_BYTES = 300
_MAX_FIELD_BYTES = 200
_MOST_BYTES_OF_A_CHARACTER = 12
# An error that a retry may cure has one of these, or RESOURCE_EXHAUSTED with a time to wait.
_RETRYABLE = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED})
_DETAILS_KEY = "grpc-status-details-bin"


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One field of a request that is at fault, and why."""

    field: str
    description: str


class QuireError(Exception):
    """The base of all errors that cross an RPC edge. Raise a subclass.

    Args:
        message: One clear line for people: the thing, the value, the limit.
        reason: UPPER_SNAKE for programs; the class's own reason when absent.
        violations: The request's fields that are at fault.
        retry_after_ms: When a retry makes sense.
        metadata: Further values for programs.
    """

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN
    default_reason: ClassVar[str] = "UNKNOWN"

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "default_reason" not in vars(cls):
            cls.default_reason = cls.code.name

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        violations: Sequence[FieldViolation] = (),
        retry_after_ms: int | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.violations: tuple[FieldViolation, ...] = tuple(violations)
        self.retry_after_ms = retry_after_ms
        self.metadata: dict[str, str] = dict(metadata or {})

    @classmethod
    def of_field(cls, field: str, description: str, *, reason: str | None = None) -> Self:
        """The error for one field, in one line and as a violation."""
        return cls(f"{field} {description}", reason=reason, violations=[FieldViolation(field, description)])

    @property
    def is_retryable(self) -> bool:
        """Whether the same request may succeed later. A limit that is reached says when; else waiting does not help."""
        return self.code in _RETRYABLE or (
            self.code is grpc.StatusCode.RESOURCE_EXHAUSTED and self.retry_after_ms is not None
        )


class InvalidArgument(QuireError):
    code = grpc.StatusCode.INVALID_ARGUMENT


class NotFound(QuireError):
    code = grpc.StatusCode.NOT_FOUND


class AlreadyExists(QuireError):
    code = grpc.StatusCode.ALREADY_EXISTS


class Aborted(QuireError):
    code = grpc.StatusCode.ABORTED


class ResourceExhausted(QuireError):
    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class FailedPrecondition(QuireError):
    code = grpc.StatusCode.FAILED_PRECONDITION


class Unimplemented(QuireError):
    code = grpc.StatusCode.UNIMPLEMENTED


class Unavailable(QuireError):
    code = grpc.StatusCode.UNAVAILABLE


class Cancelled(QuireError):
    code = grpc.StatusCode.CANCELLED


class DeadlineExceeded(QuireError):
    code = grpc.StatusCode.DEADLINE_EXCEEDED


class Unauthenticated(QuireError):
    code = grpc.StatusCode.UNAUTHENTICATED


class PermissionDenied(QuireError):
    code = grpc.StatusCode.PERMISSION_DENIED


class Internal(QuireError):
    code = grpc.StatusCode.INTERNAL


_CLASSES: dict[grpc.StatusCode, type[QuireError]] = {cls.code: cls for cls in QuireError.__subclasses__()}
_STATUS_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


class _FailedCall(Protocol):
    """The interface of a failed call that both gRPC APIs share."""

    def code(self) -> grpc.StatusCode: ...

    def details(self) -> str | None: ...

    def trailing_metadata(self) -> Iterable[tuple[str, str | bytes]] | None: ...


def error_for_code(
    code: int | grpc.StatusCode,
    message: str,
    *,
    reason: str | None = None,
    violations: Sequence[FieldViolation] = (),
    retry_after_ms: int | None = None,
    metadata: Mapping[str, str] | None = None,
) -> QuireError:
    """The error of the class for `code` (a google.rpc.Code or a StatusCode); Internal if there is no such class."""
    status = _STATUS_CODES.get(code, grpc.StatusCode.UNKNOWN) if isinstance(code, int) else code
    cls = _CLASSES.get(status, Internal)
    default_reason = None if status in _CLASSES else status.name
    return cls(
        message,
        reason=reason or default_reason,
        violations=violations,
        retry_after_ms=retry_after_ms,
        metadata=metadata,
    )


def invalid_field(field: str, description: str) -> InvalidArgument:
    """The error for one field, in one line and as a violation: invalid_field("batch.rows", "holds row 3 twice")."""
    return InvalidArgument.of_field(field, description)


def to_rpc_status(error: QuireError) -> grpc.Status:
    """The status to end a call with; its trailing metadata carries the google.rpc details."""
    message = _cut(error.message, _MAX_MESSAGE_BYTES)
    status = status_pb2.Status(code=error.code.value[0], message=message)
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata)
    status.details.add().Pack(info)
    if error.violations:
        bad_request = error_details_pb2.BadRequest()
        for violation in error.violations[:_MAX_VIOLATIONS]:
            field = _cut(violation.field, _MAX_FIELD_BYTES)
            bad_request.field_violations.add(field=field, description=_cut(violation.description, _MAX_VIOLATION_BYTES))
        status.details.add().Pack(bad_request)
    if error.retry_after_ms is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(error.retry_after_ms)
        status.details.add().Pack(retry)
    return rpc_status.to_status(status)


def from_rpc_error(error: grpc.RpcError) -> QuireError:
    """The error that the other end raised, from a failed call of either gRPC API.

    A status without details of ours (the connection broke, a proxy answered) becomes the subclass of its code with that
    subclass's reason.
    """
    call = cast(_FailedCall, error)
    status = _details_of(call)
    fields: dict[str, Any] = {}
    if status is not None:
        for detail in status.details:
            fields.update(_unpack(detail))
    return error_for_code(call.code(), call.details() or call.code().name, **fields)


def _details_of(call: _FailedCall) -> status_pb2.Status | None:
    for key, value in call.trailing_metadata() or ():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                return None
    return None


def _unpack(detail: Any) -> dict[str, Any]:
    """The keyword arguments of `error_for_code` that one google.rpc detail stands for."""
    info = error_details_pb2.ErrorInfo()
    if detail.Unpack(info):
        return {"reason": info.reason or None, "metadata": dict(info.metadata)}
    bad_request = error_details_pb2.BadRequest()
    if detail.Unpack(bad_request):
        return {"violations": [FieldViolation(v.field, v.description) for v in bad_request.field_violations]}
    retry = error_details_pb2.RetryInfo()
    if detail.Unpack(retry):
        return {"retry_after_ms": retry.retry_delay.ToMilliseconds()}
    return {}


def _cut(text: str, limit: int) -> str:
    """The text, shortened if it takes more than `limit` bytes in a header."""
    if len(text) <= limit // _MOST_BYTES_OF_A_CHARACTER:
        return text
    size = 0
    for place, character in enumerate(text[: limit + 1]):
        is_plain = " " <= character <= "~" and character != "%"
        size += 1 if is_plain else 3 * len(character.encode())
        if size > limit:
            return text[: max(place - 3, 0)] + "..."
    return text
