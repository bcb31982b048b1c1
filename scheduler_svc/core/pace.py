"""Whether beam searches in different steps wait for each other, by the durations of steps and plans."""

import math

from scheduler_svc.core.running_batch import RowTable
from scheduler_svc.core.step import StepInFlight

_MIN_RATIO = 4.0
"""Minimum ratio of a step's duration to the scheduler's time between a result and the next plan."""


class Pace:
    """Durations of the newest decode step and of the newest plan, in seconds of the core's clock: whether beam searches
    in different steps wait for each other.

    The next step of a search needs the result of its last one. With several steps in flight, searches that came at
    different times take turns, and each step reads all weights of the model. If the searches that could run wait for
    the step in flight, all continue in one step. Then the workers are idle while the scheduler applies its result, so
    searches wait only if steps take much longer than that (ADR 3 has the figures).
    """

    def __init__(self) -> None:
        self._step_s = 0.0
        self._planning_s = math.inf
        self._answered_at = -math.inf
        self._is_planned = True

    def planning(self, now: float) -> None:
        """A step is about to be planned."""
        if not self._is_planned:
            self._is_planned = True
            self._planning_s = now - self._answered_at

    def answered(self, step: StepInFlight, now: float) -> None:
        """The result of a step came."""
        if not step.has_chunks:
            # It began when the step before it was over. A step with a prompt takes longer than the steps after it.
            self._step_s = now - max(step.planned, self._answered_at)
        self._answered_at, self._is_planned = now, False

    def beams_should_wait(self, rows: RowTable) -> bool:
        """Whether the beams that could run now wait for beams in flight. False if other rows could run: these do not
        wait, and the beams add little to their step."""
        return self._step_s >= _MIN_RATIO * self._planning_s and _are_beams_apart(rows)


def _are_beams_apart(rows: RowTable) -> bool:
    """Whether only dependent rows can compute, while other dependent rows wait for a result."""
    if not rows.num_dependent:
        return False
    unfinished = rows.active & (rows.num_tokens < rows.max_len)
    can_compute = unfinished & (rows.num_computed < rows.num_tokens)
    if not can_compute.any() or (can_compute & (rows.prefills | ~rows.dependent)).any():
        return False
    return bool((unfinished & rows.dependent & ~can_compute).any())
