"""The Kubernetes manifests fit the services, and the check that says so finds what does not fit."""

import copy
import dataclasses
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from quire.cli.main import main
from quire.rpc.tls import Role
from tests.unit.quire.cli.test_certs import names_of
from tools.check_kubernetes import DIRECTORY, problems
from tools.kubernetes_manifests import Manifests


@pytest.fixture
def manifests() -> Manifests:
    return Manifests.read(DIRECTORY)


def changed(manifests: Manifests, kind: str, name: str, change: Callable[[dict[str, Any]], Any]) -> Manifests:
    documents = copy.deepcopy(manifests.documents)
    (document,) = (each for each in documents if (each["kind"], each["metadata"]["name"]) == (kind, name))
    change(cast(dict[str, Any], document))
    return dataclasses.replace(manifests, documents=documents)


def container_of(document: dict[str, Any]) -> dict[str, Any]:
    return document["spec"]["template"]["spec"]["containers"][0]


def replaced(argument: str, by: str) -> Callable[[dict[str, Any]], None]:
    """An argument that is another one."""

    def change(document: dict[str, Any]) -> None:
        arguments = container_of(document)["args"]
        arguments[arguments.index(argument)] = by

    return change


def set_to(value: Any, *path: str | int) -> Callable[[dict[str, Any]], None]:
    """A field of the container, or of the document where the path begins with "spec", that has another value."""

    def change(document: dict[str, Any]) -> None:
        target: Any = document if path[0] == "spec" else container_of(document)
        for step in path[:-1]:
            target = target[step]
        target[path[-1]] = value

    return change


def test_nothing_is_wrong_with_them(manifests: Manifests) -> None:
    assert problems(manifests) == []
    assert {pod.name for pod in manifests.pods()} == {"gateway", "scheduler", "worker"}


POD = ("spec", "template", "spec")
BROKEN = {
    "a flag that there is not": (
        *("Deployment", "gateway", replaced("--grpc-port=50051", "--grpc-prot=50051")),
        "--grpc-prot=50051",
    ),
    "a wrong value": ("StatefulSet", "worker", replaced("--device=cpu", "--device=tpu"), 'device: "tpu" is not valid'),
    "a variable that there is not": (
        *("StatefulSet", "worker", set_to("QUIRE_TLS_DIRECTORY", "env", 0, "name")),
        "worker: QUIRE_TLS_DIRECTORY is no variable",
    ),
    "a port that nobody listens on": (
        *("StatefulSet", "scheduler", set_to(50099, "ports", 0, "containerPort")),
        "scheduler: it listens on 50052 for grpc",
    ),
    "an address on loopback": (
        *("StatefulSet", "worker", replaced("--listen=0.0.0.0:50053", "--listen=127.0.0.1:50053")),
        "worker: grpc listens on 127.0.0.1:50053, where no other pod",
    ),
    "a probe of another port": (
        *("StatefulSet", "worker", set_to("127.0.0.1:50052", "readinessProbe", "exec", "command", 2)),
        "worker: readinessProbe asks 127.0.0.1:50052",
    ),
    "a probe that restarts who waits": (
        *("StatefulSet", "scheduler", set_to(["python", "/opt/quire/healthcheck.py", "127.0.0.1:50052"],
          "startupProbe", "exec", "command")),
        "scheduler: startupProbe restarts",
    ),
    "a script that is not in the image": (
        *("Deployment", "gateway", set_to("/opt/check.py", "livenessProbe", "exec", "command", 1)),
        "gateway: livenessProbe runs python /opt/check.py",
    ),
    "a Service without pods": (
        *("Service", "gateways", set_to({"app.kubernetes.io/name": "gate"}, "spec", "selector")),
        "Service gateways: its selector finds no pod",
    ),
    "a Service to no port": (
        *("Service", "gateway", set_to("https", "spec", "ports", 1, "targetPort")),
        "Service gateway: 8000 leads to https",
    ),
    "a Service that is not headless": (
        *("Service", "worker", set_to("10.0.0.1", "spec", "clusterIP")),
        "worker: its Service worker is not there or not headless",
    ),
    "a wrong address of a worker": (
        *("StatefulSet", "scheduler", replaced("--workers=worker-$(REPLICA).worker.quire.svc:50053",
          "--workers=worker-$(REPLICA).workers.quire.svc:50053")),
        "scheduler: no pod is at worker-0.workers.quire.svc:50053",
    ),
    "a variable that is not set": (
        *("StatefulSet", "scheduler", replaced("--workers=worker-$(REPLICA).worker.quire.svc:50053",
          "--workers=worker-$(ORDINAL).worker.quire.svc:50053")),
        "names ORDINAL, which is not set",
    ),
    "a policy that keeps the scheduler out": (
        *("NetworkPolicy", "worker", set_to([], "spec", "ingress")),
        "worker: its NetworkPolicy does not let scheduler in",
    ),
    "a secret of another role": (
        *("StatefulSet", "worker", set_to("gateway-certs", *POD, "volumes", 0, "secret", "secretName")),
        "worker: /certs/worker.pem is in no secret",
    ),
    "keys that are not mounted": (
        *("Deployment", "gateway", replaced("--keys-file=/keys/keys.json", "--keys-file=/etc/keys.json")),
        "gateway: /etc/keys.json is in no secret",
    ),
    "a mount without a volume": (
        *("StatefulSet", "worker", set_to("temporary", "volumeMounts", 1, "name")),
        "worker: there is no volume temporary",
    ),
    "gateways that leave together": (
        *("Deployment", "gateway", set_to(6, "readinessProbe", "failureThreshold")),
        "gateway: readinessProbe takes it out after 30 s; requests wait for 30 s",
    ),
    "no time to drain": (
        *("Deployment", "gateway", set_to(38, *POD, "terminationGracePeriodSeconds")),
        "gateway: terminationGracePeriodSeconds must be above 38",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "name", "change", "problem"), BROKEN.values(), ids=BROKEN)
def test_what_does_not_fit_is_found(
    manifests: Manifests, kind: str, name: str, change: Callable[[dict[str, Any]], Any], problem: str
) -> None:
    assert [line for line in problems(changed(manifests, kind, name, change)) if problem in line]


def test_a_setting_of_no_service_is_found(manifests: Manifests) -> None:
    literals = {"configMapGenerator": [{"name": "settings", "literals": ["QUIRE_LOG_LEVLE=info"]}]}
    misspelt = dataclasses.replace(manifests, kustomization={**manifests.kustomization, **literals})
    assert problems(misspelt) == ["settings: QUIRE_LOG_LEVLE is read by no service"]


def test_the_command_in_the_manifests_makes_every_file_of_the_secrets(manifests: Manifests, tmp_path: Path) -> None:
    text = (DIRECTORY / "kustomization.yaml").read_text(encoding="utf-8")
    found = re.search(r"^#\s+quire (certs .*)$", text.replace("\\\n#", " "), re.MULTILINE)
    assert found is not None
    secrets = "deploy/kubernetes/secrets"
    words = shlex.split(found[1].replace(secrets, str(tmp_path)))
    assert main(words) == 0
    files = {file for secret in manifests.generated("secretGenerator").values() for file in secret["files"]}
    missing = {file for file in files if not (tmp_path / Path(file).relative_to("secrets")).is_file()}
    assert missing == {"secrets/keys.json"}
    names = names_of(tmp_path / "certs" / Role.WORKER / "worker.pem")
    assert {"*.worker.quire.svc", "*.scheduler.quire.svc", "gateways.quire.svc"} <= set(names)
