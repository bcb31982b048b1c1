"""How often in a row the worker was lost while a request ran that got no token in between."""

from dataclasses import dataclass

from scheduler_svc.core.request import RequestKey
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.state import SchedulerState

LOSSES_BEFORE_TRIALS = 3
"""After so many losses in a row while a request ran, between which it got no token, those that ran at the last one are
tried (see `trials`). A single loss says little: it may be somebody's kill, or another request's fault."""

LOSSES_ON_TRIAL = 3
"""After so many further ones, all at the same step of the request and while it runs alone, it is at fault."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a request had come when the worker was lost: the tokens that it has, and those of them that would have
    been computed with the step in flight. A request that runs alone takes the same steps after each attachment, so a
    worker that dies of one of them, be it of the third chunk of a prompt, dies at the same place again."""

    num_tokens: int
    num_computed: int

    @classmethod
    def of(cls, state: SchedulerState, group: SequenceGroup) -> "Progress":
        """Of a group that runs."""
        num_computed = state.batch.rows.num_computed
        rows = [sequence.row for sequence in group.computing if sequence.row is not None]
        return cls(group.num_tokens, int(num_computed[rows].sum()))


@dataclass(frozen=True, slots=True)
class Losses:
    """Those of one request in a row, the last one at `progress`. At the last `num_alone` of them it ran alone, and had
    come to the same place each time."""

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
        """With one more. Whoever got a token since the one before starts anew."""
        if before is None or before.progress.num_tokens != progress.num_tokens:
            return cls(progress, num_alone=int(alone))
        num_alone = before.num_alone if before.progress == progress else 0
        return cls(progress, before.num + 1, num_alone + 1 if alone else 0)


@dataclass(frozen=True, slots=True)
class Loss:
    """One loss of the worker with steps in flight: how far each request that ran had come, and whether a step was
    answered since the worker was attached. `detail` says what was wrong with the worker, where that is known."""

    progress: dict[RequestKey, Progress]
    has_answered: bool
    detail: str | None
