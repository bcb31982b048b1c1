"""Two tenants and their keys, through all processes: prefixes that one has cached are no other's."""

import pytest

from quire.client import AsyncClient, GenerationOptions
from tests.support.keys import KeysFile
from tests.support.serving import serving

pytestmark = pytest.mark.extended

SHORT = GenerationOptions(max_tokens=4, temperature=0.0, ignore_eos=True)
STORY = "There was a little fox who lived in a wood with many friends, and it slept in a hollow tree. " * 4


async def test_cached_prefixes_are_shared_within_a_tenant_and_not_across(tmp_path) -> None:
    keys = KeysFile(tmp_path / "keys.json")
    one, two = keys.add("one"), keys.add("two")
    async with serving(num_gpu_blocks=256, dtype="float32", keys_files=(keys.path,)) as served:

        async def cached(key: str) -> int:
            async with AsyncClient(served.server.grpc_address, api_key=key) as client:
                return (await client.generate(STORY, SHORT)).usage.cached_tokens

        assert await cached(one) == 0
        shared = await cached(one)
        assert shared >= 32
        assert [await cached(two) for _ in range(2)] == [0, shared]
