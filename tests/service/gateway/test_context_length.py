"""A prompt that is too long is refused in the same words by every front, in tokens, however long it is.

Clients such as litellm and langchain-openai look for these words and for the code to try another model.
"""

import httpx
import pytest
import pytest_asyncio

from quire.gateway.v1 import generation_pb2
from quire.rpc.errors import InvalidArgument, QuireError
from tests.service.gateway.test_kserve import make_request
from tests.service.gateway.test_kserve_errors import refusal
from tests.support.fake_scheduler import FakeScheduler
from tests.support.gateway_process import error_of, running_gateway

REASON = "CONTEXT_LENGTH_EXCEEDED"
# A few tokens too many, and far more bytes than any prompt that fits.
SLIGHTLY, FAR = "a " * 1500, "hello wo" * 400_000
COUNTS = {SLIGHTLY: "has 1,50", FAR: "has at least 168,422 tokens"}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def gateway():
    scheduler = FakeScheduler()
    await scheduler.start()
    async with running_gateway(scheduler) as running:
        yield running
    await scheduler.stop()


def message_of(front: str, text: str) -> dict:
    if front == "chat":
        return {"messages": [{"role": "user", "content": text}]}
    return {"prompt": text, "add_special_tokens": False} if front == "without special tokens" else {"prompt": text}


async def grpc_refusal(gateway, front: str, text: str) -> QuireError:
    if front == "kserve":
        return await refusal(gateway, make_request(text))
    if front == "chat":
        messages = [generation_pb2.ChatMessage(role="user", content=text)]
        return await error_of(gateway.generation.Chat(generation_pb2.ChatRequest(messages=messages)))
    return await error_of(gateway.generation.Generate(generation_pb2.GenerateRequest(text=text)))


def assert_recognised(message: str, text: str) -> None:
    assert "prompt is too long" in message
    assert "this model's maximum context length is 1024 tokens" in message
    assert COUNTS[text] in message


@pytest.mark.parametrize("text", [SLIGHTLY, FAR], ids=["slightly", "far"])
@pytest.mark.parametrize("front", ["chat", "completions", "without special tokens"])
@pytest.mark.parametrize("streaming", [False, True])
async def test_over_http_it_has_openai_s_code(gateway, front, text, streaming):
    path = "/v1/chat/completions" if front == "chat" else "/v1/completions"
    async with httpx.AsyncClient(base_url=gateway.http_url, timeout=60) as http:
        response = await http.post(path, json=message_of(front, text) | {"stream": streaming})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (400, REASON.lower(), "invalid_request_error")
    assert error["param"] == ("messages" if front == "chat" else "prompt")
    assert_recognised(error["message"], text)


@pytest.mark.parametrize("text", [SLIGHTLY, FAR], ids=["slightly", "far"])
@pytest.mark.parametrize("front", ["chat", "generate", "kserve"])
async def test_over_grpc_it_has_a_reason(gateway, front, text):
    error = await grpc_refusal(gateway, front, text)
    assert isinstance(error, InvalidArgument)
    assert error.reason == REASON
    assert_recognised(error.message, text)


async def test_it_is_told_whatever_else_is_wrong(gateway):
    request = generation_pb2.GenerateRequest(text=FAR)
    request.sampling.temperature = -1
    error = await error_of(gateway.generation.Generate(request))
    assert error.reason == REASON
    assert [violation.field for violation in error.violations] == ["text", "sampling.temperature"]


async def test_max_tokens_beyond_the_context_has_the_same_code(gateway):
    async with httpx.AsyncClient(base_url=gateway.http_url, timeout=60) as http:
        response = await http.post("/v1/completions", json={"prompt": [5] * 1000, "max_tokens": 25})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, REASON.lower(), "max_tokens")
    assert "this model's maximum context length is 1024 tokens" in error["message"]
