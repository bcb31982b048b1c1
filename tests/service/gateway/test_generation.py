"""Requests that succeed: text, tokens and messages in; chunks, text, usage out."""

import asyncio

import pytest
from tokenizers import Tokenizer

from quire.common.v1 import common_pb2
from quire.gateway.v1 import generation_pb2
from quire.model_source import resolve_model
from tests.support.fake_scheduler import counting_rule, scripted
from tests.support.gateway_process import collect, stream_request
from tests.support.parameters import row_sampling

TOKENIZER = Tokenizer.from_file(str(resolve_model(None) / "tokenizer.json"))
VOCABULARY = TOKENIZER.get_vocab()
EOS = VOCABULARY["</s>"]


def ids_of(text):
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def expected_ids(prompt, count):
    return [counting_rule(tuple(prompt), position) for position in range(count)]


async def test_stream_delivers_what_the_scheduler_generated(gateway):
    prompt = TOKENIZER.encode("hello there").ids
    stream = await collect(gateway.generation.GenerateStream(stream_request("hello there", max_tokens=20)))
    assert stream.token_ids == expected_ids(prompt, 20)
    assert stream.text == TOKENIZER.decode(stream.token_ids)
    assert stream.finished.finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert stream.completed.model == "quire-tiny"
    assert stream.completed.request_id
    assert stream.completed.usage == common_pb2.Usage(
        prompt_tokens=len(prompt), generated_tokens=20, queue_ms=1, prefill_ms=2, decode_ms=3
    )


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


async def test_eos_ends_the_sequence_and_is_not_text(gateway, scheduler):
    scheduler.rule = scripted([*ids_of("Fine."), EOS])
    stream = await collect(gateway.generation.GenerateStream(stream_request(max_tokens=50)))
    assert stream.text == "Fine."
    assert stream.token_ids[-1] == EOS
    assert stream.finished.finish_reason == common_pb2.FINISH_REASON_STOP
    assert stream.finished.stop_token_id == EOS


async def test_ignore_eos_goes_on(gateway, scheduler):
    scheduler.rule = scripted([*ids_of("Fine."), EOS])
    request = stream_request(max_tokens=12)
    request.stopping.ignore_eos = True
    stream = await collect(gateway.generation.GenerateStream(request))
    assert len(stream.token_ids) == 12
    assert list(scheduler.submits[0].eos_token_ids) == []
    assert stream.text.startswith("Fine.Fine.")


async def test_special_tokens_are_text_where_asked(gateway, scheduler):
    scheduler.rule = scripted([*ids_of("Fine."), VOCABULARY["<pad>"]])
    request = stream_request(max_tokens=len(ids_of("Fine.")) + 1)
    request.output.include_special_tokens = True
    assert (await collect(gateway.generation.GenerateStream(request))).text == "Fine.<pad>"


async def test_logprobs_come_one_a_token(gateway):
    request = stream_request(max_tokens=6)
    request.output.logprobs = 2
    stream = await collect(gateway.generation.GenerateStream(request))
    entries = [entry for chunk in stream.chunks for entry in chunk.logprobs]
    assert [entry.chosen.token_id for entry in entries] == stream.token_ids
    assert all([top.rank for top in entry.top] == [1, 2] for entry in entries)


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


async def test_no_cumulative_logprob_where_none_were_asked(gateway):
    stream = await collect(gateway.generation.GenerateStream(stream_request()))
    assert not stream.finished.HasField("cumulative_logprob")


async def test_defaults_are_resolved_before_the_scheduler_sees_them(gateway, scheduler):
    call = gateway.generation.GenerateStream(stream_request("hello", max_tokens=None))
    await scheduler.until(lambda: scheduler.submits)
    call.cancel()
    submit = scheduler.submits[0]
    prompt_length = len(submit.prompt_token_ids) // 4
    # generation_config.json of the embedded model says do_sample: false.
    drawn_by = row_sampling(submit).sampling
    assert (drawn_by.temperature, drawn_by.top_k, drawn_by.top_p, drawn_by.min_p) == (0, 0, 1, 0)
    assert submit.sampling.HasField("seed")
    assert submit.stopping.max_tokens == scheduler.max_model_len - prompt_length
    assert list(submit.eos_token_ids) == [2, 6]


async def test_given_parameters_reach_the_scheduler(gateway, scheduler):
    request = stream_request(max_tokens=3, priority=7)
    request.sampling.CopyFrom(
        common_pb2.SamplingParameters(temperature=0.5, top_k=9, top_p=0.25, min_p=0.125, seed=2**64 - 1)
    )
    request.stopping.stop_token_ids.extend([77, 78])
    await collect(gateway.generation.GenerateStream(request))
    submit = scheduler.submits[0]
    drawn_by = row_sampling(submit).sampling
    assert (drawn_by.temperature, drawn_by.top_k, drawn_by.top_p, drawn_by.min_p) == (0.5, 9, 0.25, 0.125)
    assert (submit.sampling.seed, submit.priority) == (2**64 - 1, 7)
    assert list(submit.stopping.stop_token_ids) == [77, 78]
    assert list(submit.stopping.stop) == []


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


async def test_long_text_is_tokenized_alike(gateway, scheduler):
    text = "word " * 900
    await collect(gateway.generation.GenerateStream(stream_request(text, max_tokens=1)))
    assert len(scheduler.submits[0].prompt_token_ids) // 4 == len(TOKENIZER.encode(text).ids)
