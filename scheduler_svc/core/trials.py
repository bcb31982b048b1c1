"""Finding the request whose steps the worker refuses, dies or hangs of, so that it fails alone and holds nobody up."""

from dataclasses import dataclass

from scheduler_svc.core.losses import Loss, Losses, Progress
from scheduler_svc.core.request import RequestKey
from scheduler_svc.core.sequence import Milestone, SequenceGroup
from scheduler_svc.core.state import SchedulerState
from scheduler_svc.core.step_plan import StepInFlight

_STEPS_TO_PASS = 3
"""The step that was refused, planned again as the last chunk of a prefill, and decodes after it."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A group that is at fault, which is still live, the losses of the worker that prove it, and what is known of the
    last one."""

    group: SequenceGroup
    losses: Losses
    detail: str | None


class Trials:
    """Runs suspects one by one. A refused step does not say whose row it was refused for, a lost worker not even that
    it was for a step; and after an attachment the next steps have the same rows: it could happen for ever.

    All groups that ran when a step was refused are suspects. While there are any, nobody else is admitted, and each of
    them runs alone, from an empty pipeline and with one step in flight, until it ends, passes, or has a step refused
    again: then it is at fault. Nobody fails for one refusal, and none that can run alone fails at all. Whoever passes
    has got tokens, so that even groups that are refused only together come to their ends.

    Losses of the worker are counted for each group that ran, and begin again when it gets a token. Enough of them for
    one group (see `losses`) count as a refusal: all who ran are suspects, and enough further ones while a suspect runs
    alone count as the refusal that proves its fault. Kills by others fail nobody who comes further between them.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._suspects: set[RequestKey] = set()
        self._num_answered = 0
        self._losses: dict[RequestKey, Losses] = {}
        self._has_answered = False
        self._loss: Loss | None = None

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

    def lost(self, detail: str | None) -> None:
        """The worker was lost, and did not say why. What that means is known once there is one again: `attached`."""
        state = self._state
        if state.in_flight:
            progress = {group.request.key: Progress.of(state, group) for group in state.running}
            self._loss = Loss(progress, self._has_answered, detail)

    def attached(self, *, was_alive: bool) -> Fault | None:
        """There is a worker again. `was_alive` where it is the one that was lost and nothing was wrong with it, so that
        only the link to it broke: that counts against a step only if none was answered over that link.

        Returns who is at fault, if that is known.
        """
        loss, self._loss, self._has_answered = self._loss, None, False
        if loss is None or (was_alive and loss.has_answered):
            return None
        self._count(loss)
        counted = {key: self._losses[key] for key in loss.progress if key in self._losses}
        if self._suspects:
            return next((self._fault(key, loss) for key, losses in counted.items() if losses.prove_fault), None)
        if any(losses.suffice_for_trials for losses in counted.values()):
            self._suspects = set(counted)
        return None

    def take_over(self, old: "Trials") -> None:
        """Goes on with the trials of a scheduler whose requests were taken over."""
        self._suspects, self._losses, self._loss = old._suspects, old._losses, old._loss

    def ended(self, key: RequestKey) -> None:
        """A request is over: what its losses said of it is forgotten."""
        self._losses.pop(key, None)

    def answered(self, step: StepInFlight) -> None:
        """The oldest step in flight was answered: one more in favour of whoever is on trial."""
        self._has_answered = True
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

    def _count(self, loss: Loss) -> None:
        """One more loss for all who ran and are still live."""
        for key, progress in loss.progress.items():
            if self._state.queue_of(key) is None:
                continue
            self._losses[key] = Losses.after(self._losses.get(key), progress, alone=self.are_on)

    def _fault(self, key: RequestKey, loss: Loss) -> Fault:
        queue = self._state.queue_of(key)
        assert queue is not None
        return Fault(queue.get(key), self._losses[key], loss.detail)
