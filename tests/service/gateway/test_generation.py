"""Requests that succeed, in what gRPC says of them beyond what all fronts say."""

import asyncio

import grpc
import pytest

from quire.common.v1 import common_pb2
from quire.gateway.v1 import generation_pb2, generation_pb2_grpc
from tests.support.fake_scheduler import Hypothesis, counting_rule, scripted
from tests.support.gateway_process import collect, collected, stream_request
from tests.support.grpc_types import EOF
from tests.support.rig import EOS, TOKENIZER

STORY = TOKENIZER.encode("Once there was a fox. The fox ran.", add_special_tokens=False).ids


def expected_ids(prompt, count):
    return [counting_rule(tuple(prompt), position) for position in range(count)]


async def test_a_stream_and_a_whole_answer_say_what_the_scheduler_generated(gateway):
    prompt = TOKENIZER.encode("hello there").ids
    stream = await collect(gateway.generation.GenerateStream(stream_request("hello there", max_tokens=20)))
    assert stream.token_ids == expected_ids(prompt, 20)
    assert stream.text == TOKENIZER.decode(stream.token_ids)
    assert stream.completed.model == "quire-tiny"
    assert stream.completed.request_id
    assert stream.completed.usage == common_pb2.Usage(
        prompt_tokens=len(prompt), generated_tokens=20, queue_ms=1, prefill_ms=2, decode_ms=3
    )
    request = generation_pb2.GenerateRequest(text="hello there", request_id="mine", stopping={"max_tokens": 20})
    answer = await gateway.generation.Generate(request)
    (sequence,) = answer.sequences
    assert (answer.request_id, answer.model) == ("mine", "quire-tiny")
    assert (sequence.index, sequence.text, list(sequence.token_ids)) == (0, stream.text, stream.token_ids)
    assert sequence.finish_reason == stream.finished.finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert answer.usage == stream.completed.usage


@pytest.mark.parametrize("fault", [None, "silent", "lost"])
async def test_the_usage_of_what_a_stop_string_ended_is_the_schedulers_if_it_says_it(gateway, scheduler, fault):
    scheduler.rule = scripted(STORY)
    scheduler.answers_aborts = fault is None
    responses = []
    async with asyncio.timeout(30):
        request = stream_request(max_tokens=200, stopping={"stop": ["fox. The"]})
        async for response in gateway.generation.GenerateStream(request):
            responses.append(response)
            if response.WhichOneof("event") == "finished" and fault == "lost":
                scheduler.break_streams()
    usage = collected(responses).completed.usage
    if fault is None:
        assert (usage.queue_ms, usage.prefill_ms, usage.decode_ms) == (1, 2, 3)
    else:
        assert usage.queue_ms == 0
        assert usage.prefill_ms > 0
    assert len(scheduler.submits) == 1


async def test_slow_client_gets_everything_once_in_larger_chunks(gateway, scheduler):
    scheduler.step_delay_s = 0
    # Log probabilities fill the connection's window, which is kept small, so that the gateway's writes have to wait.
    slow_request = stream_request("slow", max_tokens=900, output={"logprobs": 20})
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_535)]
    async with grpc.aio.insecure_channel(gateway.gateway.grpc_address, options) as channel:
        slow = generation_pb2_grpc.GenerationServiceStub(channel).GenerateStream(slow_request)
        responses = [await slow.read()]
        await scheduler.until(lambda: not scheduler.live)
        other = await collect(gateway.generation.GenerateStream(stream_request("other", max_tokens=20)))
        assert len(other.token_ids) == 20
        while (response := await slow.read()) is not EOF:
            responses.append(response)
    stream = collected(responses)
    assert len(stream.token_ids) == 900
    assert sum(len(chunk.logprobs) for chunk in stream.chunks) == 900
    assert 10 < max(len(chunk.token_ids) for chunk in stream.chunks) <= 256
    assert not scheduler.aborted


async def test_hypotheses_of_a_beam_search_become_the_sequences_of_an_answer(gateway, scheduler):
    scheduler.emits.clear()
    texts = ["The fox ran home.", "The fox slept.", "A fox."]
    ids = [TOKENIZER.encode(text, add_special_tokens=False).ids for text in texts]
    token_ids = [ids[0], *([*each, EOS] for each in ids[1:])]
    request = generation_pb2.GenerateRequest(text="hello", output=common_pb2.OutputOptions(logprobs=0))
    request.sampling.n, request.sampling.beam_search.beam_width = 3, 4
    answering = asyncio.ensure_future(gateway.generation.Generate(request))
    await scheduler.until(lambda: scheduler.live)
    (handle,) = scheduler.live
    scheduler.deliver(
        handle,
        [
            Hypothesis(each, -1.5 * (number + 1), EOS if number else None, logprobs=[-0.5] * len(each))
            for number, each in enumerate(token_ids)
        ],
    )
    answer = await asyncio.wait_for(answering, 30)
    assert [sequence.index for sequence in answer.sequences] == [0, 1, 2]
    assert [sequence.text for sequence in answer.sequences] == texts
    assert [list(sequence.token_ids) for sequence in answer.sequences] == token_ids
    assert [sequence.cumulative_logprob for sequence in answer.sequences] == [-0.5 * len(each) for each in token_ids]
    assert [[each.chosen.logprob for each in sequence.logprobs] for sequence in answer.sequences] == [
        [-0.5] * len(each) for each in token_ids
    ]
    reasons = [sequence.finish_reason for sequence in answer.sequences]
    assert reasons == [common_pb2.FINISH_REASON_LENGTH, common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_STOP]
    assert [sequence.stop_token_id for sequence in answer.sequences[1:]] == [EOS, EOS]
    assert answer.usage.generated_tokens == sum(map(len, token_ids))
