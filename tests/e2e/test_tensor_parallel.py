"""Ranks that share a model say what one says, and what transformers says, for every family of Quire's own."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from quire.client import GenerationOptions
from tests.support.greedy import likeliest_after
from tests.support.models import SHAPES, VOCAB_SIZE, make_model, make_shape
from tests.support.more_models import NATIVE, make_family
from tests.support.serving import Served, forked_programs, forked_worker, serving

NUM_PROMPTS, MAX_TOKENS = 24, 24
LENGTHS = (1, 7, 16, 17, 40, 70)
# Heads of key and value for each rank, one head of key and value for both, an odd number of inner features, fused
# query, key and value, projected embeddings; a vocabulary that two does not divide is tested with the layers.
FAMILIES = (
    "gpt2-tied-32",
    "opt-post-norm-projected-64",
    "llama-mqa-80",
    "mistral-sliding",
    "qwen2-tied",
    "qwen3-alternating",
)
WITH_THREADS = "llama-mqa-80"
"""Each of its ranks has two threads."""


def make(directory: Path, name: str) -> PreTrainedModel:
    return make_shape(directory, name) if name in SHAPES else make_family(directory, NATIVE[name])


def make_prompts(seed: int) -> list[list[int]]:
    """The second half begins as the first, so that prefixes are hit."""
    rng = random.Random(seed)
    half = NUM_PROMPTS // 2
    firsts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(LENGTHS[i % len(LENGTHS)])] for i in range(half)]
    return firsts + [[*first, rng.randrange(3, VOCAB_SIZE)] for first in firsts]


async def ask(served: Served, prompts: list[list[int]], **options: float) -> list[list[int]]:
    asked = GenerationOptions(**{"max_tokens": MAX_TOKENS, "ignore_eos": True, **options})
    generations = await served.together(served.client.generate(prompt, asked) for prompt in prompts)
    return [list(generation.sequences[0].token_ids) for generation in generations]


async def check_greedy(served: Served, model: PreTrainedModel, prompts: list[list[int]]) -> None:
    """The server says what transformers says."""
    outputs = await ask(served, prompts, temperature=0.0)
    assert {len(output) for output in outputs} == {MAX_TOKENS}
    assert outputs == likeliest_after(model, prompts, outputs)


@pytest.mark.parametrize(
    "name", ["llama-gqa-explicit-128", *(pytest.param(name, marks=pytest.mark.extended) for name in FAMILIES)]
)
async def test_two_ranks_say_what_transformers_says_while_blocks_run_out(name: str, tmp_path: Path) -> None:
    model = make(tmp_path, name)
    prompts = make_prompts(seed=3)
    settings = {"dtype": "float32", "num_gpu_blocks": 16, "max_num_batched_tokens": 256, "preemption_mode": "swap"}
    num_threads = 2 if name == WITH_THREADS else 1
    async with serving(model=str(tmp_path), tensor_parallel_size=2, num_threads=num_threads, **settings) as served:
        await check_greedy(served, model, prompts)
        state = await served.state()
        assert state.preemptions > 0
        assert [worker.attached for worker in state.workers] == [True, True]


@pytest.mark.extended
async def test_three_ranks_say_what_transformers_says_with_parts_that_differ_in_size(tmp_path: Path) -> None:
    model = make_model(tmp_path, "llama", hidden_size=96, num_attention_heads=6, num_key_value_heads=3)
    prompts = make_prompts(seed=5)
    async with serving(model=str(tmp_path), tensor_parallel_size=3, num_threads=1, dtype="float32") as served:
        await check_greedy(served, model, prompts)


@pytest.mark.extended
async def test_ranks_that_share_no_memory_say_what_transformers_says(tmp_path: Path) -> None:
    model = make(tmp_path, "llama-gqa-explicit-128")
    prompts = make_prompts(seed=6)
    apart = replace(forked_programs(), worker=forked_worker("tests.support.apart_worker"))
    settings = {"model": str(tmp_path), "tensor_parallel_size": 2, "num_threads": 1, "dtype": "float32"}
    async with serving(programs=apart, **settings) as served:
        await check_greedy(served, model, prompts)


@pytest.mark.extended
async def test_two_ranks_draw_what_one_draws(tmp_path: Path) -> None:
    make(tmp_path, "llama-gqa-untied-32")
    prompts = make_prompts(seed=4)
    drawn = []
    for size in (1, 2):
        async with serving(model=str(tmp_path), dtype="float32", tensor_parallel_size=size, num_threads=1) as served:
            drawn.append(await ask(served, prompts, temperature=0.9, seed=11, top_p=0.9, repetition_penalty=1.2))
    assert drawn[0] == drawn[1]
    assert len({tuple(tokens) for tokens in drawn[0]}) > NUM_PROMPTS // 2
