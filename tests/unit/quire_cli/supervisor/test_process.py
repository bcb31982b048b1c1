"""Waits before restarts."""

from quire_cli.supervisor.process import RestartBackoff


def test_waits_double_up_to_the_longest() -> None:
    backoff = RestartBackoff()
    waits = [backoff.delay_s(lived_s=1) for _ in range(8)]
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


def test_who_ended_by_itself_did_not_die() -> None:
    backoff = RestartBackoff()
    assert [backoff.delay_s(lived_s=1, died=False) for _ in range(5)] == [0.1] * 5
    assert [backoff.delay_s(lived_s=1, died=died) for died in (True, False, True)] == [0.1, 0.1, 0.2]


def test_a_long_life_forgives_what_was_before() -> None:
    backoff = RestartBackoff()
    for _ in range(8):
        backoff.delay_s(lived_s=0)
    assert backoff.delay_s(lived_s=29.9) == 5.0
    assert backoff.delay_s(lived_s=30) == 0.1
    assert backoff.delay_s(lived_s=0) == 0.2
