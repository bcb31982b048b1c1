"""Callers that wait until the blocks of their pins are computed."""

import asyncio

from scheduler_svc.core.pins import Pin, Pins


class PinFailedError(Exception):
    """The pin is gone before its blocks were computed."""


class Pinning:
    """Wakes callers when a pin holds its blocks, or is gone."""

    def __init__(self) -> None:
        self._waiting: dict[Pin, asyncio.Future[None]] = {}

    async def wait(self, pin: Pin) -> None:
        """Returns once the pin holds its blocks. Raises PinFailedError."""
        if pin.is_held:
            return
        future = self._waiting.setdefault(pin, asyncio.get_running_loop().create_future())
        # Several callers may wait for one pin, and one of them may leave.
        await asyncio.shield(future)

    def settle(self, pins: Pins) -> None:
        """To be called after whatever may have changed the pins."""
        for pin in [pin for pin in self._waiting if pin.is_held or pins.of_tenant(pin.tenant, pin.pin_id) is not pin]:
            future = self._waiting.pop(pin)
            if pin.is_held:
                future.set_result(None)
            else:
                future.set_exception(PinFailedError(f"pin {pin.pin_id} was let go of before it was computed"))
                # Nobody may be left to take it.
                future.exception()
