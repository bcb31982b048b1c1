"""How a worker ends that cannot go on. Its supervisor starts another one."""

import asyncio
import logging
import os
from collections.abc import Callable
from typing import NoReturn

_HANG_STEP_TIMEOUTS = 2.0
"""The scheduler gives a step up after its timeout. A device that stays in it as long again does not recover; one that
does (kernels were compiled) is attached again and keeps its model."""
_MAX_LOOK_INTERVAL_S = 1.0
_logger = logging.getLogger(__name__)


def leave_process(why: str, status: int = 1) -> NoReturn:
    """Ends this process at once, for its supervisor to start another. In an ordered end, a thread could wait for an
    operation that never returns."""
    _logger.critical("%s; leaving", why)
    logging.shutdown()
    os._exit(status)


async def end_when_hung(
    busy_ms: Callable[[], int], step_timeout_s: float, leave: Callable[[str], object] = leave_process
) -> None:
    """Watches how long the device has been in its current step. Calls `leave` and returns when that is too long at two
    looks in a row: after a pause of the whole process, a device that works is in another step at the second look."""
    limit_s = _HANG_STEP_TIMEOUTS * step_timeout_s
    interval_s = min(step_timeout_s / 4, _MAX_LOOK_INTERVAL_S)
    num_too_long = 0
    while num_too_long < 2:
        await asyncio.sleep(interval_s)
        num_too_long = num_too_long + 1 if busy_ms() > limit_s * 1e3 else 0
    leave(f"the device hangs: it has been in one step for more than {limit_s:g} s")
