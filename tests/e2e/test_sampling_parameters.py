"""What a request asks of the sampler, through all processes, while blocks run out and rows are computed again."""

import asyncio
import random
from dataclasses import replace

import pytest
import pytest_asyncio
import torch

from quire.client import GenerationOptions
from tests.support.greedy import generate_greedily
from tests.support.models import VOCAB_SIZE, make_shape
from tests.support.serving import Served, serving

pytestmark = pytest.mark.extended

GREEDY = GenerationOptions(temperature=0.0, max_tokens=48, ignore_eos=True)


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
