"""Answers of other servers with OpenAI's API, and how they are read."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from quire.load import Chat, Constant, LoadRequest, fixed, take, with_decoding
from quire.runtime.settings import ConfigurationError
from quire_cli.bench.driver import CannotMeasureError, Chunks, RequestFailedError
from quire_cli.bench.openai_client import OpenAiServer

MODELS = {"data": [{"id": "m", "owned_by": "vllm", "max_model_len": 512}]}
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}


def events(*contents: dict[str, Any]) -> bytes:
    return b"".join(f"data: {json.dumps(content)}\n\n".encode() for content in contents) + b"data: [DONE]\n\n"


class Peer:
    """A server that gives the test's answers, and records the bodies."""

    def __init__(self, answer: bytes | tuple[int, Any] = b"", *, refuses: str | None = None) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self._answer = answer
        self._refuses = refuses

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json=MODELS)
        body = json.loads(request.content)
        self.bodies.append(body)
        self.paths.append(request.url.path)
        if self._refuses is not None and self._refuses in body:
            return httpx.Response(400, json={"error": {"message": f"unknown field {self._refuses}"}})
        if isinstance(self._answer, tuple):
            return httpx.Response(self._answer[0], json=self._answer[1])
        return httpx.Response(200, content=self._answer)


def make_server(peer: Callable[[httpx.Request], httpx.Response], **options: Any) -> OpenAiServer:
    given: dict[str, Any] = {
        "model": "m",
        "api_key": None,
        "endpoint": None,
        "sampling": {"temperature": 0.0},
        "ignore_eos": True,
    } | options
    return OpenAiServer("http://peer/v1", transport=httpx.MockTransport(peer), **given)


def make_request(**fields: Any) -> LoadRequest:
    (request,) = with_decoding(take(fixed(7, 3, 1000), 1, seed=0), **fields)
    return request


async def send(server: OpenAiServer, request: LoadRequest, history: Any = None) -> tuple[Chunks, Any]:
    chunks = Chunks(0.0, request.beam_width or request.n)
    return chunks, await server.send(request, chunks, history)


def text(piece: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": piece, "finish_reason": finish_reason}]}


async def test_a_completion_is_asked_for_in_token_ids_with_its_length() -> None:
    peer = Peer(events(text("a"), text(""), text("c"), text("", "length"), {"choices": [], "usage": USAGE}))
    request = make_request()
    chunks, answer = await send(make_server(peer), request)
    (body,) = peer.bodies
    assert peer.paths == ["/v1/completions"]
    assert body["prompt"] == request.token_ids.tolist()
    assert (body["max_tokens"], body["min_tokens"], body["ignore_eos"], body["stream"]) == (3, 3, True, True)
    # A token without text counts, the end does not.
    assert chunks.tokens == [1, 1, 1]
    assert (answer.prompt_tokens, answer.cached_tokens, answer.preemptions) == (7, 2, None)


async def test_a_chat_carries_the_answers_and_drops_the_oldest_messages() -> None:
    answers = events({"choices": [{"index": 0, "delta": {"content": "yes"}}]})
    peer = Peer(answers)
    server = make_server(peer, endpoint="chat")
    dataset = Chat(Constant(4), Constant(2), 64, 1000, max_prompt_len=11, mean_turns=1e6)
    history = None
    for request in take(dataset, 3, seed=0):
        _, answer = await send(server, request, history)
        history = answer.history
    roles = [[message["role"] for message in body["messages"]] for body in peer.bodies]
    assert roles == [["user"], ["user", "assistant", "user"], ["user", "assistant", "user"]]
    assert peer.bodies[1]["messages"][1]["content"] == "yes"
    assert peer.bodies[2]["messages"][0] == peer.bodies[1]["messages"][2]


async def test_beams_come_at_once_and_each_is_a_sequence() -> None:
    content = {"choices": [{"index": i, "text": "x"} for i in range(2)], "usage": {"completion_tokens": 6}}
    peer = Peer((200, content))
    chunks, _ = await send(make_server(peer), make_request(beam_width=2))
    (body,) = peer.bodies
    assert (body["use_beam_search"], body["n"], body["stream"]) == (True, 2, False)
    assert (chunks.tokens, chunks.sequences) == ([3, 3], [0, 1])


async def test_a_server_that_does_not_know_ignore_eos_is_not_asked_for_it() -> None:
    peer = Peer(events(text("a")), refuses="ignore_eos")
    server = make_server(peer)
    facts = await server.connect()
    assert facts.details["ignore_eos"] is False
    assert facts.max_model_len == 512
    await send(server, make_request())
    assert "ignore_eos" not in peer.bodies[-1]


@pytest.mark.parametrize(
    ("answer", "reason", "message"),
    [
        ((429, {"error": {"code": "queue_full", "message": "later"}}), "HTTP 429 (queue_full)", "later"),
        ((503, "down"), "HTTP 503", '"down"'),
        (events({"error": {"message": "broken", "type": "server_error"}}), "HTTP 200 (server_error)", "broken"),
        (b"data: []\n\n", "MALFORMED_ANSWER", "has not the form of OpenAI's API: AttributeError"),
        (events({"choices": [None]}), "MALFORMED_ANSWER", "AttributeError"),
        (b"data: " + b"[" * 100_000 + b"\n\n", "MALFORMED_ANSWER", "RecursionError"),
        (b"data: {nonsense\n\n", "NO_JSON", "an event of the stream is no JSON"),
        (events(text("a"), {"usage": {"prompt_tokens": "many"}}), "MALFORMED_ANSWER", "prompt tokens is 'many'"),
        (
            events({"choices": [{"index": 1 << 40, "text": "a"}]}),
            "MALFORMED_ANSWER",
            "a sequence 1099511627776; 1 were",
        ),
        (events(text("a"), {"usage": {"completion_tokens": -1}}), "MALFORMED_ANSWER", "output tokens is -1"),
        (b"<html>hello</html>", "INCOMPLETE_STREAM", "the answer is no stream of events"),
        (b'data: {"choices": [{"text": "a"}]}\n\n', "INCOMPLETE_STREAM", "the stream ended before its end"),
    ],
    ids=str,
)
async def test_failures_have_a_reason_and_a_message(answer: Any, reason: str, message: str) -> None:
    with pytest.raises(RequestFailedError) as raised:
        await send(make_server(Peer(answer)), make_request())
    assert raised.value.reason == reason
    assert message in raised.value.message


@pytest.mark.parametrize(
    ("response", "error", "message"),
    [
        (httpx.Response(404, text="nothing"), CannotMeasureError, "404 to /v1/models, and no list of models"),
        (httpx.Response(401), CannotMeasureError, "asks for an API key"),
        (httpx.Response(503, json={"error": {"message": "loading"}}), CannotMeasureError, "not ready: HTTP 503 to /v1"),
        (httpx.Response(200, json={"data": [{"id": "a"}, {"id": "b"}]}), ConfigurationError, "it serves a, b"),
        (httpx.Response(200, json=[]), CannotMeasureError, "no list of models"),
    ],
    ids=["404", "401", "503", "two models", "a list"],
)
async def test_servers_that_cannot_be_measured(response: httpx.Response, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        await make_server(lambda _: response).connect()


async def test_a_connection_that_breaks_or_brings_nothing_is_a_failure() -> None:
    def breaking(error: httpx.RequestError) -> OpenAiServer:
        def answer(request: httpx.Request) -> httpx.Response:
            if request.url.path == "/v1/models":
                return httpx.Response(200, json=MODELS)
            raise error

        return make_server(answer)

    with pytest.raises(RequestFailedError, match="reset"):
        await send(breaking(httpx.ReadError("reset")), make_request())
    with pytest.raises(RequestFailedError, match="KeyError 'choices'"):
        await send(make_server(Peer((200, {}))), make_request(beam_width=2))
    with pytest.raises(CannotMeasureError, match=r"the first request, of one token: no answer within 60 s"):
        await breaking(httpx.ReadTimeout("timed out")).connect()
