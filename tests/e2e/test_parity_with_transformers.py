"""Through all processes, greedy output equals what transformers generates, for a shape of each family. The other shapes
are in test_more_models.py, in one process."""

import random

import pytest

from quire.client import GenerationOptions
from tests.support.greedy import likeliest_after
from tests.support.models import VOCAB_SIZE, make_shape
from tests.support.serving import serving

NUM_PROMPTS, MAX_TOKENS = 64, 40
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
"""One of each family."""


@pytest.mark.parametrize("shape", SHOWN)
async def test_64_greedy_requests_at_once_equal_transformers_while_blocks_run_out(shape, tmp_path):
    model = make_shape(tmp_path, shape)
    prompts = make_prompts(seed=1)
    # 70 blocks hold 1,120 of the 4,100 tokens that all requests come to.
    async with serving(
        model=str(tmp_path), dtype="float32", num_threads=2, num_gpu_blocks=70, max_num_batched_tokens=300
    ) as served:
        generations = await served.together(served.client.generate(prompt, GREEDY) for prompt in prompts)
        outputs = [list(generation.sequences[0].token_ids) for generation in generations]
        assert {len(output) for output in outputs} == {MAX_TOKENS}
        assert outputs == likeliest_after(model, prompts, outputs)
        assert (await served.state()).preemptions > 0
