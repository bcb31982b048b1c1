"""Anthropic's Messages API in front of a fake scheduler."""

import json
from datetime import datetime

import pytest
from anthropic import Anthropic

from tests.support.fake_scheduler import scripted

MESSAGES = "/v1/messages"
HELLO = {"model": "quire-tiny", "max_tokens": 30, "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def client(rig):
    return rig.http


async def create(client, **fields) -> dict:
    response = await client.post(MESSAGES, json=HELLO | fields)
    assert response.status_code == 200, response.text
    return response.json()


async def events_of(client, **fields) -> list[dict]:
    """The events of a stream, each with its name."""
    async with client.stream("POST", MESSAGES, json=HELLO | fields | {"stream": True}) as response:
        assert response.status_code == 200
        lines = [line async for line in response.aiter_lines() if line]
    events = []
    for name, data in zip(lines[::2], lines[1::2], strict=True):
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


async def test_a_stream_has_every_event_in_order(client):
    events = await events_of(client)
    kinds = [event["type"] for event in events]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert len(deltas) > 1
    assert kinds == [
        "message_start",
        "ping",
        "content_block_start",
        *["content_block_delta"] * len(deltas),
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert {event["index"] for event in events if event["type"].startswith("content_block")} == {0}
    message = await create(client)
    assert "".join(delta["text"] for delta in deltas) == message["content"][0]["text"]
    started = events[0]["message"]
    assert (started["content"], started["stop_reason"], started["usage"]["output_tokens"]) == ([], None, 0)
    assert events[2]["content_block"] == {"type": "text", "text": ""}
    usage = events[-2]["usage"]
    assert usage == message["usage"] | {
        "input_tokens": usage["input_tokens"],
        "cache_read_input_tokens": usage["cache_read_input_tokens"],
    }


async def test_an_empty_answer_has_no_blocks(client, rig):
    rig.scheduler.rule = scripted([2])
    assert (await create(client))["content"] == []
    assert "content_block_start" not in [event["type"] for event in await events_of(client)]


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "kind"),
    [
        ("POST", MESSAGES, b"{", 400, "invalid_request_error"),
        ("POST", MESSAGES, json.dumps(HELLO | {"max_tokens": 0}), 400, "invalid_request_error"),
        ("POST", MESSAGES, json.dumps(HELLO | {"model": "claude"}), 404, "not_found_error"),
        ("POST", f"{MESSAGES}/count_tokens", json.dumps({"messages": []}), 400, "invalid_request_error"),
        ("POST", MESSAGES, b" " * (5 << 20), 413, "request_too_large"),
        ("GET", MESSAGES, b"", 405, "invalid_request_error"),
        ("POST", f"{MESSAGES}/invented", b"", 404, "not_found_error"),
    ],
)
async def test_errors_have_anthropic_s_shape(client, method, path, content, status, kind):
    answer = await client.request(method, path, content=content)
    assert answer.status_code == status
    error = answer.json()
    assert (error["type"], error["error"]["type"]) == ("error", kind)
    assert error["error"]["message"]


async def test_the_refusal_of_a_thread_tells_the_client_to_go_on_without(client):
    answer = await client.post(MESSAGES, json=HELLO | {"thread": {"type": "create"}})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert "thread" in error["message"]
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


async def test_models_are_listed_in_the_shape_of_whoever_asks(rig):
    headers = {"anthropic-version": "2023-06-01"}
    listed = (await rig.http.get("/v1/models", headers=headers)).json()
    (model,) = listed.pop("data")
    assert listed == {"has_more": False, "first_id": "quire-tiny", "last_id": "quire-tiny"}
    assert (model["type"], model["id"], model["display_name"]) == ("model", "quire-tiny", "quire-tiny")
    assert datetime.fromisoformat(model["created_at"]).year >= 2024
    assert (await rig.http.get("/v1/models/quire-tiny", headers=headers)).json() == model
    assert (await rig.http.get("/v1/models/quire-tiny")).json()["object"] == "model"
    for path in ("/v1/models/other", "/v1/complete"):
        missing = await rig.http.get(path, headers=headers)
        assert (missing.status_code, missing.json()["type"]) == (404, "error")
        assert missing.json()["error"]["type"] == "not_found_error"


@pytest.mark.parametrize("version", ["2023-06-01", "2026-10-21"])
async def test_every_version_of_the_api_gets_the_same_forms(rig, version):
    body = {"model": "quire-tiny", "max_tokens": 8, "messages": [{"role": "user", "content": "hello"}]}
    answers = []
    for named in (version, Anthropic(api_key="unused").default_headers["anthropic-version"]):
        answer = await rig.http.post("/v1/messages", json=body, headers={"anthropic-version": named})
        assert answer.status_code == 200
        answers.append({name: value for name, value in answer.json().items() if name != "id"})
    assert answers[0] == answers[1]
