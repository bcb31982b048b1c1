"""What deploy/ would start in containers, run as processes: commands, variables, certificates and health checks."""

import asyncio
import configparser
import re
import shlex
import time
from collections.abc import Mapping
from pathlib import Path

import httpx
import pytest
import zmq
import zmq.asyncio
from prometheus_client.parser import text_string_to_metric_families

from quire.client import AsyncClient, ClientTls, GenerationOptions
from quire_cli.main import main
from tests.support.compose import COMPOSE, ROOT, WITH_TLS, default_of, services_of
from tests.support.containers import Container, Machine, containers_of_pods
from tests.support.keys import KeysFile
from tools.check_kubernetes import DEFAULT, RENDERED

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


# Of docs/proposals/003-model-server-protocol in kubernetes-sigs/gateway-api-inference-extension, August 2026.
GAUGES_OF_THE_PROTOCOL = {
    *("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"),
    *("vllm:cache_config_info", "vllm:lora_requests_info"),
}


async def test_a_pod_of_an_inference_pool_shows_what_its_endpoint_picker_reads(tmp_path: Path) -> None:
    """What the metrics say is tested in tests/service/gateway/test_vllm_metric_names.py."""
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
            # What was published before comes by the other port.
            socket.connect(f"tcp://127.0.0.1:{machine.port('5557')}")
            topic = None
            while topic is None:
                body = {"prompt": f"{time.monotonic()} there was a fox. " * 9, "max_tokens": 1}
                assert (await http.post("/v1/completions", json=body)).is_success
                if await socket.poll(1000):
                    topic = (await socket.recv_multipart())[0]
        assert topic.endswith(b"@quire-tiny")
