"""Any mix of greedy, sampled, n, best_of and beam requests gives each request what it gets alone: also where requests
share prefixes, find them cached, and are preempted by both ways, over a pool of float32 and one of int8."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from quire.client import AsyncClient, BeamSearch, EarlyStopping, Generation, GenerationOptions
from tests.support.metrics import read_metric
from tests.support.ports import free_port
from tests.support.serving import serving

pytestmark = pytest.mark.extended

SHARED = "Once upon a time there was a little fox named Pip who lived in a wood with all of his friends. One day"
# What each prompt begins with: nothing in common, a little, or much that fills several blocks.
PROMPTS = ("A", "The river", SHARED, f"{SHARED} he", f"{SHARED} the sun was warm and", "The little dragon " * 12)
KINDS = (
    GenerationOptions(temperature=0.0),
    GenerationOptions(temperature=1.0),
    GenerationOptions(temperature=0.9, top_p=0.9, n=3),
    GenerationOptions(temperature=1.0, n=2, best_of=4),
    GenerationOptions(beam_search=BeamSearch(2), n=2),
    GenerationOptions(beam_search=BeamSearch(6, 0.6, EarlyStopping.TRUE), n=3),
    GenerationOptions(beam_search=BeamSearch(4, 1.5, EarlyStopping.NEVER), n=4),
    GenerationOptions(temperature=0.8, repetition_penalty=1.2, logprobs=2),
    GenerationOptions(temperature=1.0, frequency_penalty=0.5, presence_penalty=0.3, min_p=0.01, n=2),
    GenerationOptions(temperature=1.0, allowed_token_ids=range(50, 90), logit_bias={60: 3.0, 61: -100.0}),
    GenerationOptions(temperature=1.0, min_tokens=12, stop_token_ids=range(300, 428), bad_words=["the", "a"]),
)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    prompt: str
    options: GenerationOptions
    priority: int

    async def of(self, client: AsyncClient) -> Generation:
        return await client.generate(self.prompt, self.options, priority=self.priority)


def with_limits(kind: GenerationOptions, seed: int, rng: random.Random) -> GenerationOptions:
    """The same kind with a length and a seed of its own; some end with the model's eos, others do not."""
    values = {name: getattr(kind, name) for name in kind.__dataclass_fields__}
    own_seed = None if kind.beam_search else seed
    return GenerationOptions(
        **(values | {"seed": own_seed, "max_tokens": rng.randrange(15, 60), "ignore_eos": rng.random() < 0.5})
    )


def make_asks() -> list[Ask]:
    """Every kind after every prompt."""
    rng = random.Random(4)
    pairs = [(kind, prompt) for kind in KINDS for prompt in PROMPTS]
    return [
        Ask(prompt, with_limits(kind, seed, rng), rng.randrange(-3, 4)) for seed, (kind, prompt) in enumerate(pairs)
    ]


ASKS = make_asks()


def assert_same(got: Generation, expected: Generation, tolerance: float) -> None:
    assert len(got.sequences) == len(expected.sequences)
    for one, other in zip(got.sequences, expected.sequences, strict=True):
        assert (one.index, one.token_ids, one.text) == (other.index, other.token_ids, other.text)
        assert (one.finish_reason, one.stop_token_id) == (other.finish_reason, other.stop_token_id)
        assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=tolerance)
        chosen = [entry.chosen.logprob for entry in one.logprobs]
        assert chosen == pytest.approx([entry.chosen.logprob for entry in other.logprobs], abs=tolerance)


# The tenth draws its first token at 0.29444773; between two tokens of int8 lies 0.29445: the order of a sum decides.
FEW = [replace(ask, options=replace(ask.options, seed=1009)) if ask is ASKS[9] else ask for ask in ASKS[:48:3]]


@pytest.mark.parametrize(
    ("pool", "asks", "tolerance", "num_blocks", "least_cached"),
    # 60 blocks hold 960 tokens; all sequences come to about nine times as many. Of int8 the tokens alone are the same.
    [("auto", ASKS, 1e-4, 60, 6), ("int8", FEW, math.inf, 36, 0)],
    ids=["auto", "int8"],
)
async def test_all_at_once_give_what_each_gives_alone(
    pool: str, asks: Sequence[Ask], tolerance: float, num_blocks: int, least_cached: int
) -> None:
    flags: dict[str, Any] = {"dtype": "float32", "kv_cache_dtype": pool}
    async with serving(**flags) as served:
        alone = [await ask.of(served.client) for ask in asks]
    order = random.Random(1).sample(range(len(asks)), len(asks))
    port = free_port()
    flags |= {"num_gpu_blocks": num_blocks, "max_num_seqs": 64, "policy": "fair", "preemption_mode": "auto"}
    async with serving(**flags, scheduler_metrics_port=port) as served:
        preemptions = swap_outs = reported = num_cached = 0.0
        # Which way a preemption takes depends on the order in which they come, so ask until both were taken.
        while not 0 < swap_outs < preemptions:
            answers = await served.together(asks[index].of(served.client) for index in order)
            for index, answer in zip(order, answers, strict=True):
                assert_same(answer, alone[index], tolerance)
            preemptions = await read_metric(port, "quire_scheduler_preemptions_total")
            swap_outs = await read_metric(port, "quire_scheduler_swap_outs_total")
            reported += sum(answer.usage.preemptions for answer in answers)
            num_cached += sum(answer.usage.cached_tokens > 0 for answer in answers)
    assert reported == preemptions
    assert num_cached >= least_cached
