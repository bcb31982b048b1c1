"""The Kubernetes manifests as far as they speak of Quire: pods, what they run with, and who finds whom."""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gateway.settings import GatewaySettings
from quire.settings import ConfigurationError, load_settings
from scheduler_svc.settings import SchedulerSettings
from worker_svc.settings import WorkerSettings

SETTINGS: Mapping[str, type] = {"worker": WorkerSettings, "scheduler": SchedulerSettings, "gateway": GatewaySettings}
_POD_KINDS = ("Deployment", "StatefulSet")
# What a variable holds that Kubernetes fills in.
_STAND_INS = {"fieldRef": "0", "resourceFieldRef": "2"}


@dataclass(frozen=True, slots=True)
class Pod:
    """The pods of one Deployment or StatefulSet, which have one container each.

    Attributes:
        arguments: Of `quire`, the name of the service first.
        settings: What the service would run with.
        variables: The environment of the container, by name.
    """

    owner: Mapping[str, Any]
    arguments: Sequence[str]
    settings: Any
    variables: Mapping[str, str]

    @property
    def name(self) -> str:
        return self.owner["metadata"]["name"]

    @property
    def labels(self) -> Mapping[str, str]:
        return self.owner["spec"]["template"]["metadata"]["labels"]

    @property
    def spec(self) -> Mapping[str, Any]:
        return self.owner["spec"]["template"]["spec"]

    @property
    def container(self) -> Mapping[str, Any]:
        (container,) = self.spec["containers"]
        return container

    @property
    def ports(self) -> Mapping[str, int]:
        """The declared ports by name."""
        return {port["name"]: port["containerPort"] for port in self.container["ports"]}

    def listens(self) -> Mapping[str, str]:
        """Where the service listens for other machines, as HOST:PORT, by the names that its ports should have."""
        settings = self.settings
        metrics = (
            {} if settings.metrics_port is None else {"metrics": f"{settings.metrics_host}:{settings.metrics_port}"}
        )
        if not isinstance(settings, GatewaySettings):
            return {"grpc": settings.listen, **metrics}
        grpc = f"{settings.grpc_host}:{settings.grpc_port}"
        return {"grpc": grpc, "http": f"{settings.http_host}:{settings.http_port}", **metrics}


@dataclass(frozen=True, slots=True)
class Manifests:
    """All documents that a kustomization names, before kustomize has changed them."""

    kustomization: Mapping[str, Any]
    documents: tuple[Mapping[str, Any], ...]

    @classmethod
    def read(cls, directory: Path) -> "Manifests":
        """OSError or yaml.YAMLError where they cannot be read."""
        kustomization = yaml.safe_load((directory / "kustomization.yaml").read_text(encoding="utf-8"))
        texts = [(directory / name).read_text(encoding="utf-8") for name in kustomization["resources"]]
        return cls(kustomization, tuple(document for text in texts for document in yaml.safe_load_all(text)))

    def of_kind(self, *kinds: str) -> Iterator[Mapping[str, Any]]:
        return (document for document in self.documents if document["kind"] in kinds)

    def pods(self) -> list[Pod]:
        """ConfigurationError where flags or variables of a service are none or have wrong values."""
        return [self._pod(owner) for owner in self.of_kind(*_POD_KINDS)]

    def generated(self, generator: str) -> Mapping[str, Mapping[str, Any]]:
        """What "secretGenerator" or "configMapGenerator" makes, by name."""
        return {each["name"]: each for each in self.kustomization.get(generator, ())}

    def _pod(self, owner: Mapping[str, Any]) -> Pod:
        (container,) = owner["spec"]["template"]["spec"]["containers"]
        variables = self._variables(container)
        arguments = [_expanded(word, variables) for word in container["args"]]
        service, *flags = arguments
        settings = load_settings(SETTINGS[service], flags, variables, program=f"quire {service}")
        return Pod(owner, arguments, settings, variables)

    def _variables(self, container: Mapping[str, Any]) -> Mapping[str, str]:
        variables: dict[str, str] = {}
        for source in container.get("envFrom", ()):
            config = self.generated("configMapGenerator")[source["configMapRef"]["name"]]
            for literal in config["literals"]:
                name, separator, variables[name] = literal.partition("=")
                if not separator:
                    raise ConfigurationError(f"{config['name']}: {literal} is not NAME=VALUE")
        for variable in container.get("env", ()):
            variables[variable["name"]] = variable.get("value") or _STAND_INS[next(iter(variable["valueFrom"]))]
        return variables


def known_variables(settings: type) -> set[str]:
    """The names of the variables that a service reads."""
    own_names = {"keys_files": "QUIRE_KEYS_FILE"}
    return {own_names.get(field.name, f"QUIRE_{field.name.upper()}") for field in dataclasses.fields(settings)}


def _expanded(word: str, variables: Mapping[str, str]) -> str:
    """As Kubernetes does: what names no variable stays as it is."""
    return re.sub(r"\$\((\w+)\)", lambda match: variables.get(match[1], match[0]), word)
