"""Metrics and logs of running services: metrics by all names of documents, dashboards and rules, and logs as JSON."""

import json
import os
import signal

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.client import Client, GenerationOptions
from quire.testing import EmbeddedServer, ServerError, free_port
from tests.support.processes import wait_true
from tests.support.promql import metrics_in
from tests.unit.packaging.test_observability import RULES, expressions

pytestmark = pytest.mark.extended

# Metrics that Prometheus itself reports, that rules make, or that exist only with keys or TLS.
ELSEWHERE = {"up", "ALERTS", "quire_certificate_seconds_left"} | {rule["record"] for rule in RULES if "record" in rule}


def test_every_metric_of_dashboards_and_rules_is_shown_and_logs_are_json_of_a_level_that_changes() -> None:
    ports = {name: free_port() for name in ("gateway", "scheduler", "worker")}
    flags = [f"--{name}-metrics-port={port}" for name, port in ports.items()]
    flags += ["--tenant-metrics=2", "--vllm-metric-names", "--log-format=json"]
    with EmbeddedServer(*flags) as server:
        with Client(server.grpc_address) as client:
            client.generate("Once", GenerationOptions(max_tokens=4))
        assert httpx.get(f"{server.http_url}/v1/models", timeout=30).is_success
        texts = [httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=30).text for port in ports.values()]

        def records() -> list[dict[str, str]]:
            # The first line says that it is ready.
            return [json.loads(line) for line in server.log if not line.startswith("quire: ready")]

        assert server.services.keys() == ports.keys()
        with pytest.raises(ServerError, match='no service "web" runs; there are gateway, scheduler, worker'):
            server.kill("web")
        os.kill(server.pid, signal.SIGUSR1)
        wait_true(lambda: {each["service"] for each in records() if "debug" in each["message"]} == ports.keys())
    families = [family for text in texts for family in text_string_to_metric_families(text)]
    # Series with a label appear when they count for the first time.
    shown = {sample.name for family in families for sample in family.samples} | {
        "quire_gateway_refused_callers_total",
        "quire_scheduler_tenant_blocks",
        "quire_scheduler_tenant_live_requests",
    }
    assert {name for _, text in expressions() for name in metrics_in(text)} - ELSEWHERE <= shown
    assert all({"time", "level", "service", "logger", "message"} <= record.keys() for record in records())
    assert "serve" in {record["service"] for record in records()}
