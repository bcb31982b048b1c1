"""The embedded model through all processes: what a user sees."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from quire.client import ChatMessage, FinishReason, GenerationOptions, RequestCompleted, SequenceFinished, TokenChunk
from quire.rpc.errors import Cancelled, DeadlineExceeded, InvalidArgument
from tests.support.killing import TooLateError, until_hit
from tests.support.scheduler_process import wait_nothing_in_use
from tests.support.serving import Served, serving

SAMPLED = GenerationOptions(temperature=1.0, top_p=0.95, seed=11, max_tokens=40)
PROMPTS = ("Once upon a time", "Question: What is the capital of France?\nAnswer:", "A", "The little dragon " * 20)


async def test_the_embedded_model_answers_what_it_was_trained_on(served: Served):
    answer = await served.client.chat([ChatMessage("user", "What is the capital of France?")])
    assert "Paris" in answer.text
    assert answer.sequences[0].finish_reason == FinishReason.STOP


async def test_a_stream_is_chunks_then_one_finished_then_completed(served: Served):
    options = GenerationOptions(temperature=0.0, max_tokens=30)
    whole = await served.client.generate("Once upon a time", options)
    async with served.client.generate_stream("Once upon a time", options) as stream:
        events = [event async for event in stream]
    chunks = [event for event in events if isinstance(event, TokenChunk)]
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == whole.sequences[0].token_ids
    assert [type(event) for event in events[len(chunks) :]] == [SequenceFinished, RequestCompleted]
    assert stream.completed is not None
    assert stream.completed.usage.generated_tokens == 30


async def test_a_seed_gives_the_same_tokens_alone_and_in_a_crowd(served: Served):
    alone = [await served.client.generate(prompt, SAMPLED) for prompt in PROMPTS]
    crowd = await asyncio.gather(
        *(served.client.generate(prompt, SAMPLED) for prompt in PROMPTS),
        *(served.client.generate(f"{i} little stories", GenerationOptions(max_tokens=30)) for i in range(30)),
    )
    assert [each.text for each in crowd[: len(PROMPTS)]] == [each.text for each in alone]


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=[16, pytest.param(37, marks=pytest.mark.extended)])
async def chunked(request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    """Another server, which computes prompts in small chunks and has nothing in its cache."""
    async with serving(
        max_num_batched_tokens=request.param, max_num_seqs=16, num_gpu_blocks=256, dtype="float32"
    ) as running:
        yield running


async def test_the_size_of_prefill_chunks_changes_no_token(served: Served, chunked: Served):
    expected = [await served.client.generate(prompt, SAMPLED) for prompt in PROMPTS]
    got = await asyncio.gather(*(chunked.client.generate(prompt, SAMPLED) for prompt in PROMPTS))
    assert [each.sequences[0].token_ids for each in got] == [each.sequences[0].token_ids for each in expected]


async def test_different_seeds_differ_and_no_seed_is_drawn_anew(served: Served):
    options = GenerationOptions(temperature=1.0, max_tokens=30)
    texts = {(await served.client.generate("Once upon a time", options)).text for _ in range(4)}
    assert len(texts) == 4


async def test_logprobs_of_greedy_tokens_are_the_highest(served: Served):
    options = GenerationOptions(temperature=0.0, max_tokens=8, logprobs=3)
    (sequence,) = (await served.client.generate("Once upon a time", options)).sequences
    assert [entry.chosen.token_id for entry in sequence.logprobs] == list(sequence.token_ids)
    for entry in sequence.logprobs:
        assert entry.chosen.rank == 1
        assert entry.top[0].token_id == entry.chosen.token_id
        assert [top.logprob for top in entry.top] == sorted((top.logprob for top in entry.top), reverse=True)


async def test_a_stop_string_ends_the_text_before_it(served: Served):
    whole = await served.client.generate("Once upon a time", GenerationOptions(temperature=0.0, max_tokens=60))
    stop = whole.text[20:27]
    cut = await served.client.generate(
        "Once upon a time", GenerationOptions(temperature=0.0, max_tokens=60, stop=[stop])
    )
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.sequences[0].finish_reason == FinishReason.STOP
    assert cut.sequences[0].stop_string == stop


async def test_a_client_that_leaves_frees_its_blocks(served: Served):
    options = GenerationOptions(temperature=0.0, max_tokens=900, ignore_eos=True)

    async def leave() -> None:
        async with contextlib.AsyncExitStack() as stack:
            streams = [
                await stack.enter_async_context(served.client.generate_stream(f"Story {i}", options)) for i in range(8)
            ]
            for stream in streams:
                await anext(aiter(stream))
            async with served.aborting():
                if await served.num_live() < len(streams):
                    raise TooLateError
                assert (await served.state()).gpu_pool.used_blocks > 0
                for stream in streams:
                    await stream.close()

    await until_hit(leave)


async def test_a_passed_deadline_frees_blocks(served: Served):
    options = GenerationOptions(temperature=0.0, max_tokens=900, ignore_eos=True)
    async with served.aborting():
        with pytest.raises(DeadlineExceeded):
            await served.client.generate("Once upon a time", options, timeout_s=0.2)


async def test_cancel_by_id_ends_the_other_call(served: Served):
    options = GenerationOptions(temperature=0.0, max_tokens=900, ignore_eos=True)

    async with served.aborting():
        call = asyncio.create_task(served.client.generate("Once upon a time", options, request_id="to-be-cancelled"))
        await served.until_live(1)
        await served.client.cancel("to-be-cancelled")
        with pytest.raises(Cancelled):
            await call


async def test_bad_input_disturbs_no_other_stream(served: Served):
    options = GenerationOptions(temperature=0.0, max_tokens=120, ignore_eos=True)
    expected = await served.client.generate("Once upon a time", options)
    good = asyncio.create_task(served.client.generate("Once upon a time", options))
    bad = [
        served.client.generate([]),
        served.client.generate([10**6]),
        served.client.generate("x", GenerationOptions(temperature=float("nan"))),
        served.client.generate("x", GenerationOptions(top_p=0.0)),
        served.client.generate("x", GenerationOptions(max_tokens=10**6)),
        served.client.generate("word " * 5000),
    ]
    for outcome in await asyncio.gather(*bad, return_exceptions=True):
        assert isinstance(outcome, InvalidArgument)
        assert outcome.violations
    assert (await good).text == expected.text


async def test_tokenize_and_detokenize_are_inverse(served: Served):
    text = "Grüße, 你好, 🙂 and\ttabs"
    tokens = await served.client.tokenize(text, add_special_tokens=False)
    assert await served.client.detokenize(tokens.token_ids) == text


async def test_a_follow_up_turn_hits_the_cache_and_says_the_same_as_without(served: Served, chunked: Served):
    question = ChatMessage("user", "Tell me a story about a fox named Pip.")
    options = GenerationOptions(temperature=0.0)
    first = await served.client.chat([question], options)
    turn = [question, ChatMessage("assistant", first.text), ChatMessage("user", "What is 2 plus 3?")]
    follow_up = await served.client.chat(turn, options)
    history = first.usage.prompt_tokens + first.usage.generated_tokens
    assert follow_up.usage.cached_tokens >= history - 2 * 16
    without = await chunked.client.chat(turn, options)
    assert without.usage.cached_tokens == 0
    assert without.text == follow_up.text


async def test_at_64_streams_the_scheduler_waits_for_no_client(served: Served):
    options = GenerationOptions(temperature=0.0, max_tokens=60, ignore_eos=True)
    prompts = [f"Story number {i}." for i in range(32)]
    idle = [served.client.generate_stream(prompt, options) for prompt in prompts]
    firsts = [await anext(aiter(stream)) for stream in idle]
    # 32 clients read nothing from here on, 32 others come and are served; then all 64 requests are over.
    await asyncio.gather(*(served.client.generate(prompt, options) for prompt in prompts))
    await wait_nothing_in_use(served.scheduler)
    for stream, first in zip(idle, firsts, strict=True):
        chunks = [first, *[event async for event in stream if isinstance(event, TokenChunk)]]
        offset = 0
        for chunk in chunks:
            assert isinstance(chunk, TokenChunk)
            assert chunk.offset == offset
            offset += len(chunk.token_ids)
        assert offset == 60
