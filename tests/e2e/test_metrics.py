"""What running services show: metrics by all names of documents, dashboards and rules, and logs as JSON."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.client import Client, GenerationOptions
from tests.support.ports import free_port
from tests.support.promql import metrics_in
from tests.unit.packaging.test_observability import RULES, expressions

pytestmark = pytest.mark.extended

# Reported by Prometheus itself, made by rules, or there once keys are used or with TLS.
ELSEWHERE = {"up", "ALERTS", "quire_certificate_seconds_left"} | {rule["record"] for rule in RULES if "record" in rule}


_SERVE = "import sys; from quire_cli.main import main; sys.exit(main(['serve', *sys.argv[1:]]))"


class Served:
    """A `quire serve` of its own, its ports for metrics, and what it wrote to stderr."""

    def __init__(self) -> None:
        self.ports = {name: free_port() for name in ("gateway", "scheduler", "worker")}
        flags = [f"--{name}-metrics-port={port}" for name, port in self.ports.items()]
        flags += ["--grpc-port=0", "--http-port=0", "--tenant-metrics=2", "--vllm-metric-names", "--log-format=json"]
        self.process = subprocess.Popen(
            [sys.executable, "-c", _SERVE, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("quire: ready"), line
        self.grpc, self.http = (line.split(f"{name}=")[1].split()[0] for name in ("grpc", "http"))

    def names(self) -> set[str]:
        """The names of all series that the services show."""
        texts = [httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=30).text for port in self.ports.values()]
        families = [family for text in texts for family in text_string_to_metric_families(text)]
        return {sample.name for family in families for sample in family.samples}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.process.terminate()
    served.process.communicate()


def test_every_metric_of_dashboards_and_rules_is_one_that_services_show(served: Served) -> None:
    with Client(served.grpc) as client:
        client.generate("Once", GenerationOptions(max_tokens=4))
    assert httpx.get(f"http://{served.http}/v1/models", timeout=30).is_success
    wanted = {name for _, text in expressions() for name in metrics_in(text)} - ELSEWHERE
    # Series with a label appear when they count for the first time.
    shown = served.names() | {
        "quire_gateway_refused_callers_total",
        "quire_scheduler_tenant_blocks",
        "quire_scheduler_tenant_live_requests",
    }
    assert wanted <= shown


def test_logs_are_json_and_the_level_changes_while_it_runs(served: Served) -> None:
    served.process.send_signal(signal.SIGUSR1)
    assert served.process.stderr is not None
    records: list[dict[str, str]] = []
    changed: set[str] = set()
    while changed != {"gateway", "scheduler", "worker"}:
        records.append(json.loads(served.process.stderr.readline()))
        if "debug" in records[-1]["message"]:
            changed.add(records[-1]["service"])
    assert all({"time", "level", "service", "logger", "message"} <= record.keys() for record in records)
    assert "serve" in {record["service"] for record in records}
