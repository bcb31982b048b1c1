"""Logs and metrics."""

import logging
import re
import socket
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Counter

from quire.settings import ConfigurationError
from quire.telemetry import MetricsServer, configure_logging


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    """The root logger, which gets its handlers and level back."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers[:] = []
    yield root
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_record_is_one_line_with_service_and_logger(root_logger, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("worker", "warning")
    logging.getLogger("some.module").info("not shown")
    logging.getLogger("some.module").warning("%d blocks", 3)
    captured = capsys.readouterr()
    pattern = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3} WARNING worker some\.module 3 blocks\n"
    assert re.fullmatch(pattern, captured.err)
    assert captured.out == ""


def test_metrics_are_served_until_stop() -> None:
    registry = CollectorRegistry()
    Counter("steps", "Steps.", registry=registry).inc(5)
    server = MetricsServer.start("127.0.0.1", 0, registry)
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=5) as response:
        assert "steps_total 5.0" in response.read().decode()
    server.stop()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port), timeout=5)


def test_a_metrics_port_in_use_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"127.0.0.1:{port}: the port is in use"):
            MetricsServer.start("127.0.0.1", port, CollectorRegistry())
