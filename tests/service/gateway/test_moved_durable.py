"""A durable request that has moved to another replica is read from that one alone, also when it moves back."""

import asyncio

from quire.gateway.v1 import generation_pb2
from quire.scheduler.v1 import scheduler_pb2
from tests.support.gateway_process import stream_request
from tests.support.processes import until_true
from tests.support.scheduler_process import until, wait_nothing_in_use
from tests.support.two_gateways import TwoGateways, two_gateways

NUM_TOKENS = 400


async def read(call, token_ids: list[int]) -> None:
    async for response in call:
        if response.WhichOneof("event") == "chunk":
            assert response.chunk.offset == len(token_ids)
            token_ids += response.chunk.token_ids


async def is_found_once(two: TwoGateways) -> bool:
    """Whether one replica alone knows the request."""
    asked = scheduler_pb2.FindDurableRequest(tenant="default", request_id="story")
    calls = (scheduler.FindDurable(asked) for scheduler in two.schedulers)
    answers = await asyncio.gather(*calls, return_exceptions=True)
    return sum(isinstance(answer, scheduler_pb2.FindDurableResponse) for answer in answers) == 1


def move(two: TwoGateways) -> tuple[str, str]:
    """Does what is done when a replica is not ready for too long; returns where the request was, and where it is."""
    replicas = two.first.gateway._generator.replicas
    (live,) = two.first.gateway._ledger
    assert live.replica is not None
    here = replicas.links[live.replica]
    here.is_ready = False
    replicas._leave_unready(live)
    here.is_ready = True
    assert live.replica is not None
    return here.address, live.replica


async def test_a_durable_request_that_moves_is_forgotten_where_it_was_and_may_move_back(tmp_path):
    request = stream_request(max_tokens=NUM_TOKENS, request_id="story", durable=True)
    request.stopping.ignore_eos = True
    token_ids: list[int] = []
    async with two_gateways(tmp_path, num_replicas=2, failover_delay=0.0) as two:
        reading = asyncio.create_task(read(two.first.generation.GenerateStream(request), token_ids))
        await until_true(lambda: len(token_ids) > 20)
        first, second = move(two)
        await until_true(lambda: len(token_ids) > 120)
        await until(lambda: is_found_once(two))
        assert move(two) == (second, first)
        await until(lambda: is_found_once(two))
        await asyncio.wait_for(reading, 30)
        assert len(token_ids) == NUM_TOKENS
        again: list[int] = []
        await read(two.second.generation.ResumeStream(generation_pb2.ResumeStreamRequest(request_id="story")), again)
        assert again == token_ids
        for scheduler in two.schedulers:
            await wait_nothing_in_use(scheduler)
