"""Any mix of greedy, sampled, n, best_of and beam requests gives each request what it gets alone: also where requests
share prefixes, find them cached, and are preempted by both ways, under every policy."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import pytest_asyncio

from quire.client import AsyncClient, BeamSearch, EarlyStopping, Generation, GenerationOptions
from tests.support.metrics import read_metric
from tests.support.ports import free_port
from tests.support.serving import Served, serving

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


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def alone() -> list[Generation]:
    """What each request gets when no other runs and blocks abound."""
    async with serving(dtype="float32") as served:
        return [await ask.of(served.client) for ask in ASKS]


def assert_same(got: Generation, expected: Generation) -> None:
    assert len(got.sequences) == len(expected.sequences)
    for one, other in zip(got.sequences, expected.sequences, strict=True):
        assert (one.index, one.token_ids, one.text) == (other.index, other.token_ids, other.text)
        assert (one.finish_reason, one.stop_token_id) == (other.finish_reason, other.stop_token_id)
        assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-4)
        chosen = [entry.chosen.logprob for entry in one.logprobs]
        assert chosen == pytest.approx([entry.chosen.logprob for entry in other.logprobs], abs=1e-4)


async def ask_all(served: Served, order: Sequence[int]) -> dict[int, Generation]:
    """All requests at once, sent in this order."""
    answers = await served.together(ASKS[index].of(served.client) for index in order)
    return dict(zip(order, answers, strict=True))


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
async def test_all_at_once_give_what_each_gives_alone(policy: str, alone: list[Generation]) -> None:
    order = random.Random(policy).sample(range(len(ASKS)), len(ASKS))
    port = free_port()
    # 60 blocks hold 960 tokens; all sequences come to about nine times as many.
    settings = {"num_gpu_blocks": 60, "policy": policy, "preemption_mode": "auto", "scheduler_metrics_port": port}
    async with serving(dtype="float32", max_num_seqs=64, **settings) as served:
        preemptions = swap_outs = reported = num_cached = 0.0
        # Which way a preemption takes depends on the order in which they come, so ask until both were taken.
        while not 0 < swap_outs < preemptions:
            answers = await ask_all(served, order)
            for index in order:
                assert_same(answers[index], alone[index])
            preemptions = await read_metric(port, "quire_scheduler_preemptions_total")
            swap_outs = await read_metric(port, "quire_scheduler_swap_outs_total")
            reported += sum(answer.usage.preemptions for answer in answers.values())
            num_cached += sum(answer.usage.cached_tokens > 0 for answer in answers.values())
    assert reported == preemptions
    assert num_cached > 5
