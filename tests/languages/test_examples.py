"""The examples in other languages are built by their `build.sh` and run against a server whose gateway is killed in the
middle of a stream: all print the same text, and read the same errors."""

import asyncio
import os
import signal
import subprocess
import time
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest

from quire.client import Constraint, GenerationOptions
from tests.languages.conftest import KeyedServer
from tests.languages.connections import has_connection, ports_to

DIRECTORY = Path(__file__).resolve().parents[2] / "examples"
EXAMPLES = (
    *("connect/client", "connect/web_client", "cpp/client", "go/client", "java/client", "ruby/client"),
    "rust/client",
)
PROMPT = "Once upon a time"
OPTIONS = GenerationOptions(temperature=0.0, constraint=Constraint(regex="(é [a-z]{2} 🦊 ){12}"))
GATEWAYS = ("gateway", "gateway-1")
NUM_TOKENS = 8
"""The gateway is killed when the client has this number of tokens."""


@pytest.fixture(scope="session")
def build_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(os.environ.get("QUIRE_EXAMPLES") or tmp_path_factory.mktemp("examples"))


def build(language: str, directory: Path) -> Path:
    """Builds an example; returns the folder of its programs. Skips the test if a tool is not installed."""
    out = directory / language
    out.mkdir(parents=True, exist_ok=True)
    script = DIRECTORY / language / "build.sh"
    began_at = time.monotonic()
    built = subprocess.run([script, out], capture_output=True, text=True, timeout=500)
    if built.returncode == 127:
        pytest.skip(built.stderr.strip())
    assert built.returncode == 0, built.stderr
    print(f"{language}: built in {time.monotonic() - began_at:.1f} s")
    return out


def kill_gateways_of(keyed: KeyedServer, client_pid: int, address: str) -> None:
    """Kills the gateway that the client is connected to; over HTTP it may be connected to both."""
    port = int(address.rpartition(":")[2])
    peers = ports_to(client_pid, port)
    services = keyed.served.server.services
    pids = [services[name] for name in GATEWAYS]
    victims = [pid for pid in pids if has_connection(pid, port, peers)]
    assert victims
    for victim in victims:
        os.killpg(victim, signal.SIGKILL)


async def run(keyed: KeyedServer, command: list[str], address: str) -> dict[str, str]:
    """Runs an example; kills its gateway once it has some tokens. Returns what it prints: lines of "name: value"."""
    process = await asyncio.create_subprocess_exec(
        *command, address, keyed.key, stdout=PIPE, stderr=PIPE, process_group=0
    )
    assert process.stdout is not None
    assert process.stderr is not None
    printing = asyncio.create_task(process.stdout.read())
    errors, has_killed = list[str](), False
    try:
        async with asyncio.timeout(60):
            async for line in process.stderr:
                name, _, value = line.decode().strip().partition(": ")
                if name != "tokens":
                    errors.append(line.decode())
                elif int(value) >= NUM_TOKENS and not has_killed:
                    kill_gateways_of(keyed, process.pid, address)
                    has_killed = True
            printed = (await printing).decode()
            assert await process.wait() == 0, "".join(errors) + printed
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
    return dict(line.split(": ", 1) for line in printed.splitlines())


@pytest.mark.parametrize("example", EXAMPLES)
async def test_an_example_survives_its_gateway(example: str, keyed: KeyedServer, build_directory: Path) -> None:
    language, _, name = example.partition("/")
    program = build(language, build_directory) / name
    await keyed.served.wait_ready()
    (expected,) = (await keyed.client.generate(PROMPT, OPTIONS)).sequences
    server = keyed.served.server
    printed = await run(keyed, [str(program)], server.http_address if name == "web_client" else server.grpc_address)
    assert printed == {
        "text": expected.text,
        "stream": expected.text,
        "resumed": "true",
        "refused": "INVALID_ARGUMENT sampling.temperature",
        "wrong key": "INVALID_API_KEY",
        "deadline": "true",
        "cancelled": "true",
    }
    # The calls that their client left have ended.
    await keyed.served.until_live(0)
