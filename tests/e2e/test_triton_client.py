"""Triton's own Python client against all processes."""

import pytest
import pytest_asyncio

from quire.client import GenerationOptions
from tests.support.serving import Served
from tests.support.triton_client import TritonClient, triton_client

pytestmark = pytest.mark.extended

STORY = "Once upon a time"
OPTIONS = {"max_tokens": 24, "temperature": 0.0}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def client(served: Served):
    async with triton_client(served.server.grpc_address) as running:
        yield running


async def test_texts_are_those_of_quires_own_client(served: Served, client: TritonClient):
    expected = (await served.client.generate(STORY, GenerationOptions(max_tokens=24, temperature=0))).text
    assert await client.simple("is_server_ready")
    inputs = {"text_input": [STORY], "exclude_input_in_output": [True]}
    assert (await client.infer(inputs, parameters=OPTIONS))["outputs"] == {"text_output": [expected]}
    request = {"inputs": {"text_input": [STORY], "stream": [True]}, "parameters": OPTIONS}
    pieces = await client.stream(request | {"request_id": "a"}, request | {"request_id": "b"})
    for request_id in ("a", "b"):
        mine = [piece for piece in pieces if piece["id"] == request_id]
        assert "".join(piece["outputs"]["text_output"][0] for piece in mine) == expected
        assert mine[-1]["parameters"] == {"triton_final_response": True}
