"""Requests that succeed, in what gRPC says of them beyond what all fronts say."""

import asyncio

import grpc
import pytest

from quire.common.v1 import common_pb2
from quire.gateway.v1 import generation_pb2, generation_pb2_grpc
from tests.support.fake_scheduler import counting_rule, scripted
from tests.support.gateway_process import collect, collected, stream_request
from tests.support.grpc_types import EOF
from tests.support.rig import TOKENIZER

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


async def test_token_ids_are_taken_as_they_are(gateway, scheduler):
    request = stream_request(None, token_ids=common_pb2.TokenIds(ids=[9, 8, 7]))
    stream = await collect(gateway.generation.GenerateStream(request))
    assert next(iter(scheduler.submits)).prompt_token_ids == b"\x09\0\0\0\x08\0\0\0\x07\0\0\0"
    assert stream.token_ids == expected_ids([9, 8, 7], 8)


async def test_chat_uses_the_template_and_adds_no_special_tokens_of_its_own(gateway):
    messages = [generation_pb2.ChatMessage(role="user", content="What is 2 plus 3?")]
    prompt = TOKENIZER.encode("<s><|user|>What is 2 plus 3?<|end|><|assistant|>", add_special_tokens=False).ids
    answer = await gateway.generation.Chat(generation_pb2.ChatRequest(messages=messages, stopping={"max_tokens": 5}))
    assert list(answer.sequences[0].token_ids) == expected_ids(prompt, 5)
    assert answer.usage.prompt_tokens == len(prompt)


@pytest.mark.parametrize("best_of", [1, 3])
async def test_cumulative_logprob_is_the_sum_of_the_chosen_ones(gateway, best_of):
    asked = {
        "text": "hello",
        "sampling": common_pb2.SamplingParameters(best_of=best_of),
        "stopping": common_pb2.StoppingParameters(max_tokens=6),
        "output": common_pb2.OutputOptions(logprobs=2),
    }
    stream = await collect(gateway.generation.GenerateStream(generation_pb2.GenerateStreamRequest(**asked)))
    (sequence,) = (await gateway.generation.Generate(generation_pb2.GenerateRequest(**asked))).sequences
    of_stream = [entry for chunk in stream.chunks for entry in chunk.logprobs]
    for reported, entries, token_ids in (
        (stream.finished, of_stream, stream.token_ids),
        (sequence, sequence.logprobs, sequence.token_ids),
    ):
        assert [entry.chosen.token_id for entry in entries] == token_ids
        assert all([top.rank for top in entry.top] == [1, 2] for entry in entries)
        assert reported.HasField("cumulative_logprob")
        assert reported.cumulative_logprob == sum(entry.chosen.logprob for entry in entries)
    bare = await collect(gateway.generation.GenerateStream(stream_request()))
    assert not bare.finished.HasField("cumulative_logprob")


async def test_prompt_logprobs_are_in_both_kinds_of_answer(gateway, scheduler):
    scheduler.repeats_events = True
    options = common_pb2.OutputOptions(prompt_logprobs=0)
    prompt = common_pb2.TokenIds(ids=[50, 60, 70])
    stream = await collect(gateway.generation.GenerateStream(stream_request(None, token_ids=prompt, output=options)))
    request = generation_pb2.GenerateRequest(token_ids=prompt, output=options, stopping={"max_tokens": 2})
    answer = await gateway.generation.Generate(request)
    for reported in (stream.completed.prompt_logprobs, answer.prompt_logprobs):
        assert [(entry.chosen.token_id, entry.chosen.logprob) for entry in reported] == [(60, -1.0), (70, -2.0)]


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


async def test_many_streams_at_once(gateway):
    texts = [
        "nul \0 byte",
        "emoji 😀 and 你好",
        " leading and trailing ",
        *(f"story {number}" for number in range(125)),
    ]
    streams = await asyncio.gather(
        *(collect(gateway.generation.GenerateStream(stream_request(text, max_tokens=10))) for text in texts)
    )
    for text, stream in zip(texts, streams, strict=True):
        assert stream.token_ids == expected_ids(TOKENIZER.encode(text).ids, 10)


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
