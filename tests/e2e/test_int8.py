"""Int8 weights and an int8 KV pool behind their flags: answers stay right, and requests do not change each other."""

import random
from dataclasses import replace
from typing import Any

import pytest

from quire.client import Generation, GenerationOptions
from tests.e2e.test_mixed_batch import ASKS
from tests.support.metrics import read_metric
from tests.support.ports import free_port
from tests.support.serving import Served, serving

pytestmark = pytest.mark.extended

# Held out of training; the embedded model answers them right in bfloat16 and float32.
QUESTIONS = {
    "Question: 82 + 48\nAnswer:": " 82 + 48 = 130.",
    "Question: Say backwards: ship, duck.\nAnswer:": " duck, ship.",
}
# The tenth draws its first token at 0.29444773, and between two tokens lies 0.29445: the order of a sum decides.
SMALL = [replace(ask, options=replace(ask.options, seed=1009)) if ask is ASKS[9] else ask for ask in ASKS[:48:3]]


@pytest.mark.parametrize(
    "flags",
    [
        {"quantization": "int8-weight-only"},
        {"quantization": "int8-dynamic"},
        {"kv_cache_dtype": "int8"},
        {"quantization": "int8-weight-only", "kv_cache_dtype": "int8", "dtype": "bfloat16"},
        {"quantization": "int8-dynamic", "kv_cache_dtype": "int8", "dtype": "bfloat16"},
    ],
    ids=lambda flags: "-".join(flags.values()),
)
async def test_held_out_questions_are_answered_right(flags: dict[str, Any]) -> None:
    async with serving(**flags) as served:
        for question, answer in QUESTIONS.items():
            got = await served.client.generate(question, GenerationOptions(temperature=0.0, max_tokens=30))
            assert got.sequences[0].text.strip() == answer.strip()


def ids_of(answer: Generation) -> list[tuple[int, ...]]:
    return [tuple(sequence.token_ids) for sequence in answer.sequences]


async def ask_all(served: Served, order: list[int]) -> dict[int, list[tuple[int, ...]]]:
    answers = await served.together(SMALL[index].of(served.client) for index in order)
    return {index: ids_of(answer) for index, answer in zip(order, answers, strict=True)}


async def test_requests_over_an_int8_pool_get_together_what_they_get_alone() -> None:
    """Greedy, drawn, several samples, beams; with shared prefixes, forks, swaps and recomputation."""
    flags: dict[str, Any] = {"dtype": "float32", "kv_cache_dtype": "int8"}
    async with serving(**flags) as served:
        alone = {index: ids_of(await ask.of(served.client)) for index, ask in enumerate(SMALL)}
    order = random.Random(1).sample(range(len(SMALL)), len(SMALL))
    port = free_port()
    async with serving(
        **flags, max_num_seqs=64, num_gpu_blocks=36, preemption_mode="auto", scheduler_metrics_port=port
    ) as served:
        # Which way a preemption takes depends on what runs at that moment, so ask until both were taken.
        preemptions = swap_outs = 0.0
        while not 0 < swap_outs < preemptions:
            assert await ask_all(served, order) == alone
            preemptions = await read_metric(port, "quire_scheduler_preemptions_total")
            swap_outs = await read_metric(port, "quire_scheduler_swap_outs_total")
