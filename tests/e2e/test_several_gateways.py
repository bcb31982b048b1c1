"""`quire serve --gateways 2`, as its clients see it."""

import asyncio

import httpx

from quire.client import AsyncClient, GenerationOptions, TokenChunk
from quire.local import LocalServer, ServeSettings
from tests.support.processes import until_true
from tests.support.serving import serving
from tests.support.shared_port import clients_of_both

PROMPT = "Once upon a time"


def options_of(max_tokens: int) -> GenerationOptions:
    return GenerationOptions(temperature=1.0, seed=3, max_tokens=max_tokens, ignore_eos=True)


async def test_all_gateways_answer_alike_over_both_ports():
    async with serving(gateways=2) as served, clients_of_both(served.server) as clients:
        texts = {(await client.generate(PROMPT, options_of(16))).text for client in clients.values()}
        body = {"prompt": PROMPT, "max_tokens": 16, "temperature": 1.0, "seed": 3, "ignore_eos": True}
        for _ in range(4):  # a connection each
            async with httpx.AsyncClient(base_url=f"http://{served.server.http_address}") as http:
                answer = await http.post("/v1/completions", json=body, timeout=10)
                texts.add(answer.json()["choices"][0]["text"])
        assert len(texts) == 1
        assert (await served.state()).connected_gateways == 2


async def test_the_end_of_the_server_lets_the_streams_of_all_gateways_finish():
    settings = ServeSettings(gateways=2, grpc_port=0, http_port=0, num_threads=2, drain_timeout=15.0)
    async with LocalServer(settings) as server:
        await server.wait_ready()
        async with clients_of_both(server) as clients, asyncio.timeout(15):
            counts = dict.fromkeys(clients, 0)
            reading = [asyncio.create_task(count(client, counts, name)) for name, client in clients.items()]
            await until_true(lambda: min(counts.values()) > 10)
            stopping = asyncio.create_task(server.stop())
            await asyncio.gather(*reading)
            assert set(counts.values()) == {400}
            await stopping


async def count(client: AsyncClient, counts: dict[str, int], name: str) -> None:
    """Counts the tokens of a stream as they come."""
    async with client.generate_stream(PROMPT, options_of(400)) as stream:
        async for event in stream:
            if isinstance(event, TokenChunk):
                counts[name] += len(event.token_ids)
