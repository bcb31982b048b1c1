"""/openapi.json says what the server does, and /tokenizer_info what its tokenizer is."""

import json
import re

import pytest
import pytest_asyncio

from gateway.api.openai.schemas import ChatBody
from gateway.api.openapi import OPEN_PATHS
from gateway.api.ui.access import is_below
from gateway.auth.caller import Access
from quire.model_source import resolve_model
from tests.support.gateway_process import running_gateway
from tests.support.keys import KeysFile


@pytest.fixture
def gateway(rig):
    return rig.gateway


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
    # Paths below /ui are a page for people, which has no contract.
    of_programs = [route for route in routes if not is_below(route.path)]
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


async def test_a_key_without_the_model_gets_no_tokenizer(scheduler, tmp_path):
    keys = KeysFile(tmp_path / "keys.json")
    key = keys.add("acme", access=Access(models=frozenset({"other"})))
    async with running_gateway(scheduler, keys_files=(keys.path,)) as running:
        for shown, status in ((key, 404), ("no", 401)):
            answer = await running.http.get("/tokenizer_info", headers={"authorization": f"Bearer {shown}"})
            assert answer.status_code == status
