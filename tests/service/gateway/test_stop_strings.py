"""Stop strings end a request at the gateway, wherever the tokens cut them."""

import asyncio

import pytest
from tokenizers import Tokenizer

from quire.model_source import resolve_model
from tests.support.fake_scheduler import scripted
from tests.support.gateway_process import collect, collected, stream_request

TOKENIZER = Tokenizer.from_file(str(resolve_model(None) / "tokenizer.json"))
STORY = "Once there was a fox. The fox ran. Then it slept."


@pytest.fixture(autouse=True)
def story(scheduler):
    scheduler.rule = scripted(TOKENIZER.encode(STORY, add_special_tokens=False).ids)


def request_with(*stop):
    request = stream_request(max_tokens=200)
    request.stopping.stop.extend(stop)
    return request


async def test_usage_is_what_the_scheduler_says(gateway, scheduler):
    usage = (await collect(gateway.generation.GenerateStream(request_with("fox. The")))).completed.usage
    assert (usage.queue_ms, usage.prefill_ms, usage.decode_ms) == (1, 2, 3)


@pytest.mark.parametrize("fault", ["silent", "lost"])
async def test_a_scheduler_that_does_not_say_the_usage_holds_nothing_up(gateway, scheduler, fault):
    scheduler.answers_aborts = False
    call = gateway.generation.GenerateStream(request_with("fox. The"))
    responses = []
    async with asyncio.timeout(30):
        async for response in call:
            responses.append(response)
            if response.WhichOneof("event") == "finished" and fault == "lost":
                scheduler.break_streams()
    usage = collected(responses).completed.usage
    assert usage.queue_ms == 0
    assert usage.prefill_ms > 0
    assert len(scheduler.submits) == 1
