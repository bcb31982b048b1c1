"""The feed of /ui with all processes: two samples of a prompt fork, and copy the block that they share."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx

from quire.client import GenerationOptions

COPY, FORK = 1, 4
PROMPT = "Four score and seven years ago our fathers brought forth"


async def frames(http: httpx.AsyncClient) -> AsyncGenerator[dict[str, Any], None]:
    """The frames of the feed."""
    async with http.stream("GET", "/ui/feed") as answer:
        name = ""
        async for line in answer.aiter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: ") and name == "frame":
                yield json.loads(line.removeprefix("data: "))


async def test_two_samples_are_seen_to_fork_and_to_copy_on_write(served):
    kinds: set[int] = set()
    options = GenerationOptions(max_tokens=300, n=2, temperature=1.0, seed=3, ignore_eos=True)
    async with httpx.AsyncClient(base_url=f"http://{served.server.http_address}", timeout=60) as http:
        watched = frames(http)
        async with asyncio.timeout(100):
            first = await anext(watched)
            assert first["is_whole"]
            assert first["numbers"]["num_blocks"] == 512
            running = asyncio.create_task(served.client.generate(PROMPT, options))
            read: dict[str, Any] = {}
            while not ({COPY, FORK} <= kinds and read):
                if running.done():
                    # It ended before its block was read.
                    running = asyncio.create_task(served.client.generate(PROMPT, options))
                frame = await anext(watched)
                events = frame["memory"]["events"]
                kinds |= {events[place] for place in range(0, len(events), 4)}
                if not read and frame["memory"]["tables"]:
                    query = {"replica": frame["replica"], "block": frame["memory"]["tables"][2]}
                    block = (await http.get("/ui/block", params=query)).json()
                    # Before the fork it has one owner, and none once both have ended.
                    read = block if len(block["owners"]) == 2 else {}
            await running
        await watched.aclose()
    assert "Four score" in "".join(read["owners"][0]["tokens"])
    assert read["ref_count"] == 2
