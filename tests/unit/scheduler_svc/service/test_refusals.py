"""When a refused caller should come back."""

from scheduler_svc.service.refusals import RetryAdvisor


def test_without_history_the_advice_is_a_second():
    assert RetryAdvisor().retry_after_ms(now=5.0) == 1000


def test_one_end_tells_no_pace():
    advisor = RetryAdvisor()
    advisor.ended(1, now=0.0)
    assert advisor.retry_after_ms(now=3.0) == 1000


def test_the_advice_is_the_pace_of_recent_ends():
    advisor = RetryAdvisor()
    for second in range(10):
        advisor.ended(2, now=float(second))
    assert advisor.retry_after_ms(now=10.0) == 500


def test_the_advice_stays_within_its_bounds():
    advisor = RetryAdvisor()
    advisor.ended(60, now=0.0)
    assert advisor.retry_after_ms(now=0.1) == 50
    slow = RetryAdvisor()
    slow.ended(2, now=0.0)
    assert slow.retry_after_ms(now=10.0) == 5000


def test_time_without_work_is_no_pace():
    advisor = RetryAdvisor()
    for each in range(64):
        advisor.ended(1, now=each / 20)
    for idle_s in (10 * 60.0, 3600.0):
        assert advisor.retry_after_ms(now=3.2 + idle_s) == 1000


def test_after_a_pause_the_pace_is_that_of_what_ended_since():
    advisor = RetryAdvisor()
    advisor.ended(30, now=0.0)
    for each in range(10):
        advisor.ended(1, now=600.0 + each / 10)
    assert advisor.retry_after_ms(now=601.0) == 100
