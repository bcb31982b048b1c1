"""Ends a worker whose device hangs: nothing in the process can bring it back, and who started it starts another."""

import asyncio
from collections.abc import Callable

from worker_svc.leaving import leave_process

_TIMES_STEP_TIMEOUT = 2.0
"""The scheduler gives a step up after its timeout. A device that is as long again in the step does not come back; one
that does (kernels were compiled) is attached again and keeps its model."""
_LONGEST_INTERVAL_S = 1.0


async def end_when_hung(
    busy_ms: Callable[[], int], step_timeout_s: float, leave: Callable[[str], object] = leave_process
) -> None:
    """Looks at how long the device has been in its current step; calls `leave` and returns when that is too long twice
    in a row: after a pause of the whole process, a device that works is in another step at the second look."""
    limit_s = _TIMES_STEP_TIMEOUT * step_timeout_s
    interval_s = min(step_timeout_s / 4, _LONGEST_INTERVAL_S)
    num_too_long = 0
    while num_too_long < 2:
        await asyncio.sleep(interval_s)
        num_too_long = num_too_long + 1 if busy_ms() > limit_s * 1e3 else 0
    leave(f"the device hangs: it has been in one step for more than {limit_s:g} s")
