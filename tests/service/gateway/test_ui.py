"""/ui: access to the page, the restrictions in its headers, and its feed."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from importlib import resources
from typing import Any

import httpx
import pytest
import pytest_asyncio

from gateway.auth.caller import Access
from gateway.auth.keys import KeyRing
from quire.messages.arrays import encode_int32
from quire.scheduler.v1 import scheduler_pb2
from tests.support.gateway_process import running_gateway
from tests.support.keys import KeysFile

FILES = sorted(each.name for each in (resources.files("gateway.api.ui") / "static").iterdir())
OPERATOR = Access(is_operator=True)


@pytest_asyncio.fixture(loop_scope="session")
async def open_page(gateway) -> AsyncIterator[httpx.AsyncClient]:
    """The page of a gateway that needs no keys."""
    yield gateway.http


@pytest.fixture
def keys(tmp_path) -> KeysFile:
    return KeysFile(tmp_path / "keys.json")


@pytest_asyncio.fixture(loop_scope="session")
async def page(scheduler, keys) -> AsyncIterator[httpx.AsyncClient]:
    """The page of a gateway that needs keys."""
    keys.add("nobody")
    async with running_gateway(scheduler, keys_files=(keys.path,)) as running:
        ring = running.gateway.authenticator
        assert isinstance(ring, KeyRing)

        # Keys that a test adds are known to the next call.
        async def refresh(request):
            await ring.refresh()

        running.http.event_hooks["request"].append(refresh)
        yield running.http


async def events_of(http: httpx.AsyncClient, url: str, last: str) -> list[tuple[str, dict]]:
    """The events of the feed up to the first one named `last`."""
    found: list[tuple[str, dict]] = []
    async with asyncio.timeout(30), http.stream("GET", url) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        name = ""
        async for line in answer.aiter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                found.append((name, json.loads(line.removeprefix("data: "))))
                if name == last:
                    return found
    raise AssertionError("the feed ended")


async def test_the_page_and_all_of_its_files_come_from_here_and_load_nothing_from_elsewhere(open_page):
    for path in ("/", "/ui"):
        assert (await open_page.get(path)).headers["location"] == "/ui/"
    for path in ("", *FILES):
        answer = await open_page.get(f"/ui/{path}")
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'self'; ")
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        links = answer.text.replace("http://www.w3.org/2000/svg", "")
        assert not any(each in links for each in ("http://", "https://", "innerHTML", "insertAdjacentHTML", "eval("))
        again = await open_page.get(f"/ui/{path}", headers={"if-none-match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    media_types = {(await open_page.get(f"/ui/{name}")).headers["content-type"] for name in ("app.js", "icon.svg")}
    assert media_types == {"text/javascript; charset=utf-8", "image/svg+xml"}
    assert (await open_page.get("/ui/other.js")).status_code == 404


@pytest.mark.parametrize("path", ["/ui", "/ui/", "/ui/app.js", "/ui/feed", "/ui/about", "/ui/block"])
async def test_only_operators_get_anything(page, keys, path):
    tenant, operator = keys.add("acme"), keys.add("staff", access=OPERATOR)
    shown = [{}, {"authorization": f"Bearer {tenant}"}, {"authorization": "Bearer wrong"}]
    assert [(await page.get(path, headers=each)).status_code for each in shown] == [401, 403, 401]
    async with page.stream("GET", path, headers={"authorization": f"Bearer {operator}"}) as answer:
        assert answer.status_code in (200, 307, 404)


async def test_a_service_is_killed_from_the_page_only_in_a_demonstration(open_page, scheduler, tmp_path):
    asked = {"service": "worker"}
    assert (await open_page.post("/ui/kill", json=asked)).status_code == 404
    path = tmp_path / "demo.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind(str(path))
        supervisor.settimeout(10)
        async with running_gateway(scheduler, demo_socket=path) as running:
            # A form of another site's page cannot have the type JSON.
            wrong: list[dict[str, Any]] = [
                {"content": b'{"service": "worker"}'},
                {"json": {"service": "gateway"}},
                {"json": []},
            ]
            for body in wrong:
                assert (await running.http.post("/ui/kill", **body)).status_code == 400
            assert (await running.http.post("/ui/kill", json=asked)).status_code == 204
            assert supervisor.recv(64) == b"worker"


async def test_a_page_gets_the_load_of_the_time_before_it_was_opened(scheduler, monkeypatch):
    monkeypatch.setattr("gateway.api.ui.feed._SAMPLE_INTERVAL_S", 0.05)
    async with running_gateway(scheduler) as running:
        await asyncio.sleep(0.5)
        [(_, history)] = [each for each in await events_of(running.http, "/ui/feed", "history") if each[0] == "history"]
    assert len(history["samples"]) > 2
    assert {"at", "down", "waiting", "running", "used", "computed"} <= history["samples"][-1].keys()


async def test_a_refusal_is_a_clear_page_with_a_form_for_the_key(page, keys):
    answer = await page.get("/ui/")
    assert "This page is for operators" in answer.text
    assert '<form method="post" action="/ui/key">' in answer.text
    assert answer.headers["content-security-policy"].startswith("default-src 'self'; ")
    assert (await page.get("/ui/style.css")).status_code == 200
    tenant = keys.add("acme")
    refused = await page.post("/ui/key", data={"key": tenant})
    assert (refused.status_code, "this API key has no such right" in refused.text) == (403, True)
    assert "set-cookie" not in refused.headers
    assert (await page.post("/ui/key", data={"key": "wrong"})).status_code == 401
    assert (await page.post("/ui/key", data={"key": "x" * 8192})).status_code == 401
    # Attempts with wrong keys are counted, here as elsewhere.
    operator = {"authorization": f"Bearer {keys.add('staff', access=OPERATOR)}"}
    metrics = (await page.get("/metrics", headers=operator)).text
    assert 'refused_callers_total{reason="INVALID_API_KEY"} 2.0' in metrics
    assert 'refused_callers_total{reason="OPERATORS_ONLY"} 1.0' in metrics


async def test_the_key_of_the_form_opens_the_page_and_the_chat_until_it_is_given_back(page, keys):
    operator = keys.add("staff", access=OPERATOR)
    answer = await page.post("/ui/key", data={"key": operator})
    assert (answer.status_code, answer.headers["location"]) == (303, "/ui/")
    cookie = answer.headers["set-cookie"].lower()
    assert all(each in cookie for each in ("httponly", "samesite=strict", "path=/ui"))
    assert (await page.get("/ui/")).status_code == 200
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
    assert (await page.post("/ui/v1/chat/completions", json=body)).status_code == 200
    # The cookie is only for paths below /ui, and only for pages of this gateway.
    assert (await page.post("/v1/chat/completions", json=body)).status_code == 401
    assert (await page.get("/ui/", headers={"sec-fetch-site": "cross-site"})).status_code == 401
    name = answer.headers["set-cookie"].partition("=")[0]
    assert (await page.get("/ui/", headers={"cookie": f"{name}=%%%"})).status_code == 401
    await page.post("/ui/key", data={"key": ""})
    assert (await page.get("/ui/")).status_code == 401


async def test_a_cookie_of_many_backslashes_takes_no_longer_than_others(page):
    began = time.process_time()
    for value in ('"' + "\\a" * 30_000 + '"', "a=b;" * 15_000):
        assert (await page.get("/ui/", headers={"cookie": f"a={value}"})).status_code == 401
    assert time.process_time() - began < 1


async def test_gateways_at_several_ports_of_one_host_keep_their_own_sign_ins(page, keys):
    operator = keys.add("staff", access=OPERATOR)
    held: dict[str, str] = {}
    for host in ("h:8000", "h:8001", "h", "[::1]:8000"):
        answer = await page.post("/ui/key", data={"key": operator}, headers={"host": host})
        page.cookies.clear()
        name, _, rest = answer.headers["set-cookie"].partition("=")
        held[host] = f"{name}={rest.partition(';')[0]}"
    assert [each.partition("=")[0] for each in held.values()] == [
        "quire-operator-8000",
        "quire-operator-8001",
        "quire-operator",
        "quire-operator-8000",
    ]
    # A browser sends the cookies of all ports of the host, even those set by other programs.
    shown = f'other={{"a": 1}}; {held["h:8001"]}'
    for host, status in (("h:8001", 200), ("h:8000", 401), ("h", 401)):
        assert (await page.get("/ui/", headers={"host": host, "cookie": shown})).status_code == status
    left = await page.post("/ui/key", data={"key": ""}, headers={"host": "h:8001"})
    assert left.headers["set-cookie"].startswith('quire-operator-8001="";')


async def test_the_feed_ends_when_the_key_is_revoked(page, keys):
    operator = keys.add("staff", access=OPERATOR)
    headers = {"authorization": f"Bearer {operator}"}
    async with asyncio.timeout(30), page.stream("GET", "/ui/feed", headers=headers) as answer:
        lines = answer.aiter_lines()
        assert await anext(lines) == "event: gateway"
        keys.revoke(operator)
        await page.get("/ui/about")
        async for _ in lines:
            pass


async def test_the_feed_has_frames_with_memory_or_numbers_alone(open_page, scheduler):
    frame = scheduler_pb2.WatchResponse(is_whole=True, memory=scheduler_pb2.MemoryChanges(names=bytes(range(1, 9))))
    frame.waiting.add(request_id="r", reason=scheduler_pb2.WAIT_REASON_SHARED_PREFIX)
    scheduler.frames.append(frame)
    for query, has_memory in (("", True), ("?memory=0", False)):
        (*_, (_, shown)) = await events_of(open_page, f"/ui/feed{query}", "frame")
        assert (shown["replica"], shown["is_whole"]) == (scheduler.address, True)
        assert (shown["memory"]["names"], shown["waiting"][0]["reason"]) == (["0102030405060708"], "shared_prefix")
        assert scheduler.watches[-1].include_memory == has_memory


async def test_the_feed_knows_replicas_that_are_gone(open_page, scheduler, gateway):
    ((_, state),) = await events_of(open_page, "/ui/feed", "gateway")
    assert state["model"] == "quire-tiny"
    assert [(each["connected"], each["ready"]) for each in state["replicas"]] == [(True, True)]
    await scheduler.stop()
    async with asyncio.timeout(30):
        while state["replicas"][0]["connected"]:
            ((_, state),) = await events_of(open_page, "/ui/feed", "gateway")
    assert state["replicas"][0]["problem"]
    await scheduler.start()


async def test_a_block_has_the_text_of_the_callers_own_tenant_alone(open_page, scheduler):
    ids = (await open_page.post("/tokenize", json={"prompt": "a fox"})).json()["tokens"]
    answer = scheduler_pb2.ReadBlockResponse(block_hash=bytes(32), ref_count=2)
    for tenant in ("default", "other"):
        answer.owners.add(request_id="r", tenant=tenant, token_ids=encode_int32(ids))
    scheduler.blocks[5] = answer
    query = {"replica": scheduler.address, "block": "5"}
    block = (await open_page.get("/ui/block", params=query)).json()
    assert (block["block_hash"], block["ref_count"]) == ("00" * 32, 2)
    own, other = block["owners"]
    assert "fox" in "".join(own["tokens"])
    assert (other["tokens"], other["num_tokens"]) == (None, len(ids))
    for wrong in ({"block": "x"}, {"block": "-1"}, {"block": "9" * 5000}, {"replica": "elsewhere:1"}):
        assert (await open_page.get("/ui/block", params=query | wrong)).status_code in (400, 404)


async def test_the_page_can_be_off(scheduler):
    async with (
        running_gateway(scheduler, ui=False) as running,
        httpx.AsyncClient(base_url=running.http_url, timeout=60) as http,
    ):
        assert (await http.get("/ui/")).status_code == 404
