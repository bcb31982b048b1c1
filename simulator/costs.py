"""The interface of cost models, which give the duration of steps."""

from dataclasses import dataclass
from typing import Protocol

from scheduler_svc.core.step import StepWork


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """The duration of one step.

    launch  from the plan to the moment when the device could begin; hidden while the device is in the step before
    device  on the device, which runs one step after the other
    answer  from the end on the device to the moment when the scheduler has the result
    """

    device: float
    launch: float = 0.0
    answer: float = 0.0


class CostModel(Protocol):
    """Gives the duration of steps. The same work takes the same time."""

    def seconds(self, work: StepWork) -> StepSeconds: ...
