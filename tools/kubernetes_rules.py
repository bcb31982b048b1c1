"""What must hold between the Kubernetes manifests and the services' flags; each rule yields a line for each breach."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from gateway.settings import GatewaySettings
from quire.rpc.tls import AUTHORITY_FILE
from tools.kubernetes_manifests import SETTINGS, Manifests, Pod, known_variables
from worker_svc.settings import WorkerSettings

ROOT = Path(__file__).resolve().parent.parent
_PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
_KUSTOMIZATION_FIELDS = frozenset({"apiVersion", "kind", "namespace", "resources", "images", "generatorOptions"}) | {
    "configMapGenerator",
    "secretGenerator",
}
Rule = Callable[[Manifests, list[Pod]], Iterator[str]]


def breaches(manifests: Manifests) -> list[str]:
    """What is wrong. ConfigurationError where a service would not start with its flags and variables."""
    pods = manifests.pods()
    return [line for rule in RULES for line in rule(manifests, pods)]


def the_kustomization_is_one(manifests: Manifests, pods: list[Pod]) -> Iterator[str]:
    """What kustomize itself would refuse, as far as ours uses it."""
    kustomization = manifests.kustomization
    if kustomization["kind"] != "Kustomization":
        yield f"kustomization.yaml: its kind is {kustomization['kind']}; it must be Kustomization"
    for name in sorted(kustomization.keys() - _KUSTOMIZATION_FIELDS):
        yield f"kustomization.yaml: {name} is no field of a kustomization that we use"


def variables_are_known(manifests: Manifests, pods: list[Pod]) -> Iterator[str]:
    every = set().union(*map(known_variables, SETTINGS.values()))
    for config in manifests.generated("configMapGenerator").values():
        for name in sorted({literal.split("=")[0] for literal in config["literals"]} - every):
            yield f"{config['name']}: {name} is read by no service"
    for pod in pods:
        own = {each["name"] for each in pod.container.get("env", ()) if each["name"].startswith("QUIRE_")}
        for name in sorted(own - known_variables(type(pod.settings))):
            yield f"{pod.name}: {name} is no variable of this service"
        for word in pod.container["args"]:
            for name in set(re.findall(r"\$\((\w+)\)", word)) - pod.variables.keys():
                yield f"{pod.name}: {word} names {name}, which is not set"


def ports_are_those_that_the_service_listens_on(manifests: Manifests, pods: list[Pod]) -> Iterator[str]:
    for pod in pods:
        listens = pod.listens()
        for name, address in listens.items():
            host, _, port = address.rpartition(":")
            if host != "0.0.0.0":
                yield f"{pod.name}: {name} listens on {address}, where no other pod reaches it"
            if pod.ports.get(name) != int(port):
                yield f"{pod.name}: it listens on {port} for {name}; its ports are {dict(pod.ports)}"
        for name in pod.ports.keys() - listens.keys():
            yield f"{pod.name}: nothing listens on the port {name}"


def probes_ask_the_service_itself(manifests: Manifests, pods: list[Pod]) -> Iterator[str]:
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    for pod in pods:
        asked = {f"127.0.0.1:{pod.ports['grpc']}", f"unix:{getattr(pod.settings, 'local_socket', None)}"}
        for probe in _PROBES:
            program, script, *flags, address = pod.container[probe]["exec"]["command"]
            if program != "python" or f"COPY deploy/{PurePosixPath(script).name} {script}" not in dockerfile:
                yield f"{pod.name}: {probe} runs {program} {script}, which the image does not have"
            if address not in asked:
                yield f"{pod.name}: {probe} asks {address}; the service answers at {', '.join(sorted(asked))}"
            if probe in _restarting_probes(pod) and flags != ["--alive"]:
                yield f"{pod.name}: {probe} restarts a service that only waits for another one; it needs --alive"


def services_lead_to_ports_of_pods(manifests: Manifests, pods: list[Pod]) -> Iterator[str]:
    for service in manifests.of_kind("Service"):
        name, chosen = service["metadata"]["name"], _selected(service["spec"]["selector"], pods)
        if not chosen:
            yield f"Service {name}: its selector finds no pod"
        for pod in chosen:
            for port in service["spec"]["ports"]:
                target = port["targetPort"]
                if pod.ports.get(target) != port["port"]:
                    yield f"Service {name}: {port['port']} leads to {target} of {pod.name}, which has {dict(pod.ports)}"


def services_find_each_other(manifests: Manifests, pods: list[Pod]) -> Iterator[str]:
    """By names of StatefulSets' pods, through a headless Service and a NetworkPolicy that lets them."""
    namespace = manifests.kustomization["namespace"]
    reachable = {f"{pod.name}-0.{pod.owner['spec']['serviceName']}.{namespace}.svc:{pod.ports['grpc']}": pod
                 for pod in pods if pod.owner["kind"] == "StatefulSet"}  # fmt: skip
    headless = {
        each["metadata"]["name"] for each in manifests.of_kind("Service") if each["spec"].get("clusterIP") == "None"
    }
    for pod in pods:
        for address in (*getattr(pod.settings, "workers", ()), *getattr(pod.settings, "schedulers", ())):
            called = reachable.get(address)
            if called is None:
                yield f"{pod.name}: no pod is at {address}; there are {', '.join(sorted(reachable))}"
            elif called.owner["spec"]["serviceName"] not in headless:
                yield f"{called.name}: its Service {called.owner['spec']['serviceName']} is not there or not headless"
            elif not _lets_in(manifests, called, pod):
                yield f"{called.name}: its NetworkPolicy does not let {pod.name} in"


def files_are_mounted(manifests: Manifests, pods: list[Pod]) -> Iterator[str]:
    for pod in pods:
        mounts = {each["mountPath"]: each["name"] for each in pod.container["volumeMounts"]}
        volumes = {each["name"]: each for each in pod.spec["volumes"]}
        for name in set(mounts.values()) - volumes.keys():
            yield f"{pod.name}: there is no volume {name}"
        for path in _files_of(pod):
            volume = volumes.get(mounts.get(str(path.parent), ""), {})
            secret = volume.get("secret", {}).get("secretName")
            made = manifests.generated("secretGenerator").get(secret, {"files": ()})
            if path.name not in {PurePosixPath(file).name for file in made["files"]}:
                yield f"{pod.name}: {path} is in no secret that is mounted"


def a_stop_leaves_time_to_drain(manifests: Manifests, pods: list[Pod]) -> Iterator[str]:
    for pod in pods:
        pause = pod.container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ("sleep", "0"))
        needed_s = float(pause[-1]) + getattr(pod.settings, "drain_timeout", 0.0)
        if pod.spec["terminationGracePeriodSeconds"] <= needed_s:
            yield f"{pod.name}: terminationGracePeriodSeconds must be above {needed_s:g}"


def gateways_stay_while_requests_wait(manifests: Manifests, pods: list[Pod]) -> Iterator[str]:
    """All of them stop serving when the last worker is lost, and would be taken from their Services at once."""
    for pod in pods:
        if isinstance(pod.settings, GatewaySettings):
            probe, waits_s = pod.container["readinessProbe"], pod.settings.connect_timeout
            leaves_s = probe.get("periodSeconds", 10) * probe.get("failureThreshold", 3)
            if leaves_s <= waits_s:
                yield f"{pod.name}: readinessProbe takes it out after {leaves_s} s; requests wait for {waits_s:g} s"


RULES: tuple[Rule, ...] = (
    the_kustomization_is_one,
    variables_are_known,
    ports_are_those_that_the_service_listens_on,
    probes_ask_the_service_itself,
    services_lead_to_ports_of_pods,
    services_find_each_other,
    files_are_mounted,
    a_stop_leaves_time_to_drain,
    gateways_stay_while_requests_wait,
)


def _selected(selector: Mapping[str, str], pods: list[Pod]) -> list[Pod]:
    return [pod for pod in pods if selector.items() <= pod.labels.items()]


def _lets_in(manifests: Manifests, called: Pod, caller: Pod) -> bool:
    """Whether all policies of a pod together let another one connect to its gRPC port; without any, everyone may."""
    policies = [each["spec"] for each in manifests.of_kind("NetworkPolicy")]
    own = [spec for spec in policies if _selected(spec["podSelector"]["matchLabels"], [called])]
    return not own or any(_allows(rule, caller) for spec in own for rule in spec["ingress"])


def _allows(rule: Mapping[str, Any], caller: Pod) -> bool:
    if "grpc" not in {each["port"] for each in rule["ports"]}:
        return False
    return "from" not in rule or any(_selected(each["podSelector"]["matchLabels"], [caller]) for each in rule["from"])


def _restarting_probes(pod: Pod) -> Collection[str]:
    """Those that end a pod. A worker waits for no other service: one that does not come to serve may be restarted."""
    return ("livenessProbe",) if isinstance(pod.settings, WorkerSettings) else ("startupProbe", "livenessProbe")


def _files_of(pod: Pod) -> list[PurePosixPath]:
    """What the service reads of secrets."""
    settings, files = pod.settings, []
    if settings.tls_dir is not None:
        role = pod.arguments[0]
        files = [PurePosixPath(settings.tls_dir) / name for name in (AUTHORITY_FILE, f"{role}.pem", f"{role}.key")]
    if isinstance(settings, GatewaySettings):
        more = (*settings.keys_files, settings.public_cert, settings.public_key)
        files += [PurePosixPath(path) for path in more if path is not None]
    return files
