"""compose.yaml with deploy/compose.tls.yaml: every link is encrypted, and each service holds no key but its own."""

from pathlib import Path
from typing import Any

import pytest

from gateway.settings import GatewaySettings
from quire.settings import load_settings
from scheduler_svc.settings import SchedulerSettings
from tests.support.compose import COMPOSE, WITH_TLS, default_of, quire_services_of, services_of
from worker_svc.settings import WorkerSettings

SETTINGS = {"gateway": GatewaySettings, "scheduler": SchedulerSettings, "worker": WorkerSettings}


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    return quire_services_of(COMPOSE, WITH_TLS)


def settings_of(service: dict[str, Any]) -> Any:
    name, *flags = service["command"]
    environment = {key: default_of(value) for key, value in service["environment"].items()}
    return load_settings(SETTINGS[name], flags, environment, program=f"quire {name}")


def test_it_changes_services_that_there_are(services: dict[str, Any]) -> None:
    assert services.keys() == quire_services_of(COMPOSE).keys()
    assert services.keys() <= services_of(WITH_TLS).keys() <= services_of(COMPOSE).keys()


def test_each_service_has_the_certificates_of_its_role_alone(services: dict[str, Any]) -> None:
    for service in services.values():
        directory = settings_of(service).tls_dir
        mounts = [default_of(volume) for volume in service["volumes"] if "certs" in volume]
        assert mounts == [f"./certs/{service['command'][0]}:{directory}:ro"]


def test_gateways_can_be_given_keys(services: dict[str, Any]) -> None:
    for name in ("gateway", "gateway-2"):
        service = services[name]
        assert "./keys:/keys:ro" in [default_of(volume) for volume in service["volumes"]]
        given = {**service, "environment": service["environment"] | {"QUIRE_KEYS_FILE": "/keys/keys.json"}}
        assert service["environment"].keys() >= {"QUIRE_KEYS_FILE", "QUIRE_TLS_DIR"}
        assert settings_of(service).keys_files == ()
        assert settings_of(given).keys_files == (Path("/keys/keys.json"),)


def test_services_run_as_the_owner_of_the_keys(services: dict[str, Any]) -> None:
    assert {default_of(service["user"]) for service in services.values()} == {"1000:1000"}
    assert {service["environment"]["USER"] for service in services.values()} == {"quire"}


def test_health_of_a_gateway_is_asked_where_no_certificate_matters(services: dict[str, Any]) -> None:
    for name in ("gateway", "gateway-2"):
        assert services[name]["healthcheck"]["test"][-1] == f"unix:{settings_of(services[name]).local_socket}"
        assert services[name]["healthcheck"]["retries"] == services_of(COMPOSE)[name]["healthcheck"]["retries"]


def test_what_starts_without_tls_only_when_asked_for_does_so_with_it(services: dict[str, Any]) -> None:
    for name in ("gateway-2", "worker-gpu"):
        assert services[name]["profiles"] == services_of(COMPOSE)[name]["profiles"]
    assert "profiles" not in services["gateway"]
