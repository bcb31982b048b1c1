"""Metrics and logs of running services: metrics by all names of documents, dashboards and rules, and logs as JSON."""

import json
import signal
import subprocess
import sys

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.client import Client, GenerationOptions
from tests.support.ports import free_port
from tests.support.promql import metrics_in
from tests.unit.packaging.test_observability import RULES, expressions

pytestmark = pytest.mark.extended

# Metrics that Prometheus itself reports, that rules make, or that exist only with keys or TLS.
ELSEWHERE = {"up", "ALERTS", "quire_certificate_seconds_left"} | {rule["record"] for rule in RULES if "record" in rule}


SERVE = "import sys; from quire_cli.main import main; sys.exit(main(['serve', *sys.argv[1:]]))"


def test_every_metric_of_dashboards_and_rules_is_shown_and_logs_are_json_of_a_level_that_changes() -> None:
    ports = {name: free_port() for name in ("gateway", "scheduler", "worker")}
    flags = [f"--{name}-metrics-port={port}" for name, port in ports.items()]
    flags += ["--grpc-port=0", "--http-port=0", "--tenant-metrics=2", "--vllm-metric-names", "--log-format=json"]
    command = [sys.executable, "-c", SERVE, *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        assert line.startswith("quire: ready"), line
        grpc, http = (line.split(f"{name}=")[1].split()[0] for name in ("grpc", "http"))
        with Client(grpc) as client:
            client.generate("Once", GenerationOptions(max_tokens=4))
        assert httpx.get(f"http://{http}/v1/models", timeout=30).is_success
        texts = [httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=30).text for port in ports.values()]
        process.send_signal(signal.SIGUSR1)
        records: list[dict[str, str]] = []
        changed: set[str] = set()
        while changed != ports.keys():
            records.append(json.loads(process.stderr.readline()))
            if "debug" in records[-1]["message"]:
                changed.add(records[-1]["service"])
        process.terminate()
        process.communicate()
    families = [family for text in texts for family in text_string_to_metric_families(text)]
    # Series with a label appear when they count for the first time.
    shown = {sample.name for family in families for sample in family.samples} | {
        "quire_gateway_refused_callers_total",
        "quire_scheduler_tenant_blocks",
        "quire_scheduler_tenant_live_requests",
    }
    assert {name for _, text in expressions() for name in metrics_in(text)} - ELSEWHERE <= shown
    assert all({"time", "level", "service", "logger", "message"} <= record.keys() for record in records)
    assert "serve" in {record["service"] for record in records}
