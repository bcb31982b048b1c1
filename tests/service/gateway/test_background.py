"""Responses in the background, with OpenAI's own client: through two gateways that share a file."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from google.rpc import code_pb2
from openai import AsyncOpenAI, BadRequestError, NotFoundError

from gateway import sqlite
from gateway.api.responses import background
from gateway.api.responses.background_store import BackgroundStore
from gateway.api.responses.write_response import output_so_far
from quire.scheduler.v1 import scheduler_pb2
from tests.support.gateway_process import RunningGateway, running_gateway
from tests.support.keys import KeysFile
from tests.support.rig import REASONED_IDS, TEXT, WEATHER, Rig, running_rig
from tests.support.scheduler_process import until, wait_nothing_in_use
from tests.support.two_gateways import TwoGateways, two_gateways

ENDS = ("completed", "incomplete", "failed", "cancelled")


@pytest.fixture
async def two(tmp_path, model) -> AsyncIterator[TwoGateways]:
    store = f"sqlite:{tmp_path}/kept.db"
    async with two_gateways(tmp_path, script=REASONED_IDS, model=model, response_store=store) as gateways:
        yield gateways


@pytest.fixture
async def clients(two) -> AsyncIterator[list[AsyncOpenAI]]:
    made = [AsyncOpenAI(base_url=f"{each.http_url}/v1", api_key="unused", max_retries=0) for each in two.both]
    yield made
    for client in made:
        await client.close()


@pytest.fixture
async def alone(tmp_path, model) -> AsyncIterator[tuple[Rig, AsyncOpenAI]]:
    """One gateway that keeps responses in memory, and its client."""
    async with running_rig(tmp_path, model=model) as rig:
        rig.reset()
        async with AsyncOpenAI(base_url=f"{rig.gateway.http_url}/v1", api_key="unused", max_retries=0) as client:
            yield rig, client


def background_of(gateway: RunningGateway) -> Any:
    """Its background responses."""
    runs: list[Any] = [front.tasks.get("background responses") for front in gateway.gateway._fronts]
    return next(run for run in runs if run is not None).__self__


async def until_ended(client: AsyncOpenAI, response_id: str) -> Any:
    async def has_ended() -> bool:
        return (await client.responses.retrieve(response_id)).status in ENDS

    await until(has_ended)
    return await client.responses.retrieve(response_id)


TOOLS: Any = [WEATHER | {"type": "function"}]


async def test_a_response_runs_without_its_call_and_is_found_at_any_gateway(clients):
    first, second = clients
    begun = await first.responses.create(
        model="model", input="hello", background=True, tools=TOOLS, metadata={"a": "b"}, temperature=0.5
    )
    assert (begun.status, begun.background, begun.output, begun.error) == ("queued", True, [], None)
    assert (begun.temperature, begun.metadata) == (0.5, {"a": "b"})
    ended = await until_ended(second, begun.id)
    assert (ended.status, ended.background) == ("completed", True)
    assert [item.type for item in ended.output] == ["reasoning", "message", "function_call", "function_call"]
    assert ended.usage.output_tokens > 0
    plain = await first.responses.create(model="model", input="hello", tools=TOOLS)
    assert plain.output_text == ended.output_text
    # It is stored like other responses.
    after = await second.responses.create(model="model", input="and then?", previous_response_id=begun.id)
    assert after.status == "completed"
    items = await second.responses.input_items.list(begun.id)
    assert len(items.data) == 1
    await first.responses.delete(begun.id)
    with pytest.raises(NotFoundError):
        await second.responses.retrieve(begun.id)


async def test_readers_come_back_to_the_exact_event_through_any_gateway(clients, two):
    stream = await clients[0].responses.create(model="model", input="hello", background=True, stream=True, tools=TOOLS)
    events = []
    async for event in stream:
        events.append(event)
        if len(events) == 9:
            break
    await stream.close()
    response_id = events[0].response.id
    assert [event.type for event in events[:3]] == ["response.created", "response.queued", "response.in_progress"]
    rest = await clients[1].responses.retrieve(response_id, stream=True, starting_after=events[-1].sequence_number)
    events += [event async for event in rest]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.completed"
    assert events[-1].response == await clients[0].responses.retrieve(response_id)
    path = f"/v1/responses/{response_id}"
    whole = (await two.first.http.get(path, params={"stream": "true"})).text
    assert whole.count("\nevent: ") == len(events)
    for number in (-1, 0, 7, len(events) - 2, len(events) - 1):
        expected = whole.split("\n\n")[number + 1 :]
        for http in (two.first.http, two.second.http):
            asked = {"stream": "true"} | ({"starting_after": str(number)} if number >= 0 else {})
            assert (await http.get(path, params=asked)).text == "\n\n".join(expected)
            if number >= 0:
                headers = {"last-event-id": f"{response_id}:{number}"}
                assert (await http.post("/v1/responses", headers=headers)).text == "\n\n".join(expected)
    number = len(events) + 5
    for headers, name in (({}, "starting_after"), ({"last-event-id": f"{response_id}:{number}"}, "Last-Event-ID")):
        params = {"stream": "true", "starting_after": str(number)}
        refused = await two.second.http.get(path, params=params, headers=headers)
        assert refused.status_code == 400
        message = f'{name} is {number}; the last event of response "{response_id}" so far is number {len(events) - 1}'
        assert (refused.json()["error"]["message"], refused.json()["error"]["param"]) == (message, name)


async def test_a_cancelled_response_keeps_what_it_had_said(tmp_path, model):
    store = f"sqlite:{tmp_path}/kept.db"
    async with two_gateways(tmp_path, model=model, response_store=store) as two:
        body = {"input": "hello", "background": True, "stream": True, "max_output_tokens": 900}
        said, cancelled, path = list[dict[str, Any]](), None, ""
        async with two.first.http.stream("POST", "/v1/responses", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    said.append(json.loads(line.removeprefix("data: ")))
                    if said[-1]["type"] == "response.output_text.delta" and cancelled is None:
                        two.stand_still()
                        path = f"/v1/responses/{said[0]['response']['id']}/cancel"
                        cancelled = (await two.second.http.post(path)).json()
        text = "".join(each["delta"] for each in said if each["type"] == "response.output_text.delta")
        assert cancelled is not None
        (message,) = cancelled["output"]
        assert (cancelled["status"], message["status"]) == ("cancelled", "incomplete")
        assert message["content"][0]["text"] == text != ""
        assert (said[-1]["type"], said[-1]["response"]) == ("response.incomplete", cancelled)
        # A second call gets the same answer, through any gateway.
        assert (await two.first.http.post(path)).json() == cancelled
        assert (await two.first.http.get(path.removesuffix("/cancel"))).json() == cancelled
        two.workers[0].hang.clear()
        await wait_nothing_in_use(two.scheduler)


@pytest.mark.parametrize("had", ["nothing new", "all so far"])
async def test_a_deletion_is_the_last_event_of_those_who_read(alone, had):
    rig, client = alone
    rig.scheduler.emits.clear()
    begun = await client.responses.create(model="quire-tiny", input="hello", background=True)
    path = f"/v1/responses/{begun.id}"

    async def is_told() -> bool:
        return (await client.responses.retrieve(begun.id)).status == "queued"

    await until(is_told)
    after = {"starting_after": "1"} if had == "nothing new" else {}
    async with rig.http.stream("GET", path, params={"stream": "true"} | after) as answer:
        await rig.http.delete(path)
        lines = [line async for line in answer.aiter_lines() if line.startswith("data: ")]
    assert not lines[-1].startswith("data: [")
    last = json.loads(lines[-1].removeprefix("data: "))
    assert (last["type"], last["sequence_number"], last["code"]) == ("error", 2, "response_not_found")
    assert last["error"]["code"] == last["code"]


async def test_a_reader_of_a_durable_stream_is_told_of_its_cancellation(alone):
    rig, _ = alone
    rig.scheduler.emits.clear()
    body = {"input": "hello", "stream": True, "durable": True}
    making = asyncio.create_task(rig.http.post("/v1/responses", json=body))
    await rig.scheduler.until(lambda: rig.scheduler.submits)
    response_id = rig.scheduler.submits[-1].request_id
    headers = {"last-event-id": f"{response_id}:1"}
    async with rig.http.stream("POST", "/v1/responses", headers=headers) as answer:
        await rig.http.post(f"/v1/requests/{response_id}/cancel")
        lines = [line async for line in answer.aiter_lines() if line.startswith("data: ")]
    last = json.loads(lines[-1].removeprefix("data: "))
    assert (last["type"], last["sequence_number"], last["code"]) == ("error", 2, "cancelled_by_id")
    await making


async def test_events_tell_all_of_the_output(clients):
    made = await clients[0].responses.create(model="model", input="hello", background=True, stream=True, tools=TOOLS)
    events = [event.to_dict() async for event in made]
    assert output_so_far(events) == events[-1]["response"]["output"]


async def test_a_response_that_has_no_answer_is_known_and_not_continued(alone):
    rig, client = alone
    rig.scheduler.emits.clear()
    begun = await client.responses.create(model="quire-tiny", input="hello", background=True)
    for says in ("is in_progress|is queued", "is cancelled"):
        with pytest.raises(BadRequestError, match=says) as refused:
            await client.responses.create(model="quire-tiny", input="x", previous_response_id=begun.id)
        assert refused.value.param == "previous_response_id"
        (item,) = (await client.responses.input_items.list(begun.id)).data
        assert item.content[0].text == "hello"
        await client.responses.cancel(begun.id)
    headers = {"last-event-id": "resp_other:0"}
    answer = await rig.http.get(f"/v1/responses/{begun.id}?stream=true", headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Last-Event-ID")


@pytest.mark.parametrize("place", [0, 1])
async def test_readers_wait_to_be_told_here_and_at_another_gateway(clients, two, monkeypatch, place):
    read, num_read = BackgroundStore.pieces, 0

    def counted(store: BackgroundStore, *arguments: Any) -> Any:
        nonlocal num_read
        num_read += 1
        return read(store, *arguments)

    monkeypatch.setattr(BackgroundStore, "pieces", counted)
    monkeypatch.setattr(background, "_POLL_S", 0.001)
    two.stand_still()
    begun = await clients[0].responses.create(model="model", input="hello", background=True)
    response_id = begun.id
    stream = await clients[place].responses.retrieve(response_id, stream=True)
    await anext(aiter(stream))
    for _ in range(40):
        await clients[0].responses.retrieve(response_id)
    assert num_read < 20
    await clients[0].responses.cancel(response_id)
    assert [event async for event in stream][-1].response.status == "cancelled"
    two.workers[0].hang.clear()
    await wait_nothing_in_use(two.scheduler)


async def test_requests_that_run_in_the_background_count_as_held(tmp_path, model):
    async with two_gateways(tmp_path, model=model, max_total_body_bytes=8 << 20) as two:
        two.stand_still()
        body = {"input": "hello", "background": True, "user": "x" * (1 << 20)}
        answers = [await two.first.http.post("/v1/responses", json=body) for _ in range(12)]
        begun = [answer.json()["id"] for answer in answers if answer.status_code == 200]
        assert 0 < len(begun) < 8
        refused = answers[-1]
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "bodies_full")
        assert (await two.second.http.post("/v1/responses", json=body)).status_code == 200
        for response_id in begun:
            assert (await two.first.http.post(f"/v1/responses/{response_id}/cancel")).status_code == 200
        assert (await two.first.http.post("/v1/responses", json=body)).status_code == 200
        two.workers[0].hang.clear()


async def test_another_gateway_goes_on_where_one_stops(clients, two):
    whole = await clients[0].responses.create(
        model="model", input="Tell me.", background=True, tools=TOOLS, stream=True
    )
    expected = [event async for event in whole]
    stream = await clients[0].responses.create(
        model="model", input="Tell me.", background=True, tools=TOOLS, stream=True
    )
    events_here = aiter(stream)
    seen = [await anext(events_here) for _ in range(6)]
    two.stand_still()
    response_id = seen[0].response.id
    reading = asyncio.create_task(_all_events(clients[1], response_id))
    await background_of(two.first).stop_runs()
    two.workers[0].hang.clear()
    events = await asyncio.wait_for(reading, 30)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events] == [event.type for event in expected]
    assert _texts(events) == _texts(expected)
    assert [each.to_dict() for each in events[: len(seen)]] == [each.to_dict() for each in seen]


async def _all_events(client: AsyncOpenAI, response_id: str) -> list[Any]:
    return [event async for event in await client.responses.retrieve(response_id, stream=True)]


def _texts(events: list[Any]) -> list[str]:
    return [event.delta for event in events if event.type.endswith(".delta")]


async def test_what_cannot_run_is_refused_at_once(alone):
    rig, client = alone
    for wrong, param in [
        ({"store": False}, "store"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"extra_body": {"durable": True}, "stream": True}, "durable"),
    ]:
        with pytest.raises(BadRequestError) as refused:
            await client.responses.create(model="quire-tiny", input="hello", background=True, **wrong)
        assert refused.value.param == param
    done = await client.responses.create(model="quire-tiny", input="hello", background=True)
    assert (await until_ended(client, done.id)).output_text == TEXT
    for asked in ("x", "-1", "1e3", "\N{ARABIC-INDIC DIGIT ONE}"):
        answer = await rig.http.get(f"/v1/responses/{done.id}", params={"stream": "true", "starting_after": asked})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "starting_after")
    plain = await client.responses.create(model="quire-tiny", input="hello")
    answer = await rig.http.get(f"/v1/responses/{plain.id}", params={"stream": "true"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream")


async def test_responses_in_the_background_are_private_and_end_with_their_key(scheduler, tmp_path):
    scheduler.emits.clear()
    keys = KeysFile(tmp_path / "keys.json")
    acme, other = keys.add("acme"), keys.add("other")
    async with running_gateway(scheduler, keys_files=(keys.path,)) as gateway:
        url = f"{gateway.http_url}/v1"
        async with AsyncOpenAI(base_url=url, api_key=acme) as mine, AsyncOpenAI(base_url=url, api_key=other) as theirs:
            begun = await mine.responses.create(model="quire-tiny", input="hello", background=True)
            for call in (theirs.responses.retrieve, theirs.responses.cancel, theirs.responses.delete):
                with pytest.raises(NotFoundError):
                    await call(begun.id)
            with pytest.raises(NotFoundError):
                await theirs.responses.retrieve(begun.id, stream=True)
            assert (await mine.responses.cancel(begun.id)).status == "cancelled"


async def test_a_response_waits_for_a_full_scheduler_and_fails_where_it_is_broken(alone):
    rig, client = alone
    full = scheduler_pb2.RequestFailure(
        code=code_pb2.RESOURCE_EXHAUSTED, reason="QUEUE_FULL", message="full", retry_after_ms=50
    )
    rig.scheduler.refusal.append(full)
    waits = await client.responses.create(model="quire-tiny", input="hello", background=True)
    assert (await until_ended(client, waits.id)).output_text == TEXT
    broken = scheduler_pb2.RequestFailure(code=code_pb2.INTERNAL, reason="BROKEN", message="it is broken")
    rig.scheduler.refusal.append(broken)
    fails = await client.responses.create(model="quire-tiny", input="hello", background=True)
    ended = await until_ended(client, fails.id)
    assert (ended.status, ended.error.message) == ("failed", "it is broken")
    events = await _all_events(client, fails.id)
    assert [event.type for event in events] == ["response.created", "response.queued", "response.failed"]


async def test_a_lease_that_passes_while_the_response_runs_starts_no_second_run(alone, monkeypatch):
    rig, client = alone
    monkeypatch.setattr(sqlite, "LEASE_S", -1.0)
    rig.scheduler.emits.clear()
    begun = await client.responses.create(model="quire-tiny", input="hello", background=True)
    responses = background_of(rig.gateway)
    (run,) = responses._runs.values()
    await responses._look_after()
    assert list(responses._runs.values()) == [run]
    rig.scheduler.emits.set()
    assert (await until_ended(client, begun.id)).output_text
