"""What deploy/ would start in containers, run as processes: commands, variables, certificates and health checks."""

import asyncio
import shlex
from collections.abc import Mapping
from pathlib import Path

import pytest

from quire.cli.main import main
from quire.client import AsyncClient, ClientTls, GenerationOptions
from tests.support.compose import COMPOSE, WITH_TLS, default_of, services_of
from tests.support.containers import Container, Machine
from tests.support.keys import KeysFile
from tools.check_kubernetes import DIRECTORY
from tools.kubernetes_manifests import Manifests

pytestmark = pytest.mark.extended

SERVICES = ("worker", "scheduler", "gateway")
TIMEOUT_S = 60
GREEDY = GenerationOptions(temperature=0.0, max_tokens=4, ignore_eos=True)


def certificates_of(file: Path, directory: Path) -> Path:
    """Made by the command that stands at the head of the file."""
    lines = (line.removeprefix("#").strip() for line in file.read_text(encoding="utf-8").splitlines())
    # A command may go on in the next line.
    commands = "\n".join(lines).replace("\\\n", "").splitlines()
    words = shlex.split(next(line for line in commands if line.startswith("quire certs ")))
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


def kubernetes_containers(certificates: Path, directory: Path, keys: Path) -> Mapping[str, Container]:
    pods = {pod.name: pod for pod in Manifests.read(DIRECTORY).pods()}
    return {
        name: Container(
            pods[name].arguments,
            pods[name].variables,
            pods[name].container["readinessProbe"]["exec"]["command"],
            {"/certs": certificates / name, "/tmp": directory, "/keys": keys},
        )
        for name in SERVICES
    }


async def check_answers(address: str, certificates: Path, api_key: str | None = None) -> None:
    async with AsyncClient(address, tls=ClientTls(certificates / "ca.pem"), api_key=api_key) as client:
        answer = await client.generate("What is 2+2?", GREEDY)
    assert answer.sequences[0].text


async def test_compose_with_tls_serves(tmp_path: Path) -> None:
    certificates = certificates_of(WITH_TLS, tmp_path / "certs")
    machine = Machine(compose_containers(certificates, tmp_path), ("50051", "50052", "50053", "8000"))
    async with asyncio.timeout(TIMEOUT_S), machine.running():
        await check_answers(f"127.0.0.1:{machine.port('50051')}", certificates)


async def test_the_kubernetes_manifests_serve(tmp_path: Path) -> None:
    certificates = certificates_of(DIRECTORY / "kustomization.yaml", tmp_path / "certs")
    api_key = KeysFile(tmp_path / "keys.json").add("acme")
    containers = kubernetes_containers(certificates, tmp_path, tmp_path)
    machine = Machine(containers, ("50051", "50052", "50053", "8000"), own_ports=("9400",))
    async with asyncio.timeout(TIMEOUT_S), machine.running():
        await check_answers(f"127.0.0.1:{machine.port('50051')}", certificates, api_key)
