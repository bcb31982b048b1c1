"""Several samples of one prompt through all processes."""

import pytest
import pytest_asyncio

from quire.client import ChatMessage, FinishReason, GenerationOptions, SequenceFinished, TokenChunk
from quire.common.v1 import common_pb2
from quire.gateway.v1 import generation_pb2, generation_pb2_grpc
from quire.rpc.channel import open_channel
from tests.support.serving import Served, serving

pytestmark = pytest.mark.extended

PROMPT = "Once upon a time"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def served():
    # Few blocks, so that groups are preempted when they run together.
    async with serving(num_gpu_blocks=64, dtype="float32") as running:
        yield running


async def test_n_samples_come_with_their_index_and_the_first_is_what_n_1_gives(served: Served):
    options = GenerationOptions(temperature=1.0, seed=5, max_tokens=30)
    one = await served.client.generate(PROMPT, options)
    four = await served.client.generate(PROMPT, GenerationOptions(temperature=1.0, seed=5, max_tokens=30, n=4))
    assert [sequence.index for sequence in four.sequences] == [0, 1, 2, 3]
    assert four.sequences[0].text == one.text
    assert len({sequence.text for sequence in four.sequences}) == 4
    assert four.usage.prompt_tokens == one.usage.prompt_tokens


async def test_groups_get_together_what_each_gets_alone(served: Served):
    options = [
        GenerationOptions(temperature=float(i % 3 > 0), seed=i, max_tokens=60 + i, n=1 + i % 4, ignore_eos=True)
        for i in range(12)
    ]
    alone = [await served.client.generate(f"{PROMPT}, story {i % 5}", each) for i, each in enumerate(options)]
    before = (await served.state()).preemptions
    crowd = await served.together(
        served.client.generate(f"{PROMPT}, story {i % 5}", each) for i, each in enumerate(options)
    )
    assert (await served.state()).preemptions > before
    texts = [[sequence.text for sequence in generation.sequences] for generation in alone]
    assert [[sequence.text for sequence in generation.sequences] for generation in crowd] == texts


async def test_a_stream_has_one_end_for_each_sequence(served: Served):
    options = GenerationOptions(temperature=1.0, seed=3, max_tokens=20, n=3)
    whole = await served.client.generate(PROMPT, options)
    texts = {0: "", 1: "", 2: ""}
    ends = []
    async with served.client.generate_stream(PROMPT, options) as stream:
        async for event in stream:
            if isinstance(event, TokenChunk):
                texts[event.sequence_index] += event.text
            if isinstance(event, SequenceFinished):
                ends.append(event.sequence_index)
    assert [texts[index] for index in range(3)] == [sequence.text for sequence in whole.sequences]
    assert sorted(ends) == [0, 1, 2]


async def test_a_stop_string_ends_one_sequence_and_the_others_go_on(served: Served):
    options = GenerationOptions(temperature=1.0, seed=9, max_tokens=50, n=3, ignore_eos=True)
    whole = await served.client.generate(PROMPT, options)
    stop = whole.sequences[1].text[30:38]
    stopped = await served.client.generate(
        PROMPT, GenerationOptions(temperature=1.0, seed=9, max_tokens=50, n=3, ignore_eos=True, stop=[stop])
    )
    for before, after in zip(whole.sequences, stopped.sequences, strict=True):
        assert after.text == before.text.split(stop)[0]
    assert stopped.sequences[1].finish_reason == FinishReason.STOP


async def test_best_of_returns_the_likeliest_of_the_samples(served: Served):
    message = [ChatMessage("user", "Tell me a story about a fox named Pip.")]
    options = GenerationOptions(temperature=1.0, seed=2, max_tokens=24, n=6, logprobs=0, ignore_eos=True)
    samples = (await served.client.chat(message, options)).sequences
    mean = {
        sequence.text: sum(entry.chosen.logprob for entry in sequence.logprobs) / len(sequence.logprobs)
        for sequence in samples
    }
    best = sorted(mean, key=lambda text: -mean[text])[:2]
    options = GenerationOptions(temperature=1.0, seed=2, max_tokens=24, n=2, best_of=6, ignore_eos=True)
    picked = await served.client.chat(message, options)
    assert [sequence.text for sequence in picked.sequences] == best
    assert picked.usage.generated_tokens == 6 * 24


async def test_a_group_continues_where_some_of_its_sequences_have_output(served: Served):
    # An eighth of the pool: prompts that are not shared would not fit.
    request = generation_pb2.GenerateRequest(
        token_ids=common_pb2.TokenIds(ids=[40 + index % 50 for index in range(128)]),
        sampling=common_pb2.SamplingParameters(n=12, seed=5, temperature=1.0),
        stopping=common_pb2.StoppingParameters(max_tokens=20, ignore_eos=True),
        output=common_pb2.OutputOptions(prompt_logprobs=1),
    )
    async with open_channel(served.server.grpc_address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        whole = await stub.Generate(request, wait_for_ready=True, timeout=60)
        for counts in ([5, 0] * 6, [0] * 11 + [20]):
            again = generation_pb2.GenerateRequest()
            again.CopyFrom(request)
            for sequence, count in zip(whole.sequences, counts, strict=True):
                again.continue_from.add(token_ids=sequence.token_ids[:count])
            rest = await stub.Generate(again, timeout=60)
            for sequence, before, count in zip(rest.sequences, whole.sequences, counts, strict=True):
                assert list(sequence.token_ids) == list(before.token_ids[count:])
            assert [each.chosen.token_id for each in rest.prompt_logprobs] == request.token_ids.ids[1:]
