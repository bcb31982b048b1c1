"""HEAD requests of load balancers; calls from pages of allowed origins; unexpected errors with an id."""

import logging

import httpx
import pytest

from tests.support.fake_scheduler import FakeScheduler
from tests.support.gateway_process import running_gateway

PATHS = ("/health", "/live", "/load", "/ping", "/ready", "/server_info", "/version", "/metrics")
CHANGING = {"date", "x-request-id"}


def headers_of(answer: httpx.Response) -> dict[str, str]:
    # Metrics may change between two requests: processor time and memory, for example.
    changing = CHANGING | ({"content-length"} if answer.url.path == "/metrics" else set())
    return {name: value for name, value in answer.headers.items() if name not in changing}


@pytest.fixture
async def ready_gateway(gateway, scheduler):
    await gateway.gateway._models.default.replicas.wait_until_ready()
    return gateway


@pytest.mark.parametrize("path", PATHS)
async def test_head_is_answered_as_get_without_a_body(ready_gateway, path):
    asked, got = await ready_gateway.http.head(path), await ready_gateway.http.get(path)
    assert (asked.status_code, got.status_code) == (200, 200)
    assert headers_of(asked) == headers_of(got)
    assert got.content
    assert not asked.content


@pytest.mark.parametrize(
    ("path", "status"), [("/ready", 503), ("/health", 503), ("/ping", 503), ("/live", 200), ("/version", 200)]
)
async def test_without_a_replica_that_can_serve_a_gateway_is_live_and_not_healthy(path, status):
    async with FakeScheduler(refuses_connections=True) as scheduler, running_gateway(scheduler) as gateway:
        answer = await gateway.http.head(path)
    assert (answer.status_code, answer.content) == (status, b"")


async def test_other_methods_are_told_which_there_are(gateway):
    answer = await gateway.http.post("/health")
    assert answer.status_code == 405
    assert set(answer.headers["allow"].split(", ")) == {"GET", "HEAD"}


async def test_pages_of_allowed_origins_alone_may_call(scheduler):
    preflight = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-lang",
    }
    async with running_gateway(scheduler, allowed_origins=("https://a.example", "https://b.example")) as gateway:
        allowed = await gateway.http.options("/v1/completions", headers=preflight | {"origin": "https://b.example"})
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://b.example"
        assert "authorization" in allowed.headers["access-control-allow-headers"].lower()
        other = await gateway.http.options("/v1/completions", headers=preflight | {"origin": "https://c.example"})
        assert (other.status_code, other.headers.get("access-control-allow-origin")) == (400, None)
        answer = await gateway.http.post("/v1/completions", json={"prompt": 5}, headers={"origin": "https://a.example"})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (400, "https://a.example")


@pytest.mark.parametrize("sent", [{}, {"x-request-id": "mine"}])
async def test_an_unexpected_error_is_logged_once_with_the_id_that_its_answer_has(scheduler, monkeypatch, caplog, sent):
    def fail(registry):
        raise RuntimeError("broken")

    monkeypatch.setattr("gateway.server.http.generate_latest", fail)
    async with running_gateway(scheduler, allowed_origins=("https://a.example",)) as gateway:
        answer = await gateway.http.get("/metrics", headers=sent | {"origin": "https://a.example"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "unexpected")
    assert answer.headers["access-control-allow-origin"] == "https://a.example"
    (request_id,) = answer.headers.get_list("x-request-id")
    assert request_id == sent.get("x-request-id", request_id)
    assert request_id in answer.json()["error"]["message"]
    (record,) = logged_errors(caplog)
    assert request_id in record.getMessage()
    assert record.exc_info is not None


def logged_errors(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Errors that the HTTP server logged."""
    return [
        each
        for each in caplog.records
        if each.levelname == "ERROR" and each.name.partition(".")[0] in ("gateway", "uvicorn", "starlette")
    ]


async def test_no_page_of_another_origin_may_call_unless_it_is_said(gateway):
    async with httpx.AsyncClient(base_url=gateway.http_url, timeout=60) as client:
        answer = await client.post("/v1/completions", json={"prompt": 5}, headers={"origin": "https://a.example"})
    assert "access-control-allow-origin" not in answer.headers
