"""The part of the Helm chart's manifests that concerns Quire: pods, and the services that run in them."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml

from gateway.settings import GatewaySettings
from quire.rpc.address import TcpAddress, parse_address
from quire.runtime.settings import load_settings, variables_of
from scheduler_svc.settings import SchedulerSettings
from worker_svc.settings import WorkerSettings

SETTINGS: Mapping[str, type] = {"worker": WorkerSettings, "scheduler": SchedulerSettings, "gateway": GatewaySettings}
NAMESPACE = RELEASE = "quire"
"""Where the chart is rendered to, and the name of its release."""
_UNITS: Mapping[str, float] = {
    "": 1,
    "m": 1e-3,
    **{name: 1000.0**power for power, name in enumerate("kMGTPE", 1)},
    **{f"{name}i": 1024.0**power for power, name in enumerate("KMGTPE", 1)},
}
_RANK = re.compile(r"QUIRE_TENSOR_PARALLEL_RANK=\$\(\(LWS_WORKER_INDEX \* (\d+) \+ (\d+)\)\) exec quire ")


# That of libyaml, which wheels of PyYAML have, takes a tenth of the time.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def documents_of(text: str) -> Iterator[Any]:
    """The documents of a YAML file."""
    return yaml.load_all(text, _LOADER)


@dataclass(frozen=True, slots=True)
class Container:
    """A container that runs a service.

    Attributes:
        arguments: The arguments of `quire`, the name of the service first.
        settings: The settings that the service would run with.
        variables: The environment of the container, by name.
        spec: As the manifest has it.
    """

    arguments: Sequence[str]
    settings: Any
    variables: Mapping[str, str]
    spec: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.spec["name"]

    @property
    def service(self) -> str:
        return self.arguments[0]

    @property
    def ports(self) -> Mapping[str, int]:
        """The declared ports by name."""
        return {port["name"]: port["containerPort"] for port in self.spec["ports"]}

    @property
    def mounts(self) -> Mapping[str, str]:
        """The names of volumes by the paths where they are mounted."""
        return {each["mountPath"]: each["name"] for each in self.spec["volumeMounts"]}

    @property
    def address(self) -> str:
        """Where other services call it."""
        if isinstance(self.settings, GatewaySettings):
            return f"{self.settings.grpc_host}:{self.settings.grpc_port}"
        return self.settings.listen

    def listens(self) -> list[TcpAddress]:
        """The TCP addresses on which it listens for other pods."""
        settings = self.settings
        texts = [each for each in (self.address, getattr(settings, "transfer_listen", None)) if each is not None]
        if isinstance(settings, GatewaySettings):
            texts.append(f"{settings.http_host}:{settings.http_port}")
        if settings.metrics_port is not None:
            texts.append(f"{settings.metrics_host}:{settings.metrics_port}")
        for events in (getattr(settings, "kv_events", None), getattr(settings, "kv_events_replay", None)):
            if events is not None:
                texts.append(events.removeprefix("tcp://").replace("*", "0.0.0.0"))
        return [address for address in map(parse_address, texts) if isinstance(address, TcpAddress)]


@dataclass(frozen=True, slots=True)
class Pod:
    """The first of the pods that a template makes.

    Attributes:
        owner: The workload that has the template.
        hostname: The name by which others find a pod of a StatefulSet or a LeaderWorkerSet; else its own name.
        containers: In the order in which they start; the last one ends first.
    """

    owner: Mapping[str, Any]
    hostname: str
    template: Mapping[str, Any]
    containers: tuple[Container, ...]

    @property
    def labels(self) -> Mapping[str, str]:
        return self.template["metadata"]["labels"]

    @property
    def spec(self) -> Mapping[str, Any]:
        return self.template["spec"]

    @property
    def name(self) -> str:
        """The component, for messages."""
        return self.labels["app.kubernetes.io/component"]

    @property
    def volumes(self) -> Mapping[str, Mapping[str, Any]]:
        return {each["name"]: each for each in self.spec["volumes"]}

    @property
    def ports(self) -> Mapping[str, int]:
        return {name: port for container in self.containers for name, port in container.ports.items()}

    def container(self, service: str) -> Container:
        """The first one that runs the service."""
        return next(each for each in self.containers if each.service == service)


@dataclass(frozen=True, slots=True)
class Manifests:
    """All documents of one rendering of the chart."""

    documents: tuple[Mapping[str, Any], ...]

    @classmethod
    def read(cls, file: Path) -> "Manifests":
        """OSError or yaml.YAMLError where they cannot be read."""
        return cls(tuple(documents_of(file.read_text(encoding="utf-8"))))

    def of_kind(self, *kinds: str) -> Iterator[Mapping[str, Any]]:
        return (document for document in self.documents if document["kind"] in kinds)

    def pods(self) -> list[Pod]:
        """ConfigurationError where flags or variables of a service are none or have wrong values."""
        pods = []
        for owner in self.of_kind("Deployment", "StatefulSet"):
            pods.append(self._pod(owner, owner["spec"]["template"], f"{owner['metadata']['name']}-0"))
        for owner in self.of_kind("LeaderWorkerSet"):
            leader, name = owner["spec"]["leaderWorkerTemplate"], f"{owner['metadata']['name']}-0"
            pods.append(self._pod(owner, leader["leaderTemplate"], name))
            pods.append(self._pod(owner, leader["workerTemplate"], f"{name}-1"))
        return pods

    def _pod(self, owner: Mapping[str, Any], template: Mapping[str, Any], hostname: str) -> Pod:
        spec = template["spec"]
        containers = [*spec.get("initContainers", ()), *spec["containers"]]
        return Pod(owner, hostname, template, tuple(self._container(each, owner, hostname) for each in containers))

    def _container(self, spec: Mapping[str, Any], owner: Mapping[str, Any], hostname: str) -> Container:
        variables = dict(self._variables(spec, hostname))
        if owner["kind"] == "LeaderWorkerSet":
            subdomain = owner["metadata"]["name"]
            variables["LWS_LEADER_ADDRESS"] = f"{subdomain}-0.{subdomain}.{NAMESPACE}"
        if (numbered := _RANK.match(spec.get("command", ("",))[-2:][0])) is not None:
            variables["QUIRE_TENSOR_PARALLEL_RANK"] = str(int(numbered[1]) + int(numbered[2]))
        arguments = [_expanded(word, variables) for word in spec["args"]]
        service, *flags = arguments
        settings = load_settings(SETTINGS[service], flags, variables, program=f"quire {service}")
        return Container(arguments, settings, variables, spec)

    def _variables(self, container: Mapping[str, Any], hostname: str) -> Iterator[tuple[str, str]]:
        configs = {each["metadata"]["name"]: each["data"] for each in self.of_kind("ConfigMap")}
        for source in container.get("envFrom", ()):
            if "configMapRef" in source:  # The values of a Secret are not known here.
                yield from configs[source["configMapRef"]["name"]].items()
        for variable in container.get("env", ()):
            if "value" in variable:
                yield variable["name"], variable["value"]
            elif "fieldRef" in variable["valueFrom"]:
                yield variable["name"], hostname
            elif "resourceFieldRef" in variable["valueFrom"]:
                kind, _, resource = variable["valueFrom"]["resourceFieldRef"]["resource"].partition(".")
                yield variable["name"], str(math.ceil(quantity(container["resources"][kind][resource])))


def quantity(value: Any) -> float:
    """A quantity of Kubernetes ("500m", "8Gi", 1) in processors, bytes or pieces."""
    number, suffix = cast(re.Match[str], re.fullmatch(r"([\d.]+)([a-zA-Z]*)", str(value))).groups()
    return float(number) * _UNITS[suffix]


def known_variables(settings: type) -> set[str]:
    """The names of the variables that a service reads."""
    return set(variables_of(settings))


def _expanded(word: str, variables: Mapping[str, str]) -> str:
    """As Kubernetes does: a reference to an unknown variable stays as it is."""
    return re.sub(r"\$\((\w+)\)", lambda match: variables.get(match[1], match[0]), word)
