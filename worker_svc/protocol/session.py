"""Sessions: the scheduler that the worker obeys, and the next step. Pure: no clock, no I/O, no device.

An epoch is one incarnation of the scheduler (or one attachment of it), a generation one incarnation of this worker. The
scheduler may be `max_steps_in_flight` steps ahead. No step is repeated: after a missed answer schedulers attach anew.
"""

from quire.rpc.errors import FailedPrecondition
from quire.worker.v1.worker_pb2 import StepRequest


class Session:
    """The steps of one attachment."""

    def __init__(self, epoch: int, worker_generation: int, max_steps_in_flight: int) -> None:
        self.epoch = epoch
        self.ended = False
        self._worker_generation = worker_generation
        self._max_steps_in_flight = max_steps_in_flight
        self._last_started = 0
        self._last_finished = 0

    @property
    def num_in_flight(self) -> int:
        """Number of steps that started and are not answered."""
        return self._last_started - self._last_finished

    @property
    def last_finished_step_id(self) -> int:
        """0 before the first step."""
        return self._last_finished

    def check(self, message: StepRequest) -> None:
        """Checks that a step is the next one. Changes nothing.

        Raises:
            FailedPrecondition: another epoch or generation, a step out of order, or too many steps in flight.
        """
        if self.ended:
            raise FailedPrecondition(f"the session of epoch {self.epoch} has ended", reason="SESSION_ENDED")
        if message.scheduler_epoch != self.epoch:
            raise FailedPrecondition(
                f"scheduler_epoch is {message.scheduler_epoch}; this session is of epoch {self.epoch}",
                reason="WRONG_EPOCH",
            )
        if message.worker_generation != self._worker_generation:
            raise FailedPrecondition(
                f"worker_generation is {message.worker_generation}; this worker is {self._worker_generation}",
                reason="WRONG_GENERATION",
            )
        step_id, expected = message.step_id, self._last_started + 1
        if step_id != expected:
            raise FailedPrecondition(
                f"step_id is {step_id}; the next step of this session is {expected}", reason="STEP_GAP"
            )
        if self.num_in_flight >= self._max_steps_in_flight:
            raise FailedPrecondition(
                f"step {step_id} came with {self.num_in_flight} steps unanswered; "
                f"at most {self._max_steps_in_flight} may be",
                reason="TOO_MANY_STEPS_IN_FLIGHT",
            )

    def start(self, step_id: int) -> None:
        """The step passed `check`, is valid, and is queued."""
        assert step_id == self._last_started + 1
        self._last_started = step_id

    def finish(self, step_id: int) -> None:
        """The oldest step in flight is answered."""
        assert step_id == self._last_finished + 1 <= self._last_started
        self._last_finished = step_id

    def end(self) -> None:
        """No further step is taken. Idempotent."""
        self.ended = True


_VACANT_S = 30.0
"""A lower epoch is accepted after it was refused for so long while no scheduler was attached. Epochs come from a clock:
after it was set back, a restarted scheduler would otherwise be refused for as long as it was set back."""


class Sessions:
    """All sessions of a worker: at most one is active, and epochs do not decrease while a scheduler is attached."""

    def __init__(self, worker_generation: int, max_steps_in_flight: int) -> None:
        self._worker_generation = worker_generation
        self._max_steps_in_flight = max_steps_in_flight
        self._highest_epoch: int | None = None
        self._vacant_since: float | None = None
        self._current: Session | None = None

    def attach(self, epoch: int, now: float) -> Session:
        """A new session; the previous one ends.

        Args:
            now: monotonic, in seconds.

        Raises:
            FailedPrecondition: a higher epoch is attached now (NEWER_SCHEDULER) or was seen (STALE_EPOCH), or this very
                epoch is attached now (EPOCH_ATTACHED).
        """
        highest = self._highest_epoch
        if highest is not None and epoch < highest and not self._is_vacant(now):
            if self._is_attached:
                raise FailedPrecondition(
                    f"scheduler_epoch is {epoch}; a scheduler of epoch {highest} is attached", reason="NEWER_SCHEDULER"
                )
            raise FailedPrecondition(
                f"scheduler_epoch is {epoch}; this worker has seen {highest}", reason="STALE_EPOCH"
            )
        if self._current is not None and not self._current.ended:
            if epoch == highest:
                raise FailedPrecondition(f"epoch {epoch} is attached already", reason="EPOCH_ATTACHED")
            self._current.end()
        self._highest_epoch, self._vacant_since = epoch, None
        self._current = Session(epoch, self._worker_generation, self._max_steps_in_flight)
        return self._current

    @property
    def _is_attached(self) -> bool:
        return self._current is not None and not self._current.ended

    def _is_vacant(self, now: float) -> bool:
        """Whether no scheduler has been attached since a stale epoch was first refused, long enough ago."""
        if self._is_attached:
            self._vacant_since = None
            return False
        if self._vacant_since is None:
            self._vacant_since = now
        return now - self._vacant_since >= _VACANT_S
