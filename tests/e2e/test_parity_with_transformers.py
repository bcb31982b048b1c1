"""Through all processes, concurrent requests get the same text as from transformers while blocks run out: a shape of
each family by one rank, some by several. tests/unit/worker_svc/models compares the logits of all families."""

import itertools
import json
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from quire.client import BeamSearch, GenerationOptions
from tests.support.models import VOCAB_SIZE, make_model
from tests.support.serving import Served, forked_programs, forked_worker, serving
from tests.support.tiers import parametrize_once


@torch.inference_mode()
def likeliest_after(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]
) -> list[list[int]]:
    """For each token of each output, the one that the model finds likeliest there. They are the outputs themselves if
    these are greedy, which takes one call of the model for all prompts of a length, and `generate` one for each token.
    """
    found: list[list[int]] = [[] for _ in prompts]
    for length, indices in _by_length(prompts).items():
        batch = torch.tensor([[*prompts[index], *outputs[index]] for index in indices])
        likeliest = model(batch).logits[:, length - 1 : -1].argmax(-1)
        for index, row in zip(indices, likeliest.tolist(), strict=True):
            found[index] = row
    return found


def _by_length(prompts: Sequence[Sequence[int]]) -> dict[int, list[int]]:
    indices: dict[int, list[int]] = defaultdict(list)
    for index, prompt in enumerate(prompts):
        indices[len(prompt)].append(index)
    return indices


LENGTHS = (1, 2, 7, 15, 16, 17, 40, 70, 99)
SEARCHED = "llama-gqa-untied-32"
"""Family for beam searches, which do not depend on the family, since the scheduler runs them."""
FAMILIES = (SEARCHED, "gpt2-tied-32", "opt-pre-norm-32", "gemma3-alternating", "gemma4-shared")
# Heads of key and value for each rank, one head of key and value for both, an odd number of inner features, fused
# query, key and value, projected embeddings; a vocabulary that two does not divide is tested with the layers.
FOR_TWO_RANKS = ("llama-gqa-explicit-128", *("gpt2-tied-32", "opt-post-norm-projected-64", "qwen3-alternating"))


def make_prompts(count: int, max_length: int = 99) -> list[list[int]]:
    """The second half begins like the first half, so that prefixes are hit."""
    rng, lengths = random.Random(count), [length for length in LENGTHS if length <= max_length]
    firsts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(lengths[i % len(lengths)])] for i in range(count // 2)]
    return firsts + [[*first, rng.randrange(3, VOCAB_SIZE)] for first in firsts]


async def ask(served: Served, prompts: list[list[int]], max_tokens: int, **options: Any) -> list[list[int]]:
    """The output of each prompt; all are sent at once."""
    fields: dict[str, Any] = {"max_tokens": max_tokens, "ignore_eos": True, **options}
    asked = GenerationOptions(**fields)
    generations = await served.together(served.client.generate(prompt, asked) for prompt in prompts)
    return [list(generation.sequences[0].token_ids) for generation in generations]


async def check_greedy(served: Served, model: PreTrainedModel, prompts: list[list[int]], max_tokens: int) -> None:
    outputs = await ask(served, prompts, max_tokens, temperature=0.0)
    assert {len(output) for output in outputs} == {max_tokens}
    assert outputs == likeliest_after(model, prompts, outputs)


# Enough stop tokens that some random texts of 24 tokens have one and some have none.
STOPS = range(5, VOCAB_SIZE, 32)
SEARCH = GenerationOptions(
    beam_search=BeamSearch(4, length_penalty=0.5), n=4, max_tokens=24, stop_token_ids=STOPS, ignore_eos=True
)


async def check_beams(served: Served, model: PreTrainedModel, prompts: Sequence[Sequence[int]]) -> None:
    """All hypotheses of each prompt, best first; all searches run at once."""
    answers = await served.together(served.client.generate(list(prompt), SEARCH) for prompt in prompts)
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            expected = model.generate(  # pyrefly: ignore
                torch.tensor([list(prompt)]),
                num_beams=4,
                num_return_sequences=4,
                do_sample=False,
                length_penalty=0.5,
                max_new_tokens=24,
                eos_token_id=list(STOPS),
                pad_token_id=0,
                return_dict_in_generate=True,
                output_scores=True,
            )
        outputs = [list(each.token_ids) for each in answer.sequences]
        # Tokens after a stop token are padding.
        rows = expected.sequences[:, len(prompt) :].tolist()
        assert outputs == [row[: len(output)] for row, output in zip(rows, outputs, strict=True)]
        assert all(len(output) == 24 or output[-1] in STOPS for output in outputs)
        scores = [each.cumulative_logprob / len(each.token_ids) ** 0.5 for each in answer.sequences]
        assert scores == pytest.approx(expected.sequences_scores.tolist(), abs=1e-4)


@parametrize_once("name", FAMILIES, second_tier=1)
async def test_requests_at_once_equal_transformers_while_blocks_run_out(name: str, tmp_path: Path) -> None:
    """Greedy requests, then beam searches of one family."""
    model = make_model(tmp_path, name)
    # 70 blocks hold 1,120 of the 4,400 tokens that all requests have together.
    settings: dict[str, Any] = {"num_threads": 2, "num_gpu_blocks": 70, "max_num_batched_tokens": 300}
    async with serving(model=str(tmp_path), dtype="float32", **settings) as served:
        await check_greedy(served, model, make_prompts(64), 40)
        preemptions = (await served.state()).preemptions
        assert preemptions > 0
        if name == SEARCHED:
            await check_beams(served, model, make_prompts(18))
            assert (await served.state()).preemptions > preemptions


MODEL_RULES: dict[str, Any] = {
    "suppress_tokens": [*range(3, VOCAB_SIZE, 7)],
    "begin_suppress_tokens": [*range(4, VOCAB_SIZE, 5)],
    # transformers removes the tokens that end a text.
    "bad_words_ids": [[token] for token in range(6, VOCAB_SIZE, 11) if token not in STOPS],
    "sequence_bias": [[[token], 0.25 * (token % 5)] for token in range(3, VOCAB_SIZE)],
    "no_repeat_ngram_size": 2,
    # Outputs that grow by two blocks: blocks run out, however the requests' arrivals and ends coincide.
    "min_new_tokens": 20,
    "repetition_penalty": 1.1,
}


@pytest.mark.extended
async def test_the_rules_of_generation_config_json_do_what_they_do_in_transformers(tmp_path: Path) -> None:
    """In greedy requests at once and in beam searches, while blocks run out."""
    model = make_model(tmp_path, SEARCHED)
    (tmp_path / "generation_config.json").write_text(json.dumps(MODEL_RULES))
    prompts = make_prompts(18)
    settings: dict[str, Any] = {"num_threads": 2, "num_gpu_blocks": 30, "max_num_batched_tokens": 300}
    plain = GenerationOptions(max_tokens=24, temperature=0.0, stop_token_ids=STOPS, ignore_eos=True)
    async with serving(model=str(tmp_path), dtype="float32", **settings) as served:
        found = await served.together(served.client.generate(prompt, plain) for prompt in prompts)
        assert (await served.state()).preemptions > 0
        model.generation_config = GenerationConfig(**MODEL_RULES)
        for prompt, answer in zip(prompts, found, strict=True):
            options: dict[str, Any] = {"do_sample": False, "eos_token_id": list(STOPS), "pad_token_id": 0}
            generate: Any = model.generate
            expected = generate(torch.tensor([prompt]), max_new_tokens=24, **options)
            output = list(answer.sequences[0].token_ids)
            assert output == expected[0, len(prompt) :].tolist()
            assert len(output) == len({*itertools.pairwise(output)}) + 1 > 20
        await check_beams(served, model, prompts)


TWO_RANKS: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "num_gpu_blocks": 16,
    "max_num_batched_tokens": 300,
    "preemption_mode": "swap",
}
CASES = [*((name, 1) for name in FOR_TWO_RANKS), ("llama-mqa-80", 2), ("lfm2", 1), ("qwen3.5", 1)]
# The state of a sequence takes 6 blocks.
BLOCKS = {"qwen3.5": 44}


@parametrize_once("name, num_threads", CASES, second_tier=1)
async def test_two_ranks_say_what_transformers_says_while_blocks_run_out(
    name: str, num_threads: int, tmp_path: Path
) -> None:
    model = make_model(tmp_path, name)
    settings: dict[str, Any] = {**TWO_RANKS, "num_gpu_blocks": BLOCKS.get(name, TWO_RANKS["num_gpu_blocks"])}
    async with serving(model=str(tmp_path), dtype="float32", num_threads=num_threads, **settings) as served:
        await check_greedy(served, model, make_prompts(24, max_length=70), 24)
        state = await served.state()
        assert state.preemptions > 0
        assert [worker.attached for worker in state.workers] == [True] * 2


@pytest.mark.extended
async def test_three_ranks_say_what_transformers_says_with_parts_that_differ_in_size(tmp_path: Path) -> None:
    model = make_model(tmp_path, "llama-gqa-untied-32", hidden_size=96, num_attention_heads=6, num_key_value_heads=3)
    async with serving(model=str(tmp_path), tensor_parallel_size=3, dtype="float32") as served:
        await check_greedy(served, model, make_prompts(24), 24)


@pytest.mark.extended
async def test_ranks_that_share_no_memory_say_what_transformers_says(tmp_path: Path) -> None:
    model = make_model(tmp_path, "llama-gqa-explicit-128")
    apart = replace(forked_programs(), worker=forked_worker("tests.support.apart_worker"))
    async with serving(programs=apart, model=str(tmp_path), tensor_parallel_size=2, dtype="float32") as served:
        await check_greedy(served, model, make_prompts(24), 24)
