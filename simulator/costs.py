"""The interface of what says how long a step takes."""

from dataclasses import dataclass
from typing import Protocol

from scheduler_svc.core.step import StepWork


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """How long one step takes.

    launch  from the plan to the moment when the device could begin; hidden while the device is in the step before
    device  on the device, which runs one step after the other
    answer  from the end on the device to the moment when the scheduler has the result
    """

    device: float
    launch: float = 0.0
    answer: float = 0.0


class CostModel(Protocol):
    """Says how long steps take. The same work takes the same time."""

    def seconds(self, work: StepWork) -> StepSeconds: ...
