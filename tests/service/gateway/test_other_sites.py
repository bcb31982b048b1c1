"""Pages of other sites in a browser on the same machine cannot use the server or read its answers."""

import json

import httpx
import pytest

from tests.support.gateway_process import running_gateway
from tests.support.keys import KeysFile

COMPLETION = {"prompt": "hello", "max_tokens": 2}
BODY = json.dumps(COMPLETION).encode()
JSON = {"content-type": "application/json"}
ORIGIN = {"origin": "https://evil.example"}
PATH = "/v1/completions"


@pytest.fixture
def client(gateway):
    return gateway.http


@pytest.mark.parametrize(
    "headers",
    [
        ORIGIN,
        ORIGIN | {"content-type": ""},
        ORIGIN | {"content-type": "text/plain;charset=UTF-8"},
        ORIGIN | {"content-type": "text/plain,x+json"},
        ORIGIN | {"content-type": "multipart/form-data; boundary=application/json"},
        {"content-type": "application/x-www-form-urlencoded"},
    ],
)
@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions", "/tokenize", "/detokenize"])
async def test_what_a_page_may_send_without_being_asked_spends_no_time(client, scheduler, path, headers):
    answer = await client.post(path, content=BODY, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")
    assert "application/json" in answer.json()["error"]["message"]
    assert not scheduler.submits


CHANGING = (
    *("/sleep?level=2", "/wake_up", "/reset_prefix_cache", "/v1/files"),
    *(f"/v1/{each}/cancel" for each in ("requests/a", "responses/resp_a", "batches/a")),
)
FORM = {"content-type": "multipart/form-data; boundary=a"}


@pytest.mark.parametrize(
    "headers",
    [
        ORIGIN,
        ORIGIN | FORM,
        {"origin": "null"},
        {"origin": "http://127.0.0.1:1"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"} | FORM,
    ],
)
async def test_paths_without_a_body_do_nothing_for_pages_of_other_sites(client, scheduler, headers):
    for path in CHANGING:
        answer = await client.post(path, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type"), path
        assert "--allowed-origins" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", CHANGING)
async def test_paths_without_a_body_serve_programs_and_own_pages(client, path):
    own = {"origin": str(client.base_url).rstrip("/")}
    for headers in ({}, own, own | {"sec-fetch-site": "same-origin"}, {"sec-fetch-site": "none"}, JSON | ORIGIN):
        answer = await client.post(path, headers=headers)
        assert answer.status_code != 415 or path == "/v1/files", (answer.text, headers)
        assert "--allowed-origins" not in answer.text


@pytest.mark.parametrize(
    ("allowed", "origin", "status"),
    [
        (("https://app.example",), "https://app.example", 200),
        (("https://app.example",), "https://evil.example", 415),
        (("*",), "https://evil.example", 200),
    ],
)
async def test_pages_of_allowed_origins_are_served_without_a_body(scheduler, allowed, origin, status):
    async with running_gateway(scheduler, allowed_origins=allowed) as gateway:
        headers = {"origin": origin, "sec-fetch-site": "cross-site"}
        assert (await gateway.http.post("/reset_prefix_cache", headers=headers)).status_code == status


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "10.0.0.1", "[::2]:1"])
async def test_a_host_that_is_not_loopback_is_refused_by_name(client, scheduler, host):
    for method, path in (("POST", PATH), ("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/nothing")):
        answer = await client.request(method, path, headers=JSON | {"host": host}, content=BODY)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "host_not_allowed")
        name = host.removesuffix(":8000").removesuffix(":1").strip("[]")
        assert f"--allowed-hosts {name} allows it" in answer.json()["error"]["message"]
    assert not scheduler.submits
    for path in ("/health", "/ready", "/version"):
        assert (await client.get(path, headers={"host": host})).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:1", "localhost.", "a.localhost:80", "127.0.0.1", "127.1.2.3:9", "[::1]", "[::1]:80", ""],
)
async def test_every_name_of_loopback_is_served(client, host):
    assert (await client.post(PATH, content=BODY, headers=JSON | {"host": host})).status_code == 200


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("http://localhost:1/v1/models?a=b", 200),
        ("HTTP://me@127.0.0.1/v1/models", 200),
        ("http://localhost", 307),
        ("http://evil.example/v1/models", 403),
        ("http:///v1/models", 404),
    ],
)
async def test_a_target_with_a_host_as_proxies_send_it_is_that_host_s_path(client, target, status):
    # If both name a host, the target's counts (RFC 9112, 3.2.2).
    answer = await client.get("/", headers={"host": "localhost"}, extensions={"target": target.encode()})
    assert answer.status_code == status
    if "?" in target:
        assert answer.json()["data"]


@pytest.mark.parametrize(
    ("settings", "host", "status"),
    [
        ({"allowed_hosts": ("*",)}, "evil.example", 200),
        ({"allowed_hosts": ("llm.example",)}, "LLM.example:443", 200),
        ({"allowed_hosts": ("llm.example",)}, "evil.example", 403),
        ({"allowed_hosts": ("llm.example",), "http_host": "0.0.0.0"}, "evil.example", 403),
        ({"http_host": "0.0.0.0"}, "evil.example", 200),
        ({"http_host": "localhost"}, "evil.example", 403),
    ],
)
async def test_hosts_are_checked_on_loopback_or_where_they_are_named(scheduler, settings, host, status):
    async with running_gateway(scheduler, **settings) as gateway, httpx.AsyncClient(timeout=60) as http:
        port = gateway.gateway.http_address.rpartition(":")[2]
        answer = await http.get(f"http://127.0.0.1:{port}/v1/models", headers={"host": host})
    assert answer.status_code == status


@pytest.mark.parametrize(
    "headers",
    [
        {},
        JSON,
        {"content-type": "Application/JSON; charset=utf-8"},
        {"content-type": "application/problem+json"},
        # Allowed origins, and the server's own pages: a browser sends a preflight request before this one.
        JSON | ORIGIN,
    ],
)
async def test_programs_are_served_as_before(client, headers):
    assert (await client.post(PATH, content=BODY, headers=headers)).status_code == 200


async def test_keys_keep_other_sites_out_by_themselves(scheduler, tmp_path):
    keys = KeysFile(tmp_path / "keys.json")
    headers = {"host": "llm.example", "authorization": f"Bearer {keys.add('acme')}"}
    async with (
        running_gateway(scheduler, keys_files=(keys.path,)) as gateway,
        httpx.AsyncClient(base_url=gateway.http_url, timeout=60) as http,
    ):
        assert (await http.get("/v1/models", headers=headers)).status_code == 200
