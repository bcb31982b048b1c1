"""Calls that a client retries by itself."""

from typing import Any

import pytest

from quire.client import RetryPolicy
from quire.client.connection import service_config
from quire.client.retries import Attempts, CallTime
from quire.gateway.v1 import generation_pb2, model_pb2, prefix_pb2
from quire.rpc.errors import InvalidArgument, QuireError, ResourceExhausted, Unavailable

FULL = ResourceExhausted("full", retry_after_ms=2000)
GONE = Unavailable("gone")


def make_attempts(
    policy: RetryPolicy | None, *, is_idempotent: bool = False, end: float | None = None, draw: float = 0.0
) -> Attempts:
    return Attempts(policy, CallTime(end, lambda: 100.0), is_idempotent, lambda: draw)


def assert_raises(attempts: Attempts, error: QuireError) -> None:
    with pytest.raises(type(error)) as caught:
        attempts.delay_after(error)
    assert caught.value is error


def names_of(service: Any) -> set[tuple[str, str]]:
    return {(service.full_name, method.name) for method in service.methods}


def test_grpc_repeats_what_the_protos_call_idempotent_and_nothing_else() -> None:
    (config,) = service_config(spread=True)["methodConfig"]
    repeated: set[tuple[str, str]] = set()
    services = [
        model_pb2.DESCRIPTOR.services_by_name["ModelService"],
        prefix_pb2.DESCRIPTOR.services_by_name["PrefixService"],
        generation_pb2.DESCRIPTOR.services_by_name["GenerationService"],
    ]
    for service in services:
        for name in config["name"]:
            if name["service"] == service.full_name:
                repeated |= {each for each in names_of(service) if name.get("method", each[1]) == each[1]}
    left_out = set().union(*map(names_of, services)) - repeated
    generating = ("Generate", "GenerateStream", "Chat", "ChatStream", "ResumeStream")
    loading = ("LoadAdapter", "UnloadAdapter")
    models, _, generation = (service.full_name for service in services)
    assert left_out == {(models, method) for method in loading} | {(generation, method) for method in generating}
    assert config["retryPolicy"]["retryableStatusCodes"] == ["UNAVAILABLE"]


def test_without_a_policy_every_error_is_the_callers() -> None:
    for error in (FULL, GONE, InvalidArgument("bad")):
        assert_raises(make_attempts(None, is_idempotent=True), error)


def test_waits_are_those_that_refusals_name_and_a_quarter_more_or_double_up_to_the_longest() -> None:
    assert make_attempts(RetryPolicy()).delay_after(FULL) == 2.0
    assert make_attempts(RetryPolicy(), draw=1.0).delay_after(FULL) == 2.5
    attempts = make_attempts(RetryPolicy(attempts=None, first_delay_s=0.5, last_delay_s=3), is_idempotent=True)
    assert [attempts.delay_after(GONE) for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert all(attempts.delay_after(GONE) == 3.0 for _ in range(2000))


def test_a_lost_generation_is_made_again_only_where_that_is_asked_for() -> None:
    assert_raises(make_attempts(RetryPolicy()), GONE)
    assert make_attempts(RetryPolicy(lost_generations=True)).delay_after(GONE) == 0.1
    assert make_attempts(RetryPolicy(), is_idempotent=True).delay_after(GONE) == 0.1


def test_other_errors_refusals_without_a_time_and_the_last_attempt_are_the_callers() -> None:
    policy = RetryPolicy(attempts=None, lost_generations=True)
    for error in (InvalidArgument("bad"), ResourceExhausted("too large")):
        assert_raises(make_attempts(policy, is_idempotent=True), error)
    attempts = make_attempts(RetryPolicy(attempts=3))
    attempts.delay_after(FULL)
    attempts.delay_after(FULL)
    assert_raises(attempts, FULL)
    assert_raises(make_attempts(RetryPolicy(attempts=1)), FULL)


def test_no_wait_goes_beyond_the_time_of_the_call_of_which_never_less_than_nothing_is_left() -> None:
    assert make_attempts(RetryPolicy(), end=102.0).delay_after(FULL) == 2.0
    assert_raises(make_attempts(RetryPolicy(), end=101.9), FULL)
    assert CallTime(90.0, lambda: 100.0).left_s() == 0.0
    assert CallTime(101.5, lambda: 100.0).left_s() == 1.5
    assert CallTime(None, lambda: 100.0).left_s() is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attempts": 0}, "attempts is 0; the least value is 1"),
        ({"first_delay_s": 0.0}, "first_delay_s is 0.0"),
        ({"first_delay_s": 2.0, "last_delay_s": 1.0}, "last_delay_s 1.0"),
        ({"last_delay_s": float("nan")}, "last_delay_s nan"),
        ({"resume_for_s": -1}, "resume_for_s is -1"),
    ],
)
def test_what_is_no_policy_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RetryPolicy(**fields)
