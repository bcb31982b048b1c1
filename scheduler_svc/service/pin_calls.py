"""Calls that pin prefixes and return once the blocks are computed. Pins end in time even if no step is planned."""

import asyncio
from collections.abc import Callable

from quire.runtime import clock
from scheduler_svc.core.pins import Pin
from scheduler_svc.core.request import Adapter
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.service.refusals import RetryAdvisor, refusals_as_errors

_MIN_TIMER_S = 0.001


class PinFailedError(Exception):
    """The pin ended before its blocks were computed."""


class PinCalls:
    """The callers that wait for pins of the current core, and the timer for the next pin that ends."""

    def __init__(
        self, scheduler_of: Callable[[], Scheduler | None], retry: RetryAdvisor, on_change: Callable[[], None]
    ) -> None:
        """`on_change` is called when pins came or went: the scheduler may have become busy or idle."""
        self._scheduler_of = scheduler_of
        self._retry = retry
        self._on_change = on_change
        self._waiters: dict[Pin, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def pin(
        self, tenant: str, token_ids: list[int], time_to_live_s: float, adapter: Adapter | None = None
    ) -> Pin:
        """Pins a prefix and returns once its blocks are computed. Raises QuireError if the core refuses it, or
        PinFailedError."""
        scheduler = self._scheduler_of()
        assert scheduler is not None, "no worker was attached yet"
        with refusals_as_errors(self._retry):
            pin = scheduler.pin(tenant, token_ids, clock.monotonic(), time_to_live_s, adapter)
        self._changed(scheduler)
        if not pin.is_held:
            waiter = self._waiters.setdefault(pin, asyncio.get_running_loop().create_future())
            # Several callers may wait for one pin, and one of them may leave.
            await asyncio.shield(waiter)
        return pin

    def unpin(self, tenant: str, pin_id: str) -> bool:
        """Ends a pin. Returns whether the tenant had it."""
        scheduler = self._scheduler_of()
        if scheduler is None or not scheduler.unpin(tenant, pin_id):
            return False
        self._changed(scheduler)
        return True

    def wake_waiters(self) -> None:
        """Wakes the callers whose pins hold their blocks now, or have ended."""
        scheduler, waiters = self._scheduler_of(), self._waiters
        assert scheduler is not None
        pins = scheduler.pins
        for pin in [pin for pin in waiters if pin.is_held or pins.of_tenant(pin.tenant, pin.pin_id) is not pin]:
            waiter = waiters.pop(pin)
            if pin.is_held:
                waiter.set_result(None)
            else:
                waiter.set_exception(PinFailedError(f"pin {pin.pin_id} ended before its blocks were computed"))
                # All callers may have left, and asyncio logs an exception that is never retrieved.
                waiter.exception()

    def _expire(self) -> None:
        scheduler = self._scheduler_of()
        assert scheduler is not None
        scheduler.expire_pins(clock.monotonic())
        self._changed(scheduler)

    def _changed(self, scheduler: Scheduler) -> None:
        """Sets the timer for the next pin that ends or decays, since an idle scheduler plans no steps. A timer may fire
        a little early, so it is set again while there are pins."""
        self.wake_waiters()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (changes_at := scheduler.pins.next_change) is not None:
            delay_s = max(changes_at - clock.monotonic(), _MIN_TIMER_S)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._expire)
        self._on_change()
