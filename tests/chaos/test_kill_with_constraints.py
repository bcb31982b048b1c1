"""kill -9 under load while texts are constrained: matchers are made anew of the tokens, and the texts are the same."""

import asyncio
import json

import jsonschema
import pytest
import pytest_asyncio

from quire.client import BeamSearch, Constraint, GenerationOptions, StructuralTag, StructuralTags
from quire.model_directory import ModelDirectory
from quire.model_source import resolve_model
from tests.support.killing import MAX_TOKENS, Streams, kill, until_hit
from tests.support.serving import Served, serving

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PEOPLE = {"type": "array", "items": PERSON, "minItems": 200}
CALLS = StructuralTags([StructuralTag("<call>", "</call>", json_schema=PERSON)], required=True, no_free_text=True)
# Longer than any test reads, where nothing ends them early.
CONSTRAINTS = (
    Constraint(json_schema=PEOPLE),
    Constraint(regex="([a-z]{3} [0-9]{2,4}, ){400}"),
    Constraint(json_schema=PEOPLE, begins_after=" "),
    Constraint(structural_tags=CALLS),
)
ENDLESS = dict.fromkeys(ModelDirectory.open(resolve_model(None)).eos_token_ids, -100.0)


def constrained(index: int) -> GenerationOptions:
    """Greedy and seeded sampling, each constraint, one row in five without any."""
    constraint = None if index % 5 == 4 else CONSTRAINTS[index % len(CONSTRAINTS)]
    return GenerationOptions(
        temperature=float(index % 2), seed=index, max_tokens=MAX_TOKENS, constraint=constraint, logit_bias=ENDLESS
    )


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def undisturbed(survivor: Served) -> list[tuple[list[int], str]]:
    """What the streams get where no process dies."""
    return await Streams(options_of=constrained).read(survivor.client)


@pytest.mark.parametrize(
    ("names", "durable"),
    [
        (["worker"], False),
        pytest.param(["scheduler"], False, marks=pytest.mark.extended),
        pytest.param(["gateway"], True, marks=pytest.mark.extended),
        pytest.param(["scheduler", "worker"], False, marks=pytest.mark.extended),
    ],
)
async def test_constrained_streams_survive_the_loss_of(
    names: list[str], durable: bool, served: Served, undisturbed: list[tuple[list[int], str]]
) -> None:
    async def disturbed() -> list[tuple[list[int], str]]:
        # A worker that was just started compiles them first: else streams without any may end before the others begin.
        await asyncio.gather(
            *(served.client.generate("", GenerationOptions(max_tokens=1, constraint=each)) for each in CONSTRAINTS)
        )
        streams = Streams(options_of=constrained, durable=durable)
        async with streams.reading(served) as reading:
            await streams.advance()
            await streams.kill(served, *names)
            return await reading

    assert await until_hit(disturbed) == undisturbed


@pytest.mark.extended
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


@pytest.mark.extended
async def test_a_worker_that_returns_compiles_constraints_anew(served: Served) -> None:
    options = GenerationOptions(temperature=1.0, seed=1, constraint=Constraint(json_schema=PERSON), max_tokens=120)
    first = await served.client.generate("Name:", options)
    await kill(served, "worker")
    assert (await served.client.generate("Name:", options)).text == first.text
