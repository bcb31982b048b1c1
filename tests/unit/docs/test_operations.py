"""docs/operations.md names the metrics and reasons that there are."""

import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from gateway.metrics import GatewayMetrics
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.service.durable import DurableLimits
from scheduler_svc.service.metrics import SchedulerMetrics
from scheduler_svc.service.requests import Requests
from tests.support.core_driver import make_config
from tests.unit.docs.test_api_reasons import documented_reasons
from worker_svc.metrics import WorkerMetrics

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")


def gateway_registry() -> CollectorRegistry:
    metrics = GatewayMetrics()
    metrics.watch_schedulers(lambda: 0)
    return metrics.registry


def scheduler_registry() -> CollectorRegistry:
    metrics, scheduler = SchedulerMetrics(), Scheduler(make_config())
    metrics.watch(lambda: scheduler, Requests(lambda _: False, lambda _: None, DurableLimits(1, 1, 1.0)))
    return metrics.registry


@pytest.mark.parametrize(
    ("service", "registry"),
    [("gateway", gateway_registry()), ("scheduler", scheduler_registry()), ("worker", WorkerMetrics().registry)],
    ids=["gateway", "scheduler", "worker"],
)
def test_every_metric_of_a_service_stands_in_its_table_and_no_other(service: str, registry: CollectorRegistry) -> None:
    rows = re.findall(rf"^\| `(quire_{service}_\w+)` \| (\w+) \|", TEXT, re.MULTILINE)
    exported = {
        f"{family.name}_total" if family.type == "counter" else family.name: family.type
        for family in registry.collect()
    }
    assert len(rows) == len(exported)
    assert dict(rows) == exported


def test_metrics_in_the_text_are_in_the_tables() -> None:
    in_tables = set(re.findall(r"^\| `(quire_\w+)`", TEXT, re.MULTILINE))
    assert set(re.findall(r"\bquire_(?:gateway|scheduler|worker)_\w+", TEXT)) == in_tables


def test_every_reason_that_is_explained_is_one_that_is_given() -> None:
    section = TEXT.partition("## When something is wrong")[2].partition("| seen |")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert rows
    assert {reason for row in rows for reason in re.findall(r"`([A-Z_]+)`", row)} <= documented_reasons()
