"""compose.yaml, by itself and with deploy/compose.tls.yaml: the services start with flags that exist, in an order that
works, and only the gateway is reachable. With TLS each service holds only its own key."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.settings import GatewaySettings
from quire.runtime.settings import load_settings
from quire.version import VERSION
from scheduler_svc.settings import SchedulerSettings
from tests.support.compose import COMPOSE, WITH_TLS, default_of, quire_services_of, services_of
from tools.kubernetes_manifests import known_variables
from worker_svc.settings import WorkerSettings

ROOT = Path(__file__).resolve().parents[3]
SETTINGS = {"gateway": GatewaySettings, "scheduler": SchedulerSettings, "worker": WorkerSettings}


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    return quire_services_of(COMPOSE)


@pytest.fixture(scope="module")
def with_tls() -> dict[str, Any]:
    return quire_services_of(COMPOSE, WITH_TLS)


def settings_of(services: dict[str, Any], name: str, **more: str) -> Any:
    """Settings of the service, with the environment that compose gives it, and with `more`."""
    service, *flags = services[name]["command"]
    environment = {key: default_of(value) for key, value in services[name]["environment"].items()} | more
    return load_settings(SETTINGS[service], flags, environment, program=f"quire {service}")


def test_every_flag_and_variable_is_one_that_the_service_knows(
    services: dict[str, Any], with_tls: dict[str, Any]
) -> None:
    assert with_tls.keys() == services.keys()
    assert services.keys() <= services_of(WITH_TLS).keys() <= services_of(COMPOSE).keys()
    for each in (services, with_tls):
        for name, service in each.items():
            settings_of(each, name)
            assert service["environment"].keys() - {"USER"} <= known_variables(SETTINGS[service["command"][0]])


def test_a_gateway_can_be_given_keys_whose_folder_it_sees(services: dict[str, Any], with_tls: dict[str, Any]) -> None:
    for each in (services, with_tls):
        for name in ("gateway", "gateway-2"):
            assert each[name]["environment"]["QUIRE_KEYS_FILE"] == "${QUIRE_KEYS_FILE:-,}"
            assert {"./keys:/keys:ro", "./models:/models:ro"} <= set(map(default_of, each[name]["volumes"]))
            assert settings_of(each, name).keys_files == ()
            given = settings_of(each, name, QUIRE_KEYS_FILE="/keys/keys.json")
            assert given.keys_files == (Path("/keys/keys.json"),)
    # Only the owner of keys can read them: services run as that user.
    assert services["gateway"]["user"] == "${QUIRE_USER:-10001:10001}"
    assert {default_of(service["user"]) for service in with_tls.values()} == {"1000:1000"}
    assert {service["environment"]["USER"] for service in with_tls.values()} == {"quire"}


def test_with_tls_each_service_has_the_certificates_of_its_role_alone(with_tls: dict[str, Any]) -> None:
    for name, service in with_tls.items():
        mounts = [default_of(volume) for volume in service["volumes"] if "certs" in volume]
        assert mounts == [f"./certs/{service['command'][0]}:{settings_of(with_tls, name).tls_dir}:ro"]


def test_only_the_gateway_is_published_and_only_on_loopback(services: dict[str, Any]) -> None:
    gateway = settings_of(services, "gateway")
    published = [default_of(port) for port in services["gateway"]["ports"]]
    assert published == [f"127.0.0.1:50051:{gateway.grpc_port}", f"127.0.0.1:8000:{gateway.http_port}"]
    for name in ("worker", "scheduler"):
        assert "ports" not in services[name]
    # Prometheus and Grafana are also published only on loopback.
    for service in services_of(COMPOSE).values():
        assert all(default_of(port).startswith("127.0.0.1:") for port in service.get("ports", ()))


def test_what_speaks_without_authentication_reaches_hubs_and_collectors_and_is_reached_by_nobody_else() -> None:
    compose = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))
    is_internal = {name: network.get("internal", False) for name, network in compose["networks"].items()}
    members = {
        name: [key for key, service in compose["services"].items() if name in service["networks"]]
        for name in is_internal
    }
    assert is_internal == {"inside": True, "egress": False, "outside": False}
    assert members["egress"] == ["worker", "worker-gpu", "scheduler", "worker-prefill", "scheduler-prefill"]
    assert not set(members["outside"]) & set(members["egress"])


def test_services_restart_have_time_to_drain_no_rights_and_images_of_their_own(services: dict[str, Any]) -> None:
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    for name, service in services.items():
        assert service["restart"] == "unless-stopped"
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        grace_s = int(service["stop_grace_period"].removesuffix("s"))
        assert grace_s > getattr(settings_of(services, name), "drain_timeout", 0.0)
        target = service["build"]["target"]
        assert target.startswith(service["command"][0])
        assert service["image"] == f"quire-{target}:${{QUIRE_TAG:-{VERSION}}}"
        assert f" AS {target}\n" in dockerfile


def test_images_are_pinned_run_as_nobody_in_particular_and_say_whether_they_serve() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    assert re.search(
        r"^ARG PYTHON_IMAGE=python:3\.11\.\d+-slim-bookworm@sha256:[0-9a-f]{64}$", dockerfile, re.MULTILINE
    )
    stages = dict(re.findall(r"^FROM (\S+) AS (\S+)$", dockerfile, re.MULTILINE))
    assert set(stages) <= {"${PYTHON_IMAGE}", "packages", "base"}
    for target in ("gateway", "scheduler", "worker-cpu", "worker-cuda"):
        stage = dockerfile.partition(f"FROM base AS {target}\n")[2].partition("\nFROM ")[0]
        (address,) = re.findall(r'^HEALTHCHECK .*"(\S+)"\]$', stage, re.MULTILINE)
        if target == "gateway":
            # The certificate for clients may lack the container's address, or be from another authority.
            assert f"ENV QUIRE_LOCAL_SOCKET={address.removeprefix('unix:')}\n" in stage
            continue
        host, _, port = address.rpartition(":")
        assert host == "127.0.0.1"
        assert port in re.findall(r"^EXPOSE ([\d ]+)$", stage, re.MULTILINE)[0].split()
    users = re.findall(r"^USER (\S+)$", dockerfile, re.MULTILINE)
    assert users == ["10001:10001", "0", "10001:10001"]


def test_the_health_of_a_gateway_is_asked_where_no_certificate_matters(
    services: dict[str, Any], with_tls: dict[str, Any]
) -> None:
    for each in (services, with_tls):
        for name in ("gateway", "gateway-2"):
            *_, address = each[name]["healthcheck"]["test"]
            assert address == f"unix:{each[name]['environment']['QUIRE_LOCAL_SOCKET']}"


def test_the_dockerfile_breaks_no_rule_of_hadolint() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    result = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "")


def test_only_sources_of_kernels_compile_them_again_and_only_workers_have_them() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    stages = {each.split("\n", 1)[0].split()[-1]: each for each in dockerfile.split("\nFROM ")[1:]}
    copied = re.findall(r"^COPY (.+) \S+$", stages["kernels"], re.MULTILINE)
    folders = {each.parent.name for each in (ROOT / "quire_kernels" / "cpu").glob("*/*.cpp")}
    assert set(copied) == {"quire_kernels/cpu/CMakeLists.txt", *(f"quire_kernels/cpu/{folder}" for folder in folders)}
    with_kernels = {name for name, stage in stages.items() if "COPY --from=kernels" in stage}
    assert with_kernels == {"worker-cpu", "worker-cuda"}
    # A compiler in this stage would build them for every image.
    assert "g++" not in stages["quire"]


def test_compose_builds_on_the_base_image_of_the_environment(services: dict[str, Any]) -> None:
    for service in services.values():
        # Without a value it is taken from the environment, or the Dockerfile has it.
        assert service["build"]["args"]["PYTHON_IMAGE"] is None


def test_commands_of_the_documents_make_the_folders_that_they_copy_to() -> None:
    """A Debian may have no /etc/sysusers.d."""
    text = (ROOT / "docs" / "deploying.md").read_text(encoding="utf-8")
    assert not re.findall(r"^cp .* /etc/(?!systemd/system/)\S+", text, re.MULTILINE)
    assert re.search(r"^install -D .* /etc/sysusers\.d/quire\.conf && systemd-sysusers$", text, re.MULTILINE)
