"""Texts that match a request's constraint, with all kinds of constraints and all ways of decoding."""

import json
import re
from dataclasses import replace

import jsonschema
import pytest

from quire.client import (
    AsyncClient,
    BeamSearch,
    Constraint,
    FinishReason,
    GenerationOptions,
    StructuralTag,
    StructuralTags,
)
from quire.rpc.errors import InvalidArgument
from tests.support.serving import Served

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
SAMPLED = GenerationOptions(temperature=1.0, seed=3, max_tokens=120)
PROMPT = "Write about a cat:"


@pytest.fixture
def client(served: Served) -> AsyncClient:
    return served.client


async def texts_of(client, constraint: Constraint, options: GenerationOptions = SAMPLED, **changes) -> list[str]:
    answer = await client.generate(PROMPT, replace(options, constraint=constraint, **changes))
    assert {each.finish_reason for each in answer.sequences} == {FinishReason.STOP}
    return [each.text for each in answer.sequences]


@pytest.mark.parametrize("decoding", [{}, {"temperature": 0.0}, {"n": 3}, {"beam_search": BeamSearch(3)}], ids=str)
async def test_answers_are_valid_under_the_json_schema(client, decoding) -> None:
    if "beam_search" in decoding:
        decoding = {"temperature": None, "n": 3} | decoding
    for text in await texts_of(client, Constraint(json_schema=PERSON), **decoding):
        jsonschema.validate(json.loads(text), PERSON)


async def test_each_kind_of_constraint_is_met(client) -> None:
    brief = {(await client.tokenize(text, add_special_tokens=False)).token_ids[0]: 9.0 for text in ('"', "}", ":")}
    assert isinstance(json.loads((await texts_of(client, Constraint(json_object=True), logit_bias=brief))[0]), dict)
    assert re.fullmatch("[0-9]{3}-[a-f]+x", (await texts_of(client, Constraint(regex="[0-9]{3}-[a-f]{1,9}x")))[0])
    assert (await texts_of(client, Constraint(choice=["red", "green", "grün"])))[0] in ("red", "green", "grün")
    assert set((await texts_of(client, Constraint(lark='start: "ab" rest\nrest: "c" | "d" "e"')))[0]) <= set("abcde")
    tags = StructuralTags([StructuralTag("<call>", "</call>", json_schema=PERSON)], required=True, no_free_text=True)
    (text,) = await texts_of(client, Constraint(structural_tags=replace(tags, single=True)))
    jsonschema.validate(json.loads(text.removeprefix("<call>").removesuffix("</call>")), PERSON)


async def test_a_request_whose_other_parameters_leave_no_token_fails_alone_and_by_name(client) -> None:
    only = (await client.tokenize("b", add_special_tokens=False)).token_ids
    with pytest.raises(InvalidArgument, match="no token may follow that allowed_token_ids and bad_words leave"):
        await texts_of(client, Constraint(regex="a+"), allowed_token_ids=only)
    assert await texts_of(client, Constraint(regex="abc")) == ["abc"]
