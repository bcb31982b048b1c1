"""Time limits for peers that allow for pauses of this process."""

import asyncio
from collections.abc import Callable

LAST_LOOK_S = 0.2


class PatientTimer:
    """Calls back once a time is over and the event loop has run for LAST_LOOK_S after that.

    A process that stood still, on a machine that was suspended or is very busy, finds its timers due at the same moment
    as messages that its peers sent in time. Therefore it handles those messages first, which may cancel the timer.
    """

    def __init__(self, delay_s: float, callback: Callable[..., object], *args: object) -> None:
        self._callback = callback
        self._args = args
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(delay_s, self._look_again)

    def cancel(self) -> None:
        """Calls nothing any more. Idempotent."""
        self._timer.cancel()

    def _look_again(self) -> None:
        self._timer = self._loop.call_later(LAST_LOOK_S, self._callback, *self._args)
