"""`/sleep` and `/wake_up` with all processes: requests wait, and go on where they were."""

import asyncio
import json

import httpx

from tests.support.serving import serving

LONG = {"prompt": "Once upon a time", "max_tokens": 600, "ignore_eos": True, "temperature": 0, "stream": True}


async def test_requests_wait_while_the_pool_is_given_back_and_go_on_at_the_next_token():
    async with (
        serving(num_gpu_blocks=64, dtype="float32") as served,
        httpx.AsyncClient(base_url=f"http://{served.server.http_address}", timeout=60) as http,
    ):
        has_begun = asyncio.Event()

        async def text_of(body: dict) -> str:
            text = ""
            async with http.stream("POST", "/v1/completions", json=body) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        text += json.loads(line[6:])["choices"][0]["text"]
                        has_begun.set()
            return text

        async def is_sleeping() -> bool:
            return (await http.get("/is_sleeping")).json()["is_sleeping"]

        expected = await text_of(LONG)
        has_begun.clear()
        running = asyncio.create_task(text_of(LONG))
        await has_begun.wait()
        # Two at once, and again: it sleeps.
        answers = await asyncio.gather(*(http.post("/sleep?level=1&mode=keep") for _ in range(2)), http.post("/sleep"))
        assert [(each.status_code, each.json()) for each in answers] == [(200, {"is_sleeping": True})] * 3
        assert await is_sleeping()
        health = await http.get("/health")
        assert (health.status_code, "asleep" in health.json()["reason"]) == (503, True)
        new = asyncio.create_task(text_of(LONG | {"max_tokens": 3}))
        for path, param in [("/sleep?level=2", "level"), ("/sleep?mode=abort", "mode"), ("/wake_up?tags=all", "tags")]:
            refused = await http.post(path)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        assert (await http.post("/wake_up?tags=weights")).json() == {"is_sleeping": True}
        assert not running.done()
        assert not new.done()
        assert (await http.post("/wake_up?tags=kv_cache")).json() == {"is_sleeping": False}
        assert await running == expected
        assert expected.startswith(await new)
        assert (await http.get("/health")).status_code == 200
        # What was cached is gone, and nothing of the zeros is taken for a prefix.
        assert await text_of(LONG) == expected
        assert (await http.post("/wake_up")).json() == {"is_sleeping": False}
