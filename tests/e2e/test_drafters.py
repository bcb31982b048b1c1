"""Drafts from answers of other requests come where they should, and change no text. Others: test_speculation.py."""

from dataclasses import replace

import numpy as np

from tests.e2e.test_speculation import FLAGS
from tests.support.whole_engine import WholeEngine, make_request
from worker_svc.sampling.drafters import SharedDrafter


def test_what_a_tenant_was_answered_is_guessed_for_this_tenant_only() -> None:
    off, on = WholeEngine(*FLAGS), WholeEngine(*FLAGS, "--speculate", "shared")
    on.use(SharedDrafter())
    prompt = np.random.default_rng(8).integers(20, 400, 20).tolist()
    requests = [
        replace(make_request(number, prompt, max_tokens=60, seed=6, sampling={"temperature": 0.8}), tenant=tenant)
        for number, tenant in enumerate(("anna", "ben", "anna"))
    ]
    # One request after the other.
    assert on.run(requests, max_num_seqs=1) == off.run(requests)
    assert [on.usages[number].accepted_draft_tokens for number in (0, 1)] == [0, 0]
    assert on.usages[2].accepted_draft_tokens >= 25
