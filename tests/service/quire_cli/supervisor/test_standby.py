"""Services that stand by: they do nothing before their turn, and serve from then on."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from quire.rpc.process import STANDBY
from tests.support.forks import SERVICES, WORKER, forked
from tests.support.processes import until_true

MODEL = str(Path(__file__).parents[4] / "assets" / "quire-tiny")
SERVICES_THAT_STAND_BY = {
    "worker_svc": (WORKER, ["--model", MODEL, "--num-gpu-blocks=64", "--num-threads=1"]),
    "scheduler_svc": (SERVICES, ["--workers=unix:absent"]),
    "gateway": (SERVICES, ["--schedulers=unix:absent", "--grpc-port=0", "--http-port=0"]),
}


@contextmanager
def standby(module: str, socket: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The service with this module as a standby, which will serve at the socket."""
    imported, flags = SERVICES_THAT_STAND_BY[module]
    own = f"--local-socket={socket}" if module == "gateway" else f"--listen=unix:{socket}"
    command = [*forked(module, *imported), own, *flags]
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=os.environ | {STANDBY: "1"}) as process:
        try:
            yield process
        finally:
            process.kill()


def of_fork(name: str, parent: int) -> bool:
    """Whether a process with this name is in the process group of `parent`."""
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(place.name)) == os.getpgid(parent) and (place / "comm").read_text().rstrip("\n") == name:
                return True
        except OSError:
            continue
    return False


@pytest.mark.parametrize("module", SERVICES_THAT_STAND_BY)
async def test_a_service_that_stands_by_serves_when_it_is_its_turn(module: str, tmp_path_factory) -> None:
    socket = tmp_path_factory.mktemp("s") / "s"
    with standby(module, socket) as process:
        await until_true(lambda: of_fork("quire-standby", process.pid))
        assert not socket.exists()
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
        await until_true(socket.exists)
        assert of_fork("quire", process.pid)
        process.send_signal(signal.SIGTERM)
        await until_true(lambda: process.poll() is not None)
        assert process.returncode == 0


@pytest.mark.parametrize("how", ["SIGTERM", "its supervisor ends"])
async def test_a_service_that_stands_by_ends(how: str, tmp_path: Path) -> None:
    with standby("gateway", tmp_path / "s") as process:
        await until_true(lambda: of_fork("quire-standby", process.pid))
        if how == "SIGTERM":
            process.send_signal(signal.SIGTERM)
        else:
            process.communicate()
        await until_true(lambda: process.poll() is not None)
        assert process.returncode == 0
