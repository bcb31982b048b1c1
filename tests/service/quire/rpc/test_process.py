"""`run_service` in separate processes, since the tests are about signals and exit statuses."""

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

PRELUDE = """
import asyncio, sys
from quire.rpc.process import run_service
from quire.runtime.settings import ConfigurationError, TemporaryError
async def forever(clean_up=0.0):
    print("up", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        print("draining", flush=True)
        await asyncio.sleep(clean_up)
        print("drained", flush=True)
async def fail(error):
    raise error
def refuse():
    raise ConfigurationError("--x is wrong")
"""


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def run(main: str, before: str = "") -> subprocess.Popen[str]:
        code = f"{PRELUDE}\n{before}\nsys.exit(run_service({main}, program='quire thing'))"
        pipe = subprocess.PIPE
        started.append(subprocess.Popen([sys.executable, "-c", code], stdout=pipe, stderr=pipe, text=True))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


def end_of(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    stdout, stderr = process.communicate(timeout=60)
    return process.returncode, stdout, stderr


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_drains_and_exits_with_0(start, number: signal.Signals) -> None:
    process = start("forever")
    assert read_line(process) == "up\n"
    process.send_signal(number)
    assert end_of(process) == (0, "draining\ndrained\n", "")


@pytest.mark.parametrize(
    ("before", "status"), [("", -signal.SIGTERM), ("import os; os.getpid = lambda: 1", 128 + signal.SIGTERM)]
)
def test_a_second_signal_ends_a_process_also_the_first_one_of_a_container(start, before: str, status: int) -> None:
    """The kernel does not deliver a signal that a container's first process does not handle."""
    process = start("lambda: forever(60)", before)
    assert read_line(process) == "up\n"
    process.send_signal(signal.SIGTERM)
    assert read_line(process) == "draining\n"
    process.send_signal(signal.SIGTERM)
    assert end_of(process) == (status, "", "")


def test_a_hangup_is_no_second_signal_and_one_that_nohup_ignores_is_none(start) -> None:
    for before, numbers in [
        ("", [signal.SIGHUP]),
        ("import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)", [signal.SIGHUP, signal.SIGTERM]),
    ]:
        process = start("lambda: forever(0.5)", before)
        assert read_line(process) == "up\n"
        for number in numbers:
            process.send_signal(number)
        assert read_line(process) == "draining\n"
        process.send_signal(signal.SIGHUP)
        assert read_line(process) == "drained\n"
        assert end_of(process) == (0, "", "")


@pytest.mark.parametrize(
    ("main", "status", "error"),
    [
        ("refuse", 2, r"quire thing: error: --x is wrong\n"),
        ("lambda: fail(TemporaryError('the hub is away'))", 75, r"quire thing: error: the hub is away\n"),
        ("lambda: fail(ValueError('broken'))", 1, r"quire thing failed\nTraceback [\s\S]*\nValueError: broken\n"),
        ("lambda: asyncio.sleep(0)", 0, ""),
    ],
)
def test_a_main_that_ends_by_itself_says_how(start, main: str, status: int, error: str) -> None:
    ended, stdout, stderr = end_of(start(main))
    assert (ended, stdout) == (status, "")
    assert re.fullmatch(error, stderr)
