"""Server-sent events with ids: a reader that returns with Last-Event-ID gets the rest, through any gateway."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.support.gateway_process import running_gateway
from tests.support.keys import KeysFile
from tests.support.rig import REASONED_IDS, WEATHER
from tests.support.scheduler_process import state_of, until
from tests.support.two_gateways import TwoGateways, two_gateways

TOOL = {"type": "function", "function": WEATHER}
QUESTION = [{"role": "user", "content": "Is it warm in Rome?"}]
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": QUESTION, "tools": [TOOL], "n": 2, "max_tokens": 200}),
    "usage": (
        "/v1/chat/completions",
        {"messages": QUESTION, "stream_options": {"include_usage": True}, "logprobs": True, "max_tokens": 20},
    ),
    "completion": ("/v1/completions", {"prompt": "Once", "n": 2, "max_tokens": 24, "echo": True, "logprobs": 1}),
    "response": ("/v1/responses", {"input": "hello", "tools": [WEATHER | {"type": "function"}]}),
    "message": ("/v1/messages", {"messages": QUESTION, "max_tokens": 200}),
}


@pytest.fixture
async def two(tmp_path, model) -> AsyncIterator[TwoGateways]:
    async with two_gateways(tmp_path, script=REASONED_IDS, model=model) as gateways:
        yield gateways


def _without_time(text: str) -> str:
    """Removes the time of completion from the last event of a response."""
    return re.sub(r'"completed_at":\d+', '"completed_at":T', text)


def events_of(text: str) -> list[str]:
    assert text.endswith("\n\n")
    return text.removesuffix("\n\n").split("\n\n")


@pytest.mark.parametrize("name", CALLS)
async def test_the_rest_of_a_stream_is_the_same_bytes_through_any_gateway(two, name):
    path, body = CALLS[name]
    answer = await two.first.http.post(path, json=body | {"stream": True, "durable": True})
    assert answer.status_code == 200, answer.text
    events = events_of(answer.text)
    ids = [event.partition("\n")[0].removeprefix("id: ") for event in events if event.startswith("id: ")]
    assert [int(each.rpartition(":")[2]) for each in ids] == list(range(len(ids)))
    # All events but the end mark have ids.
    assert len(events) - len(ids) == (path.startswith("/v1/c"))
    assert len(ids) > 12
    for number in range(0, len(ids), 7):
        gateway = two.both[number % 2]
        rest = await gateway.http.post(path, json={}, headers={"last-event-id": ids[number]})
        assert rest.status_code == 200, rest.text
        assert _without_time(rest.text) == _without_time("".join(f"{each}\n\n" for each in events[number + 1 :]))


async def test_ids_are_private_to_a_tenant_and_to_a_path(scheduler, tmp_path):
    keys = KeysFile(tmp_path / "keys.json")
    acme, other = ({"authorization": f"Bearer {keys.add(tenant)}"} for tenant in ("acme", "other"))
    async with running_gateway(scheduler, keys_files=(keys.path,)) as gateway:
        path, body = "/v1/completions", {"prompt": "Once", "max_tokens": 8, "stream": True, "durable": True}
        http = gateway.http
        first = await http.post(path, json=body, headers=acme)
        last = first.text.partition("\n")[0].removeprefix("id: ")
        refused = await http.post(path, headers=other | {"last-event-id": last})
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "request_not_found")
        elsewhere = await http.post("/v1/messages", headers=acme | {"last-event-id": last})
        assert elsewhere.status_code == 404
        for malformed in ("7", "a:b", f"{'x' * 200}:1", "../../etc:-1"):
            answer = await http.post(path, headers=acme | {"last-event-id": malformed})
            assert answer.status_code == 400
            assert "Last-Event-ID" in answer.json()["error"]["message"]


async def test_durable_is_refused_where_nothing_could_come_back(gateway):
    for body in ({"prompt": "Once", "durable": True}, {"prompt": ["a", "b"], "stream": True, "durable": True}):
        answer = await gateway.http.post("/v1/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "durable")


async def test_a_reader_that_comes_back_takes_the_stream_over(two):
    two.stand_still()
    body = {"prompt": "Once", "max_tokens": 8, "stream": True, "durable": True, "request_id": "mine"}
    async with asyncio.timeout(30):
        started = asyncio.create_task(two.first.http.post("/v1/completions", json=body))

        async def runs() -> bool:
            state = await state_of(two.scheduler)
            return state.running_requests + state.waiting_requests > 0

        await until(runs)
        again = asyncio.create_task(two.second.http.post("/v1/completions", headers={"last-event-id": "mine:0"}))
        first = await started
    assert "request_taken_over" in first.text
    again.cancel()
    with contextlib.suppress(asyncio.CancelledError, httpx.HTTPError):
        await again


async def test_an_error_is_the_last_event_of_a_stream_that_a_reader_came_back_to(two):
    body = {"prompt": "Once", "max_tokens": 900, "stream": True, "durable": True, "request_id": "mine"}
    body |= {"ignore_eos": True}
    async with asyncio.timeout(30):
        async with two.first.http.stream("POST", "/v1/completions", json=body) as first:
            # The event that the other reader gets first exists before the generation stops.
            async for line in first.aiter_lines():
                if line == "id: mine:1":
                    break
        two.stand_still()
        headers = {"last-event-id": "mine:0"}
        async with two.second.http.stream("POST", "/v1/completions", headers=headers) as again:
            lines = again.aiter_lines()
            assert await anext(lines) == "id: mine:1"
            await two.first.http.post("/v1/requests/mine/cancel")
            rest = [line async for line in lines if line]
    assert '"code":"cancelled_by_id"' in rest[-1]
    registry = two.second.gateway._context.metrics.registry
    labels = {"model": two.second.gateway._models.default.model.name, "outcome": "completed"}
    assert registry.get_sample_value("quire_gateway_requests_total", labels) == 0
