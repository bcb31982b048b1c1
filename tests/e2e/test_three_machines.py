"""Worker, scheduler and gateway on three machines: network namespaces with one link, as docs/deploying.md sets them up.

Each service runs the command of its unit in deploy/systemd, with the variables that the document gives it.
"""

import asyncio
import configparser
import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from quire_cli.main import main
from quire_cli.supervisor.commands import child_environ
from tests.support.compose import ROOT
from tests.support.keys import KeysFile

IP = shutil.which("ip", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(os.geteuid() != 0 or IP is None, reason="network namespaces need root and iproute2"),
]

HEALTHCHECK = ROOT / "deploy" / "healthcheck.py"
UNITS = ROOT / "deploy" / "systemd"
SERVICES = ("worker", "scheduler", "gateway")
HOSTS = {name: f"10.203.77.{number}" for number, name in enumerate((*SERVICES, "client"), start=1)}
ABSENT = "10.203.77.99"
TIMEOUT_S = 250
TOKENS = 200


def ip(*words: str) -> None:
    assert IP is not None
    subprocess.run([IP, *words], check=True, capture_output=True)


class Network:
    """A namespace a machine, each with an address of HOSTS, all on one bridge."""

    def __init__(self) -> None:
        # Names of network devices have 15 letters at most.
        self._prefix = f"q{os.getpid()}"

    def namespace(self, name: str) -> str:
        return f"{self._prefix}-{name}"

    def command(self, name: str, *words: str) -> list[str]:
        """The command, to be run on a machine."""
        assert IP is not None
        return [IP, "netns", "exec", self.namespace(name), *words]

    @contextlib.contextmanager
    def up(self) -> Iterator[None]:
        switch = self.namespace("switch")
        try:
            ip("netns", "add", switch)
            ip("-n", switch, "link", "add", "br0", "type", "bridge")
            ip("-n", switch, "link", "set", "br0", "up")
            for name, address in HOSTS.items():
                space, port = self.namespace(name), f"to-{name}"
                ip("netns", "add", space)
                ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
                ip("-n", switch, "link", "set", port, "master", "br0", "up")
                ip("-n", space, "address", "add", f"{address}/24", "dev", "eth0")
                ip("-n", space, "link", "set", "eth0", "up")
                ip("-n", space, "link", "set", "lo", "up")
            yield
        finally:
            for name in ("switch", *HOSTS):
                with contextlib.suppress(subprocess.CalledProcessError):
                    ip("netns", "delete", self.namespace(name))

    def cable(self, name: str, state: str) -> None:
        """Takes the link of a machine "down" or "up"."""
        ip("-n", self.namespace("switch"), "link", "set", f"to-{name}", state)


class Service:
    """A service on its machine, as systemd would run it."""

    def __init__(self, name: str, network: Network, directory: Path) -> None:
        unit = configparser.ConfigParser(strict=False)
        unit.read(UNITS / f"quire-{name}.service")
        program, *words = shlex.split(unit["Service"]["ExecStart"])
        assert program == "/opt/quire/bin/quire"
        self._name, self._network = name, network
        self._command = network.command(name, sys.executable, "-m", "quire_cli.main", *words)
        self._environment = child_environ(os.environ) | variables_of(name, directory)
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(*self._command, env=self._environment)

    async def until_serving(self, port: int) -> None:
        check = self._network.command(self._name, sys.executable, str(HEALTHCHECK), f"127.0.0.1:{port}")
        while True:
            process = await asyncio.create_subprocess_exec(
                *check, env=self._environment, stdout=asyncio.subprocess.DEVNULL
            )
            if await process.wait() == 0:
                return

    async def kill(self) -> None:
        """As when it crashes; `ip` has become the process itself."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


def variables_of(name: str, directory: Path) -> dict[str, str]:
    """Those of the document, with addresses for names, and files below the directory."""
    text = (ROOT / "docs" / "deploying.md").read_text(encoding="utf-8")
    # What is computed again is the same to the last bit that matters only in float32.
    variables = {"QUIRE_NUM_THREADS": "1", "QUIRE_DTYPE": "float32"} if name == "worker" else {}
    for file in ("quire", name):
        (block,) = re.findall(rf"`/etc/quire/{file}\.env`[^`]*```sh\n(.*?)```", text, re.DOTALL)
        variables |= dict(line.split("=", 1) for line in block.splitlines())
    variables.pop("QUIRE_MODEL", None)
    if name == "gateway":  # A replica that is not there, as where more may be added.
        variables["QUIRE_SCHEDULERS"] += f",{ABSENT}:50052"
    for host, address in HOSTS.items():
        variables = {key: value.replace(f"{host}.example", address) for key, value in variables.items()}
    variables["QUIRE_TLS_DIR"] = variables["QUIRE_TLS_DIR"].replace("/etc/quire/certs", str(directory / "certs" / name))
    return {key: value.replace("/etc/quire", str(directory)) for key, value in variables.items()}


@pytest.fixture
async def network(tmp_path: Path) -> AsyncIterator[Network]:
    network = Network()
    with network.up():
        yield network


async def test_each_of_three_machines_may_crash_and_a_link_fail_while_a_stream_runs(
    network: Network, tmp_path: Path
) -> None:
    flags = ["--tls-dir", str(tmp_path / "certs"), "--by-role", "--host", ",".join(HOSTS.values())]
    assert main(["certs", *flags]) == 0
    api_key = KeysFile(tmp_path / "keys.json").add("acme")
    services = {name: Service(name, network, tmp_path) for name in SERVICES}
    async with asyncio.timeout(TIMEOUT_S), contextlib.AsyncExitStack() as stack:
        # In the order that waits the longest for each other.
        for name in reversed(SERVICES):
            await services[name].start()
            stack.push_async_callback(services[name].kill)
        await services["gateway"].until_serving(50051)
        expected = await Stream(network, tmp_path, api_key).rest()
        assert len(expected) > TOKENS
        for name in ("worker", "scheduler"):
            stream = Stream(network, tmp_path, api_key)
            await stream.begin()
            await services[name].kill()
            await services[name].start()
            assert await stream.rest() == expected, name
        stream = Stream(network, tmp_path, api_key)
        await stream.begin()
        network.cable("worker", "down")
        network.cable("worker", "up")
        assert await stream.rest() == expected
        await services["gateway"].kill()
        await services["gateway"].start()
        await services["gateway"].until_serving(50051)
        assert await Stream(network, tmp_path, api_key).rest() == expected


class Stream:
    """A greedy answer that `quire generate` prints on a machine of its own."""

    def __init__(self, network: Network, directory: Path, api_key: str) -> None:
        flags = ("--address", f"{HOSTS['gateway']}:50051", "--tls-ca-file", str(directory / "certs" / "ca.pem"))
        more = ("--max-tokens", str(TOKENS), "--temperature", "0", "--ignore-eos", "Once upon a time")
        self._command = network.command("client", sys.executable, "-m", "quire_cli.main", "generate", *flags, *more)
        self._environment = child_environ(os.environ) | {"QUIRE_API_KEY": api_key}
        self._process: asyncio.subprocess.Process | None = None
        self._text = b""

    async def begin(self) -> None:
        """Returns when the first output is there."""
        self._process = await asyncio.create_subprocess_exec(
            *self._command, env=self._environment, stdout=asyncio.subprocess.PIPE
        )
        assert self._process.stdout is not None
        self._text = await self._process.stdout.read(1)

    async def rest(self) -> str:
        """The whole answer, when it is complete."""
        if self._process is None:
            await self.begin()
        assert self._process is not None
        output, _ = await self._process.communicate()
        assert self._process.returncode == 0
        return (self._text + output).decode()
