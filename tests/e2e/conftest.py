"""One server of the embedded model for all tests that need no special settings."""

from collections.abc import AsyncIterator

import pytest_asyncio
from openai import AsyncOpenAI

from tests.support.serving import Served, serving


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def served() -> AsyncIterator[Served]:
    # float32: in bfloat16 equal logits are common, and the batch decides which one wins.
    async with serving(num_gpu_blocks=512, dtype="float32", demo=True) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session")
async def openai_client(served: Served) -> AsyncIterator[AsyncOpenAI]:
    url = f"http://{served.server.http_address}/v1"
    async with AsyncOpenAI(base_url=url, api_key="unused", max_retries=0, timeout=60) as running:
        yield running
