"""Abilities of the embedded model: it calls tools, reports what they returned, and answers in JSON."""

import json
from typing import Any

import pytest
from openai import AsyncOpenAI

MODEL = "quire-tiny"


def function(name: str, description: str, **properties: Any) -> Any:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TEXT, NUMBER = {"type": "string"}, {"type": "number"}
WEATHER = function("get_weather", "Get the current weather in a city.", city=TEXT)
TIMER = function("set_timer", "Set a timer.", minutes={"type": "integer"})
MULTIPLY = function("multiply", "Multiply two numbers.", a=NUMBER, b=NUMBER)


def user(text: str) -> Any:
    return {"role": "user", "content": text}


async def chat(client: AsyncOpenAI, *messages: Any, **fields: Any) -> Any:
    answer = await client.chat.completions.create(
        model=MODEL, messages=list(messages), temperature=0, max_tokens=200, **fields
    )
    return answer.choices[0]


@pytest.mark.parametrize(
    ("question", "name", "arguments"),
    [
        ("What is the weather in Paris?", "get_weather", {"city": "Paris"}),
        ("Set a timer for 12 minutes.", "set_timer", {"minutes": 12}),
        ("What is 314 times 27?", "multiply", {"a": 314, "b": 27}),
    ],
)
async def test_it_calls_the_right_tool_of_three(openai_client: AsyncOpenAI, question, name, arguments):
    choice = await chat(openai_client, user(question), tools=[WEATHER, TIMER, MULTIPLY])
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert (call.function.name, json.loads(call.function.arguments)) == (name, arguments)
