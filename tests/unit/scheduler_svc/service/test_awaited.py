"""When an answer of a worker is late."""

import pytest

from quire.rpc.patience import LAST_LOOK_S
from scheduler_svc.service.awaited import Awaited

TIMEOUT_S = 60.0
LATE_S = TIMEOUT_S + 1
SECOND_LOOK_S = LATE_S + 2 * LAST_LOOK_S


@pytest.fixture
def awaited() -> Awaited:
    awaited = Awaited(TIMEOUT_S)
    awaited.clear(0.0)
    return awaited


def test_nothing_is_late_where_nothing_is_awaited(awaited):
    assert awaited.late(1e6) is None
    awaited.sent(1, 0.0)
    assert awaited.answered(1, 5.0) == 5.0
    assert awaited.late(1e6) is None


def test_the_oldest_is_late_by_a_second_look(awaited):
    """As where scheduler or worker stood still: its answer comes behind the first heartbeat."""
    awaited.sent(1, 0.0)
    awaited.sent(2, 0.0)
    assert awaited.late(LATE_S) is None
    assert awaited.late(SECOND_LOOK_S) == (1, SECOND_LOOK_S)


def test_what_waited_for_the_one_before_has_its_own_time(awaited):
    awaited.sent(1, 0.0)
    awaited.sent(2, 0.0)
    assert awaited.late(LATE_S) is None
    awaited.answered(1, LATE_S)
    assert awaited.late(SECOND_LOOK_S) is None
    assert awaited.late(LATE_S + LATE_S) is None
    assert awaited.late(LATE_S + SECOND_LOOK_S) == (2, pytest.approx(SECOND_LOOK_S))


def test_answers_to_later_ones_give_the_oldest_no_more_time(awaited):
    awaited.sent(1, 0.0)
    for number in range(2, 100):
        awaited.sent(number, float(number))
        awaited.answered(number, float(number))
    assert awaited.late(LATE_S) is None
    assert awaited.late(SECOND_LOOK_S) == (1, SECOND_LOOK_S)


def test_with_other_workers_all_begins_anew(awaited):
    awaited.sent(1, 0.0)
    awaited.clear(LATE_S)
    awaited.sent(1, LATE_S)
    assert awaited.late(SECOND_LOOK_S) is None
