"""Conditions under which a worker regards its device as hanging."""

import asyncio
import itertools
from collections.abc import Iterable

from worker_svc.device.device_loop import end_when_hung


class Device:
    """Is busy for the given times, look by look; ends the test's task after the last one."""

    def __init__(self, busy_ms: Iterable[int]) -> None:
        self._busy_ms = iter(busy_ms)
        self.messages: list[str] = []

    def busy_ms(self) -> int:
        try:
            return next(self._busy_ms)
        except StopIteration:
            raise asyncio.CancelledError from None

    async def watch(self, step_timeout_s: float) -> list[str]:
        async with asyncio.timeout(30):
            guard = asyncio.create_task(end_when_hung(self.busy_ms, step_timeout_s, self.messages.append))
            await asyncio.wait([guard])
        return self.messages


async def test_a_device_that_stays_in_a_step_for_twice_the_timeout_ends_the_process() -> None:
    (message,) = await Device(itertools.count(100, 10)).watch(0.1)
    assert message.startswith("the device hangs: it has been in one step for more than 0.2 s")


async def test_long_steps_and_idleness_end_nothing() -> None:
    assert await Device([0, 0, 150, 190, 200, 5, 199, 0] * 3).watch(0.1) == []
    # After a pause of the process a step only seems long.
    assert await Device([0, 10, 9000, 3, 9000, 0, 4]).watch(0.1) == []
