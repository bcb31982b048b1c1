"""How long a pass takes: what was measured at the start, and what the latest passes took."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_WEIGHT_OF_LATEST, _FORGOTTEN = 0.1, 0.005


@dataclass(frozen=True, slots=True)
class PassCosts:
    """How long a pass takes: `seconds` with `num_rows`, which rise, and so much more for each token of context."""

    num_rows: Sequence[int] = (1, 64)
    seconds: Sequence[float] = (1.0, 4.0)
    context_s: float = 0.0

    def of(self, num_rows: NDArray[np.integer]) -> NDArray[np.float64]:
        """Without contexts. Beyond what was measured each row costs as much as the last ones did."""
        within = np.interp(num_rows, self.num_rows, self.seconds)
        slope = (self.seconds[-1] - self.seconds[-2]) / (self.num_rows[-1] - self.num_rows[-2])
        return within + slope * np.maximum(num_rows - self.num_rows[-1], 0)


class NextPass:
    """Predicts how long one more pass of a step takes.

    On the CPU, the first pass of a step shares the processors with the scheduler and the gateway, which handle the
    tokens of the step before; the passes behind it have them to themselves. Of 64 rows of quire-tiny on two cores the
    first takes 10 ms, each further one 2.6 ms. So the first pass is only an upper bound for the next one, which is
    predicted from the costs that were measured at the start, times a factor that follows the further passes.
    """

    def __init__(self, costs: PassCosts | None = None) -> None:
        """Without costs, the next pass is expected to take as long as the last one."""
        self._costs = costs
        self._slowdown, self._latest_s = 1.0, 0.0

    def took(self, num_rows: int, seconds: float, *, is_first: bool) -> None:
        """A pass of a step took so long."""
        self._latest_s = seconds
        if self._costs is None:
            return
        slowdown = seconds / self._cost_of(num_rows)
        if is_first:
            # Forgets a little each time, so that a slow moment does not end further passes for good.
            slowdown = min(slowdown, (1 - _FORGOTTEN) * self._slowdown)
        else:
            slowdown = (1 - _WEIGHT_OF_LATEST) * self._slowdown + _WEIGHT_OF_LATEST * slowdown
        self._slowdown = max(slowdown, 1.0)

    def expected_s(self, num_rows: int) -> float:
        """The seconds of one more pass with so many rows."""
        return self._latest_s if self._costs is None else self._slowdown * self._cost_of(num_rows)

    def _cost_of(self, num_rows: int) -> float:
        assert self._costs is not None
        return float(self._costs.of(np.array([num_rows]))[0])
