"""The rules between the Kubernetes manifests and the services' flags; each rule yields a line for each breach."""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from gateway.settings import GatewaySettings
from quire.rpc.address import DnsName, TcpAddress, UnixAddress, parse_target
from quire.rpc.tls import AUTHORITY_FILE
from tools.kubernetes_manifests import NAMESPACE, SETTINGS, Container, Manifests, Pod, known_variables, quantity
from worker_svc.settings import WorkerSettings

ROOT = Path(__file__).resolve().parent.parent
QUEUE_METRIC = "quire_scheduler_live_requests"
"""The metric by which replicas are scaled."""
_HEALTHCHECK = "/opt/quire/healthcheck.py"
Rule = Callable[[Manifests, list[Pod]], Iterator[str]]


def breaches(manifests: Manifests) -> list[str]:
    """All breaches. ConfigurationError if a service would not start with its flags and variables."""
    pods = manifests.pods()
    return [line for rule in RULES for line in rule(manifests, pods)]


def variables_are_known(manifests: Manifests, pods: list[Pod]) -> Iterator[str]:
    every = set().union(*map(known_variables, SETTINGS.values()))
    for config in manifests.of_kind("ConfigMap"):
        for name in sorted({name for name in config["data"] if name.startswith("QUIRE_")} - every):
            yield f"ConfigMap {config['metadata']['name']}: {name} is read by no service"
    for _, container in _containers(pods):
        own = {each["name"] for each in container.spec.get("env", ()) if each["name"].startswith("QUIRE_")}
        for name in sorted(own - known_variables(type(container.settings))):
            yield f"{container.name}: {name} is no variable of this service"
        for word in container.spec["args"]:
            for name in set(re.findall(r"\$\((\w+)\)", word)) - container.variables.keys():
                yield f"{container.name}: {word} names {name}, which is not set"


def ports_are_those_that_services_listen_on(manifests: Manifests, pods: list[Pod]) -> Iterator[str]:
    for _, container in _containers(pods):
        listens = container.listens()
        for address in listens:
            if address.host != "0.0.0.0":
                yield f"{container.name}: it listens on {address}, where no other pod reaches it"
        ports = {address.port for address in listens}
        if ports != set(container.ports.values()):
            yield f"{container.name}: it listens on {sorted(ports)}; its ports are {dict(container.ports)}"
    for pod in pods:
        if len(pod.ports) != len(set(pod.ports.values())) or len(pod.ports) != sum(
            len(c.ports) for c in pod.containers
        ):
            yield f"{pod.name}: two containers have the same port"


def probes_ask_the_service_itself(manifests: Manifests, pods: list[Pod]) -> Iterator[str]:
    has_script = f"{PurePosixPath(_HEALTHCHECK).name} {_HEALTHCHECK}" in (ROOT / "Dockerfile").read_text()
    for _, container in _containers(pods):
        asked = {container.address.replace("0.0.0.0", "127.0.0.1")}
        if isinstance(container.settings, GatewaySettings):
            asked = {f"unix:{container.settings.local_socket}"}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            program, script, *flags, address = container.spec[probe]["exec"]["command"]
            if (program, script, has_script) != ("python", _HEALTHCHECK, True):
                yield f"{container.name}: {probe} runs {program} {script}, which the image does not have"
            if address not in asked:
                yield f"{container.name}: {probe} asks {address}; the service answers at {', '.join(asked)}"
            if probe != "readinessProbe" and flags != ["--alive"]:
                yield f"{container.name}: {probe} restarts a service that only waits for another one; it needs --alive"


def requests_are_within_limits(manifests: Manifests, pods: list[Pod]) -> Iterator[str]:
    """The API server refuses a pod that requests more than its limit, which no schema says."""
    for _, container in _containers(pods):
        limits = container.spec["resources"].get("limits", {})
        for name, requested in container.spec["resources"].get("requests", {}).items():
            if name in limits and quantity(requested) > quantity(limits[name]):
                yield f"{container.name}: it requests {requested} of {name}; its limit is {limits[name]}"


def services_lead_to_ports_of_pods(manifests: Manifests, pods: list[Pod]) -> Iterator[str]:
    for service in manifests.of_kind("Service"):
        name, chosen = service["metadata"]["name"], _selected(service["spec"]["selector"], pods)
        if not chosen:
            yield f"Service {name}: its selector finds no pod"
        for pod in chosen:
            for port in service["spec"]["ports"]:
                # A headless Service leads to the pod's own port, and ignores its target port.
                headless = service["spec"].get("clusterIP") == "None"
                if headless and _gateway_is_inside(pod):
                    continue
                target = port["targetPort"]
                number = target if isinstance(target, int) else pod.ports.get(target)
                if number not in pod.ports.values() or (headless and number != port["port"]):
                    yield f"Service {name}: {port['port']} leads to {target} of {pod.name}, which has {dict(pod.ports)}"


def services_find_each_other(manifests: Manifests, pods: list[Pod]) -> Iterator[str]:
    """By sockets in a pod, else by names of headless Services or of their pods, past NetworkPolicies."""
    for pod, container in _containers(pods):
        for text in (*getattr(container.settings, "workers", ()), *getattr(container.settings, "schedulers", ())):
            address = parse_target(text)
            if isinstance(address, UnixAddress):
                yield from _socket_breaches(pod, container, text)
                continue
            if isinstance(address, DnsName):
                called = _behind(manifests, pods, address.host)
            else:
                # The first of several replicas stands for all.
                first = re.sub(r"-replica-\d+(?=[-.])", "-replica-0", address.host)
                called = [each for each in pods if _host_of(manifests, each) == first]
            if not called:
                there = ", ".join(sorted(filter(None, (_host_of(manifests, each) for each in pods))))
                yield f"{container.name}: no pod is at {address}; there are {there}"
            for each in called:
                if address.port not in each.ports.values():
                    yield f"{container.name}: nothing listens at {address}"
                elif not _lets_in(manifests, each, address.port, pod):
                    yield f"{each.name}: its NetworkPolicy does not let {pod.name} in"


def blocks_can_be_fetched(manifests: Manifests, pods: list[Pod]) -> Iterator[str]:
    """Workers say a name of their pod and a port that they have, past NetworkPolicies, where requests can move."""
    for pod, container in _containers(pods):
        if not isinstance(container.settings, WorkerSettings) or container.settings.transfer_listen is None:
            continue
        endpoint = parse_target(container.settings.transfer_endpoint or container.settings.listen)
        if not isinstance(endpoint, TcpAddress) or endpoint.host != _host_of(manifests, pod):
            yield f"{container.name}: its pod is not at {endpoint}"
        elif endpoint.port not in container.ports.values():
            yield f"{container.name}: nothing listens at {endpoint}"
        elif not all(_lets_in(manifests, pod, endpoint.port, each) for each in pods if each.name == "replica"):
            yield f"{pod.name}: its NetworkPolicy does not let other replicas in at {endpoint.port}"


def policies_name_numbers_of_ports(manifests: Manifests, pods: list[Pod]) -> Iterator[str]:
    """Some network plugins do not resolve names of sidecars' ports, and the policy would let no one in."""
    for policy in manifests.of_kind("NetworkPolicy"):
        chosen = _selected(policy["spec"]["podSelector"]["matchLabels"], pods)
        there = {port for pod in chosen for port in pod.ports.values()}
        for port in (each["port"] for rule in policy["spec"]["ingress"] for each in rule.get("ports", ())):
            if port not in there:
                yield f"NetworkPolicy {policy['metadata']['name']}: {port} is no number of a port of its pods"


def ranks_are_complete(manifests: Manifests, pods: list[Pod]) -> Iterator[str]:
    """Every rank of a replica is there once, all at the same rendezvous, and the scheduler calls each."""
    owners = {each.owner["metadata"]["name"]: None for each in pods}
    for owner in owners:
        yield from _rank_breaches([each for each in pods if each.owner["metadata"]["name"] == owner])


def _rank_breaches(pods: list[Pod]) -> Iterator[str]:
    """Breaches among the pods of one replica."""
    workers = [each for _, each in _containers(pods) if isinstance(each.settings, WorkerSettings)]
    schedulers = [each for _, each in _containers(pods) if each.service == "scheduler"]
    if not workers and not schedulers:
        return
    sizes = {each.settings.tensor_parallel_size for each in workers}
    ranks = sorted(each.settings.tensor_parallel_rank for each in workers)
    if {len(ranks)} != sizes or ranks != list(range(len(ranks))):
        yield f"workers: ranks {ranks} of {sorted(sizes)}"
    if len({each.settings.tensor_parallel_address for each in workers}) > 1:
        yield "workers: ranks meet at different addresses"
    for scheduler in schedulers:
        if len(scheduler.settings.workers) != len(ranks):
            yield f"scheduler: it has {len(scheduler.settings.workers)} workers of {len(ranks)}"


def files_are_mounted(manifests: Manifests, pods: list[Pod]) -> Iterator[str]:
    for pod, container in _containers(pods):
        for name in set(container.mounts.values()) - pod.volumes.keys():
            yield f"{container.name}: there is no volume {name}"
        for path in _files_of(container):
            secret = pod.volumes.get(container.mounts.get(str(path.parent), ""), {}).get("secret", {})
            if path.name not in _files_in(secret):
                yield f"{container.name}: {path} is in no secret that is mounted"


def a_stop_leaves_time_to_drain(manifests: Manifests, pods: list[Pod]) -> Iterator[str]:
    """Containers of a pod end one after the other; containers that others need end last."""
    for pod in pods:
        needed_s = 0.0
        for container in pod.containers:
            pause = container.spec.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ("0",))
            needed_s += float(pause[-1]) + getattr(container.settings, "drain_timeout", 0.0)
        if pod.spec["terminationGracePeriodSeconds"] <= needed_s:
            yield f"{pod.name}: terminationGracePeriodSeconds must be above {needed_s:g}"
        services = [each.service for each in pod.containers]
        if services != sorted(services, key=["worker", "scheduler", "gateway"].index):
            yield f"{pod.name}: {', '.join(services)} start in this order, and end in the opposite one"


def gateways_stay_while_requests_wait(manifests: Manifests, pods: list[Pod]) -> Iterator[str]:
    """All of them stop serving when the last worker is lost, and would be taken from their Services at once."""
    for pod, container in _containers(pods):
        if isinstance(container.settings, GatewaySettings) and not _gateway_is_inside(pod):
            probe, waits_s = container.spec["readinessProbe"], container.settings.connect_timeout
            leaves_s = probe.get("periodSeconds", 10) * probe.get("failureThreshold", 3)
            if leaves_s <= waits_s:
                yield f"{container.name}: readinessProbe takes it out after {leaves_s} s; requests wait {waits_s:g} s"


def custom_resources_speak_of_what_is_there(manifests: Manifests, pods: list[Pod]) -> Iterator[str]:
    """Scalers name workloads and use the queue metric; selectors and routes find pods and their ports."""
    workloads = {(each.owner["kind"], each.owner["metadata"]["name"]) for each in pods}
    for scaler in manifests.of_kind("HorizontalPodAutoscaler", "ScaledObject"):
        target = scaler["spec"]["scaleTargetRef"]
        if (target["kind"], target["name"]) not in workloads:
            yield f"{scaler['kind']}: there is no {target['kind']} {target['name']}"
        for queue in ("waiting", "running"):
            if not any(QUEUE_METRIC in text and queue in text for text in _metrics_of(scaler)):
                yield f"{scaler['kind']}: it does not look at {QUEUE_METRIC} of queue {queue}"
    for kind, selector in (
        ("PodDisruptionBudget", "selector"),
        ("PodMonitor", "selector"),
        ("InferencePool", "selector"),
    ):
        for document in manifests.of_kind(kind):
            name, chosen = document["metadata"]["name"], _selected(document["spec"][selector]["matchLabels"], pods)
            if not chosen:
                yield f"{kind} {name}: its selector finds no pod"
            ports = {port for pod in chosen for port in (*pod.ports, *pod.ports.values())}
            asked = [each["port"] for each in document["spec"].get("podMetricsEndpoints", ())]
            asked += [each["number"] for each in document["spec"].get("targetPorts", ())]
            for port in (each for each in asked if each not in ports and each != "metrics"):
                yield f"{kind} {name}: no pod has the port {port}"


RULES: tuple[Rule, ...] = (
    variables_are_known,
    ports_are_those_that_services_listen_on,
    probes_ask_the_service_itself,
    requests_are_within_limits,
    services_lead_to_ports_of_pods,
    services_find_each_other,
    ranks_are_complete,
    blocks_can_be_fetched,
    policies_name_numbers_of_ports,
    files_are_mounted,
    a_stop_leaves_time_to_drain,
    gateways_stay_while_requests_wait,
    custom_resources_speak_of_what_is_there,
)


def _containers(pods: list[Pod]) -> Iterator[tuple[Pod, Container]]:
    return ((pod, container) for pod in pods for container in pod.containers)


def _gateway_is_inside(pod: Pod) -> bool:
    return len({each.service for each in pod.containers}) == len(SETTINGS)


def _selected(selector: Mapping[str, str], pods: list[Pod]) -> list[Pod]:
    return [pod for pod in pods if selector.items() <= pod.labels.items()]


def _behind(manifests: Manifests, pods: list[Pod], host: str) -> list[Pod]:
    """The pods whose addresses a headless Service of this name has."""
    return [
        pod
        for service in manifests.of_kind("Service")
        if service["spec"].get("clusterIP") == "None" and f"{service['metadata']['name']}.{NAMESPACE}.svc" == host
        for pod in _selected(service["spec"]["selector"], pods)
    ]


def _host_of(manifests: Manifests, pod: Pod) -> str | None:
    """The name by which other pods find it; None if no headless Service gives it one."""
    if pod.owner["kind"] == "LeaderWorkerSet":  # Its controller makes the Service.
        return f"{pod.hostname}.{pod.owner['metadata']['name']}.{NAMESPACE}.svc"
    service = pod.owner["spec"].get("serviceName")
    headless = {each["metadata"]["name"] for each in manifests.of_kind("Service") if each["spec"].get("clusterIP")}
    return f"{pod.hostname}.{service}.{NAMESPACE}.svc" if service in headless else None


def _socket_breaches(pod: Pod, container: Container, address: str) -> Iterator[str]:
    """Both ends of a socket are in one pod, and see its directory as the same volume."""
    directory = str(PurePosixPath(address.removeprefix("unix:")).parent)
    called = [each for each in pod.containers if each.address == address]
    if not called:
        yield f"{container.name}: no container of its pod listens on {address}"
    for each in called:
        if container.mounts.get(directory) is None or container.mounts[directory] != each.mounts.get(directory):
            yield f"{container.name}: it shares no volume at {directory} with {each.name}"


def _lets_in(manifests: Manifests, called: Pod, port: int, caller: Pod) -> bool:
    """Whether all policies of a pod together let another one connect to a port; without any, every pod may."""
    policies = [each["spec"] for each in manifests.of_kind("NetworkPolicy")]
    own = [spec for spec in policies if _selected(spec["podSelector"]["matchLabels"], [called])]
    return not own or any(_allows(rule, port, caller) for spec in own for rule in spec["ingress"])


def _allows(rule: Mapping[str, Any], port: int, caller: Pod) -> bool:
    if "ports" in rule and port not in {each["port"] for each in rule["ports"]}:
        return False
    return "from" not in rule or any(_selected(each["podSelector"]["matchLabels"], [caller]) for each in rule["from"])


def _files_of(container: Container) -> list[PurePosixPath]:
    """The files of secrets that the service reads."""
    settings, files = container.settings, []
    if settings.tls_dir is not None:
        role = container.service
        files = [PurePosixPath(settings.tls_dir) / name for name in (AUTHORITY_FILE, f"{role}.pem", f"{role}.key")]
    if isinstance(settings, GatewaySettings):
        more = (*settings.keys_files, settings.public_cert, settings.public_key)
        files += [PurePosixPath(path) for path in more if path is not None]
    return files


def _files_in(secret: Mapping[str, Any]) -> set[str]:
    """The files of a Secret's volume: as it names them, else as the commands of docs/deploying.md make them."""
    if "items" in secret:
        return {each["path"] for each in secret["items"]}
    role = secret.get("secretName", "").removesuffix("-certs")
    return {"keys.json"} if role == "api-keys" else {AUTHORITY_FILE, f"{role}.pem", f"{role}.key"}


def _metrics_of(scaler: Mapping[str, Any]) -> list[str]:
    return [str(each) for each in scaler["spec"].get("metrics", scaler["spec"].get("triggers", ()))]
