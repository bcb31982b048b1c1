"""A server that starts again is warm from disk, after an ordered stop and after kill -9; damage is computed anew."""

from pathlib import Path
from typing import Any

import pytest

from quire.client import GenerationOptions
from tests.support.killing import kill
from tests.support.scheduler_process import until
from tests.support.serving import Served, serving

PROMPTS = [[20 + (7 * index + 3 * place) % 400 for place in range(200)] for index in range(3)]
NUM_CACHED = 200 // 16 * 16
OPTIONS = GenerationOptions(temperature=0.0, max_tokens=20, ignore_eos=True)


async def generate(served: Served) -> tuple[list[list[int]], list[int]]:
    """The tokens of each prompt's output, and how many of the prompt's came from the cache."""
    results = [await served.client.generate(prompt, OPTIONS) for prompt in PROMPTS]
    return [list(each.sequences[0].token_ids) for each in results], [each.usage.cached_tokens for each in results]


@pytest.mark.asyncio(loop_scope="session")
async def test_server_that_starts_again_is_warm_from_disk(tmp_path: Path) -> None:
    file = tmp_path / "kv" / "blocks.kv"
    settings: dict[str, Any] = {"kv_disk": file.parent, "num_gpu_blocks": 128, "dtype": "bfloat16"}
    settings["persistent_kv_cache"] = "off"
    async with serving(**settings) as served:
        expected, cached = await generate(served)
        assert cached == [0, 0, 0]
    async with serving(**settings) as served:
        assert await generate(served) == (expected, [NUM_CACHED] * 3)
        size = file.stat().st_size
        others = [[each + 1 for each in prompt] for prompt in PROMPTS]
        for prompt in others:
            await served.client.generate(prompt, OPTIONS)

        async def are_written() -> bool:
            # The newest block of a request becomes final with a later step, of another request.
            return file.stat().st_size - size >= (size - 4096) * 11 // 13

        await until(are_written)
        await kill(served, "worker")
        await kill(served, "scheduler")
        await served.server.wait_ready()
        assert await generate(served) == (expected, [NUM_CACHED] * 3)
    # A bit of each slot of the first prompt is another: they are found, and nobody is told anything wrong.
    data = bytearray(file.read_bytes())
    for place in range(4096 + 300, len(data), 1000):
        data[place] ^= 1
    file.write_bytes(data)
    async with serving(**settings) as served:
        assert await generate(served) == (expected, [0, 0, 0])
