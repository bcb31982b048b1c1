"""Text and log probabilities have the same bits for any chunks of prompts and any recomputation: a prompt token is
always computed as one of several, an output token always as a decode."""

from typing import Any

import pytest

from scheduler_svc.core.config import PreemptionMode
from tests.e2e.test_speculation import FLAGS, POOLS, make_requests
from tests.support.tiers import parametrize_once
from tests.support.whole_engine import WholeEngine

# At most two or three requests find room at once, and blocks of others are evicted.
RECOMPUTE: dict[str, Any] = {"num_blocks": 44, "preemption_mode": PreemptionMode.RECOMPUTE}


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest) -> WholeEngine:
    return WholeEngine(*FLAGS, *POOLS[request.param])


@parametrize_once(
    "engine, max_num_batched_tokens",
    [("bfloat16", 24), ("bfloat16", 41), ("bfloat16", 2048), ("int8 pool", 40), ("int8 weights", 33), ("float32", 40)],
    second_tier=2,
    indirect=["engine"],
)
def test_text_is_that_of_an_undisturbed_run(engine: WholeEngine, max_num_batched_tokens: int) -> None:
    requests = make_requests(engine.worker.info.model.vocab_size)
    expected = engine.run(requests)
    assert engine.preemptions == 0
    assert engine.run(requests, **RECOMPUTE, max_num_batched_tokens=max_num_batched_tokens) == expected
    assert engine.preemptions >= 2
    assert engine.swap_outs == 0
