"""Finds the request, constraint or adapter that makes workers fail: a request whose steps the worker refuses, dies in
or hangs in, or a constraint or adapter that it dies of while it prepares it. Then only that request fails, or the
requests that need the constraint or adapter.

`Trials` only decides: the scheduler runs, requeues and fails groups as it says, and `preparation` prepares each suspect
by itself.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from scheduler_svc.core.policy import GroupQueue
from scheduler_svc.core.request import Need, RequestKey
from scheduler_svc.core.running_batch import RowTable
from scheduler_svc.core.sequence import SequenceGroup

LOSSES_BEFORE_TRIALS = 3
"""Number of losses in a row, while a request runs and gets no token between them, after which the requests that ran at
the last loss are tried. One loss proves little: an operator may have killed the worker, or another request did."""

LOSSES_ON_TRIAL = 3
"""Number of further losses, all at the same step of the request while only it runs, that prove it at fault."""

_MAX_NEEDS = 64
"""Maximum number of constraints and adapters whose losses are counted."""

_STEPS_TO_PASS = 3
"""Steps that a suspect must pass: the refused step, planned again as the last chunk of a prefill, and later decodes."""

_MAX_ONE_BY_ONE = 16
"""If there are more suspects, cohorts are tried first. ADR 0024 has why not fewer, and why cohorts are not halved."""


@dataclass(frozen=True, slots=True)
class Progress:
    """A request's position when the worker was lost: its tokens, and how many of them were computed, including the step
    in flight. A request that runs by itself takes the same steps after each attachment, so a worker that dies of one of
    them, such as the third chunk of a prompt, dies at the same position again."""

    num_tokens: int
    num_computed: int

    @classmethod
    def of(cls, group: SequenceGroup, table: RowTable) -> "Progress":
        rows = [sequence.row for sequence in group.computing if sequence.row is not None]
        return cls(group.num_tokens, int((table.num_computed - table.num_unsure)[rows].sum()))


@dataclass(frozen=True, slots=True)
class Losses:
    """Number of times in a row that the worker was lost while a request ran and got no token in between, the last time
    at `progress`. At the last `num_alone` losses only this request ran, at the same position each time."""

    progress: Progress
    num: int = 1
    num_alone: int = 0

    @property
    def suffice_for_trials(self) -> bool:
        return self.num >= LOSSES_BEFORE_TRIALS

    @property
    def prove_fault(self) -> bool:
        return self.num >= LOSSES_BEFORE_TRIALS + LOSSES_ON_TRIAL and self.num_alone >= LOSSES_ON_TRIAL

    @classmethod
    def after(cls, before: "Losses | None", progress: Progress, *, alone: bool) -> "Losses":
        """The losses with one more. The count starts anew if the request got a token since the last loss."""
        if before is None or before.progress.num_tokens != progress.num_tokens:
            return cls(progress, num_alone=int(alone))
        num_alone = before.num_alone if before.progress == progress else 0
        return cls(progress, before.num + 1, num_alone + 1 if alone else 0)


@dataclass(frozen=True, slots=True)
class _Loss:
    """One loss of the worker while steps were in flight or something was prepared: the progress of each request with a
    step in flight, the needs being prepared, and whether a step was answered since the worker was attached. `detail`
    says what was wrong with the worker, if that is known."""

    progress: dict[RequestKey, Progress]
    needs: Sequence[Need]
    has_answered: bool
    detail: str | None


@dataclass(frozen=True, slots=True)
class Fault:
    """A live request, a constraint or an adapter that is at fault, the losses of the worker that prove it, and the
    known detail of the last loss."""

    suspect: RequestKey | Need
    losses: Losses
    detail: str | None


class Trials:
    """Runs suspects apart from all other groups. A refused step does not say which row is the reason, and a lost worker
    does not even say whether a step is. The next steps after an attachment have the same rows, so without trials the
    failure could repeat forever.

    All groups that ran when a step was refused are suspects. While there are suspects, no other group is admitted, and
    the suspects run in cohorts: one group each if there are few suspects, else about the square root of their number. A
    cohort runs with one step in flight until its groups have ended or passed. If a step of several groups is refused
    again, each of them is tried by itself; a group is at fault if it has a step refused while it runs by itself. No
    group fails for one refusal, and no group that can run by itself fails at all. A group that passes got tokens, so
    even groups that are refused only together reach their ends.

    Losses of the worker are counted for each group that ran, and start anew when it gets a token. Enough losses of one
    group count as a refusal: all groups that ran are suspects. One further loss splits a cohort, and enough losses
    while only one suspect runs count as the refusal that proves its fault. Kills from outside fail no group that gets
    tokens between them: at most they split a cohort.

    Losses are counted in the same way for each constraint and adapter that was being prepared, and start anew when it
    is prepared. After enough losses it is prepared by itself, and enough of these losses prove its fault. They are not
    forgotten then: each later request that needs it costs at most one more loss.
    """

    def __init__(self) -> None:
        # The number of the cohort in which each suspect is tried. The highest cohort is tried first.
        self._suspects: dict[RequestKey, int] = {}
        # Answered steps in which a suspect sampled, since the last refusal or loss.
        self._num_answered: Counter[RequestKey] = Counter()
        self._losses: dict[RequestKey, Losses] = {}
        self._need_losses: dict[Need, Losses] = {}
        self._has_answered = False
        self._loss: _Loss | None = None

    @property
    def are_on(self) -> bool:
        """Whether suspects are still to be tried."""
        return bool(self._suspects)

    def refused(self, running: GroupQueue) -> SequenceGroup | None:
        """The oldest step in flight was refused. Returns the group at fault, which still runs; None if unknown."""
        groups = list(running)
        if not self._suspects:
            self._suspect([group.request.key for group in groups])
            return None
        if len(groups) > 1:
            self._take_apart(group.request.key for group in groups)
            return None
        # The group on trial, if it was not aborted meanwhile.
        return groups[0] if groups else None

    @property
    def counted_needs(self) -> Collection[Need]:
        """Needs during whose preparation the worker was lost, and that it has not prepared since."""
        return self._need_losses.keys()

    def is_suspect(self, need: Need) -> bool:
        """Whether the need is prepared by itself, since its preparation may cause losses of the worker."""
        losses = self._need_losses.get(need)
        return losses is not None and losses.suffice_for_trials

    def prepared(self, need: Need) -> None:
        """The worker has prepared the need, or reported that it cannot."""
        self._need_losses.pop(need, None)

    def lost(
        self, running: Iterable[SequenceGroup], needs: Sequence[Need], table: RowTable, detail: str | None
    ) -> None:
        """The worker was lost for an unknown reason while steps of these groups were in flight, or while it prepared
        these needs. `attached` judges the loss."""
        progress = {group.request.key: Progress.of(group, table) for group in running}
        self._loss = _Loss(progress, needs, self._has_answered, detail)

    def attached(self, is_live: Callable[[RequestKey], bool], *, was_alive: bool) -> Fault | None:
        """A worker is attached again. `was_alive` if it is the worker that was lost and nothing was wrong with it, so
        that only the link to it broke: such a loss counts only if no step was answered over that link.

        Returns the fault, if it is known.
        """
        loss, self._loss, self._has_answered = self._loss, None, False
        # Suspects are computed again from the start.
        self._num_answered.clear()
        if loss is None or (was_alive and loss.has_answered):
            return None
        if (fault := self._judge_needs(loss)) is not None:
            return fault
        alone = self.are_on and len(loss.progress) == 1 and not loss.needs
        counted: dict[RequestKey, Losses] = {}
        for key, progress in loss.progress.items():
            if is_live(key):
                counted[key] = self._losses[key] = Losses.after(self._losses.get(key), progress, alone=alone)
        if self._suspects and len(counted) > 1:
            self._take_apart(counted)
        elif self._suspects:
            return next((Fault(key, each, loss.detail) for key, each in counted.items() if each.prove_fault), None)
        elif any(losses.suffice_for_trials for losses in counted.values()):
            self._suspect(list(counted))
        return None

    def _judge_needs(self, loss: _Loss) -> Fault | None:
        """Counts a loss for the needs that were being prepared. Returns the need that is at fault, if any."""
        alone = len(loss.needs) == 1 and not loss.progress
        for need in loss.needs:
            # A preparation has no progress: all its losses are at the same position.
            counted = Losses.after(self._need_losses.pop(need, None), Progress(0, 0), alone=alone)
            # The newest are last.
            self._need_losses[need] = counted
            if counted.prove_fault:
                return Fault(need, counted, loss.detail)
        while len(self._need_losses) > _MAX_NEEDS:
            del self._need_losses[next(iter(self._need_losses))]
        return None

    def forget(self, key: RequestKey) -> None:
        """Forgets the counts of a request that ended."""
        self._losses.pop(key, None)
        self._num_answered.pop(key, None)

    def answered(self, keys: Iterable[RequestKey]) -> None:
        """The oldest step in flight was answered. These requests sampled in it, which counts in their favour."""
        self._has_answered = True
        if self._suspects:
            self._num_answered.update(set(keys))

    def take_passed(self, running: GroupQueue, is_live: Callable[[RequestKey], bool]) -> list[SequenceGroup]:
        """The groups that passed and must make way for the next suspects, before a step is planned."""
        self._suspects = {key: number for key, number in self._suspects.items() if is_live(key)}
        passed = [group for group in running if self._num_answered[group.request.key] >= _STEPS_TO_PASS]
        for group in passed:
            self._suspects.pop(group.request.key, None)
        return passed if self._suspects else []

    def next_of(self, waiting: GroupQueue, running: GroupQueue) -> SequenceGroup | None:
        """The suspect that is tried next, together with its cohort. None if groups outside the cohort run, or if no
        suspect of the cohort waits."""
        if not self.are_together(group.request.key for group in running):
            return None
        current = max(self._suspects.values())
        keys = (key for key, number in self._suspects.items() if number == current and key in waiting)
        key = next(keys, None)
        return None if key is None else waiting.get(key)

    def are_together(self, keys: Iterable[RequestKey]) -> bool:
        """Whether these may run at the same time: while there are suspects, only groups of the cohort on trial may."""
        return not self._suspects or {self._suspects.get(key) for key in keys} <= {max(self._suspects.values())}

    def _suspect(self, keys: list[RequestKey]) -> None:
        """Begins the trials of all these, in their order."""
        size = 1 if len(keys) <= _MAX_ONE_BY_ONE else math.isqrt(len(keys))
        self._suspects = {key: -(place // size) for place, key in enumerate(keys)}

    def _take_apart(self, keys: Iterable[RequestKey]) -> None:
        """One of these is at fault, or all of them together: each is tried by itself, before all others."""
        suspects = [key for key in keys if key in self._suspects]
        first = max(self._suspects.values()) + len(suspects)
        self._suspects |= {key: first - place for place, key in enumerate(suspects)}
