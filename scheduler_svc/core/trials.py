"""Finding the request whose steps the worker refuses, so that it fails alone and holds nobody up."""

from scheduler_svc.core.request import RequestKey
from scheduler_svc.core.sequence import Milestone, SequenceGroup
from scheduler_svc.core.state import SchedulerState
from scheduler_svc.core.step_plan import StepInFlight

_STEPS_TO_PASS = 3
"""The step that was refused, planned again as the last chunk of a prefill, and decodes after it."""


class Trials:
    """Runs suspects one by one. A refused step does not say whose row it was refused for, and after an attachment the
    next one has the same rows: it would be refused for ever.

    All groups that ran when a step was refused are suspects. While there are any, nobody else is admitted, and each of
    them runs alone, from an empty pipeline, until it ends, passes, or has a step refused again: then it is at fault.
    Nobody fails for one refusal, and none that can run alone fails at all. Whoever passes has got tokens, so that even
    groups that are refused only together come to their ends.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._suspects: set[RequestKey] = set()
        self._num_answered = 0

    @property
    def are_on(self) -> bool:
        """Whether suspects are still to be tried."""
        return bool(self._suspects)

    def refused(self) -> SequenceGroup | None:
        """The oldest step in flight was refused. Returns the group at fault, which still runs; None where it may be any
        of several."""
        running = list(self._state.running)
        if not self._suspects:
            self._suspects = {group.request.key for group in running}
            return None
        # The one on trial, if it was not aborted meanwhile.
        return running[0] if running else None

    def answered(self, step: StepInFlight) -> None:
        """The oldest step in flight was answered: one more in favour of whoever is on trial."""
        if self._suspects and len(step.rows):
            self._num_answered += 1

    def settle(self, now: float) -> None:
        """To be called before a step is planned. Whoever has passed makes way for the next suspect."""
        state = self._state
        self._suspects = {key for key in self._suspects if state.queue_of(key) is not None}
        if self._num_answered < _STEPS_TO_PASS:
            return
        self._num_answered = 0
        for group in list(state.running):
            self._suspects.discard(group.request.key)
            if self._suspects:
                group.timeline.note(Milestone.RECOMPUTED, now)
                state.requeue(group)

    def next_of_waiting(self) -> SequenceGroup | None:
        """The suspect that is tried next; None while a step of the one before is in flight."""
        state = self._state
        if len(state.running) or state.in_flight:
            return None
        self._num_answered = 0
        return next(group for group in state.waiting if group.request.key in self._suspects)
