"""What the page's button "Kill the worker" does, with `--demo`: the worker is killed, and the stream goes on."""

import httpx

from quire.client import GenerationOptions, TokenChunk
from tests.support.serving import serving

NUM_TOKENS = 300


async def test_a_stream_goes_on_when_the_page_kills_the_worker():
    async with serving(demo=True, num_threads=1) as served:
        killed = served.server.process("worker").pid
        options = GenerationOptions(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
        async with (
            httpx.AsyncClient(base_url=f"http://{served.server.http_address}", timeout=30) as http,
            served.client.generate_stream("Once upon a time", options) as stream,
        ):
            num_tokens = 0
            async for event in stream:
                if not num_tokens:
                    (await http.post("/ui/kill", json={"service": "worker"})).raise_for_status()
                num_tokens += len(event.token_ids) if isinstance(event, TokenChunk) else 0
        assert num_tokens == NUM_TOKENS
        assert served.server.process("worker").pid != killed
