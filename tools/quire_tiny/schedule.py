"""The learning rate over the steps of training."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Schedule:
    """Linear warm-up, a long stay at the peak, linear decay to zero at `steps`."""

    steps: int
    warm_up: int
    decay: int
    peak: float

    def rate(self, step: int) -> float:
        rise = (step + 1) / self.warm_up
        fall = (self.steps - step) / self.decay
        return self.peak * min(1.0, rise, fall)
