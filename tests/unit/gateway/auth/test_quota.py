"""Limits of one key: admission, cost, and messages of refusals; and the bucket that measures a rate."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.auth.quota import Account, Limits, Refund, TokenBucket
from quire.rpc.errors import Cancelled, Internal, ResourceExhausted, Unauthenticated


class Clock:
    """Time that the test sets."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def run_one(account, num_tokens=1, generated=0):
    with account.admitted(num_tokens, lambda: generated):
        pass


def refusal(account, num_tokens=1):
    with pytest.raises(ResourceExhausted) as raised:
        account.check(num_tokens)
    return raised.value


def test_requests_beyond_the_rate_are_refused_until_time_has_passed(clock):
    account = Account(Limits(requests_per_minute=2), clock)
    run_one(account)
    run_one(account)
    error = refusal(account)
    assert error.reason == "RATE_LIMIT_EXCEEDED"
    assert error.metadata == {"limit": "requests_per_minute", "value": "2"}
    assert error.retry_after_ms == 30_000
    clock.now += error.retry_after_ms / 1000
    account.check()


def test_each_refusal_is_told_once_and_failures_of_what_was_admitted_are_none(clock):
    reasons = []
    account = Account(Limits(requests_per_minute=3, max_concurrent_requests=1), clock, reasons.append)
    with account.admitted(1):
        refusal(account)
        with pytest.raises(ResourceExhausted), account.admitted(1):
            pass
    assert reasons == ["CONCURRENCY_LIMIT"] * 2
    with pytest.raises(ResourceExhausted, match="the queue is full"), account.admitted(1, lambda: 1):
        raise ResourceExhausted("the queue is full", reason="QUEUE_FULL")
    run_one(account)
    refusal(account)
    with pytest.raises(ResourceExhausted):
        account.check_resumption()
    account.is_closed = True
    with pytest.raises(Unauthenticated):
        account.check()
    assert reasons[2:] == ["RATE_LIMIT_EXCEEDED"] * 2 + ["INVALID_API_KEY"]


@pytest.mark.parametrize(
    ("limits", "reason"),
    [(Limits(max_concurrent_requests=2), "CONCURRENCY_LIMIT"), (Limits(requests_per_minute=2), "RATE_LIMIT_EXCEEDED")],
)
def test_a_call_of_more_requests_than_can_ever_run_is_not_told_to_come_back(clock, limits, reason):
    account = Account(limits, clock)
    account.check_call(2)
    with pytest.raises(ResourceExhausted) as raised:
        account.check_call(3)
    assert (raised.value.reason, raised.value.retry_after_ms) == (reason, None)


def test_output_is_charged_as_it_is_generated(clock):
    account = Account(Limits(tokens_per_minute=100), clock)
    generated = [0]
    with account.admitted(10, lambda: generated[0]):
        account.check(90)
        generated[0] = 40
        assert refusal(account, 51).retry_after_ms == 600
        account.check(50)
        generated[0] = 60
        assert refusal(account, 31).reason == "RATE_LIMIT_EXCEEDED"
        account.check(30)
    assert refusal(account, 31).reason == "RATE_LIMIT_EXCEEDED"
    account.check(30)


def test_a_prompt_that_no_minute_can_pay_for_is_refused_without_a_time_to_come_back(clock):
    error = refusal(Account(Limits(tokens_per_minute=100), clock), 101)
    assert error.retry_after_ms is None
    assert "101" in error.message
    assert "100 tokens per minute" in error.message


@pytest.mark.parametrize(("refund", "left"), [(Refund.ALL, 100), (Refund.PROMPT, 100), (Refund.NOTHING, 40)])
def test_a_refused_request_gets_back_what_it_did_not_use(clock, refund, left):
    account = Account(Limits(requests_per_minute=2, tokens_per_minute=100), clock)

    def be_refused():
        with account.admitted() as use:
            account.charge_prompt(use, 60)
            use.refund = lambda error: refund
            raise ResourceExhausted("the queue is full")

    with pytest.raises(ResourceExhausted):
        be_refused()
    account.check(left)
    assert left == 100 or refusal(account, left + 1).metadata["limit"] == "tokens_per_minute"
    run_one(account, 0)
    if refund is Refund.ALL:
        account.check()
    else:
        assert refusal(account).metadata["limit"] == "requests_per_minute"


def test_changed_limits_hold_at_once_and_forget_nothing(clock):
    account = Account(Limits(requests_per_minute=10), clock)
    for _ in range(5):
        run_one(account)
    account.change_limits(Limits(requests_per_minute=5))
    refusal(account)
    account.change_limits(Limits(requests_per_minute=6))
    run_one(account)
    refusal(account)
    account.change_limits(Limits())
    account.check()


@given(
    st.integers(1, 50),
    st.lists(st.tuples(st.floats(0, 30), st.integers(0, 60), st.integers(0, 40)), min_size=1, max_size=40),
)
def test_no_more_prompts_are_admitted_than_the_time_pays_for(per_minute, arrivals):
    """In any order of events, admitted prompts fit into one full bucket plus its refill meanwhile."""
    clock = Clock()
    started_at, admitted = clock.now, 0
    account = Account(Limits(tokens_per_minute=per_minute), clock)
    for delay, prompt, generated in arrivals:
        clock.now += delay
        try:
            run_one(account, prompt, generated)
        except ResourceExhausted:
            continue
        admitted += prompt
        assert admitted <= math.ceil(per_minute + (clock.now - started_at) * per_minute / 60)


def test_a_use_that_is_replaced_keeps_its_place_and_pays_the_difference(clock):
    account = Account(Limits(tokens_per_minute=100, max_concurrent_requests=1), clock)
    with account.admitted(10, lambda: 20) as use:
        other = account.replace(use, lambda: 80)
    assert refusal(account).reason == "CONCURRENCY_LIMIT"
    account.end(use)
    assert refusal(account).reason == "CONCURRENCY_LIMIT"
    account.end(account.replace(other, lambda: 30))
    account.check(60)
    assert refusal(account, 61).metadata["limit"] == "tokens_per_minute"


def test_resumption_costs_a_request_and_neither_place_nor_tokens(clock):
    account = Account(Limits(requests_per_minute=2, tokens_per_minute=100, max_concurrent_requests=1), clock)
    with account.admitted(10, lambda: 90) as use:
        held = account.replace(use, lambda: 190)
    with account.resumed(held, lambda: 40):
        pass
    clock.now += 30
    account.check(50)
    with pytest.raises(ResourceExhausted) as raised, account.admitted(1) as use:
        account.check_resumption()
    assert raised.value.metadata["limit"] == "requests_per_minute"


@pytest.mark.parametrize(("per_minute", "there"), [(100, 90), (40, 30)])
def test_what_was_used_stays_used_when_the_rate_changes(per_minute, there):
    bucket = TokenBucket(60, 0.0)
    bucket.take(10, 0.0)
    bucket.resize(per_minute, 0.0)
    assert bucket.seconds_until(there, 0.0) == 0
    assert bucket.seconds_until(there + 1, 0.0) > 0


@pytest.mark.parametrize("error", [Internal("failed"), Cancelled("by id"), RuntimeError("a fault")])
def test_a_request_that_fails_for_another_reason_is_paid_for(clock, error):
    account = Account(Limits(requests_per_minute=1), clock)
    with pytest.raises(type(error)), account.admitted(1):
        raise error
    refusal(account)


def test_a_clock_that_stands_still_or_goes_back_fills_nothing():
    bucket = TokenBucket(60, 100.0)
    bucket.take(60, 100.0)
    assert bucket.seconds_until(1, 90.0) == pytest.approx(1)
    assert bucket.seconds_until(1, 100.0) == pytest.approx(1)


def test_what_is_given_back_is_there_again_but_never_more_than_a_minute():
    bucket = TokenBucket(60, 0.0)
    bucket.take(50, 0.0)
    bucket.take(-50, 0.0)
    bucket.take(-50, 0.0)
    bucket.take(60, 0.0)
    assert bucket.seconds_until(1, 0.0) == pytest.approx(1)
