"""Faults strike processes of the server only, and prove that they happened."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from random import Random

import pytest

from quire.runtime.settings import ConfigurationError
from quire_cli.torture import main
from quire_torture.faults import NothingHappenedError, Place, command_fault, parse_fault
from quire_torture.link import Link
from quire_torture.processes import listener_of, named, tree_of
from tests.support.processes import until_true

SERVER = """
import socket, subprocess, sys
listening = socket.create_server(("127.0.0.1", 0))
waiting = "import sys; open('/proc/self/comm', 'w').write(sys.argv[2][2:]); print(flush=True); sys.stdin.read()"
# The names are not in the command of this process.
names = [kind + "_svc" for kind in ("one", "other")]
standby = [sys.executable, "-c", waiting, names[0], "--a-standby"]
children = [subprocess.Popen(standby, stdin=-1, stdout=-1)]
# It has its name.
children[0].stdout.readline()
for name in names:
    children.append(subprocess.Popen([sys.executable, "-c", waiting, name, "--of=" + names[0]], stdin=-1, stdout=-3))
print(listening.getsockname()[1], flush=True)
for child in children:
    child.wait()
"""


@contextlib.asynccontextmanager
async def server() -> AsyncIterator[Place]:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", SERVER, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        port = int(await process.stdout.readline())
        assert listener_of(port) == process.pid
        await until_true(lambda: all(named(process.pid, name) for name in ("one_svc", "other_svc")), timeout_s=10)
        yield Place(port, Link(lambda: f"127.0.0.1:{port}"), lambda: False, process.pid)
    finally:
        for each in tree_of(process.pid).values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(each.pid, 9)
        await process.wait()


async def test_faults_strike_the_processes_that_they_name() -> None:
    async with server() as place:
        (one,), (other,) = named(place.root or 0, "one_svc"), named(place.root or 0, "other_svc")
        assert await command_fault(f"kill -STOP {one.pid}").happen(place, Random(0)) == "status 0"
        await until_true(lambda: one.state == "T", timeout_s=10)
        assert other.state not in ("T", None)
        assert "is gone" in await parse_fault("kill -9 {pid:other_svc}").happen(place, Random(0))
        assert (one.state, other.state) == ("T", None)
        assert "is gone" in await parse_fault("kill one_svc").happen(place, Random(0))


@pytest.mark.parametrize("text", ["cut", "leave", "kill absent_svc"])
async def test_fault_that_does_not_happen_is_not_counted(text: str) -> None:
    async with server() as place:
        with pytest.raises(NothingHappenedError):
            await parse_fault(text).happen(place, Random(0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["http://192.0.2.7:8000"], "--this-server-is-mine"),
        (["ftp://127.0.0.1"], "expected http"),
        (["http://127.0.0.1:1", "--fault", "explode"], '"explode" is no fault'),
        (["https://127.0.0.1:1", "--fault", "cut"], "needs http"),
        (["http://127.0.0.1:1"], "does not list its models"),
    ],
)
def test_what_cannot_be_tortured_is_told_in_one_error(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        main(arguments)
