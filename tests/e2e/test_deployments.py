"""What deploy/ would start in containers, run as processes: commands, variables, certificates and health checks."""

import asyncio
import configparser
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

import pytest

from quire.client import AsyncClient, ClientTls, GenerationOptions
from quire_cli.main import main
from tests.support.compose import COMPOSE, ROOT, WITH_TLS, default_of, services_of
from tests.support.containers import Container, Machine, containers_of_pods
from tests.support.keys import KeysFile
from tools.check_kubernetes import DEFAULT

pytestmark = pytest.mark.extended

DEPLOYING = ROOT / "docs" / "deploying.md"
SERVICES = ("worker", "scheduler", "gateway")
TIMEOUT_S = 200
GREEDY = GenerationOptions(temperature=0.0, max_tokens=4, ignore_eos=True)


def certificates_of(file: Path, directory: Path) -> Path:
    """Made by the last command that stands in the file."""
    lines = (line.removeprefix("#").strip() for line in file.read_text(encoding="utf-8").splitlines())
    # A command may go on in the next line.
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
    """Commands of the units of systemd, with the variables that the document gives each service."""
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
        if name == "gateway":  # By default, which is taken here.
            variables |= {"QUIRE_GRPC_PORT": "50051", "QUIRE_HTTP_PORT": "8000"}
        port = variables.get("QUIRE_LISTEN", "0.0.0.0:50051")
        mounts = {"/etc/quire/certs": certificates / name, "/etc/quire": directory}
        found[name] = Container(arguments, variables, ("python", "healthcheck.py", port), mounts)
    return found


async def check_answers(address: str, tls: ClientTls | None = None, api_key: str | None = None) -> None:
    async with AsyncClient(address, tls=tls, api_key=api_key) as client:
        answer = await client.generate("What is 2+2?", GREEDY)
    assert answer.sequences[0].text


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


async def test_the_units_of_systemd_serve(tmp_path: Path) -> None:
    certificates = certificates_of(DEPLOYING, tmp_path / "certs")
    api_key = KeysFile(tmp_path / "keys.json").add("acme")
    machine = Machine(units(certificates, tmp_path), ("50051", "50052", "50053", "8000"))
    async with asyncio.timeout(TIMEOUT_S), machine.running():
        await check_answers(f"127.0.0.1:{machine.port('50051')}", ClientTls(certificates / "ca.pem"), api_key)
