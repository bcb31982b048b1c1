"""Finding the request whose steps the worker refuses, dies or hangs of, so that it fails alone and holds nobody up."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from scheduler_svc.core.losses import Loss, Losses, Progress
from scheduler_svc.core.request import RequestKey
from scheduler_svc.core.sequence import Milestone, SequenceGroup
from scheduler_svc.core.state import SchedulerState
from scheduler_svc.core.step_plan import StepInFlight

_STEPS_TO_PASS = 3
"""The step that was refused, planned again as the last chunk of a prefill, and decodes after it."""

_MAX_ONE_BY_ONE = 16
"""More suspects than these are tried in cohorts first. ADR 0024 has why not fewer, and why cohorts are not halved."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A group that is at fault, which is still live, the losses of the worker that prove it, and what is known of the
    last one."""

    group: SequenceGroup
    losses: Losses
    detail: str | None


class Trials:
    """Runs suspects apart from all others. A refused step does not say whose row it was refused for, a lost worker not
    even that it was for a step; and after an attachment the next steps have the same rows: it could happen for ever.

    All groups that ran when a step was refused are suspects. While there are any, nobody else is admitted, and they run
    in cohorts: each alone where they are few, else about as many together as there are cohorts. A cohort runs with one
    step in flight until its groups have ended or passed; where a step of several is refused again, each of those runs
    alone, and where one alone has a step refused, it is at fault. Nobody fails for one refusal, and none that can run
    alone fails at all. Whoever passes has got tokens, so that even groups that are refused only together come to their
    ends.

    Losses of the worker are counted for each group that ran, and begin again when it gets a token. Enough of them for
    one group (see `losses`) count as a refusal: all who ran are suspects. One further loss takes a cohort apart, and
    enough of them while a suspect runs alone count as the refusal that proves its fault. Kills by others fail nobody
    who comes further between them: all that they do to a cohort is that its groups are tried alone.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        # By the number of the cohort that they are tried in, the highest first.
        self._suspects: dict[RequestKey, int] = {}
        # Answered steps in which a suspect sampled, since the last refusal or loss.
        self._num_answered: Counter[RequestKey] = Counter()
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
            self._suspect([group.request.key for group in running])
            return None
        if len(running) > 1:
            self._take_apart(group.request.key for group in running)
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
        # Whoever is on trial is computed again.
        self._num_answered.clear()
        if loss is None or (was_alive and loss.has_answered):
            return None
        self._count(loss)
        counted = {key: self._losses[key] for key in loss.progress if key in self._losses}
        if self._suspects and len(counted) > 1:
            self._take_apart(counted)
            return None
        if self._suspects:
            return next((self._fault(key, loss) for key, losses in counted.items() if losses.prove_fault), None)
        if any(losses.suffice_for_trials for losses in counted.values()):
            self._suspect(list(counted))
        return None

    def take_over(self, old: "Trials") -> None:
        """Goes on with the trials of a scheduler whose requests were taken over."""
        self._suspects, self._losses, self._loss = old._suspects, old._losses, old._loss

    def ended(self, key: RequestKey) -> None:
        """A request is over: what its losses said of it is forgotten."""
        self._losses.pop(key, None)

    def answered(self, step: StepInFlight) -> None:
        """The oldest step in flight was answered: one more in favour of those on trial."""
        self._has_answered = True
        if self._suspects:
            sequences = [self._state.batch.rows.sequences[row] for row in step.rows.tolist()]
            self._num_answered.update({each.request.key for each in sequences if each is not None})

    def settle(self, now: float) -> None:
        """To be called before a step is planned. Whoever has passed makes way for the next suspects."""
        state = self._state
        self._suspects = {key: number for key, number in self._suspects.items() if state.queue_of(key) is not None}
        passed = [each for each in state.running if self._num_answered[each.request.key] >= _STEPS_TO_PASS]
        for group in passed:
            self._suspects.pop(group.request.key, None)
        if self._suspects:
            for group in passed:
                group.timeline.note(Milestone.RECOMPUTED, now)
                state.requeue(group)

    def next_of_waiting(self) -> SequenceGroup | None:
        """The suspect that is tried next, beside those of its cohort; None while there is none, or a step of others is
        in flight."""
        state = self._state
        if state.in_flight:
            return None
        current = max(self._suspects.values())
        if not self.are_together(group.request.key for group in state.running):
            return None
        waiting = (key for key, number in self._suspects.items() if number == current and key in state.waiting)
        key = next(waiting, None)
        return None if key is None else state.waiting.get(key)

    def are_together(self, keys: Iterable[RequestKey]) -> bool:
        """Whether these may run at the same time: while there are suspects, those of the cohort on trial alone."""
        return not self._suspects or {self._suspects.get(key) for key in keys} <= {max(self._suspects.values())}

    def _suspect(self, keys: list[RequestKey]) -> None:
        """The trials of all these begin, in their order."""
        size = 1 if len(keys) <= _MAX_ONE_BY_ONE else math.isqrt(len(keys))
        self._suspects = {key: -(place // size) for place, key in enumerate(keys)}

    def _take_apart(self, keys: Iterable[RequestKey]) -> None:
        """One of these is at fault, or all of them together: each is tried alone, before all others."""
        suspects = [key for key in keys if key in self._suspects]
        first = max(self._suspects.values()) + len(suspects)
        self._suspects |= {key: first - place for place, key in enumerate(suspects)}

    def _count(self, loss: Loss) -> None:
        """One more loss for all who ran and are still live."""
        alone = self.are_on and len(loss.progress) == 1
        for key, progress in loss.progress.items():
            if self._state.queue_of(key) is None:
                continue
            self._losses[key] = Losses.after(self._losses.get(key), progress, alone=alone)

    def _fault(self, key: RequestKey, loss: Loss) -> Fault:
        queue = self._state.queue_of(key)
        assert queue is not None
        return Fault(queue.get(key), self._losses[key], loss.detail)
