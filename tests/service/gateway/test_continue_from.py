"""Requests that continue from tokens that their caller has: nothing is lost, repeated or changed."""

import asyncio

import pytest

from quire.common.v1 import common_pb2
from quire.gateway.v1 import generation_pb2
from tests.support.fake_scheduler import scripted
from tests.support.gateway_process import collect, refusal_of, stream_request
from tests.support.rig import TOKENIZER

SPEECH = TOKENIZER.encode(" there was a little dog. 你好 😀 ends", add_special_tokens=False).ids
EOS = 2
ALL = len(SPEECH)


def held(*sequences, **fields):
    return [generation_pb2.HeldSequence(token_ids=token_ids, **fields) for token_ids in sequences]


def request_of(token_ids=None, *, max_tokens=ALL, stop=(), characters=None, **fields):
    request = stream_request(max_tokens=max_tokens, **fields)
    request.sampling.temperature = 0
    request.stopping.stop.extend(stop)
    if token_ids is not None:
        request.continue_from.extend(held(token_ids, num_characters=characters))
    return request


@pytest.mark.parametrize("stop", [(), ("dog. 你",), ("a little", "x")])
async def test_the_rest_follows_wherever_the_stream_was_cut(gateway, scheduler, stop):
    """Even between the bytes of a character, and in the middle of a possible stop string."""
    scheduler.rule = scripted([*SPEECH, EOS])
    whole = await collect(gateway.generation.GenerateStream(request_of(max_tokens=40, stop=stop)))
    pieces = {chunk.offset: chunk for chunk in whole.chunks}
    for cut in range(len(whole.token_ids) + 1):
        text = "".join(chunk.text for offset, chunk in pieces.items() if offset + len(chunk.token_ids) <= cut)
        if cut == len(whole.token_ids):
            text = whole.text
        request = request_of(whole.token_ids[:cut], max_tokens=40, stop=stop, characters=len(text))
        rest = [response async for response in gateway.generation.GenerateStream(request)]
        chunks = [response.chunk for response in rest if response.HasField("chunk")]
        assert text + "".join(chunk.text for chunk in chunks) == whole.text
        assert [token for chunk in chunks for token in chunk.token_ids] == whole.token_ids[cut:]
        lengths = [len(chunk.token_ids) for chunk in chunks]
        assert [chunk.offset for chunk in chunks] == [cut + sum(lengths[:place]) for place in range(len(chunks))]
        assert rest[-2].finished == whole.finished
        assert rest[-1].completed.usage.generated_tokens == len(whole.token_ids)
        assert rest[-1].completed.usage.prompt_tokens == whole.completed.usage.prompt_tokens


async def collect_rest(gateway, request):
    async with asyncio.timeout(30):
        return [response async for response in gateway.generation.GenerateStream(request)]


@pytest.mark.parametrize(
    ("token_ids", "fields", "reason"),
    [
        (SPEECH, {}, common_pb2.FINISH_REASON_LENGTH),
        ([*SPEECH[:4], EOS], {}, common_pb2.FINISH_REASON_STOP),
        (SPEECH[:4], {"stop": ("little",)}, common_pb2.FINISH_REASON_STOP),
    ],
)
async def test_a_sequence_that_its_tokens_end_is_over_at_once(gateway, scheduler, token_ids, fields, reason):
    *_, finished, completed = await collect_rest(gateway, request_of(token_ids, **fields))
    assert finished.finished.num_tokens == len(token_ids)
    assert finished.finished.finish_reason == reason
    assert completed.completed.usage.generated_tokens == len(token_ids)
    assert not scheduler.submits


async def test_log_probabilities_are_those_of_the_tokens_that_follow_and_their_sum_is_that_of_all(gateway, scheduler):
    scheduler.rule = scripted(SPEECH)
    request = request_of(max_tokens=9)
    request.output.logprobs = 1
    request.continue_from.extend(held(SPEECH[:5], cumulative_logprob=-7.0))
    *chunks, finished, _ = await collect_rest(gateway, request)
    positions = [position for response in chunks for position in response.chunk.logprobs]
    assert [position.chosen.token_id for position in positions] == SPEECH[5:9]
    assert finished.finished.cumulative_logprob == -9.0


async def test_log_probabilities_of_the_prompt_come_though_its_tokens_are_held(gateway, scheduler):
    """They come before the first token. The tokens are sampled again; their sum is not counted twice."""
    scheduler.rule = scripted(SPEECH)
    request = request_of(max_tokens=9)
    request.output.logprobs, request.output.prompt_logprobs = 1, 0
    request.continue_from.extend(held(SPEECH[:9], cumulative_logprob=-9.0))
    *chunks, finished, completed = await collect_rest(gateway, request)
    assert not any(response.chunk.token_ids or response.chunk.logprobs for response in chunks)
    assert finished.finished.cumulative_logprob == -9.0
    assert len(completed.completed.prompt_logprobs) == completed.completed.usage.prompt_tokens - 1
    assert not scheduler.submits[0].emitted


def changed(request, change):
    change(request)
    return request


@pytest.mark.parametrize(
    ("change", "field", "says"),
    [
        (lambda r: r.continue_from.extend(held([5])), "continue_from", "has 2 entries; the request has 1"),
        (lambda r: r.continue_from.extend(held(*[[5]] * 200)), "continue_from", "the max is 128"),
        (lambda r: setattr(r.sampling, "n", 2), "continue_from", "has 1 entries; the request has 2"),
        (lambda r: r.continue_from[0].token_ids.append(2080), "continue_from[0].token_ids[3]", "is 2080"),
        (lambda r: r.continue_from[0].token_ids.extend([5] * 9), "continue_from[0].token_ids", "max_tokens is 9"),
        (lambda r: r.continue_from[0].token_ids.extend([EOS, 5]), "continue_from[0].token_ids[3]", "ends a sequence"),
        (lambda r: r.stopping.stop.append("there"), "continue_from[0].token_ids", "by the stop string 'there'"),
        (lambda r: setattr(r.sampling, "temperature", 1), "sampling.seed", "is absent"),
        (lambda r: setattr(r.sampling, "best_of", 2), "continue_from", "selected at the end"),
        (lambda r: setattr(r.sampling.beam_search, "beam_width", 1), "continue_from", "selected at the end"),
        (
            lambda r: setattr(r.continue_from[0], "cumulative_logprob", float("nan")),
            "continue_from[0].cumulative_logprob",
            "finite",
        ),
    ],
)
async def test_what_cannot_be_of_the_request_is_refused_by_name(gateway, scheduler, change, field, says):
    request = changed(request_of(SPEECH[:3], max_tokens=9), change)
    await refusal_of(gateway.generation.GenerateStream(request), field, says)
    assert not scheduler.submits
