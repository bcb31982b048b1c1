"""/openapi.json says what the server does: routes, bodies, answers and events, which have no field that it does not
know. /tokenizer_info says what its tokenizer is."""

import asyncio
import json
import re
from typing import Any

import jsonschema
import pytest
import pytest_asyncio
from google.rpc import code_pb2

from gateway.api.openai.schemas import ChatBody
from gateway.api.openapi import OPEN_PATHS
from gateway.api.ui.access import is_below
from quire.model_files.model_source import resolve_model
from tests.support.fake_scheduler import counting_rule
from tests.support.rig import CALL, WEATHER, WEATHER_SCHEMA


@pytest.fixture
def client(rig):
    return rig.http


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def document(shared_rig):
    return (await shared_rig.http.get("/openapi.json")).json()


def operations_of(document):
    return [
        (path, method, operation)
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    ]


async def test_every_route_is_in_the_document(gateway, document):
    routes = gateway.gateway._http.config.app.routes
    # Paths below /ui are a page for people, which has no contract; / leads there.
    of_programs = [route for route in routes if route.path != "/" and not is_below(route.path)]
    served = {(route.path_format, method.lower()) for route in of_programs for method in route.methods - {"HEAD"}}
    assert {(path, method) for path, method, _ in operations_of(document)} == served
    assert ("/openapi.json", "get") in served


async def test_the_document_is_whole(document):
    assert document["openapi"] == "3.1.0"
    names = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert names == set(document["components"]["schemas"])
    ids = [operation["operationId"] for _, _, operation in operations_of(document)]
    assert len(set(ids)) == len(ids)
    for path, _, operation in operations_of(document):
        named = {parameter["name"] for parameter in operation.get("parameters", ())}
        assert named == set(re.findall(r"{(\w+)}", path))
        assert "200" in operation["responses"] or operation["summary"].startswith("Refused: ")
        assert operation["summary"]


async def test_the_page_has_every_path_and_every_field(client, document):
    response = await client.get("/docs")
    assert response.headers["content-type"].startswith("text/html")
    for path, method, _ in operations_of(document):
        assert f"<code>{method.upper()} {path}</code>" in response.text
    assert set(re.findall(r'href="#(\w+)"', response.text)) <= set(re.findall(r'id="(\w+)"', response.text))
    assert "<td><code>reasoning_effort</code></td><td>string or null</td>" in response.text


async def test_paths_that_ask_for_no_key_say_so(document):
    open_paths = {path for path, _, operation in operations_of(document) if operation.get("security") == []}
    assert open_paths == OPEN_PATHS


async def test_bodies_are_those_that_the_server_parses(document):
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    schema = document["components"]["schemas"][body["$ref"].rpartition("/")[2]]
    assert set(schema["properties"]) == set(ChatBody.model_fields)
    assert schema["required"] == ["messages"]


async def test_the_tokenizer_is_described_as_its_directory_has_it(client):
    directory = resolve_model(None)
    info = (await client.get("/tokenizer_info")).json()
    config = json.loads((directory / "tokenizer_config.json").read_text())
    assert info["eos_token"] == config["eos_token"]
    assert info["tokenizer_class"] == config["tokenizer_class"]
    assert "<|assistant|>" in info["chat_template"]


SAID = f"<think>Hm.</think>I look.\n{CALL}"
TOOL = {"type": "function", "function": WEATHER}
USER = [{"role": "user", "content": "hello"}]
TEXTS = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["hello"]}
LOGPROBS = {"name": "return_logprobs", "shape": [1], "datatype": "BOOL", "data": [True]}


@pytest.fixture(autouse=True)
def gateway(rig):
    rig.says(SAID)
    return rig.gateway


ANSWERS = [
    ("GET", "/health", None),
    ("GET", "/openapi.json", None),
    ("GET", "/tokenizer_info", None),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/quire-tiny", None),
    ("GET", "/v2", None),
    ("GET", "/v2/health/live", None),
    ("GET", "/v2/models/quire-tiny", None),
    ("GET", "/v2/models/quire-tiny/ready", None),
    ("GET", "/v2/models/quire-tiny/versions/1/ready", None),
    ("POST", "/v2/models/quire-tiny/infer", {"inputs": [TEXTS, LOGPROBS], "id": "a"}),
    ("POST", "/v2/models/quire-tiny/versions/1/infer", {"inputs": [TEXTS]}),
    ("POST", "/tokenize", {"prompt": "hello", "return_token_strs": True}),
    ("POST", "/tokenize", {"messages": USER}),
    ("POST", "/detokenize", {"tokens": [5, 6]}),
    ("POST", "/v1/completions", {"prompt": ["a", "b"], "logprobs": 2, "prompt_logprobs": 1}),
    ("POST", "/v1/completions", {"prompt": "a", "echo": True, "logprobs": 0, "max_tokens": 2}),
    ("POST", "/v1/completions", {"prompt": "a"}),
    ("POST", "/v1/chat/completions", {"messages": USER, "tools": [TOOL], "logprobs": True, "top_logprobs": 2}),
    ("POST", "/v1/chat/completions", {"messages": USER, "max_tokens": 2}),
    ("POST", "/v1/chat/completions", {"messages": USER, "stop": "look", "prompt_logprobs": 1}),
    ("POST", "/v1/responses/input_tokens", {"input": "hello"}),
    ("POST", "/v1/messages/count_tokens", {"model": "quire-tiny", "messages": USER}),
    ("POST", "/v1/messages", {"model": "quire-tiny", "messages": USER, "max_tokens": 2}),
    (
        "POST",
        "/v1/messages",
        {
            "messages": USER,
            "max_tokens": 200,
            "tools": [{"name": "get_weather", "input_schema": WEATHER_SCHEMA}],
            "model": "quire-tiny",
        },
    ),
]


def described(gateway, document, method, path):
    """The operation of a path in the document."""
    scope = {"type": "http", "method": method, "path": path, "root_path": "", "headers": []}
    routes = gateway.gateway._http.config.app.routes
    route = next(each for each in routes if each.matches(scope)[0].name == "FULL")
    return document["paths"][route.path_format][method.lower()]


def closed(schema: Any) -> Any:
    """A schema whose objects have no further fields than the ones that it names."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    parts = {name: closed(each) for name, each in schema.items()}
    return {"additionalProperties": False} | parts if isinstance(parts.get("properties"), dict) else parts


def check_shape(document, schema, value):
    """The value is valid under the schema, and has no field that the schema does not name."""
    whole = closed(schema | {"components": document["components"]})
    jsonschema.Draft202012Validator(whole).validate(value)


async def conforming(gateway, client, document, method, path, body=None):
    """An answer that is valid under the schema of its path."""
    answer = await client.request(method, path, json=body)
    assert answer.status_code == 200, answer.text
    operation = described(gateway, document, method, path)
    check_shape(document, operation["responses"]["200"]["content"]["application/json"]["schema"], answer.json())
    return answer.json()


def test_a_field_that_the_schema_does_not_name_is_found():
    schema = {"$ref": "#/components/schemas/A"}
    named = {"type": "object", "properties": {"a": {"type": "integer"}}}
    document = {"components": {"schemas": {"A": named}}}
    check_shape(document, schema, {"a": 1})
    with pytest.raises(jsonschema.ValidationError):
        check_shape(document, schema, {"a": 1, "b": 2})


@pytest.mark.parametrize(("method", "path", "body"), ANSWERS)
async def test_an_answer_has_the_shape_that_the_document_says(gateway, client, document, method, path, body):
    await conforming(gateway, client, document, method, path, body)


async def test_responses_have_theirs(gateway, client, document):
    tool = {"type": "function"} | WEATHER
    asked = {"input": "hello", "tools": [tool], "include": ["message.output_text.logprobs"], "top_logprobs": 1}
    first = await conforming(gateway, client, document, "POST", "/v1/responses", asked)
    assert {item["type"] for item in first["output"]} == {"reasoning", "message", "function_call"}
    (call,) = (item for item in first["output"] if item["type"] == "function_call")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "it"}
    more = {"input": [result], "previous_response_id": first["id"], "tools": [tool], "max_output_tokens": 3}
    second = await conforming(gateway, client, document, "POST", "/v1/responses", more)
    assert second["status"] == "incomplete"
    for method, end in (("GET", ""), ("GET", "/input_items"), ("POST", "/cancel"), ("DELETE", "")):
        await conforming(gateway, client, document, method, f"/v1/responses/{second['id']}{end}")


CHAT = {"messages": USER, "tools": [TOOL]}
USAGE = {"stream_options": {"include_usage": True}}
STREAMS = [
    ("/v1/completions", {"prompt": ["a", "b"], "logprobs": 2, "echo": True} | USAGE),
    ("/v1/completions", {"prompt": "a", "stop": "look"}),
    ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2} | USAGE),
    ("/v1/chat/completions", CHAT | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
    ("/v1/chat/completions", {"messages": USER, "max_tokens": 2}),
    (
        "/v1/responses",
        {"input": "a", "tools": [{"type": "function"} | WEATHER], "include": ["message.output_text.logprobs"]},
    ),
    ("/v1/responses", {"input": "a", "max_output_tokens": 2}),
    ("/v1/responses", {"input": "a", "tools": [{"type": "custom", "name": "get_weather"}]}),
    (
        "/v1/chat/completions",
        {"messages": USER, "tools": [{"type": "custom", "custom": {"name": "get_weather"}}], "include_metrics": True},
    ),
    ("/v1/completions", {"prompt": "a", "prompt_logprobs": 1, "return_token_ids": True, "include_metrics": True}),
    (
        "/v1/messages",
        {
            "model": "quire-tiny",
            "messages": USER,
            "max_tokens": 200,
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "tools": [{"name": "get_weather", "input_schema": WEATHER_SCHEMA}],
        },
    ),
    ("/v1/messages", {"model": "quire-tiny", "messages": USER, "max_tokens": 2}),
]


def data_schema(operation):
    """The schema of a stream's events, except [DONE]."""
    data = operation["responses"]["200"]["content"]["text/event-stream"]["schema"]["properties"]["data"]
    described_data = data["anyOf"][1] if "anyOf" in data else data
    assert described_data["contentMediaType"] == "application/json"
    return described_data["contentSchema"]


async def events_of_stream(client, path, body):
    """The data of each event, without [DONE]."""
    async with asyncio.timeout(60), client.stream("POST", path, json=body | {"stream": True}) as answer:
        assert answer.status_code == 200, await answer.aread()
        lines = [line async for line in answer.aiter_lines()]
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(each) for each in data if each != "[DONE]"]


@pytest.mark.parametrize(("path", "body"), STREAMS)
async def test_each_event_of_a_stream_has_the_shape_that_the_document_says(gateway, client, document, path, body):
    schema = data_schema(described(gateway, document, "POST", path))
    events = await events_of_stream(client, path, body)
    assert len(events) > 2
    for event in events:
        check_shape(document, schema, event)


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_every_kind_of_event_that_is_described_is_sent(client, document, path):
    """Errors apart, which end a stream in its middle."""
    described_types = set(data_schema(document["paths"][path]["post"])["discriminator"]["mapping"])
    bodies = [body for other, body in STREAMS if other == path]
    if path == "/v1/responses":
        bodies.append({"input": "hello", "background": True})
    sent = [event for body in bodies for event in await events_of_stream(client, path, body)]
    assert {event["type"] for event in sent} == described_types - {"error", "response.failed"}


@pytest.mark.parametrize(("path", "body"), STREAMS)
async def test_an_error_in_a_stream_has_the_shape_that_the_document_says(gateway, client, document, rig, path, body):
    rig.scheduler.rule, rig.scheduler.step_delay_s = counting_rule, 0.01
    body = {each: value for each, value in body.items() if not each.startswith("max_")} | {"stream": True}
    if path == "/v1/messages":
        body["max_tokens"] = 500
    async with asyncio.timeout(60), client.stream("POST", path, json=body) as answer:
        lines = answer.aiter_lines()
        await anext(lines)
        for submit in rig.scheduler.submits[-2:]:
            failure = {"code": code_pb2.INTERNAL, "reason": "STEP_REFUSED", "message": "it failed"}
            rig.scheduler.fail(submit.handle, **failure)
        rest = [line.removeprefix("data: ") async for line in lines if line.startswith("data: {")]
    operation = described(gateway, document, "POST", path)
    error = json.loads(rest[-1])
    assert error["error"]["message"] == "it failed"
    check_shape(document, data_schema(operation), error)


async def test_every_success_in_json_has_a_shape(document):
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            content = operation["responses"].get("200", {}).get("content", {})
            assert content.get("application/json", {"schema": {}}).get("schema") is not None, (method, path)
