"""Rows with constraints that are preempted: matchers are made anew of the tokens, and the texts are the same."""

import json

import jsonschema
import pytest

from quire.client import BeamSearch, Constraint, GenerationOptions
from tests.chaos.test_kill import CONSTRAINTS, PEOPLE
from tests.support.serving import serving

pytestmark = pytest.mark.extended


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
async def test_preempted_rows_with_constraints_give_what_they_give_undisturbed(preemption) -> None:
    schema = {**PEOPLE, "minItems": 1, "maxItems": 4}
    options = [
        GenerationOptions(temperature=1.0, seed=seed, max_tokens=120, constraint=Constraint(json_schema=schema))
        for seed in range(6)
    ]
    options += [
        GenerationOptions(temperature=1.0, seed=9, n=3, best_of=4, max_tokens=80, constraint=CONSTRAINTS[1]),
        GenerationOptions(beam_search=BeamSearch(3), n=2, max_tokens=80, constraint=CONSTRAINTS[0]),
    ]

    async def texts(served, *, at_once: bool) -> list[list[str]]:
        calls = [served.client.generate("Once upon a time", each) for each in options]
        answers = await served.together(calls) if at_once else [await call for call in calls]
        return [[each.text for each in answer.sequences] for answer in answers]

    async with serving(
        num_gpu_blocks=40, dtype="float32", preemption_mode=preemption, swap_space=64 << 20, max_model_len=512
    ) as served:
        expected = await texts(served, at_once=False)
        before = (await served.state()).preemptions
        assert await texts(served, at_once=True) == expected
        assert (await served.state()).preemptions > before
    for answer in expected[:6]:
        try:
            jsonschema.validate(json.loads(answer[0]), schema)
        except json.JSONDecodeError:
            assert len(answer[0]) > 30, "ended by its length"
