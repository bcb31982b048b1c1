"""Two tenants and their keys, through all processes: what they share, and what they do not."""

import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from quire.client import AsyncClient, GenerationOptions
from tests.support.keys import KeysFile
from tests.support.serving import serving

pytestmark = pytest.mark.extended

MODEL = "quire-tiny"
SHORT = GenerationOptions(max_tokens=4, temperature=0.0, ignore_eos=True)
# Some blocks of 16 tokens. Tests differ in how they begin, since all share the caches of one server.
STORY = "there was a little fox who lived in a wood with many friends, and it slept in a hollow tree. " * 4


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def keys(tmp_path_factory):
    return KeysFile(tmp_path_factory.mktemp("keys") / "keys.json")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def tenants(keys):
    """A key of each tenant, by its name."""
    return {tenant: keys.add(tenant) for tenant in ("one", "two")}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def served(keys, tenants):
    async with serving(num_gpu_blocks=256, dtype="float32", keys_files=(keys.path,)) as running:
        yield running


async def cached_over_grpc(served, key, prompt) -> int:
    async with AsyncClient(served.server.grpc_address, api_key=key) as client:
        return (await client.generate(prompt, SHORT)).usage.cached_tokens


async def cached_over_http(served, key, prompt) -> int:
    url = f"http://{served.server.http_address}/v1"
    async with AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=60) as client:
        answer = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=4, temperature=0)
    details = answer.usage.prompt_tokens_details
    return (0 if details is None else details.cached_tokens) or 0


@pytest.mark.parametrize("cached", [cached_over_grpc, cached_over_http])
async def test_cached_prefixes_are_shared_within_a_tenant_and_not_across(served, tenants, cached):
    prompt = f"Over {cached.__name__} {STORY}"
    assert await cached(served, tenants["one"], prompt) == 0
    shared = await cached(served, tenants["one"], prompt)
    assert shared >= 32
    assert await cached(served, tenants["two"], prompt) == 0
    assert await cached(served, tenants["two"], prompt) == shared
