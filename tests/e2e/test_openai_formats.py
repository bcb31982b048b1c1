"""Answers in a format against all processes, by OpenAI's own client: what is asked for is what comes."""

import json
import re
from typing import Annotated, Any

import jsonschema
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from pydantic import BaseModel, ConfigDict, Field

from tests.support.serving import Served

MODEL = "quire-tiny"
STORY = "Once upon a time"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["kind", "brave"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest_asyncio.fixture(loop_scope="session")
async def client(served: Served):
    url = f"http://{served.server.http_address}/v1"
    async with AsyncOpenAI(base_url=url, api_key="unused", max_retries=0, timeout=60) as running:
        yield running


def is_person(text: str) -> bool:
    jsonschema.validate(json.loads(text), PERSON)
    return True


def is_object(text: str) -> bool:
    return isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    ("fields", "fits"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}}, is_person),
        ({"response_format": {"type": "json_object"}}, is_object),
        ({"guided_json": PERSON}, is_person),
        ({"structured_outputs": {"regex": "[a-c]{3}-[0-9]{1,4}"}}, re.compile(r"[a-c]{3}-[0-9]{1,4}").fullmatch),
        ({"guided_choice": ["red", "blue"]}, {"red", "blue"}.__contains__),
        ({"structured_outputs": {"grammar": 'start: "a" ("b" | "c"){1,9} "d"'}}, re.compile("a[bc]{1,9}d").fullmatch),
    ],
)
async def test_a_completion_has_the_format_that_it_should(client: AsyncOpenAI, fields, fits):
    # At random, so that the format is not what the model would write anyway; with seeds of which any object comes to
    # an end.
    for seed in (1, 3):
        answer = await client.completions.create(
            model=MODEL, prompt=STORY, max_tokens=400, temperature=0.8, seed=seed, extra_body=fields
        )
        (choice,) = answer.choices
        assert choice.finish_reason == "stop", choice.text
        assert fits(choice.text)


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(max_length=12)]
    age: Annotated[int, Field(ge=0, le=120)]


PARAMETERS = Person.model_json_schema()
TOOLS: Any = [
    {"type": "function", "function": {"name": "remember", "description": "d", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "forget"}},
]
ASKED: Any = [{"role": "user", "content": "Who is Tom?"}]
CHAT: Any = {"model": MODEL, "messages": ASKED, "max_tokens": 400, "temperature": 0.8}


async def test_a_chat_is_parsed_into_a_model_of_pydantic(client: AsyncOpenAI):
    answer = await client.chat.completions.parse(**CHAT, seed=1, response_format=Person)
    (choice,) = answer.choices
    assert isinstance(choice.message.parsed, Person)
    async with client.chat.completions.stream(**CHAT, seed=1, response_format=Person) as stream:
        streamed = await stream.get_final_completion()
    assert streamed.choices[0].message.parsed == choice.message.parsed


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "remember"}}], ids=["required", "named"]
)
@pytest.mark.parametrize("parallel", [True, False])
async def test_a_forced_call_has_arguments_that_fit(client: AsyncOpenAI, choice, parallel):
    fields = CHAT | {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": parallel}
    answer = await client.chat.completions.create(**fields, seed=2, n=2)
    for each in answer.choices:
        assert each.finish_reason == ("tool_calls" if choice == "required" else "stop"), each
        calls = each.message.tool_calls
        assert calls
        assert parallel or len(calls) == 1
        for call in calls:
            arguments = json.loads(call.function.arguments)
            if call.function.name == "remember":
                Person.model_validate(arguments)
            else:
                assert (choice, arguments) == ("required", {})
    async with client.chat.completions.stream(**fields, seed=2) as stream:
        streamed = await stream.get_final_completion()
    (first, _) = answer.choices
    (again,) = streamed.choices
    calls, calls_again = first.message.tool_calls, again.message.tool_calls
    assert [call.function.name for call in calls] == [call.function.name for call in calls_again]
    assert [call.function.arguments for call in calls] == [call.function.arguments for call in calls_again]
