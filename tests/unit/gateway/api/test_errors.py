"""Errors in OpenAI's shape."""

import json
import logging

import pytest

from gateway.api.answers import OPENAI, error_answer
from gateway.request.violations import renamed, summary
from quire.rpc import errors
from quire.rpc.errors import FieldViolation, InvalidArgument, ResourceExhausted, Unavailable


@pytest.mark.parametrize(
    ("kind", "status", "type_"),
    [
        (errors.InvalidArgument, 400, "invalid_request_error"),
        (errors.Unimplemented, 400, "invalid_request_error"),
        (errors.FailedPrecondition, 400, "invalid_request_error"),
        (errors.Unauthenticated, 401, "invalid_request_error"),
        (errors.PermissionDenied, 403, "permission_error"),
        (errors.NotFound, 404, "invalid_request_error"),
        (errors.AlreadyExists, 409, "invalid_request_error"),
        (errors.Aborted, 409, "invalid_request_error"),
        (errors.ResourceExhausted, 429, "rate_limit_error"),
        (errors.Cancelled, 499, "invalid_request_error"),
        (errors.Internal, 500, "server_error"),
        (errors.Unavailable, 503, "server_error"),
        (errors.DeadlineExceeded, 504, "server_error"),
    ],
)
def test_every_error_has_its_status(kind, status, type_):
    answer = error_answer(kind("what happened"))
    assert answer.status == status
    body = {"message": "what happened", "type": type_, "param": None, "code": kind.default_reason.lower()}
    assert json.loads(OPENAI.error_body(answer)) == {"error": body}


@pytest.mark.parametrize("retry_after_ms", [None, 2000])
@pytest.mark.parametrize("kind", errors.QuireError.__subclasses__())
def test_clients_retry_exactly_the_errors_that_a_retry_may_cure(kind, retry_after_ms):
    error = kind("what happened", retry_after_ms=retry_after_ms)
    answer = error_answer(error)
    # The rule of the clients of OpenAI and Anthropic.
    is_retried = answer.status in {408, 409, 429} or answer.status >= 500
    assert (is_retried and answer.headers.get("x-should-retry") != "false") == error.is_retryable


def test_what_two_fields_have_wrong_that_are_one_to_the_caller_is_told_once():
    violations = [FieldViolation(f"{group}logprobs", "is 50") for group in ("sampling.", "")]
    error = InvalidArgument(summary(violations), violations=violations)
    answer = error_answer(renamed(error, lambda field: field.removeprefix("sampling.")))
    assert (answer.param, answer.message) == ("logprobs", "logprobs is 50")


@pytest.mark.parametrize(("retry_after_ms", "seconds"), [(1, "1"), (1000, "1"), (1001, "2"), (0, "1")])
def test_the_time_to_come_back_is_in_whole_seconds(retry_after_ms, seconds):
    answer = error_answer(ResourceExhausted("full", retry_after_ms=retry_after_ms))
    assert answer.headers == {"retry-after": seconds}


def test_whoever_is_unavailable_says_when_to_come_back():
    assert error_answer(Unavailable("no scheduler")).headers == {"retry-after": "1"}


def test_of_an_unexpected_error_nothing_goes_out(caplog):
    with caplog.at_level(logging.ERROR):
        answer = error_answer(KeyError("secret"))
    assert answer.status == 500
    assert b"secret" not in OPENAI.error_body(answer)
    assert "secret" in caplog.text
