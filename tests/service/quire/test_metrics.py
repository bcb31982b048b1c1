"""The port of a service's metrics: its pages, and the clients that it admits if it uses TLS."""

import contextlib
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge

from quire.rpc.tls import Role, ServerTls, TlsIdentity
from quire.runtime.settings import ConfigurationError
from quire.service.metrics import MAX_CONNECTIONS, MetricsServer
from tests.support.certificates import make_certificates


@pytest.fixture
def registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    Counter("steps", "Steps.", registry=registry).inc(5)
    return registry


@pytest.fixture
def encrypted(tmp_path: Path, registry: CollectorRegistry) -> Iterator[MetricsServer]:
    make_certificates(tmp_path)
    tls = ServerTls.for_operators(TlsIdentity.of(tmp_path, Role.WORKER))
    server = MetricsServer.start("127.0.0.1", 0, registry, tls)
    yield server
    server.stop()


def context_of(directory: Path, role: Role | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=directory / "ca.pem")
    if role is not None:
        context.load_cert_chain(directory / f"{role}.pem", directory / f"{role}.key")
    return context


def scrape(server: MetricsServer, context: ssl.SSLContext | None) -> str:
    scheme = "http" if context is None else "https"
    url = f"{scheme}://localhost:{server.port}/metrics"
    with urllib.request.urlopen(url, timeout=30, context=context) as response:
        return response.read().decode()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_metrics_are_served_until_stop_with_their_colons_whatever_the_scraper_accepts(
    registry: CollectorRegistry, host: str
) -> None:
    Gauge("vllm:num_requests_running", "Requests.", registry=registry).set(3)
    server = MetricsServer.start(host, 0, registry)
    url = f"http://{f'[{host}]' if ':' in host else host}:{server.port}/metrics"
    for accepted in ("application/openmetrics-text;version=1.0.0", "text/plain;version=0.0.4", "*/*"):
        with urllib.request.urlopen(urllib.request.Request(url, headers={"Accept": accepted}), timeout=30) as response:
            text = response.read().decode()
        assert "steps_total 5.0" in text
        assert "vllm:num_requests_running 3.0" in text
    server.stop()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, server.port), timeout=30)


def test_no_name_is_looked_up_at_the_start(registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    """If name servers do not answer, a look-up blocks the event loop, and with it health, for many seconds."""
    for name in ("getfqdn", "gethostbyaddr", "gethostname"):
        monkeypatch.setattr(socket, name, lambda *_: pytest.fail("it looks a name up"))
    server = MetricsServer.start("0.0.0.0", 0, registry)
    assert "steps_total 5.0" in scrape(server, None)
    server.stop()


def test_another_role_is_forbidden_to_read_them(encrypted: MetricsServer, tmp_path: Path) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        scrape(encrypted, context_of(tmp_path, Role.GATEWAY))
    assert caught.value.code == 403
    answer = caught.value.read().decode()
    assert "operator" in answer
    assert "steps" not in answer


def test_who_shows_no_certificate_or_speaks_no_tls_is_not_answered(encrypted: MetricsServer, tmp_path: Path) -> None:
    make_certificates(tmp_path / "other")
    stranger = context_of(tmp_path / "other", Role.OPERATOR)
    stranger.load_verify_locations(tmp_path / "ca.pem")
    for context in (context_of(tmp_path, None), stranger, None):
        with pytest.raises(OSError, match=r"."):
            scrape(encrypted, context)
    assert "steps_total 5.0" in scrape(encrypted, context_of(tmp_path, Role.OPERATOR))


def test_connections_beyond_the_limit_are_closed_until_one_ends(encrypted: MetricsServer, tmp_path: Path) -> None:
    operator = context_of(tmp_path, Role.OPERATOR)
    with contextlib.ExitStack() as idle:
        *_, last = [
            idle.enter_context(socket.create_connection(("127.0.0.1", encrypted.port), timeout=30))
            for _ in range(MAX_CONNECTIONS)
        ]
        with pytest.raises(OSError, match=r"."):
            scrape(encrypted, operator)
        last.close()
        assert eventually(lambda: scrape(encrypted, operator))


def eventually(attempt: Callable[[], str]) -> str:
    """The result of an attempt that fails at first."""
    give_up_at = time.monotonic() + 60
    while True:
        try:
            return attempt()
        except OSError:
            if time.monotonic() > give_up_at:
                raise
            time.sleep(0.02)


def test_files_that_are_no_good_are_refused_at_start(registry: CollectorRegistry, tmp_path: Path) -> None:
    make_certificates(tmp_path)
    tls = ServerTls.for_operators(TlsIdentity.of(tmp_path, Role.WORKER))
    (tmp_path / "worker.pem").write_text("damaged")
    with pytest.raises(ConfigurationError, match=r"worker\.pem"):
        MetricsServer.start("127.0.0.1", 0, registry, tls)
