"""A gateway sends a prompt to the scheduler that reports its prefix as cached."""

import numpy as np

from gateway.auth.caller import DEFAULT_TENANT
from gateway.replicas.routing import prompt_hashes
from quire.common.v1 import common_pb2
from quire.messages.prefix_hashes import short
from quire.scheduler.v1 import scheduler_pb2
from tests.support.fake_scheduler import FakeScheduler
from tests.support.gateway_process import RunningGateway, collect, running_gateway, stream_request
from tests.support.processes import until_true

PROMPT = list(range(100, 200))


def update_for(scheduler: FakeScheduler, prompt: list[int], **fields) -> scheduler_pb2.CacheUpdate:
    hashes = prompt_hashes(np.array(prompt, np.int32), DEFAULT_TENANT, scheduler.block_size)
    return scheduler_pb2.CacheUpdate(stored=b"".join(map(short, hashes)), **fields)


def num_known(gateway: RunningGateway, scheduler: FakeScheduler) -> int | None:
    cached = gateway.gateway._models.default.replicas.links[scheduler.address].cached
    return None if cached is None else len(cached)


async def send(gateway: RunningGateway, prompt: list[int]) -> None:
    request = stream_request(None, max_tokens=2)
    request.token_ids.CopyFrom(common_pb2.TokenIds(ids=prompt))
    await collect(gateway.generation.GenerateStream(request))


async def test_prompts_go_where_they_are_cached_and_by_affinity_while_that_is_unknown(scheduler, other):
    async with running_gateway(scheduler, other) as gateway:
        assert scheduler.wants_cache_updates
        await send(gateway, PROMPT)
        first, second = (scheduler, other) if scheduler.submits else (other, scheduler)
        second.tell_cache(update_for(second, PROMPT[:64], cleared=True))
        await until_true(lambda: num_known(gateway, second) == 4)
        await send(gateway, PROMPT)
        assert (len(first.submits), len(second.submits)) == (1, 1)
        first.tell_cache(update_for(first, PROMPT, cleared=True))
        await until_true(lambda: num_known(gateway, first) == 6)
        await send(gateway, PROMPT)
        assert (len(first.submits), len(second.submits)) == (2, 1)
        # A new incarnation has not yet reported its cache.
        await first.restart()
        await until_true(lambda: num_known(gateway, first) is None)
        await first.until_known()
        await send(gateway, PROMPT)
        assert (len(first.submits), len(second.submits)) == (2, 2)
