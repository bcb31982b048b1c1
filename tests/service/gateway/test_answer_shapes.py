"""Successful answers have the shapes that /openapi.json says, and no field that it does not know."""

import json

import httpx
import jsonschema
import pytest
import pytest_asyncio
from pydantic import TypeAdapter
from tokenizers import Tokenizer

from quire.model_directory import resolve_model
from tests.support.chat_models import write_chat_model
from tests.support.fake_scheduler import FakeScheduler, scripted
from tests.support.gateway_process import running_gateway
from tests.support.tokenizers import id_of

TOKENIZER = Tokenizer.from_file(str(resolve_model(None) / "tokenizer.json"))
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "it"}}\n</tool_call>'
SAID = f"<think>Hm.</think>I look.\n{CALL}"
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}
FUNCTION = {"name": "look", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
USER = [{"role": "user", "content": "hello"}]
TEXTS = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["hello"]}
LOGPROBS = {"name": "return_logprobs", "shape": [1], "datatype": "BOOL", "data": [True]}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def gateway(tmp_path_factory):
    scheduler = FakeScheduler()
    await scheduler.start()
    scheduler.rule = scripted([*TOKENIZER.encode(SAID, add_special_tokens=False).ids, id_of(TOKENIZER, "</s>")])
    model = write_chat_model(tmp_path_factory.mktemp("model") / "model")
    async with running_gateway(scheduler, model=str(model), max_stored_response_bytes=1 << 20) as running:
        yield running
    await scheduler.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def client(gateway):
    async with httpx.AsyncClient(base_url=gateway.http_url, timeout=20) as http:
        yield http


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def document(client):
    return (await client.get("/openapi.json")).json()


ANSWERS = [
    ("GET", "/health", None),
    ("GET", "/ready", None),
    ("GET", "/version", None),
    ("GET", "/openapi.json", None),
    ("GET", "/tokenizer_info", None),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/model", None),
    ("GET", "/v2", None),
    ("GET", "/v2/health/live", None),
    ("GET", "/v2/health/ready", None),
    ("GET", "/v2/models/model", None),
    ("GET", "/v2/models/model/ready", None),
    ("GET", "/v2/models/model/versions/1", None),
    ("GET", "/v2/models/model/versions/1/ready", None),
    ("POST", "/v2/models/model/infer", {"inputs": [TEXTS, LOGPROBS], "id": "a"}),
    ("POST", "/v2/models/model/versions/1/infer", {"inputs": [TEXTS]}),
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
    ("POST", "/v1/messages/count_tokens", {"model": "model", "messages": USER}),
    ("POST", "/v1/messages", {"model": "model", "messages": USER, "max_tokens": 2}),
    (
        "POST",
        "/v1/messages",
        {"messages": USER, "max_tokens": 200, "tools": [{"name": "look", "input_schema": SCHEMA}], "model": "model"},
    ),
]


async def conforming(gateway, client, document, method, path, body=None):
    """An answer that is valid under the schema of its path, and that its type reads without a field left."""
    answer = await client.request(method, path, json=body)
    assert answer.status_code == 200, answer.text
    scope = {"type": "http", "method": method, "path": path, "root_path": "", "headers": []}
    routes = gateway.gateway._http.config.app.routes
    route = next(each for each in routes if each.matches(scope)[0].name == "FULL")
    operation = document["paths"][route.path_format][method.lower()]
    schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
    jsonschema.Draft202012Validator(schema | {"components": document["components"]}).validate(answer.json())
    TypeAdapter(route.answer).validate_json(json.dumps(answer.json()))
    return answer.json()


@pytest.mark.parametrize(("method", "path", "body"), ANSWERS)
async def test_an_answer_has_the_shape_that_the_document_says(gateway, client, document, method, path, body):
    await conforming(gateway, client, document, method, path, body)


async def test_responses_have_theirs(gateway, client, document):
    tool = {"type": "function"} | FUNCTION
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


async def test_every_success_in_json_has_a_shape(document):
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            content = operation["responses"].get("200", {}).get("content", {})
            assert content.get("application/json", {"schema": {}}).get("schema") is not None, (method, path)
