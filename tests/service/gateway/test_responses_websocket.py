"""Responses over WebSockets: OpenAI's own client, streams, chains, resumption, limits and bad input."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from openai.lib.responses_websocket import AsyncResponsesWebSocketSession, ResponsesWebSocketLimits
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from gateway.auth.keys import KeyRing
from tests.support.gateway_process import RunningGateway, running_gateway
from tests.support.keys import KeysFile
from tests.support.rig import REASONED_IDS, TEXT, prompt_text_of
from tests.support.scheduler_process import until
from tests.support.two_gateways import two_gateways

LIMITS = ResponsesWebSocketLimits(
    max_lanes=8, max_events_per_lane=512, max_events=512, max_bytes_per_lane=1 << 20, max_bytes=1 << 20
)
ENDS = ("response.completed", "response.incomplete", "error")


@asynccontextmanager
async def connected(gateway: RunningGateway, **headers: str) -> AsyncIterator[ClientConnection]:
    async with connect(f"ws{gateway.http_url.removeprefix('http')}/v1/responses", additional_headers=headers) as socket:
        yield socket


async def send(socket: ClientConnection, **fields: Any) -> None:
    await socket.send(json.dumps({"type": "response.create"} | fields))


async def events_of(socket: ClientConnection, count: int = 1) -> list[dict[str, Any]]:
    """The next events, until `count` responses have ended."""
    events: list[dict[str, Any]] = []
    async with asyncio.timeout(20):
        while sum(event["type"] in ENDS for event in events) < count:
            events.append(json.loads(await socket.recv()))
    return events


async def error_of(socket: ClientConnection) -> dict[str, Any]:
    (event,) = await events_of(socket)
    assert event["type"] == "error"
    return event


async def test_the_session_of_openais_client_runs_forks_of_a_chain_that_is_not_stored(rig):
    async with AsyncOpenAI(base_url=f"{rig.gateway.http_url}/v1", api_key="unused") as client:
        async with (
            client.responses.connect() as connection,
            AsyncResponsesWebSocketSession(connection, limits=LIMITS) as session,
        ):
            main, fork = session.lane("main"), session.lane("fork")
            warm: Any = {"type": "response.create", "model": "quire-tiny", "input": "I am Alice.", "store": False}
            await main.send(warm | {"generate": False})
            prepared = await main.get_final_response()
            assert (prepared.status, prepared.output) == ("completed", [])
            await main.send(warm | {"input": "Hello?", "previous_response_id": prepared.id})
            first = await main.get_final_response()
            assert first.output_text == TEXT
            again = warm | {"input": "Who am I?", "previous_response_id": first.id}
            await asyncio.gather(main.send(again), fork.send(again | {"input": "Where am I?"}))
            ends = await asyncio.gather(main.get_final_response(), fork.get_final_response())
            assert {end.previous_response_id for end in ends} == {first.id}
        prompts = [prompt_text_of(each) for each in rig.scheduler.submits]
        assert all(prompt.count("I am Alice.") == 1 for prompt in prompts)
        assert [prompt.count(TEXT) for prompt in prompts] == [0, 0, 1, 1]
        # Another connection does not know them.
        async with connected(rig.gateway) as socket:
            await send(socket, input="Who?", previous_response_id=first.id, stream_id="a")
            refused = await error_of(socket)
            assert (refused["status"], refused["stream_id"]) == (400, "a")
            assert refused["error"]["code"] == "previous_response_not_found"
        found = (await rig.http.post("/v1/responses", json={"input": "hi", "store": False})).json()
        assert found["status"] == "completed"


async def test_a_stream_runs_its_responses_in_order_and_other_streams_at_once(rig):
    rig.scheduler.emits.clear()
    async with connected(rig.gateway) as socket:
        for stream_id, text in (("a", "1"), ("a", "2"), ("b", "3"), (None, "4")):
            await send(socket, input=text, **({} if stream_id is None else {"stream_id": stream_id}))
        await until_submitted(rig, 3)
        rig.scheduler.emits.set()
        events = await events_of(socket, 4)
        ends = [event.get("stream_id") for event in events if event["type"] in ENDS]
        assert sorted(map(str, ends)) == ["None", "a", "a", "b"]
        of_a = [event["type"] for event in events if event.get("stream_id") == "a"]
        assert of_a[: len(of_a) // 2] == of_a[len(of_a) // 2 :]
        # A response that ran is stored, and is found by HTTP.
        response = next(event for event in events if event["type"] == "response.completed")["response"]
        assert (await rig.http.get(f"/v1/responses/{response['id']}")).json() == response


async def until_submitted(rig, count: int) -> None:
    async def are_submitted() -> bool:
        return len(rig.scheduler.submits) >= count

    await until(are_submitted)
    await asyncio.sleep(0.05)
    assert len(rig.scheduler.submits) == count


BAD = [
    ("{", None, "malformed_message"),
    ("[1]", None, "malformed_message"),
    ('{"type": "response.steer", "input": "x"}', "type", "invalid_argument"),
    ('{"input": "x"}', "type", "invalid_argument"),
    ('{"type": "response.create"}', "input", "invalid_argument"),
    ('{"type": "response.create", "input": "x", "stream_id": ""}', "stream_id", "invalid_stream_id"),
    ('{"type": "response.create", "input": "x", "stream_id": "a b"}', "stream_id", "invalid_stream_id"),
    ('{"type": "response.create", "input": "x", "stream_id": 7}', "stream_id", "invalid_stream_id"),
    ('{"type": "response.create", "input": "x", "background": true}', "background", "invalid_argument"),
    ('{"type": "response.create", "input": "x", "stream": false}', "stream", "invalid_argument"),
    ('{"type": "response.create", "input": "x", "generate": 3}', "generate", "invalid_argument"),
    ('{"type": "response.create", "input": "x", "generate": false, "durable": true}', "durable", "invalid_argument"),
    ('{"type": "response.create", "input": "x", "model": "other"}', "model", "model_not_found"),
    ('{"type": "response.create", "input": "x", "temperature": -1}', "temperature", "invalid_argument"),
    ('{"type": "response.resume"}', "stream_id", "invalid_argument"),
    ('{"type": "response.resume", "stream_id": "never"}', None, "stream_not_found"),
    ('{"type": "response.resume", "response_id": "resp_0"}', "response_id", "request_not_found"),
    ('{"type": "response.resume", "response_id": 7}', "response_id", "invalid_argument"),
    ('{"type": "response.resume", "stream_id": "a", "starting_after": -1}', "starting_after", "invalid_argument"),
    ('{"type": "response.resume", "stream_id": "a", "offset": 3}', "offset", "invalid_argument"),
]


async def test_bad_messages_get_one_typed_error_and_the_connection_stays(rig):
    async with connected(rig.gateway) as socket:
        for text, param, code in BAD:
            await socket.send(text)
            event = await error_of(socket)
            assert (event["error"]["param"], event["error"]["code"]) == (param, code), text
            assert 400 <= event["status"] < 500
        await socket.send(b"\xff\xfe")
        assert (await error_of(socket))["error"]["code"] == "malformed_message"
        await send(socket, input="hello", unknown=3)
        events = await events_of(socket)
        assert (events[0]["ignored_fields"], events[-1]["type"]) == ("unknown", "response.completed")
        assert "ignored_fields" not in events[1]


async def test_streams_and_waiting_responses_of_a_connection_are_limited(rig):
    rig.scheduler.emits.clear()
    async with connected(rig.gateway) as socket:
        for number in range(33):
            await send(socket, input="x", stream_id=f"s{number}")
        event = await error_of(socket)
        assert (event["stream_id"], event["error"]["code"]) == ("s32", "websocket_stream_limit_reached")
        # The stream without a name does not count; 16 run at once.
        for _ in range(80 - 32):
            await send(socket, input="x")
        await send(socket, input="x")
        event = await error_of(socket)
        assert (event["status"], event["error"]["code"]) == (429, "websocket_queue_full")
        assert event["error"]["headers"]["retry-after"] == "1"
        await until_submitted(rig, 16)

    # Requests of a client that leaves are aborted.
    async def are_aborted() -> bool:
        return len(rig.scheduler.aborted) >= 16

    await until(are_aborted)


async def test_a_get_that_is_no_upgrade_and_a_page_of_another_site_are_refused(rig):
    answer = await rig.http.get("/v1/responses")
    assert (answer.status_code, answer.json()["error"]["code"]) == (426, "upgrade_required")
    assert answer.headers["upgrade"] == "websocket"
    for headers in ({"origin": "https://evil.example"}, {"sec-fetch-site": "cross-site"}):
        with pytest.raises(InvalidStatus) as refused:
            async with connected(rig.gateway, **headers):
                pass
        assert refused.value.response.status_code == 415
    with pytest.raises(InvalidStatus) as refused:
        async with connected(rig.gateway, host="evil.example"):
            pass
    assert refused.value.response.status_code in (400, 403)
    async with connected(rig.gateway, **{"x-request-id": "mine"}) as socket:
        assert socket.response is not None
        assert socket.response.headers["x-request-id"] == "mine"


async def test_keys_are_checked_at_the_upgrade_and_for_each_response(scheduler, tmp_path):
    keys = KeysFile(tmp_path / "keys.json")
    key, other = keys.add("acme"), keys.add("other")
    async with running_gateway(scheduler, keys_files=(keys.path,)) as gateway:
        for headers in ({}, {"authorization": "Bearer wrong"}):
            with pytest.raises(InvalidStatus) as refused:
                async with connected(gateway, **headers):
                    pass
            assert refused.value.response.status_code == 401
        async with connected(gateway, authorization=f"Bearer {key}") as socket:
            await send(socket, input="hello", durable=True, stream_id="a", max_output_tokens=3)
            first = await events_of(socket)
            assert first[-1]["type"] in ENDS[:2]
            async with connected(gateway, authorization=f"Bearer {other}") as of_other:
                await of_other.send('{"type": "response.resume", "stream_id": "a"}')
                assert (await error_of(of_other))["error"]["code"] == "stream_not_found"
                response_id = first[-1]["response"]["id"]
                await of_other.send(json.dumps({"type": "response.resume", "response_id": response_id}))
                assert (await error_of(of_other))["status"] == 404
            keys.path.write_text('{"keys": []}')
            ring = gateway.gateway.authenticator
            assert isinstance(ring, KeyRing)
            await ring.refresh()
            await send(socket, input="hello")
            assert (await error_of(socket))["error"]["code"] == "invalid_api_key"
            with pytest.raises(ConnectionClosed) as closed:
                await socket.recv()
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1008


async def test_the_rest_of_a_stream_comes_through_any_gateway_by_name_or_by_response(tmp_path, model):
    store = f"sqlite:{tmp_path}/kept.db"
    async with two_gateways(tmp_path, script=REASONED_IDS, model=model, response_store=store) as two:
        async with connected(two.first) as socket:
            await send(socket, input="hello", durable=True, stream_id="a")
            whole = await events_of(socket)
            assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
        http = httpx.AsyncClient(base_url=two.first.http_url)
        async with http:
            begun = (await http.post("/v1/responses", json={"input": "hello", "background": True})).json()
        response_id = whole[-1]["response"]["id"]
        async with connected(two.second) as socket:
            for number in (-1, 0, 7, len(whole) - 2):
                after = {} if number < 0 else {"starting_after": number}
                for name in ({"stream_id": "a"}, {"stream_id": "a", "response_id": response_id}):
                    await socket.send(json.dumps({"type": "response.resume", **name, **after}))
                    rest = await events_of(socket)
                    assert rest[:-1] == whole[number + 1 : -1]
                    assert rest[-1]["response"]["output"] == whole[-1]["response"]["output"]
            await socket.send(json.dumps({"type": "response.resume", "response_id": begun["id"], "starting_after": 1}))
            rest = await events_of(socket)
            assert rest[0]["sequence_number"] == 2
            assert rest[-1]["response"]["id"] == begun["id"]


async def test_connections_close_when_idle_when_too_slow_and_for_long_messages(scheduler):
    limits: dict[str, Any] = {"websocket_idle_timeout": 0.5, "slow_sender_timeout": 0.2, "sse_keepalive": 0.1}
    async with running_gateway(scheduler, max_message_bytes=2048, **limits) as gateway:
        codes: list[tuple[int, str]] = []
        for parts in ((), ('{"type": ', "unfinished"), ('"' + "x" * 3000,)):
            async with connected(gateway) as socket:
                sending = asyncio.create_task(socket.send(slowly(parts))) if parts else None
                with pytest.raises(ConnectionClosed) as closed:
                    await asyncio.wait_for(socket.recv(), 5)
                if sending is not None:
                    sending.cancel()
                assert closed.value.rcvd is not None
                codes.append((closed.value.rcvd.code, closed.value.rcvd.reason))
        assert [code for code, _ in codes] == [1001, 1008, 1009]
        assert "--websocket-idle-timeout" in codes[0][1]
        assert "2048" in codes[2][1]


async def slowly(parts: tuple[str, ...]) -> AsyncIterator[str]:
    for part in parts:
        yield part
        await asyncio.sleep(1)


async def test_a_gateway_that_drains_ends_its_responses_and_says_so(rig, scheduler):
    async with running_gateway(scheduler, drain_timeout=5.0) as gateway:
        scheduler.emits.clear()
        async with connected(gateway) as socket, connected(gateway) as idle:
            await send(socket, input="hello")

            async def is_submitted() -> bool:
                return bool(scheduler.submits)

            await until(is_submitted)
            stopping = asyncio.create_task(gateway.gateway.stop(5.0))
            with pytest.raises(ConnectionClosed) as closed:
                await idle.recv()
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1012
            await send(socket, input="hello", stream_id="b")
            event = await error_of(socket)
            assert (event["status"], event["error"]["code"]) == (503, "draining")
            with pytest.raises(InvalidStatus) as refused:
                async with connected(gateway):
                    pass
            assert refused.value.response.status_code == 503
            scheduler.emits.set()
            assert (await events_of(socket))[-1]["type"] in ENDS[:2]
            with pytest.raises(ConnectionClosed) as closed:
                await socket.recv()
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1012
            await stopping


async def test_a_client_that_does_not_read_loses_its_responses_and_its_connection(scheduler):
    scheduler.step_delay_s = 0.002
    async with running_gateway(scheduler, slow_reader_timeout=0.3) as gateway:
        host, _, port = gateway.http_url.removeprefix("http://").rpartition(":")
        # Accepted connections inherit it.
        gateway.gateway._http._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect((host, int(port)))
        url = f"ws{gateway.http_url.removeprefix('http')}/v1/responses"
        async with connect(url, sock=raw, max_queue=1, close_timeout=0.1) as slow:
            for _ in range(8):
                logprobs = {"top_logprobs": 20, "include": ["message.output_text.logprobs"]}
                await send(slow, input="hello", max_output_tokens=900, ignore_eos=True, stream_id="a", **logprobs)
            slow.transport.pause_reading()
            await scheduler.until(lambda: scheduler.aborted)
            async with connected(gateway) as other:
                await send(other, input="hello", max_output_tokens=3)
                assert (await events_of(other))[-1]["type"] in ENDS
