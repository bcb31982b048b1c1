"""Server-sent events of OpenAI's API, as a plain HTTP client sees them."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx


async def events_of(response: httpx.Response) -> AsyncIterator[str]:
    """What stands behind "data: " of each event. Asserts that there is nothing else."""
    async for line in response.aiter_lines():
        if line:
            assert line.startswith("data: "), line
            yield line.removeprefix("data: ")


async def read_stream(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> tuple[list[Any], bool]:
    """All chunks of a stream, and whether it ended with [DONE]. It must end within 20 seconds."""
    async with asyncio.timeout(30), client.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        events = [event async for event in events_of(response)]
    is_done = bool(events) and events[-1] == "[DONE]"
    return [json.loads(event) for event in (events[:-1] if is_done else events)], is_done
