"""The output of the Helm chart, and the faults that its check finds. tests/unit/tools shows that it has none."""

import copy
import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from tests.support.compose import ROOT
from tools.check_kubernetes import (
    DEFAULT,
    RENDERED,
    custom_problems,
    problems,
    read_schemas,
    render,
    schema_problems,
)
from tools.kubernetes_manifests import RELEASE, Manifests, documents_of

RANKS, POOL, GPU = (RENDERED / name for name in ("ranks.yaml", "inference-pool.yaml", "gpu.yaml"))
Change = Callable[[dict[str, Any]], Any]


read = functools.cache(Manifests.read)


def changed(file: Path, kind: str, name: str, change: Change) -> Manifests:
    manifests = read(file)
    documents = copy.deepcopy(manifests.documents)
    (document,) = (each for each in documents if (each["kind"], each["metadata"]["name"]) == (kind, name))
    change(cast(dict[str, Any], document))
    return dataclasses.replace(manifests, documents=documents)


def container_of(document: dict[str, Any], name: str) -> dict[str, Any]:
    spec = document["spec"]
    template = spec["template"] if "template" in spec else spec["leaderWorkerTemplate"]["leaderTemplate"]
    containers = [*template["spec"].get("initContainers", ()), *template["spec"]["containers"]]
    return next(each for each in containers if each["name"] == name)


def replaced(container: str, argument: str, by: str) -> Change:
    """Replaces an argument."""

    def change(document: dict[str, Any]) -> None:
        arguments = container_of(document, container)["args"]
        arguments[arguments.index(argument)] = by

    return change


def set_to(value: Any, *path: str | int) -> Change:
    """Sets a field of the document, or of a container if the path begins with its name."""

    def change(document: dict[str, Any]) -> None:
        target: Any = document if path[0] == "spec" else container_of(document, str(path[0]))
        steps = path if path[0] == "spec" else path[1:]
        for step in steps[:-1]:
            target = target[step]
        target[steps[-1]] = value

    return change


WITHOUT_READERS = {
    "gateway": {"placement": "replicas"},
    "inferencePool": {"enabled": True, "kvEvents": {"enabled": True, "model": "tiny"}},
}


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"replica": {"nodes": 0}}, "nodes"),
        ({"replica": {"worker": {"device": "tpu"}}}, "device"),
        ({"replica": {"roles": {"draft": {"count": 1}}}}, "draft"),
        ({"replica": {"roles": {"decode": {}}}}, "count"),
        ({"replica": {"roles": {"decode": {"count": 1}}}, "autoscaling": {"kind": "hpa"}}, "and no autoscaling"),
        ({"replica": {"roles": {"decode": {"count": 1}}, "nodes": 2}}, "needs one node a replica"),
        ({"settings": {"LOG_LEVEL": "info"}}, "LOG_LEVEL"),
        ({"inferencePool": {"enabled": True}}, "gateway.placement: replicas"),
        ({"httpRoute": {"enabled": True}}, "httpRoute.parentRefs is empty"),
        ({"httpRoute": {"enabled": True, "parentRefs": [{"name": "outside"}]}}, "httpRoute.backendCA is empty"),
        (WITHOUT_READERS, "kvEvents.from is empty"),
        ({"autoscaling": {"kind": "keda", "min": 5}}, "autoscaling.min is 5, above autoscaling.max, 4"),
        # A token belongs in a Secret, which few may read.
        ({"settings": {"HF_TOKEN": "hf_x"}}, "settings.HF_TOKEN: a ConfigMap shows it"),
        # A setting that the chart also sets would have no effect.
        ({"settings": {"QUIRE_MODEL": "/models/a"}}, "settings.QUIRE_MODEL: the chart sets it"),
        # null removes a default that a template would read.
        ({"tls": None}, "tls"),
        # Helm drops fields that Kubernetes does not know, or writes values of another type.
        ({"replica": {"worker": {"resources": {"request": {"cpu": 1}}}}}, "request"),
        ({"gateway": {"keysSecret": "a: b"}}, "keysSecret"),
    ],
)
def test_helm_refuses_values_of_which_nothing_good_would_come(values: Mapping[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=re.escape(named)):
        render(values)


def test_replicas_of_a_role_have_its_flag_and_values_of_their_own() -> None:
    roles = {"prefill": {"count": 1}, "decode": {"count": 3, "worker": {"args": ["--swap-space=1GiB"]}}}
    manifests = made_with({"replica": {"roles": roles, "worker": {"args": ["--block-size=32"]}}})
    assert problems(manifests) == []
    replicas = {pod.hostname: pod for pod in manifests.pods() if pod.name == "replica"}
    prefill, decode = replicas["quire-replica-prefill-0"], replicas["quire-replica-decode-0"]
    assert [each.container("scheduler").settings.role for each in (prefill, decode)] == ["prefill", "decode"]
    assert [each.owner["spec"]["replicas"] for each in (prefill, decode)] == [1, 3]
    assert prefill.container("worker").settings.block_size == 32
    assert decode.container("worker").settings.swap_space == 1 << 30


def test_names_of_releases_make_names_that_kubernetes_allows_or_are_refused() -> None:
    for name in ("my.release", "1quire"):
        with pytest.raises(ValueError, match="must begin with a letter and have no dot"):
            render({}, name)
    for name in ("a" * 53, "a" * 38 + "--" + "b" * 13):
        manifests = made_with({}, name)
        assert all(len(each["metadata"]["name"]) <= 52 for each in manifests.documents)
        # A label of pods and of their revisions is their name, of at most 63 characters.
        assert not any("--" in each["metadata"]["name"] for each in manifests.documents)


def test_text_stays_text_and_numbers_keep_all_their_digits() -> None:
    manifests = made_with({"gateway": {"keysSecret": "123"}, "images": {"gateway": "host:1/gateway # 2"}})
    (gateway,) = (pod for pod in manifests.pods() if pod.name == "gateway")
    assert gateway.volumes["keys"]["secret"]["secretName"] == "123"
    assert gateway.container("gateway").spec["image"] == "host:1/gateway # 2"
    settings = {"QUIRE_KV_CACHE_MEMORY": 4294967296, "QUIRE_MAX_PREFILL_SHARE": 0.25, "QUIRE_MAX_NUM_SEQS": 1000000}
    (config,) = made_with({"settings": settings}).of_kind("ConfigMap")
    assert {name: config["data"][name] for name in settings} == {name: str(value) for name, value in settings.items()}
    scaled = made_with({"autoscaling": {"kind": "hpa", "runningPerReplica": 1000000}})
    (hpa,) = scaled.of_kind("HorizontalPodAutoscaler")
    assert hpa["spec"]["metrics"][0]["pods"]["target"]["averageValue"] == "1000000"


@pytest.mark.parametrize("placement", ["pods", "replicas"])
def test_pods_wait_for_as_long_as_the_settings_say(placement: str) -> None:
    """By default a pod gets 50 s to stop; a longer time to drain would end in the middle of answers."""
    settings = {"QUIRE_DRAIN_TIMEOUT": 300, "QUIRE_CONNECT_TIMEOUT": "95.5"}
    manifests = made_with({"gateway": {"placement": placement}, "settings": settings})
    assert problems(manifests) == []
    (gateway,) = (each for pod in manifests.pods() for each in pod.containers if each.service == "gateway")
    assert (gateway.settings.drain_timeout, gateway.settings.connect_timeout) == (300, 95.5)


def test_what_nobody_should_read_comes_from_a_secret() -> None:
    manifests = made_with({"settingsSecret": "more"})
    assert problems(manifests) == []
    sources = [each.spec["envFrom"] for pod in manifests.pods() for each in pod.containers]
    assert sources == [[{"configMapRef": {"name": "quire-settings"}}, {"secretRef": {"name": "more"}}]] * 3


def made_with(values: Mapping[str, Any], release: str = RELEASE) -> Manifests:
    return Manifests(tuple(documents_of(render(values, release))))


@pytest.mark.parametrize("values", [{"model": {"name": "/models/other"}}, {"settings": {"QUIRE_LOG_LEVEL": "debug"}}])
def test_a_change_of_the_model_or_of_a_setting_makes_all_pods_anew(values: Mapping[str, Any]) -> None:
    before, after = (
        [pod.template["metadata"]["annotations"]["checksum/settings"] for pod in manifests.pods()]
        for manifests in (read(DEFAULT), made_with(values))
    )
    assert len(before) == len(after) == 2
    assert not set(before) & set(after)


def test_a_worker_starts_as_many_threads_as_it_requests_processors() -> None:
    def threads_with(values: Mapping[str, Any]) -> int | None:
        (replica,) = (pod for pod in made_with(values).pods() if pod.name == "replica")
        return replica.container("worker").settings.num_threads

    requests = {"replica": {"worker": {"resources": {"requests": {"cpu": "3500m"}}}}}
    assert threads_with(requests) == 4
    assert threads_with({**requests, "settings": {"QUIRE_NUM_THREADS": 2}}) == 2


def test_rules_alerts_and_names_of_jobs_are_those_of_compose() -> None:
    (rule,) = read(GPU).of_kind("PrometheusRule")
    files = [ROOT / "deploy" / "prometheus" / name for name in ("rules.yaml", "alerts.yaml")]
    assert rule["spec"]["groups"] == [g for file in files for g in yaml.safe_load(file.read_text("utf-8"))["groups"]]
    (rule,) = made_with({"prometheusRule": {"enabled": True, "runbook": "https://host/r"}}).of_kind("PrometheusRule")
    links = [each["annotations"]["runbook_url"] for each in rule["spec"]["groups"][1]["rules"]]
    assert links[0] == "https://host/r#quiretargetdown"
    (monitor,) = read(RANKS).of_kind("PodMonitor")
    jobs = {each["relabelings"][0]["replacement"] for each in monitor["spec"]["podMetricsEndpoints"]}
    config = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yaml").read_text(encoding="utf-8"))
    assert jobs == {each["job_name"] for each in config["scrape_configs"]}


POD = ("spec", "template", "spec")
GATEWAY, REPLICA = (DEFAULT, "Deployment", "quire-gateway"), (DEFAULT, "StatefulSet", "quire-replica")
OF_RANKS = (RANKS, "LeaderWorkerSet", "quire-replica")
# A document, a change in it, and a part of the check's message.
BROKEN = [
    (GATEWAY, replaced("gateway", "--grpc-port=50051", "--grpc-prot=50051"), "--grpc-prot=50051"),
    (
        (DEFAULT, "ConfigMap", "quire-settings"),
        lambda config: config["data"].update(QUIRE_LOG_LEVLE="info"),
        "quire-settings: QUIRE_LOG_LEVLE is read by no service",
    ),
    (REPLICA, set_to(50099, "scheduler", "ports", 0, "containerPort"), "scheduler: it listens on [9401, 50052]"),
    (
        (DEFAULT, "Service", "quire-gateways"),
        set_to({"app.kubernetes.io/component": "gate"}, "spec", "selector"),
        "Service quire-gateways: its selector finds no pod",
    ),
    (
        OF_RANKS,
        replaced("worker-1", "--tensor-parallel-rank=1", "--tensor-parallel-rank=0"),
        "workers: ranks [0, 0, 2, 3] of [4]",
    ),
    (
        (POOL, "StatefulSet", "quire-replica"),
        set_to(68, *POD, "terminationGracePeriodSeconds"),
        "replica: terminationGracePeriodSeconds must be above 68",
    ),
]


@pytest.mark.parametrize(("document", "change", "problem"), BROKEN, ids=[problem for _, _, problem in BROKEN])
def test_what_does_not_fit_is_found(document: tuple[Path, str, str], change: Change, problem: str) -> None:
    assert [line for line in problems(changed(*document, change)) if problem in line]


def test_a_field_that_no_schema_has_or_of_another_type_is_found() -> None:
    for change, named in (
        (lambda document: document["spec"].update(replica=2), "'replica'"),
        (set_to("grpc", "scheduler", "ports", 0, "containerPort"), "'grpc'"),
    ):
        found = list(schema_problems(changed(*REPLICA, change)))
        assert found
        assert all(line.startswith("StatefulSet quire-replica: ") and named in line for line in found)


@pytest.mark.parametrize(
    ("file", "kind", "name", "change", "found"),
    [
        (POOL, "InferencePool", "quire", set_to("Sometimes", "spec", "endpointPickerRef", "failureMode"), "Sometimes"),
        (POOL, "InferencePool", "quire", set_to([{"number": 8000}] * 9, "spec", "targetPorts"), "is too long"),
        (POOL, "HTTPRoute", "quire", set_to([], "spec", "rulez"), "rulez"),
        (GPU, "PodMonitor", "quire", set_to("yes", "spec", "podMetricsEndpoints", 0, "honorLabels"), "honorLabels"),
        (GPU, "ScaledObject", "quire-replica", set_to("two", "spec", "minReplicaCount"), "two"),
    ],
)
def test_resources_of_other_projects_fit_their_definitions_and_no_unknown_field_passes(
    file: Path, kind: str, name: str, change: Change, found: str
) -> None:
    schemas = read_schemas()
    assert list(custom_problems(read(file), schemas)) == []
    assert found in " ".join(custom_problems(changed(file, kind, name, change), schemas))


@pytest.mark.parametrize("file", sorted(RENDERED.iterdir()), ids=lambda file: file.stem)
def test_network_policies_name_numbers_of_ports(file: Path) -> None:
    """Some network plugins do not resolve names of sidecars' ports."""
    rules = [rule for policy in read(file).of_kind("NetworkPolicy") for rule in policy["spec"]["ingress"]]
    ports = [port["port"] for rule in rules for port in rule.get("ports", ())]
    assert ports
    assert all(isinstance(port, int) for port in ports)
    named = set_to("metrics", "spec", "ingress", 0, "ports", 0, "port")
    assert any("is no number" in each for each in problems(changed(file, "NetworkPolicy", "quire-replica", named)))
