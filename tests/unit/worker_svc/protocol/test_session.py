import pytest

from quire.rpc.errors import FailedPrecondition
from quire.worker.v1.worker_pb2 import StepRequest
from worker_svc.protocol.session import Session, Sessions

GENERATION = 99
EPOCH = 5


def make_session() -> Session:
    return Session(EPOCH, GENERATION, max_steps_in_flight=2)


def make_step(step_id: int, epoch: int = EPOCH, generation: int = GENERATION) -> StepRequest:
    return StepRequest(step_id=step_id, scheduler_epoch=epoch, worker_generation=generation)


def run_steps(session: Session, last: int) -> None:
    for step_id in range(session.last_finished_step_id + 1, last + 1):
        session.check(make_step(step_id))
        session.start(step_id)
        session.finish(step_id)


def reason_of(session: Session, step: StepRequest) -> str:
    with pytest.raises(FailedPrecondition) as raised:
        session.check(step)
    return raised.value.reason


def test_steps_run_from_one_on_without_gaps() -> None:
    session = make_session()
    assert reason_of(session, make_step(0)) == "STEP_GAP"
    assert reason_of(session, make_step(2)) == "STEP_GAP"
    run_steps(session, 3)
    for step_id in (3, 5):
        assert reason_of(session, make_step(step_id)) == "STEP_GAP"
    # Checking changes nothing.
    session.check(make_step(4))
    session.check(make_step(4))
    assert session.num_in_flight == 0


def test_only_so_many_steps_may_be_unanswered() -> None:
    session = make_session()
    session.start(1)
    session.start(2)
    assert reason_of(session, make_step(3)) == "TOO_MANY_STEPS_IN_FLIGHT"
    session.finish(1)
    session.check(make_step(3))


def test_steps_of_another_incarnation_and_of_an_ended_session_are_refused() -> None:
    session = make_session()
    assert reason_of(session, make_step(1, epoch=EPOCH - 1)) == "WRONG_EPOCH"
    assert reason_of(session, make_step(1, epoch=EPOCH + 1)) == "WRONG_EPOCH"
    assert reason_of(session, make_step(1, generation=1)) == "WRONG_GENERATION"
    session.end()
    assert reason_of(session, make_step(1)) == "SESSION_ENDED"


def assert_refused(sessions: Sessions, epoch: int, now: float, reason: str = "STALE_EPOCH") -> None:
    with pytest.raises(FailedPrecondition) as raised:
        sessions.attach(epoch, now)
    assert raised.value.reason == reason


def test_a_lower_epoch_is_let_in_once_nobody_was_there_for_long() -> None:
    sessions = Sessions(GENERATION, 2)
    sessions.attach(90, 0.0).end()
    for now in (50.0, 60.0, 79.9):
        assert_refused(sessions, 5, now)
    assert sessions.attach(5, 80.0).epoch == 5
    assert sessions.attach(6, 80.5).epoch == 6
    assert_refused(sessions, 5, 500.0, "NEWER_SCHEDULER")


def test_an_epoch_can_be_attached_again_only_after_its_session_ended() -> None:
    sessions = Sessions(GENERATION, 2)
    first = sessions.attach(3, 0.0)
    assert_refused(sessions, 3, 0.0, "EPOCH_ATTACHED")
    first.end()
    assert not sessions.attach(3, 0.0).ended
