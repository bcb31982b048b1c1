"""One server for all tests that kill processes of the embedded model and need no special settings."""

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.support.scheduler_process import wait_nothing_in_use
from tests.support.serving import Served, serving


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def survivor() -> AsyncIterator[Served]:
    # float32: in bfloat16 a recomputed context may give other logits.
    async with serving(num_gpu_blocks=512, dtype="float32", demo=True) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session")
async def served(survivor: Served) -> Served:
    """A server that serves again after any kill, and is idle."""
    await survivor.wait_ready()
    await wait_nothing_in_use(survivor.scheduler)
    return survivor
