"""Containers of deploy/, run as processes: commands, variables, certificates and health checks."""

import asyncio
import configparser
import contextlib
import os
import re
import shlex
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import zmq
import zmq.asyncio
from prometheus_client.parser import text_string_to_metric_families

from quire.client import AsyncClient, ClientTls, GenerationOptions
from quire.testing import free_port
from quire_cli.main import main
from quire_cli.supervisor.commands import child_environ
from tests.support.compose import COMPOSE, ROOT, WITH_TLS, default_of, services_of
from tests.support.keys import KeysFile
from tools.check_kubernetes import DEFAULT, RENDERED
from tools.kubernetes_manifests import Manifests

_POLL_INTERVAL_S = 0.2


@dataclass(frozen=True)
class Container:
    """A container as an orchestrator would start it.

    Attributes:
        arguments: Arguments of `quire`.
        health: The command that says whether it serves.
        mounts: Folders of this machine by the paths that they have inside.
    """

    arguments: Sequence[str]
    environment: Mapping[str, str]
    health: Sequence[str]
    mounts: Mapping[str, Path]


def containers_of_pods(file: Path, folder: Path, certificates: Path) -> Mapping[str, Container]:
    """All containers of all pods of rendered manifests, in the order in which they start.

    `folder` is mounted in place of all volumes except `certificates`, which has a directory for each role.
    """
    return {
        container.name: Container(
            container.arguments,
            container.variables,
            container.spec["readinessProbe"]["exec"]["command"],
            dict.fromkeys(container.mounts, folder) | {"/certs": certificates / container.service},
        )
        for pod in reversed(Manifests.read(file).pods())
        for container in pod.containers
    }


class Machine:
    """One machine that stands in for a network of containers."""

    def __init__(
        self, containers: Mapping[str, Container], ports: Sequence[str], own_ports: Sequence[str] = ()
    ) -> None:
        """`ports` and `own_ports` are ports inside; containers may share one of `own_ports`, if no other calls it."""
        self._containers = containers
        self._ports = {port: str(free_port()) for port in ports} | dict.fromkeys(own_ports, "0")

    def port(self, inside: str) -> str:
        return self._ports[inside]

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Runs all containers, and waits until they are healthy."""
        async with contextlib.AsyncExitStack() as stack:
            for container in self._containers.values():
                await stack.enter_async_context(self._process(container))
            for container in self._containers.values():
                await self._until_healthy(container)
            yield

    @contextlib.asynccontextmanager
    async def _process(self, container: Container) -> AsyncIterator[None]:
        words = [self._here(word, container) for word in container.arguments]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "quire_cli.main", *words),
            env=self._environment(container),
            stdout=asyncio.subprocess.DEVNULL,
        )
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            async with asyncio.timeout(60):
                await process.wait()

    async def _until_healthy(self, container: Container) -> None:
        _, script, *words = container.health
        command = (sys.executable, str(ROOT / "deploy" / Path(script).name))
        words = [self._here(word, container) for word in words]
        while True:
            process = await asyncio.create_subprocess_exec(
                *command, *words, env=self._environment(container), stdout=asyncio.subprocess.DEVNULL
            )
            if await process.wait() == 0:
                return
            await asyncio.sleep(_POLL_INTERVAL_S)

    def _environment(self, container: Container) -> dict[str, str]:
        given = {name: self._here(value, container) for name, value in container.environment.items()}
        return child_environ(os.environ) | given | {"QUIRE_NUM_THREADS": "1"}

    def _here(self, word: str, container: Container) -> str:
        """A word of a command line, translated to this machine: hosts are all this one, ports and folders differ."""
        word = re.sub(r"\b0\.0\.0\.0\b", "127.0.0.1", word)
        word = re.sub(r"(?<==)[a-z][\w.-]*(?=:\d+$)|^[a-z][\w.-]*(?=:\d+$)", "127.0.0.1", word)
        word = re.sub(r"(?<=dns:///)[a-z][\w.-]*(?=:\d+$)", "127.0.0.1", word)
        word = re.sub(r"(?<![\w.])\d{4,5}$", lambda match: self._ports.get(match[0], match[0]), word)
        insides = "|".join(container.mounts)
        return re.sub(rf"(?:^|(?<=[=:]))(?:{insides})(?=/|$)", lambda match: str(container.mounts[match[0]]), word)


pytestmark = pytest.mark.extended

DEPLOYING = ROOT / "docs" / "deploying.md"
SERVICES = ("worker", "scheduler", "gateway")
TIMEOUT_S = 200
GREEDY = GenerationOptions(temperature=0.0, max_tokens=4, ignore_eos=True)


def certificates_of(file: Path, directory: Path) -> Path:
    """Certificates that the last command in the file makes."""
    lines = (line.removeprefix("#").strip() for line in file.read_text(encoding="utf-8").splitlines())
    # A command may continue on the next line.
    commands = "\n".join(lines).replace("\\\n", "").splitlines()
    words = shlex.split([line for line in commands if line.startswith("quire certs ")][-1])
    words[words.index("--tls-dir") + 1] = str(directory)
    assert main(words[1:]) == 0
    return directory


def compose_containers(certificates: Path, directory: Path) -> Mapping[str, Container]:
    services = services_of(COMPOSE, WITH_TLS)
    return {
        name: Container(
            services[name]["command"],
            {key: default_of(value) for key, value in services[name]["environment"].items()},
            services[name]["healthcheck"]["test"][1:],
            {"/certs": certificates / name, "/tmp": directory},
        )
        for name in SERVICES
    }


def units(certificates: Path, directory: Path) -> Mapping[str, Container]:
    """Commands of the systemd units, with the variables that the document gives each service."""
    text = DEPLOYING.read_text(encoding="utf-8")
    found = {}
    for name in SERVICES:
        unit = configparser.ConfigParser(strict=False)
        unit.read(ROOT / "deploy" / "systemd" / f"quire-{name}.service")
        program, *arguments = shlex.split(unit["Service"]["ExecStart"])
        assert program == "/opt/quire/bin/quire"
        variables: dict[str, str] = {}
        for file in ("quire", name):
            (block,) = re.findall(rf"`/etc/quire/{file}\.env`[^`]*```sh\n(.*?)```", text, re.DOTALL)
            variables |= dict(line.split("=", 1) for line in block.splitlines())
        variables.pop("QUIRE_MODEL", None)
        if name == "gateway":  # The default ports are taken here.
            variables |= {"QUIRE_GRPC_PORT": "50051", "QUIRE_HTTP_PORT": "8000"}
        port = variables.get("QUIRE_LISTEN", "0.0.0.0:50051")
        mounts = {"/etc/quire/certs": certificates / name, "/etc/quire": directory}
        found[name] = Container(arguments, variables, ("python", "healthcheck.py", port), mounts)
    return found


async def check_answers(address: str, tls: ClientTls | None = None, api_key: str | None = None) -> None:
    async with AsyncClient(address, tls=tls, api_key=api_key) as client:
        answer = await client.generate("What is 2+2?", GREEDY)
    assert answer.sequences[0].text


@pytest.mark.long
async def test_compose_with_tls_serves(tmp_path: Path) -> None:
    certificates = certificates_of(WITH_TLS, tmp_path / "certs")
    machine = Machine(compose_containers(certificates, tmp_path), ("50051", "50052", "50053", "8000"), ("9400",))
    async with asyncio.timeout(TIMEOUT_S), machine.running():
        await check_answers(f"127.0.0.1:{machine.port('50051')}", ClientTls(certificates / "ca.pem"))


async def test_the_kubernetes_manifests_serve(tmp_path: Path) -> None:
    certificates = certificates_of(DEPLOYING, tmp_path / "certs")
    api_key = KeysFile(tmp_path / "keys.json").add("acme")
    machine = Machine(
        containers_of_pods(DEFAULT, tmp_path, certificates),
        ("50051", "50052", "8000", "9400", "9401", "9410"),
        ("9500", "9501", "9510"),
    )
    async with asyncio.timeout(TIMEOUT_S), machine.running():
        address = f"127.0.0.1:{machine.port('50051')}"
        await check_answers(address, ClientTls(certificates / "ca.pem"), api_key)


@pytest.mark.long
async def test_the_units_of_systemd_serve(tmp_path: Path) -> None:
    certificates = certificates_of(DEPLOYING, tmp_path / "certs")
    api_key = KeysFile(tmp_path / "keys.json").add("acme")
    machine = Machine(units(certificates, tmp_path), ("50051", "50052", "50053", "8000"))
    async with asyncio.timeout(TIMEOUT_S), machine.running():
        await check_answers(f"127.0.0.1:{machine.port('50051')}", ClientTls(certificates / "ca.pem"), api_key)


# From docs/proposals/003-model-server-protocol in kubernetes-sigs/gateway-api-inference-extension, August 2026.
GAUGES_OF_THE_PROTOCOL = {
    *("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"),
    *("vllm:cache_config_info", "vllm:lora_requests_info"),
}


@pytest.mark.long
async def test_a_pod_of_an_inference_pool_shows_what_its_endpoint_picker_reads(tmp_path: Path) -> None:
    """tests/service/gateway/test_vllm_metric_names.py tests the values of the metrics."""
    containers = containers_of_pods(RENDERED / "inference-pool.yaml", tmp_path, tmp_path)
    machine = Machine(containers, ("50051", "8000", "9400", "9401", "9410", "5557", "5558"))
    url = f"http://127.0.0.1:{machine.port('8000')}"
    async with asyncio.timeout(TIMEOUT_S), machine.running(), httpx.AsyncClient(base_url=url, timeout=60) as http:
        families = {each.name: each for each in text_string_to_metric_families((await http.get("/metrics")).text)}
        assert {name for name in GAUGES_OF_THE_PROTOCOL if families[name].type != "gauge"} == set()
        labels = families["vllm:cache_config_info"].samples[0].labels
        assert int(labels["block_size"]) == 16
        assert int(labels["num_gpu_blocks"]) > 0
        with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as socket:
            socket.subscribe(b"kv@")
            # The other port replays earlier events.
            socket.connect(f"tcp://127.0.0.1:{machine.port('5557')}")
            topic = None
            while topic is None:
                body = {"prompt": f"{time.monotonic()} there was a fox. " * 9, "max_tokens": 1}
                assert (await http.post("/v1/completions", json=body)).is_success
                if await socket.poll(1000):
                    topic = (await socket.recv_multipart())[0]
        assert topic.endswith(b"@quire-tiny")
