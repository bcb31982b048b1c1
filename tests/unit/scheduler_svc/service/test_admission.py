from scheduler_svc.service.admission import RetryAdvisor


def test_without_history_the_advice_is_a_second():
    assert RetryAdvisor().retry_after_ms(now=5.0) == 1000


def test_the_advice_is_the_pace_of_recent_completions():
    advisor = RetryAdvisor()
    for second in range(10):
        advisor.completed(2, now=float(second))
    assert advisor.retry_after_ms(now=10.0) == 500


def test_the_advice_stays_within_its_bounds():
    advisor = RetryAdvisor()
    advisor.completed(60, now=0.0)
    assert advisor.retry_after_ms(now=0.1) == 50
    assert advisor.retry_after_ms(now=1e6) == 30_000
