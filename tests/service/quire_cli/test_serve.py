"""`quire serve` as a process of its own, with stand-ins for the services."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.processes import is_alive, lines_of, wait_true

EXIT_GRACE_S = 40.0
# Runs the command with stand-ins that write down their pid at start, and their name when they are told to end.
DRIVER = (
    f"EXIT_GRACE_S = {EXIT_GRACE_S}"
    + """
import functools, sys
import quire_cli.supervisor.server
import quire_cli.serve as command
from quire_cli.supervisor import LocalServer
from quire_cli.supervisor.commands import Programs

log, worker_code, *argv = sys.argv[1:]
service = '''
import signal, sys, os
name = sys.argv[1]
def note(text):
    with open(sys.argv[2], "a") as file:
        file.write(text + chr(10))
def stop(*_):
    note("stopped " + name)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
note("started " + name + " " + str(os.getpid()))
'''
pause = "while True: signal.pause()"
def stand_in(name, code=pause):
    return (sys.executable, "-I", "-S", "-c", service + code, name, log)
gateway = (sys.executable, "-m", "tests.support.fake_gateway", "--note", log)
programs = Programs(worker=stand_in("worker", worker_code or pause), scheduler=stand_in("scheduler"), gateway=gateway)
# One signal alone would let a service that does not end have this long.
quire_cli.supervisor.server._EXIT_GRACE_S = EXIT_GRACE_S
command.LocalServer = functools.partial(LocalServer, programs=programs)
from quire_cli.main import main
sys.exit(main(["serve", *argv]))
"""
)


class Serve:
    """A running `quire serve`."""

    def __init__(self, directory: Path, model: Path, worker_code: str) -> None:
        self.log = directory / "log"
        self.temporary = directory / "t"
        self.temporary.mkdir()
        flags = ("--grpc-port=0", "--http-port=0", f"--model={model}")
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(self.log), worker_code, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(self.temporary)},
        )

    def pids(self) -> list[int]:
        return [int(line.split()[2]) for line in lines_of(self.log) if line.startswith("started")]

    def wait_ready(self) -> str:
        """Returns the first line of stdout, and checks that all stand-ins have started."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        wait_true(lambda: len(self.pids()) >= 2)
        return line

    def end(self) -> tuple[int, str, str]:
        """Waits for its end; returns status, stdout and stderr."""
        stdout, stderr = self.process.communicate(timeout=60)
        return self.process.returncode, stdout, stderr


@pytest.fixture
def serve(tmp_path_factory: pytest.TempPathFactory, model_directory: Path) -> Iterator[Callable[..., Serve]]:
    started: list[Serve] = []

    def start(worker_code: str = "") -> Serve:
        # A short path, since unix sockets lie in it.
        started.append(Serve(tmp_path_factory.mktemp("s"), model_directory, worker_code))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_ready_line_is_all_of_stdout_and_a_signal_stops_in_order(
    serve: Callable[..., Serve], number: signal.Signals
) -> None:
    running = serve()
    assert re.fullmatch(r"quire: ready grpc=127\.0\.0\.1:\d+ http=127\.0\.0\.1:\d+\n", running.wait_ready())
    running.process.send_signal(number)
    status, stdout, stderr = running.end()
    assert (status, stdout) == (0, "")
    assert "quire: starting worker, scheduler and gateway" in stderr
    assert [line for line in lines_of(running.log) if line.startswith("stopped")] == [
        "stopped gateway",
        "stopped scheduler",
        "stopped worker",
    ]
    assert list(running.temporary.iterdir()) == []


def test_a_service_that_refuses_its_configuration_gives_status_2_and_one_line(serve: Callable[..., Serve]) -> None:
    code = "print('quire worker: error: tensor lm_head.weight is missing', file=sys.stderr, flush=True); sys.exit(2)"
    running = serve(code)
    wait_true(lambda: len(running.pids()) >= 1)
    status, stdout, stderr = running.end()
    assert (status, stdout) == (2, "")
    assert stderr.splitlines() == [
        "quire: starting worker, scheduler and gateway",
        "quire worker: error: tensor lm_head.weight is missing",
    ]
    wait_true(lambda: not any(map(is_alive, running.pids())))
    assert list(running.temporary.iterdir()) == []


def test_children_die_with_a_supervisor_that_is_killed(serve: Callable[..., Serve]) -> None:
    running = serve()
    running.wait_ready()
    pids = running.pids()
    assert all(map(is_alive, pids))
    running.process.kill()
    wait_true(lambda: not any(map(is_alive, pids)))


def test_a_second_signal_ends_all_at_once(serve: Callable[..., Serve]) -> None:
    stubborn = "signal.signal(signal.SIGTERM, lambda *_: note('asked'))\nwhile True: signal.pause()"
    running = serve(stubborn)
    running.wait_ready()
    running.process.send_signal(signal.SIGINT)
    wait_true(lambda: "asked" in lines_of(running.log))
    asked_at = time.monotonic()
    running.process.send_signal(signal.SIGTERM)
    status, _, _ = running.end()
    assert status == 128 + signal.SIGTERM
    assert time.monotonic() - asked_at < EXIT_GRACE_S / 2
    assert not any(map(is_alive, running.pids()))
    assert list(running.temporary.iterdir()) == []


def test_a_signal_while_starting_ends_it_quietly(serve: Callable[..., Serve]) -> None:
    running = serve()
    wait_true(lambda: len(running.pids()) >= 1)
    running.process.send_signal(signal.SIGTERM)
    status, _, stderr = running.end()
    assert status == 0
    assert "Traceback" not in stderr
    assert not any(map(is_alive, running.pids()))
