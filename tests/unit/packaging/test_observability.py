"""Dashboards, rules and alerts: each expression parses, each metric exists in a service, each alert has a section of
the runbook; and compose starts the programs that read them."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.compose import COMPOSE, WITH_TLS, services_of
from tests.support.promql import metrics_in
from tests.unit.packaging.test_compose import SETTINGS, settings_of
from tools.generate_dashboards import DASHBOARDS, DIRECTORY, json_of

ROOT = Path(__file__).resolve().parents[3]
PROMETHEUS = ROOT / "deploy" / "prometheus"
RULES = [
    rule
    for name in ("rules.yaml", "alerts.yaml")
    for group in yaml.safe_load((PROMETHEUS / name).read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
]
ALERTS = [rule for rule in RULES if "alert" in rule]


def expressions() -> Iterator[tuple[str, str]]:
    """Every expression, and its place."""
    for rule in RULES:
        yield rule.get("alert") or rule["record"], rule["expr"]
    for path in sorted(DIRECTORY.glob("*.json")):
        for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]:
            for target in panel["targets"]:
                yield f"{path.stem}: {panel['title']}", target["expr"]


def known_names() -> set[str]:
    """Names in a scrape, by docs/metrics.md, which another test compares with the services; and names of rules."""
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(quire_\w+)` \| (\w+) \|", text, re.MULTILINE)
    names = {name for name, kind in rows if kind != "histogram"}
    names |= {f"{name}_{part}" for name, kind in rows if kind == "histogram" for part in ("bucket", "sum", "count")}
    return names | {rule["record"] for rule in RULES if "record" in rule} | {"up", "ALERTS"}


def test_every_expression_parses_and_names_metrics_that_there_are() -> None:
    known = known_names()
    unknown = {where: names - known for where, text in expressions() if (names := metrics_in(text)) - known}
    assert unknown == {}
    assert len(list(expressions())) > 60


def test_the_dashboards_are_those_that_the_tool_writes() -> None:
    written = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in DIRECTORY.glob("*.json")}
    assert written == {dashboard.name: json_of(dashboard) for dashboard in DASHBOARDS}


def test_every_alert_has_a_section_of_the_runbook_and_every_section_an_alert() -> None:
    text = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\w+)$", text, re.MULTILINE) == [rule["alert"] for rule in ALERTS]
    for rule in ALERTS:
        assert rule["annotations"]["runbook_url"] == f"docs/runbook.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]


@pytest.mark.parametrize(
    ("config", "files"), [("prometheus.yaml", [COMPOSE]), ("prometheus.tls.yaml", [COMPOSE, WITH_TLS])]
)
def test_prometheus_scrapes_the_ports_at_which_services_serve_metrics(config: str, files: list[Path]) -> None:
    services = services_of(*files)
    scraped = yaml.safe_load((PROMETHEUS / config).read_text(encoding="utf-8"))["scrape_configs"]
    assert {job["job_name"] for job in scraped} == {f"quire-{name}" for name in SETTINGS}
    for job in scraped:
        ((target,),) = (each["targets"] for each in job["static_configs"])
        name, _, port = target.partition(":")
        assert job["job_name"] == f"quire-{name}"
        settings = settings_of(services, name)
        assert (settings.metrics_host, settings.metrics_port) == ("0.0.0.0", int(port))
        assert (job.get("scheme") == "https") == (settings.tls_dir is not None)
    second = [each for job in scraped for each in job.get("dns_sd_configs", ())]
    assert second == [{"names": ["gateway-2"], "type": "A", "port": 9400}]
    assert services["gateway-2"]["command"] == services["gateway"]["command"]
