"""A process returns freed memory to its machine."""

import asyncio
from pathlib import Path

from quire.rpc.process import return_freed_memory
from tests.support.processes import until_true


def resident_mib() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20


async def test_memory_that_is_free_between_blocks_in_use_is_returned() -> None:
    blocks = [bytes([1]) * 100_000 for _ in range(1000)]
    # One in a hundred stays in use, also the last one.
    kept = blocks[99::100]
    del blocks
    before = resident_mib()
    returning = asyncio.create_task(return_freed_memory(0.01))
    await until_true(lambda: resident_mib() < before - 80)
    assert len(kept) == 10
    returning.cancel()
