"""Whether requests succeed, found out by sending one."""

import asyncio
from collections.abc import Callable

from quire.client import AsyncClient, GenerationOptions
from quire.rpc.errors import ResourceExhausted, Unavailable

_ONE_TOKEN = GenerationOptions(max_tokens=1, temperature=0.0)
_RETRY_S = 0.05
_PROGRESS_EVERY_S = 5.0


async def wait_until_served(address: str, api_key: str | None, report: Callable[[str], None]) -> None:
    """Sends a request of one token again and again until it succeeds; tells `report` when that takes long.

    Raises:
        QuireError: the request failed for another reason than that nobody serves yet, or that all are busy.
    """
    loop = asyncio.get_running_loop()
    started_at = loop.time()
    async with AsyncClient(address, api_key=api_key) as client:
        sending = asyncio.create_task(_send_until_it_succeeds(client))
        try:
            while not (await asyncio.wait([sending], timeout=_PROGRESS_EVERY_S))[0]:
                report(f"waiting for the model to be loaded ({loop.time() - started_at:.0f} s)")
            await sending
        finally:
            sending.cancel()
            await asyncio.wait([sending])


async def _send_until_it_succeeds(client: AsyncClient) -> None:
    while True:
        try:
            await client.generate([0], _ONE_TOKEN)
            return
        except (Unavailable, ResourceExhausted):
            await asyncio.sleep(_RETRY_S)
