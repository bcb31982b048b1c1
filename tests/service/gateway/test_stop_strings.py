"""Stop strings end a request at the gateway, wherever the tokens cut them."""

import asyncio

import pytest
from tokenizers import Tokenizer

from quire.common.v1 import common_pb2
from quire.gateway.v1 import generation_pb2
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


@pytest.mark.parametrize("stop", ["fox. The", "ran", "O", "slept.Once"])
@pytest.mark.parametrize("tokens_per_step", [1, 7])
async def test_text_ends_before_the_stop_string(gateway, scheduler, stop, tokens_per_step):
    scheduler.tokens_per_step = tokens_per_step
    stream = await collect(gateway.generation.GenerateStream(request_with(stop)))
    assert stream.text == (STORY * 2).split(stop)[0]
    assert stream.finished.finish_reason == common_pb2.FINISH_REASON_STOP
    assert stream.finished.stop_string == stop
    decoded = TOKENIZER.decode(stream.token_ids)
    assert stop in decoded
    assert stop not in TOKENIZER.decode(stream.token_ids[:-1])
    assert stream.completed.usage.generated_tokens == len(stream.token_ids)
    assert stream.completed.usage.prompt_tokens > 0


async def test_the_request_is_aborted_at_the_scheduler(gateway, scheduler):
    request = request_with("fox. The")
    request.request_id = "stopped"
    await collect(gateway.generation.GenerateStream(request))
    await scheduler.until(lambda: scheduler.aborted)
    assert scheduler.aborted == ["stopped"]
    assert not scheduler.live


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


async def test_the_whole_answer_ends_alike(gateway):
    request = generation_pb2.GenerateRequest(text="hello")
    request.stopping.stop.extend(["never there", "ran"])
    answer = await gateway.generation.Generate(request)
    assert answer.sequences[0].text == STORY.split("ran")[0]
    assert answer.sequences[0].stop_string == "ran"


async def test_held_back_text_comes_where_nothing_matched(gateway):
    request = request_with("slept. The end")
    num_tokens = len(TOKENIZER.encode(STORY, add_special_tokens=False).ids)
    request.stopping.max_tokens = num_tokens
    stream = await collect(gateway.generation.GenerateStream(request))
    assert stream.text == STORY
    assert stream.finished.finish_reason == common_pb2.FINISH_REASON_LENGTH
