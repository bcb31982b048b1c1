"""What is to be done for a request later, unless something happens before."""

import asyncio
from collections.abc import Callable

from gateway.requests.live_request import LiveRequest


class RequestTimers:
    """At most one timer a request: setting one replaces that from before."""

    def __init__(self, on_error: Callable[[LiveRequest, Exception], None]) -> None:
        """`on_error` is called with the request whose action raised, and with what it raised."""
        self._on_error = on_error
        self._timers: dict[int, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        """How many requests have one."""
        return len(self._timers)

    def __contains__(self, live: LiveRequest) -> bool:
        return live.handle in self._timers

    def set(self, live: LiveRequest, delay_s: float, action: Callable[[LiveRequest], None]) -> None:
        """Calls `action` with the request after that time, in the running loop."""
        self.cancel(live)
        loop = asyncio.get_running_loop()
        self._timers[live.handle] = loop.call_later(delay_s, self._fire, live, action)

    def cancel(self, live: LiveRequest) -> None:
        """Nothing is done. Idempotent."""
        timer = self._timers.pop(live.handle, None)
        if timer is not None:
            timer.cancel()

    def _fire(self, live: LiveRequest, action: Callable[[LiveRequest], None]) -> None:
        del self._timers[live.handle]
        try:
            action(live)
        except Exception as error:
            self._on_error(live, error)
