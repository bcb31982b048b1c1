"""Guesses of one kind each come true where they should, and no text changes."""

import json
from dataclasses import replace

import numpy as np

from quire.common.v1.common_pb2 import Constraint
from tests.support.whole_engine import WholeEngine, make_request
from worker_svc.sampling.drafters import SharedDrafter

FLAGS = [
    "--max-num-seqs",
    "16",
    "--num-gpu-blocks",
    "400",
    "--max-model-len",
    "512",
    "--num-threads",
    "1",
    "--speculate=off",
]


def test_what_a_tenant_was_answered_is_guessed_for_this_tenant_only() -> None:
    off, on = WholeEngine(*FLAGS), WholeEngine(*FLAGS, "--speculate", "shared")
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


def test_a_schema_gives_several_tokens_a_step() -> None:
    off, on = WholeEngine(*FLAGS), WholeEngine(*FLAGS, "--speculate", "grammar")
    names = {"first_name": {"type": "string", "maxLength": 5}, "favourite_colour": {"enum": ["red", "blue"]}}
    schema = {"type": "object", "properties": names, "required": [*names], "additionalProperties": False}
    constraint = Constraint(json_schema=json.dumps(schema), no_white_space=True)
    sampling = {"temperature": 0.8, "constraint": constraint}
    request = make_request(1, range(50, 60), max_tokens=60, stop_token_ids=[1], sampling=sampling)
    assert on.run([request]) == off.run([request])
    assert on.usages[1].accepted_draft_tokens == on.num_accepted >= 8
