"""Open Responses, release 2026-04-24: its seven acceptance templates, and its schemas of responses, items and events.

The schemas are written from the specification's sources (openresponses/openresponses, schema/*.tsp at commits 1e33c10f,
3533b213 and 2976c6b4), the conversations after src/lib/compliance-tests.ts at commit 0cb939cc.
"""

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from websockets.asyncio.client import connect

from tests.support.rig import CALL, REASONED, TEXT, WEATHER_SCHEMA

Schema = dict[str, Any]
STRING, INTEGER, NUMBER, BOOLEAN, NULL = ({"type": name} for name in ("string", "integer", "number", "boolean", "null"))


def either(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def one_of(*names: str) -> Schema:
    return {"enum": list(names)}


def listed(schema: Schema) -> Schema:
    return {"type": "array", "items": schema}


def an_object(kind: str | None = None, /, **properties: Schema) -> Schema:
    """An object with these properties; the names of optional ones end with "_optional"."""
    if kind is not None:
        properties["type"] = {"const": kind}
    named = {name.removesuffix("_optional"): schema for name, schema in properties.items()}
    return {"type": "object", "properties": named, "required": [name for name in named if name in properties]}


STATUS = one_of("in_progress", "completed", "incomplete")
TOP = {"token": STRING, "logprob": NUMBER, "bytes": listed(INTEGER)}
LOGPROBS = listed(an_object(**TOP, top_logprobs=listed(an_object(**TOP))))
PART = either(
    an_object("output_text", text=STRING, annotations=listed({"type": "object"}), logprobs_optional=LOGPROBS),
    *(an_object(kind, text=STRING) for kind in ("input_text", "text", "summary_text", "reasoning_text")),
    an_object("refusal", refusal=STRING),
)
ROLE = one_of("user", "assistant", "system", "developer")
ITEM = either(
    an_object("message", id=STRING, status=STATUS, role=ROLE, content=listed(PART)),
    an_object("function_call", id=STRING, call_id=STRING, name=STRING, arguments=STRING, status=STATUS),
    an_object("reasoning", id=STRING, content_optional=listed(PART), summary=listed(PART)),
)
TOOL = an_object(
    "function",
    name=STRING,
    description=either(STRING, NULL),
    parameters=either({"type": "object"}, NULL),
    strict=either(BOOLEAN, NULL),
)
FUNCTION = an_object("function", name_optional=STRING)
CHOICE = one_of("none", "auto", "required")
USAGE = an_object(
    input_tokens=INTEGER,
    output_tokens=INTEGER,
    total_tokens=INTEGER,
    input_tokens_details=an_object(cached_tokens=INTEGER),
    output_tokens_details=an_object(reasoning_tokens=INTEGER),
)
RESPONSE = an_object(
    id=STRING,
    object={"const": "response"},
    created_at=INTEGER,
    completed_at=either(INTEGER, NULL),
    status=STRING,
    incomplete_details=either(an_object(reason=STRING), NULL),
    model=STRING,
    previous_response_id=either(STRING, NULL),
    instructions=either(STRING, NULL),
    output=listed(ITEM),
    error=either(an_object(code=STRING, message=STRING), NULL),
    tools=listed(TOOL),
    tool_choice=either(FUNCTION, CHOICE, an_object("allowed_tools", tools=listed(FUNCTION), mode=CHOICE)),
    truncation=one_of("auto", "disabled"),
    parallel_tool_calls=BOOLEAN,
    text=an_object(format=an_object(type=STRING)),
    top_p=NUMBER,
    presence_penalty=NUMBER,
    frequency_penalty=NUMBER,
    top_logprobs=INTEGER,
    temperature=NUMBER,
    reasoning=either(an_object(effort=either(STRING, NULL), summary=either(STRING, NULL)), NULL),
    usage=either(USAGE, NULL),
    max_output_tokens=either(INTEGER, NULL),
    max_tool_calls=either(INTEGER, NULL),
    store=BOOLEAN,
    background=BOOLEAN,
    service_tier=STRING,
    metadata={},
    safety_identifier=either(STRING, NULL),
    prompt_cache_key=either(STRING, NULL),
)
OF_ITEM = {"item_id": STRING, "output_index": INTEGER}
OF_PART = {**OF_ITEM, "content_index": INTEGER}
STATES = ("created", "queued", "in_progress", "completed", "failed", "incomplete")
FIELDS_OF_EVENTS: dict[str, dict[str, Schema]] = {
    **{f"response.{state}": {"response": RESPONSE} for state in STATES},
    **{f"response.output_item.{step}": {"output_index": INTEGER, "item": ITEM} for step in ("added", "done")},
    **{f"response.content_part.{step}": {**OF_PART, "part": PART} for step in ("added", "done")},
    "response.output_text.delta": {**OF_PART, "delta": STRING, "logprobs_optional": LOGPROBS},
    "response.output_text.done": {**OF_PART, "text": STRING, "logprobs_optional": LOGPROBS},
    "response.function_call_arguments.delta": {**OF_ITEM, "delta": STRING},
    "response.function_call_arguments.done": {**OF_ITEM, "arguments": STRING},
    "error": {"error": an_object(type=STRING, code=either(STRING, NULL), message=STRING, param=either(STRING, NULL))},
}
EVENTS = {name: an_object(name, sequence_number=INTEGER, **fields) for name, fields in FIELDS_OF_EVENTS.items()}
# jsonschema.validate would check the schema itself each time, which takes longer than all else of these tests.
OF_RESPONSES = Draft202012Validator(RESPONSE)
OF_EVENTS = {name: Draft202012Validator(schema) for name, schema in EVENTS.items()}
LOOK = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather at a place.",
    "parameters": WEATHER_SCHEMA,
}
PIXEL = "data:image/gif;base64,R0lGODlhAQABAAAAACwAAAAAAQABAAA="


def says(role: str, content: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": content}


ASKED: dict[str, dict[str, Any]] = {
    "basic-response": {"input": [says("user", "Greet me in three words.")]},
    "streaming-response": {"input": [says("user", "Name the first five numbers.")], "stream": True},
    "system-prompt": {"input": [says("system", "Speak like a pirate."), says("user", "Greet me.")]},
    "tool-calling": {"input": [says("user", "What is the weather in Rome?")], "tools": [LOOK]},
    "tool-calling-streaming": {
        "input": [says("user", "What is the weather in Rome?")],
        "tools": [LOOK],
        "stream": True,
    },
    "multi-turn": {
        "input": [says("user", "I am Alice."), says("assistant", "Hello Alice."), says("user", "Who am I?")]
    },
}


async def asked(rig, body: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The response to a body and, for a stream, its events; all match their schemas."""
    answer = await rig.http.post("/v1/responses", json={"model": "quire-tiny"} | body)
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        response, events = answer.json(), []
    else:
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
        events = [json.loads(line) for line in lines if line != "[DONE]"]
        for event in events:
            OF_EVENTS[event["type"]].validate(event)
        response = events[-1]["response"]
    OF_RESPONSES.validate(response)
    return response, events


async def asked_by_websocket(rig, body: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """As `asked`; every answer is a stream."""
    events: list[dict[str, Any]] = []
    async with connect(f"ws{rig.gateway.http_url.removeprefix('http')}/v1/responses") as socket:
        await socket.send(json.dumps({"type": "response.create", "model": "quire-tiny"} | body))
        while not events or "response" not in events[-1] or events[-1]["response"]["status"] == "in_progress":
            events.append(json.loads(await socket.recv()))
            assert "response" in events[0], events[0]
            OF_EVENTS[events[-1]["type"]].validate(events[-1])
    return events[-1]["response"], events


def test_the_schemas_are_schemas():
    for schema in EVENTS.values():
        Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize("ask", [asked, asked_by_websocket])
@pytest.mark.parametrize("template", ASKED)
async def test_six_of_the_seven_acceptance_templates_pass(rig, template, ask):
    calls_tool = template.startswith("tool-calling")
    rig.says(CALL if calls_tool else TEXT)
    response, events = await ask(rig, ASKED[template])
    assert response["status"] == "completed"
    assert [item["type"] for item in response["output"]] == ["function_call" if calls_tool else "message"]
    assert bool(events) == (ask is asked_by_websocket or bool(ASKED[template].get("stream")))
    OF_RESPONSES.validate(response)
    if events and calls_tool:
        kinds = [event["type"] for event in events]
        assert {"response.function_call_arguments.delta", "response.function_call_arguments.done"} <= {*kinds}
        items = [event["item"]["type"] for event in events if "output_item" in event["type"]]
        assert items == ["function_call", "function_call"]


async def test_the_seventh_template_sends_an_image_which_is_refused_by_its_place(rig):
    content = [{"type": "input_text", "text": "What is this?"}, {"type": "input_image", "image_url": PIXEL}]
    answer = await rig.http.post("/v1/responses", json={"model": "quire-tiny", "input": [says("user", content)]})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["param"] == "input[0].content[1].type"
    assert "input_image" in error["message"]


SET = {
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "max_tool_calls": 3,
    "service_tier": "flex",
    "safety_identifier": "who",
    "prompt_cache_key": "what",
    "user": "me",
}
DEFAULTS = dict.fromkeys(SET) | {"presence_penalty": 0, "frequency_penalty": 0, "service_tier": "default"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "shown"),
    [(SET, SET), ({}, DEFAULTS), (dict.fromkeys(SET), DEFAULTS), ({"service_tier": "auto"}, DEFAULTS)],
)
async def test_every_state_of_a_response_says_what_its_caller_set_or_the_default(rig, stream, fields, shown):
    response, events = await asked(rig, {"input": "hello", "stream": stream} | fields)
    states = [event["response"] for event in events if "response" in event] or [response]
    stored = (await rig.http.get(f"/v1/responses/{response['id']}")).json()
    for state in (*states, stored):
        assert {name: state[name] for name in SET} == shown
    assert stored == response


async def test_reasoning_is_an_item_of_the_specification_and_its_events_have_the_names_of_openai(rig):
    rig.says(REASONED)
    response, _ = await asked(rig, {"input": "hello", "tools": [LOOK]})
    assert response["output"][0]["type"] == "reasoning"
    answer = await rig.http.post("/v1/responses", json={"input": "hello", "tools": [LOOK], "stream": True})
    lines = [line.removeprefix("event: ") for line in answer.text.splitlines() if line.startswith("event: ")]
    assert {*lines} - EVENTS.keys() == {"response.reasoning_text.delta", "response.reasoning_text.done"}
