"""How long to wait before the next attempt."""

import random

_FIRST_S = 0.01
_LAST_S = 0.25


class Backoff:
    """Doubles from 10 to 250 ms; jitter keeps many gateways from coming back at once."""

    def __init__(self, source: random.Random | None = None) -> None:
        self._random = source or random.Random()
        self._delay_s = _FIRST_S

    def next_delay_s(self) -> float:
        delay_s, self._delay_s = self._delay_s, min(self._delay_s * 2, _LAST_S)
        return delay_s * self._random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """To be called after a success."""
        self._delay_s = _FIRST_S
