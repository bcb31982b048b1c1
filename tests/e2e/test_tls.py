"""All links encrypted: `quire serve` with certificates. Processes on ports of their own are in test_deployments.py."""

import asyncio
import ssl
from pathlib import Path

import httpx
import openai
import pytest

from quire.client import AsyncClient, ClientTls, GenerationOptions
from quire.rpc.errors import Unavailable
from tests.support.certificates import make_certificates
from tests.support.serving import serving

GREEDY = GenerationOptions(temperature=0.0, max_tokens=8, ignore_eos=True)
QUESTION = "What is 2+2?"


async def generated(client: AsyncClient) -> str:
    """An answer, as soon as a server can give it: services that are not forks import all modules before."""
    async with asyncio.timeout(200):
        while True:
            try:
                return (await client.generate(QUESTION, GREEDY)).sequences[0].text
            except Unavailable:
                await asyncio.sleep(0.1)


async def test_serve_with_certificates_answers_grpc_and_https_and_survives_its_worker(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    async with serving(tls_dir=tmp_path, client_tls=ClientTls(tmp_path / "ca.pem"), num_gpu_blocks=64) as served:
        said = await generated(served.client)
        port = served.server.http_address.rpartition(":")[2]
        http = httpx.AsyncClient(verify=ssl.create_default_context(cafile=tmp_path / "ca.pem"), timeout=60)
        async with openai.AsyncOpenAI(
            base_url=f"https://localhost:{port}/v1",
            api_key="x",
            http_client=http,  # pyrefly: ignore
        ) as client:
            completion = await client.completions.create(
                model="quire-tiny", prompt=QUESTION, max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
            )
            assert completion.choices[0].text == said
        async with httpx.AsyncClient(timeout=60) as stranger:
            with pytest.raises(httpx.ConnectError):
                await stranger.get(f"https://localhost:{port}/health")
        with pytest.raises(Unavailable):
            async with AsyncClient(served.server.grpc_address) as plain:
                await plain.generate(QUESTION, GREEDY)
        await served.kill("worker")
        assert await generated(served.client) == said
