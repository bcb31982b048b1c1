"""kill -9 of scheduler and worker under load: a subscriber of KV events knows what the cache holds all the time."""

import asyncio

import pytest

from quire.client import GenerationOptions
from quire.scheduler.v1 import scheduler_pb2
from tests.support.killing import Streams, until_hit
from tests.support.kv_subscriber import KvSubscriber, until_equal
from tests.support.serving import Served, serving

pytestmark = pytest.mark.extended


async def content_of(served: Served) -> set[int] | None:
    """What an idle scheduler's cache holds, as events name it; None while requests run."""
    blocks = await served.scheduler.InspectBlocks(scheduler_pb2.InspectBlocksRequest(), wait_for_ready=True, timeout=30)
    if blocks.sequences:
        return None
    return {int.from_bytes(block.block_hash[-8:], "big") for block in blocks.cached}


async def tell_another(served: Served, index: int) -> None:
    options = GenerationOptions(max_tokens=200, ignore_eos=True, temperature=1.0, seed=index)
    await served.client.generate(f"Another story, {index}", options)


async def test_the_mirror_is_the_cache_after_every_kill(tmp_path):
    events, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    async with serving(num_gpu_blocks=240, kv_events=events, kv_events_replay=replay) as served:
        with KvSubscriber.open(events, replay) as subscriber:
            following = asyncio.create_task(subscriber.follow())
            for victims in (["scheduler"], ["worker"], ["scheduler", "worker"]):
                num_clears = subscriber.num_clears

                async def disturb(victims: list[str] = victims) -> None:
                    streams = Streams()
                    async with streams.reading(served) as reading:
                        await streams.advance()
                        await streams.kill(served, *victims)
                        await reading

                await until_hit(disturb)
                # An event of the new scheduler, in case all before it came while nobody was connected.
                await served.client.generate("So", GenerationOptions(max_tokens=40, ignore_eos=True))
                await until_equal(subscriber, lambda: content_of(served))
                assert subscriber.num_clears > num_clears
            await asyncio.gather(*(tell_another(served, index) for index in range(12)))
            await until_equal(subscriber, lambda: content_of(served))
            assert subscriber.num_removed > 0
            assert not following.done()
            following.cancel()
