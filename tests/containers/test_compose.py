"""The compose files, run for real: every variant serves, holds the rights it claims, and survives `kill -9`."""

import asyncio
import json
import os
import shutil
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.client import AsyncClient, ChatMessage, ClientTls, GenerationOptions
from tests.support.compose import COMPOSE, ROOT, WITH_TLS
from tests.support.containers import HEALTHY_WITHIN_S, Deployment, docker
from tests.support.killing import Outputs, Streams
from tests.support.processes import until_true

NUM_STREAMS = 16
NUM_TOKENS = 400
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 20}
RIGHTS = """
import json, os, pathlib
status = dict(line.split(":\\t", 1) for line in pathlib.Path("/proc/self/status").read_text().splitlines())
def writable(path):
    try:
        pathlib.Path(path, "probe").write_text("x")
    except OSError:
        return False
    return True
names = ("CapEff", "CapBnd", "NoNewPrivs", "Seccomp")
places = ("/", "/models", "/opt/quire", "/tmp")
print(json.dumps([os.getuid(), [int(status[each], 16) for each in names], [writable(each) for each in places]]))
"""
ROLLING = """
import itertools, pathlib, sys
from quire.client import Client, GenerationOptions, RetryPolicy
options = GenerationOptions(max_tokens=5)
with Client("dns:///gateway:50051", retry=RetryPolicy()) as client:
    for number in itertools.count(1):
        client.generate("Once upon a time", options)
        print(number, flush=True)
"""


def options_of(index: int) -> GenerationOptions:
    """Greedy and seeded sampling, mixed, in the model's own bfloat16."""
    return GenerationOptions(temperature=float(index % 2), seed=index, max_tokens=NUM_TOKENS, ignore_eos=True)


async def check_chat(deployment: Deployment, key: str | None = None, authority: Path | None = None) -> None:
    """Chats by HTTP and by gRPC through the published ports."""
    http, grpc = deployment.ports[:2]
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    scheme, verify = ("http", True) if authority is None else ("https", ssl.create_default_context(cafile=authority))
    async with httpx.AsyncClient(base_url=f"{scheme}://localhost:{http}", verify=verify, timeout=60) as client:
        answer = await client.post("/v1/chat/completions", json=CHAT, headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"]
    tls = None if authority is None else ClientTls(authority)
    async with AsyncClient(f"localhost:{grpc}", api_key=key, tls=tls) as client:
        assert (await client.chat([ChatMessage("user", "Who are you?")], GenerationOptions(max_tokens=5))).text


async def read_with_kill(deployment: Deployment, victim: str, client: AsyncClient, expected: Outputs) -> None:
    """Kills a service under durable streams, whose outputs must stay equal."""
    streams = Streams(NUM_STREAMS, durable=True, options_of=options_of)
    reading = asyncio.create_task(streams.read(client))
    await streams.advance(5)
    restarts = deployment.inspect(victim)["RestartCount"]
    await asyncio.to_thread(deployment.kill, victim)
    assert await asyncio.wait_for(reading, 240) == expected, f"{victim} was killed"
    await asyncio.to_thread(deployment.wait_healthy)
    assert deployment.inspect(victim)["RestartCount"] == restarts + 1


def check_rights(deployment: Deployment, service: str, memory: int, user: int = 10001) -> None:
    """No capability, no new privilege, a filter of system calls, files read-only but below /tmp, a limit of memory."""
    uid, (effective, bounding, no_new_privileges, seccomp), writable = json.loads(
        deployment.run_inside(service, RIGHTS)
    )
    assert (uid, effective, bounding, no_new_privileges) == (user, 0, 0, 1), service
    assert seccomp == 2
    assert writable == [False, False, False, True], service
    about = deployment.inspect(service)
    assert (about["HostConfig"]["Memory"], about["HostConfig"]["ReadonlyRootfs"]) == (memory, True)


async def test_by_default_all_serve_with_few_rights_survive_kills_and_stop_whole() -> None:
    deployment = Deployment("quire-test-default")
    with deployment.up() as seconds:
        print(f"healthy after {seconds:.1f} s")
        # Other work on the machine: `QUIRE_SLOWNESS=4 make test-containers`.
        assert seconds < HEALTHY_WITHIN_S * float(os.environ.get("QUIRE_SLOWNESS", "1"))
        for service, memory in (("worker", 8 << 30), ("scheduler", 1 << 30), ("gateway", 1 << 30)):
            check_rights(deployment, service, memory)
        await check_chat(deployment)
        async with AsyncClient(f"localhost:{deployment.ports[1]}") as client:
            expected = await Streams(NUM_STREAMS, options_of=options_of).read(client)
            for victim in ("worker", "scheduler", "gateway"):
                begin = time.monotonic()
                await read_with_kill(deployment, victim, client, expected)
                print(f"{victim}: equal text, healthy again {time.monotonic() - begin:.1f} s after the streams began")
            streams = Streams(NUM_STREAMS, options_of=options_of)
            reading = asyncio.create_task(streams.read(client))
            await streams.advance(5)
            await asyncio.to_thread(deployment.compose, "stop")
            assert await reading == expected
        for service in ("worker", "scheduler", "gateway"):
            assert deployment.inspect(service)["State"]["ExitCode"] == 0, service


def make_secrets() -> tuple[Path, str]:
    """A folder with certificates and a file of keys, which user 1000 owns, and the key."""
    folder = ROOT / "build" / "test-containers"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    quire = Path(sys.executable).with_name("quire")
    hosts = "worker,scheduler,gateway,gateway-2"
    subprocess.run([quire, "certs", "--tls-dir", folder / "certs", "--by-role", "--host", hosts], check=True)
    (folder / "keys").mkdir()
    add = [quire, "keys", "add", folder / "keys" / "keys.json", "--tenant", "acme"]
    key = subprocess.run(add, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    for each in (folder, *folder.rglob("*")):
        os.chown(each, 1000, 1000)
    return folder, key


async def test_with_tls_and_keys_two_gateways_serve_as_another_user() -> None:
    """The files belong to the user that made them; services run as that user and not as root."""
    folder, key = make_secrets()
    variables = {
        "QUIRE_CERTS_DIR": str(folder / "certs"),
        "QUIRE_KEYS_DIR": str(folder / "keys"),
        "QUIRE_KEYS_FILE": "/keys/keys.json",
        "QUIRE_USER": "1000:1000",
    }
    deployment = Deployment("quire-test-tls", (COMPOSE, WITH_TLS), ("two-gateways",), variables)
    authority = folder / "certs" / "ca.pem"
    with deployment.up() as seconds:
        print(f"healthy after {seconds:.1f} s")
        check_rights(deployment, "gateway", 1 << 30, user=1000)
        await check_chat(deployment, key, authority)
        second = Deployment(deployment.name, ports=(*deployment.ports[2:], 0, 0))
        await check_chat(second, key, authority)
        async with httpx.AsyncClient(verify=ssl.create_default_context(cafile=authority)) as client:
            refused = await client.post(f"https://localhost:{deployment.ports[0]}/v1/chat/completions", json=CHAT)
            assert refused.status_code == 401
        with pytest.raises(httpx.HTTPError):
            await check_chat(deployment, key)
        # A durable stream goes on through the other gateway.
        addresses = f"localhost:{deployment.ports[1]},localhost:{deployment.ports[3]}"
        tls = ClientTls(authority, server_name="localhost")
        async with AsyncClient(addresses, api_key=key, tls=tls) as client:
            expected = await Streams(NUM_STREAMS, options_of=options_of).read(client)
            await read_with_kill(deployment, "gateway-2", client, expected)


async def test_long_prompts_move_from_the_replica_that_computed_them() -> None:
    variables = {"QUIRE_ROLE": "decode", "QUIRE_SCHEDULERS": "scheduler:50052,scheduler-prefill:50052"}
    deployment = Deployment("quire-test-roles", profiles=("roles",), variables=variables)
    with deployment.up() as seconds:
        print(f"healthy after {seconds:.1f} s")
        options = GenerationOptions(max_tokens=20, temperature=0.0)
        async with AsyncClient(f"localhost:{deployment.ports[1]}") as client:
            for number in range(3):
                assert (await client.generate(f"Story {number}. " + "Once upon a time. " * 100, options)).text
        metrics = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:9400/metrics').read().decode())"
        (moved,) = (
            float(line.rpartition(" ")[2])
            for line in deployment.run_inside("scheduler-prefill", metrics).splitlines()
            if line.startswith('quire_scheduler_moved_requests_total{direction="out"}')
        )
        assert moved == 3


async def test_gateways_are_replaced_one_by_one_behind_one_address() -> None:
    """A name with two addresses; each gateway is stopped and made anew while a client of the name asks on and on."""
    ports = {"QUIRE_HTTP_PORT": "18200-18209", "QUIRE_GRPC_PORT": "18251-18259"}
    deployment = Deployment("quire-test-rolling", variables=ports)
    network, client = f"{deployment.name}_inside", f"{deployment.name}-client"
    with deployment.up("--scale", "gateway=2"):
        image = deployment.inspect("scheduler")["Config"]["Image"]
        docker(
            "run", "--detach", "--name", client, "--network", network, "--entrypoint", "python", image, "-c", ROLLING
        )
        try:
            answered = progress_of(client)
            for index in (1, 2):
                await until_true(answered(5), timeout_s=60)
                name = deployment.container("gateway", index)
                assert docker("stop", "-t", "45", name).strip() == name
                docker("rm", name)
                await until_true(answered(5), timeout_s=60)
                deployment.compose("up", "--detach", "--no-build", "--wait", "--scale", "gateway=2", "--no-recreate")
            await until_true(answered(5), timeout_s=60)
            assert docker("inspect", "--format", "{{.State.Running}}", client).strip() == "true"
        finally:
            print(docker("logs", "--tail", "5", client, check=False))
            docker("rm", "--force", client)


def progress_of(container: str) -> Callable[[int], Callable[[], bool]]:
    """For a number, a question that is true once the client had this number of answers after it was made."""

    def count() -> int:
        return len(docker("logs", container).splitlines())

    def answered(number: int) -> Callable[[], bool]:
        wanted = count() + number
        return lambda: count() >= wanted

    return answered
