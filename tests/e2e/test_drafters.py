"""The drafters of a worker: what they guess comes true where it should, and no text changes."""

from dataclasses import replace

import numpy as np
import pytest

from quire.common.v1.common_pb2 import Constraint
from scheduler_svc.core.request import Request
from tests.support.whole_engine import Text, WholeEngine, make_request
from worker_svc.sampling.drafters import SharedDrafter

FLAGS = ["--max-num-seqs", "16", "--num-gpu-blocks", "400", "--max-model-len", "512", "--num-threads", "1"]
SCHEMA = (
    '{"type": "object", "properties": {"first_name": {"type": "string", "maxLength": 5}, "favourite_colour": '
    '{"enum": ["red", "blue"]}}, "required": ["first_name", "favourite_colour"], "additionalProperties": false}'
)


@pytest.fixture(scope="module")
def engines() -> tuple[WholeEngine, WholeEngine]:
    return WholeEngine(*FLAGS), WholeEngine(*FLAGS, "--speculate", "prediction,grammar,shared,ngram")


def run(engine: WholeEngine, *requests: Request) -> dict[tuple[int, int], Text]:
    return engine.run(requests)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_prediction_with_edits_gives_several_tokens_a_step_and_the_same_text(engines, temperature: float) -> None:
    off, on = engines
    sampling = {"temperature": temperature}
    prompt = np.random.default_rng(3).integers(20, 400, 9).tolist()
    plain = make_request(1, prompt, max_tokens=60, seed=4, sampling=sampling)
    expected = run(off, plain)
    said = expected[1, 0].token_ids
    # One token is another one, two are left out, and three are added.
    predicted = [*said[:15], 3, *said[16:30], *said[32:45], 4, 5, 6, *said[45:]]
    with_prediction = make_request(1, prompt, max_tokens=60, seed=4, sampling=sampling, predicted=predicted)
    assert run(on, with_prediction) == expected
    assert on.num_accepted >= 25
    assert on.num_steps <= 26
    usage = on.usages[1]
    assert (usage.drafted_tokens, usage.accepted_draft_tokens) == (on.num_drafts, on.num_accepted)


def test_each_of_several_sequences_follows_the_prediction_and_a_search_ignores_it(engines) -> None:
    off, on = engines
    fields = {"max_tokens": 30, "seed": 2, "sampling": {"temperature": 0.3}, "num_sequences": 3}
    prompt = list(range(40, 52))
    expected = run(off, make_request(1, prompt, **fields))
    predicted = expected[1, 1].token_ids
    assert run(on, make_request(1, prompt, **fields, predicted=predicted)) == expected
    assert on.num_accepted >= 15  # half of the sequence that follows it


def test_a_schema_gives_several_tokens_a_step_and_the_same_text(engines) -> None:
    off, on = engines
    constraint = Constraint(json_schema=SCHEMA, no_white_space=True)
    request = make_request(
        1, range(50, 60), max_tokens=60, stop_token_ids=[1], sampling={"temperature": 0.8, "constraint": constraint}
    )
    expected = run(off, request)
    assert run(on, request) == expected
    assert on.num_accepted >= 8
    usage = on.usages[1]
    assert usage.accepted_draft_tokens >= 8


def test_what_a_tenant_was_answered_is_guessed_for_this_tenant_only(engines) -> None:
    off, on = engines[0], WholeEngine(*FLAGS, "--speculate", "shared")
    on.use(SharedDrafter())
    prompt = np.random.default_rng(8).integers(20, 400, 20).tolist()
    requests = [
        replace(make_request(number, prompt, max_tokens=60, seed=6, sampling={"temperature": 0.8}), tenant=tenant)
        for number, tenant in enumerate(("anna", "ben", "anna"))
    ]
    # One after the other.
    assert on.run(requests, max_num_seqs=1) == off.run(requests)
    assert [on.usages[number].accepted_draft_tokens for number in (0, 1)] == [0, 0]
    assert on.usages[2].accepted_draft_tokens >= 25
