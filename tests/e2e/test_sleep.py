"""`/sleep` and `/wake_up` with all processes: requests wait, and continue where they were."""

import asyncio
import json

import httpx
import pytest

from tests.support.serving import serving

LONG = {"prompt": "Once upon a time", "max_tokens": 300, "ignore_eos": True, "temperature": 0, "stream": True}


async def text_of(http: httpx.AsyncClient, body: dict, has_begun: asyncio.Event | None = None) -> str:
    text = ""
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
                if has_begun is not None:
                    has_begun.set()
    return text


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [1, 2])
async def test_weights_that_a_sleep_discards_are_loaded_again_and_streams_go_on(num_ranks: int):
    async with (
        serving(num_gpu_blocks=64, dtype="float32", tensor_parallel_size=num_ranks, vllm_metric_names=True) as served,
        httpx.AsyncClient(base_url=f"http://{served.server.http_address}", timeout=120) as http,
    ):
        expected = await text_of(http, LONG)
        has_begun = asyncio.Event()
        running = asyncio.create_task(text_of(http, LONG, has_begun))
        await has_begun.wait()
        # The second call discards what the first one kept.
        for level in (1, 2, 2):
            assert (await http.post(f"/sleep?level={level}")).json() == {"is_sleeping": True}
        assert "asleep without weights" in (await http.get("/health")).json()["reason"]
        states = (await http.get("/metrics")).text
        assert 'sleep_state="discard_all"} 1.0' in states
        assert not running.done()
        assert (await http.post("/wake_up")).json() == {"is_sleeping": False}
        assert await running == expected
        assert served.server.services == served.started


async def test_requests_wait_while_the_pool_is_given_back_and_go_on_at_the_next_token():
    async with (
        serving(num_gpu_blocks=64, dtype="float32") as served,
        httpx.AsyncClient(base_url=f"http://{served.server.http_address}", timeout=60) as http,
    ):
        has_begun = asyncio.Event()

        async def is_sleeping() -> bool:
            return (await http.get("/is_sleeping")).json()["is_sleeping"]

        expected = await text_of(http, LONG)
        running = asyncio.create_task(text_of(http, LONG, has_begun))
        await has_begun.wait()
        # Two calls at once, and a third: it sleeps.
        answers = await asyncio.gather(*(http.post("/sleep?level=1&mode=keep") for _ in range(2)), http.post("/sleep"))
        assert [(each.status_code, each.json()) for each in answers] == [(200, {"is_sleeping": True})] * 3
        assert await is_sleeping()
        health = await http.get("/health")
        assert (health.status_code, "asleep" in health.json()["reason"]) == (503, True)
        new = asyncio.create_task(text_of(http, LONG | {"max_tokens": 3}))
        for path, param in [("/sleep?level=3", "level"), ("/sleep?mode=abort", "mode"), ("/wake_up?tags=all", "tags")]:
            refused = await http.post(path)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        assert (await http.post("/wake_up?tags=weights")).json() == {"is_sleeping": True}
        assert not running.done()
        assert not new.done()
        assert (await http.post("/wake_up?tags=kv_cache")).json() == {"is_sleeping": False}
        assert await running == expected
        assert expected.startswith(await new)
        assert (await http.get("/health")).status_code == 200
        # Cached blocks are gone, and no zeros are taken for a prefix.
        assert await text_of(http, LONG) == expected
        assert (await http.post("/wake_up")).json() == {"is_sleeping": False}
