"""docs/metrics.md has exactly the metrics that exist."""

import re
from pathlib import Path
from unittest.mock import create_autospec

import pytest
from prometheus_client import CollectorRegistry

from gateway.metrics import GatewayMetrics
from gateway.replicas.replica_set import Replicas
from gateway.vllm_metrics import VllmMetrics
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.service.kept_requests import DurableLimits
from scheduler_svc.service.metrics import SchedulerMetrics
from scheduler_svc.service.requests import Requests
from tests.support.core_driver import make_config
from worker_svc.metrics import WorkerMetrics

DOCS = Path(__file__).resolve().parents[3] / "docs"
TEXT = (DOCS / "metrics.md").read_text(encoding="utf-8")


def gateway_metrics() -> GatewayMetrics:
    metrics = GatewayMetrics(max_tenants=1)
    metrics.of_model("m").watch_schedulers(["127.0.0.1:1"], lambda: 0)
    return metrics


def scheduler_registry() -> CollectorRegistry:
    metrics, scheduler = SchedulerMetrics(max_tenants=1), Scheduler(make_config())
    metrics.watch(lambda: scheduler, Requests(lambda _: False, lambda _: None, DurableLimits(1, 1, 1.0)))
    return metrics.registry


def exported_by(registry: CollectorRegistry) -> dict[str, str]:
    """The type of each metric, by its name in a scrape."""
    return {
        f"{family.name}_total" if family.type == "counter" else family.name: family.type
        for family in registry.collect()
    }


@pytest.mark.parametrize(
    ("service", "registry"),
    [
        ("gateway", gateway_metrics().registry),
        ("scheduler", scheduler_registry()),
        ("worker", WorkerMetrics().registry),
    ],
    ids=["gateway", "scheduler", "worker"],
)
def test_every_metric_of_a_service_stands_in_its_table_and_no_other(service: str, registry: CollectorRegistry) -> None:
    rows = re.findall(rf"^\| `(quire_{service}_\w+)` \| (counter|gauge|histogram) \|", TEXT, re.MULTILINE)
    exported = exported_by(registry)
    assert len(rows) == len(exported)
    assert dict(rows) == exported


@pytest.mark.parametrize("document", ["metrics.md", "operations.md", "security.md"])
def test_metrics_in_texts_are_in_the_tables(document: str) -> None:
    in_tables = set(re.findall(r"^\| `(quire_\w+)` \| (?:counter|gauge|histogram) \|", TEXT, re.MULTILINE))
    named = set(re.findall(r"\bquire_(?:gateway|scheduler|worker)_\w+", (DOCS / document).read_text(encoding="utf-8")))
    assert named <= in_tables


def test_every_name_of_vllm_stands_in_its_table_and_no_other() -> None:
    registry, metrics = CollectorRegistry(), gateway_metrics()
    replicas = create_autospec(Replicas, instance=True, links={}, num_unplaced=0)
    replicas.adapters_in_use.return_value, replicas.welcomes = ([], []), []
    registry.register(
        VllmMetrics([("model", metrics.of_model("m").records, replicas)], metrics.http_answers, "gateway")
    )
    table = TEXT.partition("| Quire | vLLM |")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"\| `((?:vllm:|http_)\w+)` \|", table)) == sorted(exported_by(registry))
