"""A rate as a bucket."""

import pytest

from gateway.auth.token_bucket import TokenBucket


def test_a_bucket_starts_full_and_fills_steadily():
    bucket = TokenBucket(60, 100.0)
    assert bucket.seconds_until(60, 100.0) == 0
    bucket.take(60, 100.0)
    assert bucket.seconds_until(1, 100.0) == pytest.approx(1)
    assert bucket.seconds_until(60, 130.0) == pytest.approx(30)
    assert bucket.seconds_until(60, 160.0) == 0


def test_nothing_is_saved_beyond_one_minute():
    bucket = TokenBucket(60, 0.0)
    assert bucket.seconds_until(60, 1e6) == 0
    bucket.take(60, 1e6)
    assert bucket.seconds_until(1, 1e6) > 0


def test_a_debt_is_paid_off_by_time():
    bucket = TokenBucket(60, 0.0)
    bucket.take(180, 0.0)
    assert bucket.seconds_until(1, 0.0) == pytest.approx(121)
    assert bucket.seconds_until(1, 121.0) == 0


def test_what_is_given_back_is_there_again_but_never_more_than_a_minute():
    bucket = TokenBucket(60, 0.0)
    bucket.take(50, 0.0)
    bucket.give_back(50, 0.0)
    bucket.give_back(50, 0.0)
    bucket.take(60, 0.0)
    assert bucket.seconds_until(1, 0.0) == pytest.approx(1)


def test_a_clock_that_stands_still_or_goes_back_fills_nothing():
    bucket = TokenBucket(60, 100.0)
    bucket.take(60, 100.0)
    assert bucket.seconds_until(1, 90.0) == pytest.approx(1)
    assert bucket.seconds_until(1, 100.0) == pytest.approx(1)


@pytest.mark.parametrize(("per_minute", "there"), [(100, 90), (40, 30)])
def test_what_was_used_stays_used_when_the_rate_changes(per_minute, there):
    bucket = TokenBucket(60, 0.0)
    bucket.take(10, 0.0)
    bucket.resize(per_minute, 0.0)
    assert bucket.seconds_until(there, 0.0) == 0
    assert bucket.seconds_until(there + 1, 0.0) > 0
