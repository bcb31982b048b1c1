"""Prompts are read from disk while a server runs and after its restart, after an ordered stop and after kill -9.
Damaged blocks are recomputed, and a full disk only stops further writes."""

import asyncio
import os
import resource
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from quire.client import AsyncClient, GenerationOptions
from quire.rpc.errors import QuireError
from quire.scheduler.v1 import scheduler_pb2
from quire.testing import free_port
from tests.support.scheduler_process import until
from tests.support.serving import Served, forked_programs, serving
from tests.support.two_replicas import two_replicas

PROMPTS = [[20 + (7 * index + 3 * place) % 400 for place in range(200)] for index in range(3)]
NUM_CACHED = 200 // 16 * 16
SHORT = list(range(100, 140))
OPTIONS = GenerationOptions(temperature=0.0, max_tokens=20, ignore_eos=True)


async def generate(served: Served) -> tuple[list[list[int]], list[int]]:
    """The tokens of each prompt's output, and the number of the prompt's cached tokens."""
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
        # No step with rows comes after it.
        await served.client.generate(SHORT, GenerationOptions(max_tokens=1))
    async with serving(**settings) as served:
        assert await generate(served) == (expected, [NUM_CACHED] * 3)
        again = await served.client.generate(SHORT, GenerationOptions(max_tokens=1))
        assert again.usage.cached_tokens == len(SHORT) // 16 * 16
        size = file.stat().st_size
        others = [[each + 1 for each in prompt] for prompt in PROMPTS]
        for prompt in others:
            await served.client.generate(prompt, OPTIONS)

        async def are_written() -> bool:
            return file.stat().st_size - size >= (size - 4096) * 39 // 41

        await until(are_written)
        await served.kill("worker")
        await served.kill("scheduler")
        await served.wait_ready()
        assert await generate(served) == (expected, [NUM_CACHED] * 3)
    # One bit in each slot of the first prompt is flipped: the worker finds that, and no caller gets wrong tokens.
    data = bytearray(file.read_bytes())
    for place in range(4096 + 300, len(data), 1000):
        data[place] ^= 1
    file.write_bytes(data)
    async with serving(**settings) as served:
        assert await generate(served) == (expected, [0, 0, 0])


@pytest.mark.asyncio(loop_scope="session")
async def test_prompts_come_back_from_disk_while_the_server_runs(tmp_path: Path) -> None:
    file = tmp_path / "kv" / "blocks.kv"
    # Room for one prompt and its output.
    settings: dict[str, Any] = {"kv_disk": file.parent, "num_gpu_blocks": 16, "dtype": "bfloat16"}
    async with serving(**settings) as served:
        expected, cached = await generate(served)
        assert cached == [0, 0, 0]

        async def come_back() -> bool:
            # The last block of a prompt is written a moment after it was sealed, unless its slot is reused by then.
            outputs, cached = await generate(served)
            assert outputs == expected
            return min(cached) >= NUM_CACHED - 16

        await until(come_back)
        # One bit of each block is flipped, and the disk takes no more data.
        size = file.stat().st_size
        limit_file_size(served, size)
        with file.open("r+b") as damaged:
            for place in range(4096 + 100, size, 1000):
                damaged.seek(place)
                (byte,) = damaged.read(1)
                damaged.seek(place)
                damaged.write(bytes([byte ^ 1]))
        assert await generate(served) == (expected, [0, 0, 0])
        for number in range(1, 4):
            other = [[each + number for each in prompt] for prompt in PROMPTS]
            for prompt in other:
                await served.client.generate(prompt, OPTIONS)
        assert file.stat().st_size <= size
        assert (await generate(served))[0] == expected
        assert served.server.services == served.started


@pytest.mark.long
@pytest.mark.asyncio(loop_scope="session")
async def test_ranks_have_on_disk_what_all_of_them_have(tmp_path: Path) -> None:
    first, second = tmp_path / "kv" / "blocks.kv", tmp_path / "kv" / "blocks-1.kv"
    settings: dict[str, Any] = {"kv_disk": first.parent, "num_gpu_blocks": 128, "dtype": "bfloat16"}
    settings |= {"tensor_parallel_size": 2, "persistent_kv_cache": "off"}
    of_more_ranks = first.with_name("blocks-2.kv")
    async with serving(**settings) as served:
        of_more_ranks.write_bytes(b"")
        expected, cached = await generate(served)
        assert cached == [0, 0, 0]
    # The cache is warm after an ordered stop, and after a rank was killed.
    async with serving(**settings) as served:
        assert not of_more_ranks.exists()
        await until_on_disk(served, NUM_CACHED // 16 * 3)
        assert await generate(served) == (expected, [NUM_CACHED] * 3)
        await served.kill("worker-1")
        await served.wait_ready()
        await until_on_disk(served, NUM_CACHED // 16 * 3)
        assert await generate(served) == (expected, [NUM_CACHED] * 3)
    # One bit of one part of each block is flipped.
    data = bytearray(second.read_bytes())
    for place in range(4096 + 100, len(data), (len(data) - 4096) // (220 // 16 * 3)):
        data[place] ^= 1
    second.write_bytes(data)
    async with serving(**settings) as served:
        await until_on_disk(served, NUM_CACHED // 16 * 3)
        assert await generate(served) == (expected, [0, 0, 0])
    # It was written again, and is gone.
    async with serving(**settings) as served:
        await until_on_disk(served, NUM_CACHED // 16 * 3)
        assert await generate(served) == (expected, [NUM_CACHED] * 3)
    second.unlink()
    async with serving(**settings) as served:
        assert await generate(served) == (expected, [0, 0, 0])
        await until_on_disk(served, NUM_CACHED // 16 * 3)


@pytest.mark.extended
@pytest.mark.asyncio(loop_scope="session")
async def test_prompts_go_to_the_replica_that_has_them_on_disk(tmp_path: Path) -> None:
    """The blocks are no longer in its pool, and another replica is otherwise as suitable."""
    environs = {f"worker-{number}": {"QUIRE_KV_DISK": str(tmp_path / f"kv-{number}")} for number in range(2)}
    prompts = [[20 + (7 * index + 3 * place) % 400 for place in range(200)] for index in range(8)]
    short = GenerationOptions(temperature=0.0, max_tokens=1)
    async with two_replicas(tmp_path, "--num-gpu-blocks=128", environs=environs) as replicas:

        async def sent(name: str, *numbers: int, others: int = 0) -> list[int]:
            """Sends prompts by a gateway that knows all replicas by the third prompt; returns their cached tokens."""
            replicas.start_gateway(forked_programs(), port := free_port(), name, numbers, "cache")
            async with AsyncClient(f"127.0.0.1:{port}") as client:

                async def serves() -> bool:
                    with suppress(QuireError):
                        return bool(await client.list_models())
                    return False

                await until(serves)
                cached = [(await client.generate(prompt, short)).usage.cached_tokens for prompt in prompts]
                await until(are_on_disk)
                for number in range(others):
                    await client.generate([500 + number] * 200, short)
                return cached

        async def are_on_disk() -> bool:
            return (await replicas.metrics(1))["quire_scheduler_disk_blocks"] >= len(prompts) * NUM_CACHED // 16

        # Other prompts fill the pool when all are on disk.
        await sent("gateway-1", 1, others=12)
        assert (await sent("gateway-2", 0, 1))[2:] == [NUM_CACHED] * (len(prompts) - 2)
        assert (await replicas.metrics(1))['quire_scheduler_moved_blocks_total{outcome="fetched",source="disk"}'] > 0


async def until_on_disk(served: Served, at_least: int) -> None:
    """Waits until the scheduler has `at_least` blocks on disk."""
    async with asyncio.timeout(30):
        async for frame in served.scheduler.Watch(scheduler_pb2.WatchRequest()):
            if frame.numbers.disk_blocks >= at_least:
                return


def limit_file_size(served: Served, size: int) -> None:
    """No file of the worker grows beyond `size` bytes, as on a full disk."""
    group = served.server.services["worker"]
    for process in (int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit()):
        try:
            is_of_group = os.getpgid(process) == group
        except ProcessLookupError:
            continue
        if is_of_group:
            resource.prlimit(process, resource.RLIMIT_FSIZE, (size, size))
