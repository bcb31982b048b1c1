"""Requests that succeed: text, tokens and messages in; chunks, text, usage out."""

import asyncio

import pytest
from tokenizers import Tokenizer

from quire.common.v1 import common_pb2
from quire.gateway.v1 import generation_pb2
from quire.model_source import resolve_model
from tests.support.fake_scheduler import counting_rule
from tests.support.gateway_process import collect, stream_request

TOKENIZER = Tokenizer.from_file(str(resolve_model(None) / "tokenizer.json"))
VOCABULARY = TOKENIZER.get_vocab()
EOS = VOCABULARY["</s>"]


def ids_of(text):
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def expected_ids(prompt, count):
    return [counting_rule(tuple(prompt), position) for position in range(count)]


async def test_whole_answer_equals_the_stream(gateway):
    request = generation_pb2.GenerateRequest(text="hello there", request_id="mine")
    request.stopping.max_tokens = 20
    answer = await gateway.generation.Generate(request)
    stream = await collect(gateway.generation.GenerateStream(stream_request("hello there", max_tokens=20)))
    (sequence,) = answer.sequences
    assert (answer.request_id, answer.model) == ("mine", "quire-tiny")
    assert (sequence.index, sequence.text, list(sequence.token_ids)) == (0, stream.text, stream.token_ids)
    assert sequence.finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert answer.usage == stream.completed.usage


async def test_token_ids_are_taken_as_they_are(gateway, scheduler):
    request = stream_request(None, token_ids=common_pb2.TokenIds(ids=[9, 8, 7]))
    stream = await collect(gateway.generation.GenerateStream(request))
    assert next(iter(scheduler.submits)).prompt_token_ids == b"\x09\0\0\0\x08\0\0\0\x07\0\0\0"
    assert stream.token_ids == expected_ids([9, 8, 7], 8)


async def test_chat_uses_the_template_and_adds_no_special_tokens_of_its_own(gateway):
    messages = [generation_pb2.ChatMessage(role="user", content="What is 2 plus 3?")]
    prompt = TOKENIZER.encode("<s><|user|>What is 2 plus 3?<|end|><|assistant|>", add_special_tokens=False).ids
    request = generation_pb2.ChatRequest(messages=messages)
    request.stopping.max_tokens = 5
    answer = await gateway.generation.Chat(request)
    streamed = generation_pb2.ChatStreamRequest(messages=messages, stopping=request.stopping)
    stream = await collect(gateway.generation.ChatStream(streamed))
    assert list(answer.sequences[0].token_ids) == stream.token_ids == expected_ids(prompt, 5)
    assert answer.usage.prompt_tokens == len(prompt)


@pytest.mark.parametrize("best_of", [1, 3])
async def test_cumulative_logprob_is_the_sum_of_the_chosen_ones(gateway, best_of):
    asked = {
        "text": "hello",
        "sampling": common_pb2.SamplingParameters(best_of=best_of),
        "stopping": common_pb2.StoppingParameters(max_tokens=6),
        "output": common_pb2.OutputOptions(logprobs=0),
    }
    stream = await collect(gateway.generation.GenerateStream(generation_pb2.GenerateStreamRequest(**asked)))
    (sequence,) = (await gateway.generation.Generate(generation_pb2.GenerateRequest(**asked))).sequences
    of_stream = [entry.chosen.logprob for chunk in stream.chunks for entry in chunk.logprobs]
    for reported, chosen in (
        (stream.finished, of_stream),
        (sequence, [entry.chosen.logprob for entry in sequence.logprobs]),
    ):
        assert len(chosen) == 6
        assert reported.HasField("cumulative_logprob")
        assert reported.cumulative_logprob == sum(chosen)


async def test_many_streams_at_once(gateway):
    texts = [f"story number {number}" for number in range(128)]
    streams = await asyncio.gather(
        *(collect(gateway.generation.GenerateStream(stream_request(text, max_tokens=10))) for text in texts)
    )
    for text, stream in zip(texts, streams, strict=True):
        assert stream.token_ids == expected_ids(TOKENIZER.encode(text).ids, 10)


@pytest.mark.parametrize("text", ["nul \0 byte", "emoji 😀 and 你好", " leading and trailing "])
async def test_odd_text_is_fine(gateway, text):
    stream = await collect(gateway.generation.GenerateStream(stream_request(text)))
    assert stream.token_ids == expected_ids(TOKENIZER.encode(text).ids, 8)
