"""Waits for conditions, and inspects other processes."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from quire_torture.processes import stat_of


async def until_true(condition: Callable[[], object], timeout_s: float = 60) -> None:
    """Waits until `condition()` is true; TimeoutError if that takes too long."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  (what other processes do sets no event here)
            await asyncio.sleep(0.01)


def wait_true(condition: Callable[[], object], timeout_s: float = 60) -> None:
    """Same as `until_true`, without an event loop."""
    ends_at = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > ends_at:
            raise TimeoutError("the condition did not become true")
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """False for a process that is gone or is a zombie."""
    fields = stat_of(pid)
    return fields is not None and fields[0] not in "ZX"


def lines_of(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []
