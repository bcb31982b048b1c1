"""A scripted server as a child process, over every API that it serves."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import grpc.aio
import httpx
import pytest
import pytest_asyncio

from quire.gateway.v1 import generation_pb2_grpc
from quire.testing import Answer, Failure, RuleError, ScriptedServer, ServerError, ToolCall, context_too_long, rule
from tests.support.fronts import CHATS, FRONTS, Front, KServe
from tests.support.gateway_process import RunningGateway
from tests.support.processes import is_alive, wait_true

SERVED = tuple(front for front in FRONTS if front is not KServe)
ADD = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}


@dataclass(frozen=True, slots=True)
class Doors:
    """Clients of a server, under the names that `Front` uses."""

    generation: generation_pb2_grpc.GenerationServiceStub
    channel: grpc.aio.Channel
    http: httpx.AsyncClient


@pytest_asyncio.fixture
async def doors(quire_scripted: ScriptedServer) -> AsyncIterator[RunningGateway]:
    async with (
        grpc.aio.insecure_channel(quire_scripted.grpc_address) as channel,
        httpx.AsyncClient(base_url=quire_scripted.http_url, timeout=60) as http,
    ):
        yield cast(RunningGateway, Doors(generation_pb2_grpc.GenerationServiceStub(channel), channel, http))


@pytest.mark.parametrize("front", CHATS)
async def test_every_chat_gets_reasoning_text_and_calls_whole_and_streamed(
    front: type[Front], quire_scripted: ScriptedServer, doors: RunningGateway
) -> None:
    answer = Answer(
        pieces=["Let me ", "add."],
        reasoning="numbers",
        tool_calls=[ToolCall("add", {"a": 1}), ToolCall("add", {"a": 2})],
        between_tokens_s=0.05,
    )
    quire_scripted.set_rules(rule(answer, name="adds", last="numbers", tool="add"))
    for streams in (False, True):
        got = await front(doors).ask("Add numbers", streams=streams, tools=[ADD])
        assert got.refusal is None
        assert (got.text.strip(), got.reasoning.strip()) == ("Let me add.", "numbers")
        assert [(name, arguments.replace(" ", "")) for name, arguments in got.calls] == [
            ("add", '{"a":1}'),
            ("add", '{"a":2}'),
        ]
        assert got.finish == "tool_calls"
        if streams:
            assert [each.strip() for each in got.pieces if each.strip()] == ["Let me", "add."]
    first, second = quire_scripted.requests(last="numbers")
    assert (first.rule, first.status, first.tools) == ("adds", "answered", ["add"])
    assert (second.messages[-1].role, second.messages[-1].text) == ("user", "Add numbers")


@pytest.mark.parametrize("front", SERVED)
async def test_every_api_gets_errors_delays_and_cuts(
    front: type[Front], quire_scripted: ScriptedServer, doors: RunningGateway
) -> None:
    client = front(doors)
    quire_scripted.set_rules(
        rule(Answer(error=Failure(429, "slow down", 2.0)), "now", last="busy"),
        rule(Answer(error=context_too_long()), last="long"),
        rule(Answer(pieces=["half"], error=Failure(503, "lost")), last="half"),
        rule(Answer(pieces=["one ", "two "], cut=True), last="cut"),
        rule(Answer("a b c", first_token_s=0.2, between_tokens_s=0.1, finish="length"), last="slow"),
        rule("once", last="once", times=1, name="only once"),
    )
    busy = await client.refused("busy")
    assert (busy.status, busy.message) == ("RESOURCE_EXHAUSTED", "slow down")
    assert busy.retry_after_s in (2.0, None)
    assert (await client.ask("busy")).text == "now"
    assert "context length" in (await client.refused("long")).message
    half = await client.ask("half", streams=True)
    assert (half.text, half.refusal and half.refusal.message) == ("half", "lost")
    began = time.monotonic()
    slow = await client.ask("slow", streams=True)
    assert time.monotonic() - began > 0.35
    assert (slow.pieces, slow.finish) == (["a ", "b ", "c"], "length")
    for streams in (False, True):
        if front.name.startswith("grpc"):
            assert (await client.refused("cut", streams=streams)).status == "UNAVAILABLE"
        else:
            with pytest.raises(httpx.RemoteProtocolError):
                await client.ask("cut", streams=streams)
    assert (await client.ask("once")).text == "once"
    for text, says in (("once", "used 1 of 1 times"), ("other?", "last='busy'")):
        refusal = await client.refused(text)
        assert refusal.message.startswith("no rule is for this request")
        assert text in refusal.message
        assert says in refusal.message
    statuses = [each.status for each in quire_scripted.requests()]
    assert statuses == [
        "failed",
        "answered",
        "failed",
        "failed",
        "answered",
        "cut",
        "cut",
        "answered",
        *["no rule"] * 2,
    ]
    with pytest.raises(AssertionError, match=r"(?s)ended with 'no rule': 'once'.*'other\?'"):
        quire_scripted.check()


async def test_records_have_what_a_client_sent_by_key_and_by_header(
    quire_scripted: ScriptedServer, doors: RunningGateway
) -> None:
    quire_scripted.set_rules(
        rule("for two", key="sk-2", name="key"), rule("for agents", headers={"x-agent": "b"}), rule("else", name="else")
    )
    body: dict[str, Any] = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}
    calls = [{"authorization": "Bearer sk-2"}, {"x-api-key": "sk-1", "x-agent": "abc"}, {}]
    for number, headers in enumerate(calls):
        body["messages"].append({"role": "assistant", "content": f"answer {number}"})
        response = await doors.http.post("/v1/chat/completions", json=body, headers=headers)
        assert response.status_code == 200, response.text
    assert [each.rule for each in quire_scripted.requests()] == ["key", "rules[1]", "else"]
    (second,) = quire_scripted.requests(headers={"X-Agent": "abc"})
    assert (second.key, second.model, second.path) == ("sk-1", "scripted", "/v1/chat/completions")
    assert second.body["messages"] == body["messages"][:3]
    assert [each.text for each in second.messages] == ["hi", "answer 0", "answer 1"]
    await SERVED[0](doors).ask("over grpc", authorizations=["Bearer sk-2"])
    assert [each.path for each in quire_scripted.requests(key="sk-2")] == ["/v1/chat/completions", "grpc"]
    await doors.http.post("/v1/chat/completions", json={"model": "scripted", "messages": 5})
    assert quire_scripted.requests()[-1].status == "refused"
    unused = rule("never", last="never", name="never")
    with pytest.raises(RuleError, match='the rules are not taken: two rules have the name "never"'):
        quire_scripted.set_rules(unused, unused)
    quire_scripted.set_rules(unused)
    with pytest.raises(AssertionError, match='the rule "never" was never used'):
        quire_scripted.check()


async def test_structured_answers_embeddings_and_answers_that_do_not_fit(
    quire_scripted: ScriptedServer, doors: RunningGateway
) -> None:
    quire_scripted.set_rules(
        rule(Answer(json={"city": "Köln"}), last="city"),
        rule(Answer(embedding=[0.25, 0.5]), last="vector", name="vector"),
        rule(Answer(tool_calls=[ToolCall("add")]), last="call", name="call"),
    )
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    for front in CHATS:
        assert (await front(doors).ask("city", schema=schema)).text == '{"city": "Köln"}'
    response = await doors.http.post("/v1/embeddings", json={"model": "scripted-embeddings", "input": ["vector"] * 2})
    assert [each["embedding"] for each in response.json()["data"]] == [[0.25, 0.5]] * 2
    chat = CHATS[0](doors)
    assert (
        "call cannot answer this request: it calls the tool add, and the request offers no tools"
        in (await chat.refused("call")).message
    )
    assert "vector cannot answer this request: it has an embedding" in (await chat.refused("vector")).message
    assert "it has no log probabilities" in (await chat.refused("city", logprobs=0)).message


def test_a_server_that_cannot_start_or_has_ended_shows_its_last_lines(tmp_path: Path) -> None:
    rules = tmp_path / "rules.json"
    rules.write_text('{"rules": [{"answer": "hi", "when": {"lst": "a"}}]}')
    with pytest.raises(ServerError, match=r"ended with status 2 .*(?s:.*)rules\[0\].when.lst: there is no such field"):
        ScriptedServer("--rules", str(rules)).start()
    rules.write_text('{"rules": [{"answer": "hi"}]}')
    with ScriptedServer("--rules", str(rules), "--model-names", "gpt-x,gpt-y") as server:
        names = [each["id"] for each in httpx.get(f"{server.base_url}/models").json()["data"]]
        assert {"gpt-x", "gpt-y"} <= {*names}
        port = server.http_url.rpartition(":")[2]
        with pytest.raises(ServerError, match=f"status 2 (?s:.*)127.0.0.1:{port}"):
            ScriptedServer("--http-port", port).start()
        assert b"torch" not in Path(f"/proc/{server.pid}/maps").read_bytes()
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(ServerError, match="ended with status -9"):
            server.requests()
    with pytest.raises(ServerError, match="is not started"):
        server.requests()


@pytest.mark.extended
def test_a_server_ends_with_the_process_that_started_it() -> None:
    code = "from quire.testing import ScriptedServer; print(ScriptedServer().start().pid, flush=True); input()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True) as test:
        assert test.stdout is not None
        pid = int(test.stdout.readline())
        assert is_alive(pid)
        test.kill()
    wait_true(lambda: not is_alive(pid))
