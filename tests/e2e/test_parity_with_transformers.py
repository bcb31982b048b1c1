"""Through all processes, greedy output equals what transformers generates, for every family and shape."""

import asyncio
import random

import pytest

from quire.client import GenerationOptions
from tests.support.greedy import generate_greedily
from tests.support.models import SHAPES, VOCAB_SIZE, make_shape
from tests.support.serving import serving

NUM_PROMPTS, MAX_TOKENS = 64, 64
LENGTHS = (1, 2, 7, 15, 16, 17, 40, 99)
GREEDY = GenerationOptions(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)


def make_prompts(seed: int) -> list[list[int]]:
    """Prompts of all lengths, in random order."""
    rng = random.Random(seed)
    prompts = [
        [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]
        for length in LENGTHS
        for _ in range(NUM_PROMPTS // len(LENGTHS))
    ]
    rng.shuffle(prompts)
    return prompts


SHOWN = ("gpt2-tied-32", "llama-gqa-untied-32", "opt-pre-norm-32")
"""One of each family; the others are extended tests."""


@pytest.mark.parametrize(
    "shape", [shape if shape in SHOWN else pytest.param(shape, marks=pytest.mark.extended) for shape in sorted(SHAPES)]
)
async def test_64_greedy_requests_at_once_equal_transformers_while_blocks_run_out(shape, tmp_path):
    model = make_shape(tmp_path, shape)
    prompts = make_prompts(seed=1)
    expected = generate_greedily(model, prompts, MAX_TOKENS)
    # 100 blocks hold 1,600 of the 6,000 tokens that all requests come to.
    async with serving(model=str(tmp_path), dtype="float32", num_gpu_blocks=100, max_num_batched_tokens=300) as served:
        generations = await asyncio.gather(*(served.client.generate(prompt, GREEDY) for prompt in prompts))
        assert [list(generation.sequences[0].token_ids) for generation in generations] == expected
        assert (await served.state()).preemptions > 0
