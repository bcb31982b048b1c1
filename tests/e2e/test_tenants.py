"""Two tenants and their keys, through all processes: what they share, and what they do not."""

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from gateway.auth.caller import Access
from gateway.auth.quota import Limits
from quire.client import AsyncClient, GenerationOptions
from quire.rpc.errors import NotFound, PermissionDenied, Unauthenticated
from tests.support.keys import KeysFile
from tests.support.serving import Served, serving

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
    found = {tenant: keys.add(tenant, access=Access(may_pin=True)) for tenant in ("one", "two")}
    found["limited"] = keys.add("limited", limits=Limits(requests_per_minute=1))
    return found


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def served(keys, tenants):
    async with serving(num_gpu_blocks=256, dtype="float32", keys_files=(keys.path,)) as running:
        yield running


def grpc_client(served: Served, key: str | None) -> AsyncClient:
    return AsyncClient(served.server.grpc_address, api_key=key)


def openai_client(served: Served, key: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"http://{served.server.http_address}/v1", api_key=key, max_retries=0, timeout=60)


async def cached_over_grpc(served, key, prompt) -> int:
    async with grpc_client(served, key) as client:
        return (await client.generate(prompt, SHORT)).usage.cached_tokens


async def cached_over_http(served, key, prompt) -> int:
    async with openai_client(served, key) as client:
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


async def test_both_fronts_know_a_tenant_by_its_key(served, tenants):
    prompt = f"By either way {STORY}"
    assert await cached_over_grpc(served, tenants["one"], prompt) == 0
    assert await cached_over_http(served, tenants["one"], prompt) >= 32
    assert await cached_over_http(served, tenants["two"], prompt) == 0


async def test_tenants_get_the_same_answers(served, tenants):
    async with grpc_client(served, tenants["one"]) as one, grpc_client(served, tenants["two"]) as two:
        answers = [(await client.generate(f"Alike {STORY}", SHORT)).sequences[0].token_ids for client in (one, two)]
    assert answers[0] == answers[1]


async def test_a_pin_is_its_tenants_own(served, tenants):
    prompt = f"Pinned {STORY}"
    async with grpc_client(served, tenants["one"]) as one, grpc_client(served, tenants["two"]) as two:
        pin = await one.pin_prefix(prompt)
        with pytest.raises(NotFound) as raised:
            await two.unpin_prefix(pin.pin_id)
        assert raised.value.reason == "PIN_NOT_FOUND"
        assert (await two.generate(prompt, SHORT)).usage.cached_tokens == 0
        assert (await one.generate(prompt, SHORT)).usage.cached_tokens >= 32
        await one.unpin_prefix(pin.pin_id)


async def test_openais_client_knows_the_errors(served, tenants):
    async def complete(key, **fields):
        async with openai_client(served, key) as client:
            return await client.completions.create(model=MODEL, prompt="hello", max_tokens=1, **fields)

    with pytest.raises(openai.AuthenticationError) as raised:
        await complete("sk-wrong")
    assert raised.value.code == "invalid_api_key"
    with pytest.raises(openai.PermissionDeniedError) as raised:
        await complete(tenants["one"], extra_body={"priority": -1})
    assert raised.value.code == "priority_not_allowed"
    await complete(tenants["limited"])
    with pytest.raises(openai.RateLimitError) as raised:
        await complete(tenants["limited"])
    assert raised.value.code == "rate_limit_exceeded"
    assert 0 < int(raised.value.response.headers["retry-after"]) <= 60


async def test_nothing_is_served_without_a_key(served, tenants):
    async with grpc_client(served, None) as client:
        with pytest.raises(Unauthenticated) as raised:
            await client.generate("hello", SHORT)
        assert raised.value.reason == "MISSING_API_KEY"
    async with grpc_client(served, tenants["one"]) as client:
        with pytest.raises(PermissionDenied):
            await client.generate("hello", SHORT, priority=1)
