"""What a request asks of the sampler, through all processes, while blocks run out and rows are computed again."""

import asyncio
import random
from dataclasses import replace

import pytest
import pytest_asyncio
import torch

from quire.client import FinishReason, GenerationOptions
from tests.support.greedy import generate_greedily
from tests.support.models import VOCAB_SIZE, make_shape
from tests.support.serving import Served, serving

pytestmark = pytest.mark.extended

GREEDY = GenerationOptions(temperature=0.0, max_tokens=48, ignore_eos=True)
EOS_ID = 2


def make_prompts(count: int) -> list[list[int]]:
    rng = random.Random(4)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.choice((5, 17, 40)))] for _ in range(count)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model, and the folder that it is in."""
    folder = tmp_path_factory.mktemp("model")
    return make_shape(folder, "llama-gqa-untied-32"), folder


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def served(model):
    """24 blocks hold 384 tokens: a dozen requests at once preempt each other."""
    async with serving(model=str(model[1]), dtype="float32", num_gpu_blocks=24, max_num_batched_tokens=300) as running:
        yield running


async def outputs(served: Served, prompts, *options: GenerationOptions) -> list[tuple[int, ...]]:
    """What the requests give that run at once, the options taken in turn."""
    calls = (served.client.generate(prompt, options[i % len(options)]) for i, prompt in enumerate(prompts))
    return [each.sequences[0].token_ids for each in await served.together(calls)]


async def test_repetition_penalty_equals_transformers(served: Served, model):
    prompts = make_prompts(16)
    expected = generate_greedily(model[0], prompts, 48, repetition_penalty=1.3)
    before = (await served.state()).preemptions
    got = await outputs(served, prompts, replace(GREEDY, repetition_penalty=1.3))
    assert [list(each) for each in got] == expected
    assert (await served.state()).preemptions > before
    assert expected != generate_greedily(model[0], prompts, 48)


@pytest.mark.parametrize("count", [0, 3])
async def test_prompt_logprobs_equal_transformers(served: Served, model, count):
    prompts = make_prompts(12)
    # The second time the same prompts could come from the prefix cache.
    await outputs(served, prompts, GREEDY)
    options = replace(GREEDY, prompt_logprobs=count, presence_penalty=1.0, temperature=0.4, seed=2)
    answers = await asyncio.gather(*(served.client.generate(prompt, options) for prompt in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            logprobs = model[0](torch.tensor([prompt])).logits[0].log_softmax(dim=1)
        assert len(answer.prompt_logprobs) == len(prompt) - 1
        for position, entry in enumerate(answer.prompt_logprobs, start=1):
            line = logprobs[position - 1]
            assert entry.chosen.token_id == prompt[position]
            assert entry.chosen.logprob == pytest.approx(float(line[prompt[position]]), abs=1e-4)
            assert [each.logprob for each in entry.top] == pytest.approx(line.topk(count).values.tolist(), abs=1e-4)


async def test_min_tokens_keeps_eos_and_stop_tokens_away_for_so_long(served: Served):
    for stop in ({EOS_ID: ()}, {7: (7,)}):
        ((token_id, stop_token_ids),) = stop.items()
        eager = GenerationOptions(
            temperature=0.0, max_tokens=40, logit_bias={token_id: 100.0}, stop_token_ids=stop_token_ids
        )
        for min_tokens in (0, 1, 12):
            (sequence,) = (await served.client.generate([5, 6], replace(eager, min_tokens=min_tokens))).sequences
            assert sequence.finish_reason == FinishReason.STOP
            assert sequence.stop_token_id == token_id
            assert len(sequence.token_ids) == min_tokens + 1
            assert token_id not in sequence.token_ids[:-1]


async def test_bad_words_are_not_generated(served: Served):
    options = replace(GREEDY, temperature=1.0, seed=1)
    for prompt in make_prompts(3):
        plain = (await served.client.generate(prompt, options)).sequences[0]
        texts = [await served.client.detokenize([token_id]) for token_id in plain.token_ids]
        word = next(text.strip() for text in texts if text.isascii() and text.strip().isalpha())
        spellings = [
            (await served.client.tokenize(text, add_special_tokens=False)).token_ids for text in (word, f" {word}")
        ]
        assert occurs(spellings, plain.token_ids)
        banned = (await served.client.generate(prompt, replace(options, bad_words=[word]))).sequences[0]
        assert not occurs(spellings, banned.token_ids)


def occurs(sequences, token_ids) -> bool:
    return any(
        token_ids[start : start + len(sequence)] == tuple(sequence)
        for sequence in sequences
        for start in range(len(token_ids))
    )


async def test_only_allowed_tokens_are_drawn(served: Served):
    options = GenerationOptions(temperature=1.0, seed=3, max_tokens=60, allowed_token_ids=[10, 20, 30])
    assert set((await outputs(served, [[5, 6]], options))[0]) == {10, 20, 30}


async def test_requests_of_all_kinds_at_once_get_what_each_gets_alone(served: Served):
    kinds = [
        GREEDY,
        replace(GREEDY, frequency_penalty=1.0, presence_penalty=0.5),
        replace(GREEDY, temperature=1.0, seed=5, repetition_penalty=1.2, top_k=20),
        replace(GREEDY, temperature=0.8, seed=6, logit_bias={9: 5.0, 11: -100.0}, min_p=0.01),
        replace(GREEDY, temperature=1.0, seed=7, allowed_token_ids=list(range(50, 90)), frequency_penalty=0.3),
        replace(GREEDY, temperature=1.0, seed=8, min_tokens=40, stop_token_ids=list(range(3, 131)), ignore_eos=False),
        replace(GREEDY, temperature=1.0, seed=9, bad_words=["a", "the", "e"], logprobs=2),
    ]
    prompts = make_prompts(14)
    alone = [(await outputs(served, [prompt], kinds[i % len(kinds)]))[0] for i, prompt in enumerate(prompts)]
    before = (await served.state()).preemptions
    assert await outputs(served, prompts, *kinds) == alone
    assert (await served.state()).preemptions > before
