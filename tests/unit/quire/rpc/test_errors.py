"""Errors and statuses, without a server."""

import base64
from typing import Any
from urllib.parse import quote

import grpc
import pytest

from quire.rpc.errors import (
    Cancelled,
    FieldViolation,
    Internal,
    InvalidArgument,
    QuireError,
    ResourceExhausted,
    Unavailable,
    error_for_code,
    from_rpc_error,
    invalid_field,
    to_rpc_status,
)

SUBCLASSES = QuireError.__subclasses__()


class FailedCall(grpc.RpcError):
    """The error that gRPC raises on the client's side."""

    def __init__(self, code: grpc.StatusCode, details: str | None, metadata: tuple | None) -> None:
        super().__init__()
        self._code, self._details, self._metadata = code, details, metadata

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str | None:
        return self._details

    def trailing_metadata(self) -> Any:
        return self._metadata


def round_trip(error: QuireError) -> QuireError:
    status = to_rpc_status(error)
    return from_rpc_error(FailedCall(status.code, status.details, status.trailing_metadata))


@pytest.mark.parametrize("cls", SUBCLASSES)
def test_every_error_survives_the_wire(cls: type[QuireError]) -> None:
    violations = [FieldViolation("n", "is 0"), FieldViolation("stop[3]", "is empty")]
    error = cls("what happened", reason="WHY", violations=violations, retry_after_ms=1234, metadata={"a": "b"})
    received = round_trip(error)
    assert type(received) is cls
    assert (received.code, received.message, received.reason) == (error.code, "what happened", "WHY")
    assert (received.violations, received.retry_after_ms, received.metadata) == (tuple(violations), 1234, {"a": "b"})
    assert str(received) == "what happened"
    # Without a reason, the status code gives one.
    assert cls("x").reason == round_trip(cls("x")).reason == cls.code.name


def test_a_field_at_fault_is_told_to_people_and_to_programs() -> None:
    error = round_trip(invalid_field("batch.rows", "holds row 3 twice"))
    assert isinstance(error, InvalidArgument)
    assert error.message == "batch.rows holds row 3 twice"
    assert error.violations == (FieldViolation("batch.rows", "holds row 3 twice"),)


def test_codes_are_all_different_and_have_classes() -> None:
    assert len({cls.code for cls in SUBCLASSES}) == len(SUBCLASSES) == 13
    assert type(error_for_code(8, "full", retry_after_ms=5)) is ResourceExhausted
    assert type(error_for_code(grpc.StatusCode.CANCELLED, "left")) is Cancelled
    # A retry delay of zero is not absent.
    assert round_trip(ResourceExhausted("full", retry_after_ms=0)).retry_after_ms == 0
    assert round_trip(ResourceExhausted("full")).retry_after_ms is None


@pytest.mark.parametrize("code", [grpc.StatusCode.DATA_LOSS, 15, 99])
def test_a_code_without_a_class_is_internal_and_keeps_its_name(code: int | grpc.StatusCode) -> None:
    error = error_for_code(code, "odd")
    assert type(error) is Internal
    assert error.reason == ("UNKNOWN" if code == 99 else "DATA_LOSS")


def test_absent_or_broken_details_do_not_hide_the_error() -> None:
    error = from_rpc_error(FailedCall(grpc.StatusCode.UNAVAILABLE, None, None))
    assert type(error) is Unavailable
    assert (error.message, error.reason) == ("UNAVAILABLE", "UNAVAILABLE")
    metadata = (("other", "x"), ("grpc-status-details-bin", b"\xff\xff\xff"))
    error = from_rpc_error(FailedCall(grpc.StatusCode.INVALID_ARGUMENT, "bad", metadata))
    assert type(error) is InvalidArgument
    assert error.message == "bad"


def test_long_texts_are_cut() -> None:
    received = round_trip(InvalidArgument("m" * 5000, violations=[FieldViolation("f", "d" * 5000)] * 9))
    assert received.message == "m" * 997 + "..."
    assert len(received.violations) == 5
    assert received.violations[0].description == "d" * 297 + "..."
    details = dict(to_rpc_status(InvalidArgument("m" * 5000)).trailing_metadata or ())
    assert sum(map(len, details.values())) < 4096
    value: Any
    (value,) = details.values()
    assert b"quire" in value


@pytest.mark.parametrize("text", ["f" * 5000, "%" * 5000, "\N{GRINNING FACE}" * 5000, "\n" * 5000])
def test_no_text_makes_a_status_larger_than_clients_take(text: str) -> None:
    status = to_rpc_status(InvalidArgument(text, violations=[FieldViolation(text, text)] * 9))
    # As gRPC writes them in headers.
    message = quote(status.details or "", safe="".join(map(chr, range(0x20, 0x7F))).replace("%", ""))
    details = [base64.b64encode(value) for _, value in status.trailing_metadata or () if isinstance(value, bytes)]
    assert len(message) + sum(map(len, details)) < 8192
    assert round_trip(InvalidArgument("m", violations=[FieldViolation(text, "d")])).violations[0].field.endswith("...")
