"""One supervised process, with tiny programs that stand in for a service."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from quire.rpc.address import ReservedPort
from quire_cli.supervisor.hangs import HangLimits, watch
from quire_cli.supervisor.process import RestartBackoff, ServiceRefused, ServiceSpec, SupervisedProcess
from quire_cli.supervisor.server import report_on_stderr
from quire_cli.supervisor.shared_listener import SharedListener
from tests.support.processes import is_alive, until_true

WAIT_FOR_SIGNAL = "import signal; signal.pause()"
NOTE_TERM = """
import pathlib, signal, sys
def stop(*_):
    pathlib.Path({file!r}).write_text("terminated")
    sys.exit({status})
signal.signal(signal.SIGTERM, stop)
print("up", flush=True)
signal.pause()
"""
IGNORE_TERM = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
while True: signal.pause()
"""
REFUSE = """
import sys
print("before", "quire thing: error: no room", "after", sep="\\n", file=sys.stderr)
sys.exit(2)
"""


STAND_BY = """
import os, signal, sys
is_standby = os.environ.pop("QUIRE_STANDBY", None)
if is_standby and not os.read(0, 1):
    sys.exit()
listener = "with a listener" if os.environ.get("LISTEN_PID") == str(os.getpid()) else "without a listener"
print("up", "as a standby" if is_standby else "", listener, flush=True)
print("up", flush=True)
signal.pause()
"""


class Supervision:
    """A supervised process, and all messages about it."""

    def __init__(self, code: str, report: Callable[[str], None] | None = None, **options: Any) -> None:
        self.reports: list[str] = []
        self.output: list[str] = []
        command = [sys.executable, "-I", "-S", "-c", code]
        spec = ServiceSpec("thing", lambda: command, dict(os.environ), self.output.append, **options)
        backoff = RestartBackoff(first_s=0.01)
        self.process = SupervisedProcess(spec, report=report or self.reports.append, backoff=backoff)
        self.task = self.process.start()

    async def until_up(self) -> int:
        """Waits for the line "up"; returns the pid."""
        # A child may print before the loop's thread reports that it has started.
        await until_true(lambda: "up" in self.output and self.process.is_running)
        return self.process.pid


@pytest.fixture
async def supervise() -> AsyncIterator[Callable[[str], Supervision]]:
    supervisions: list[Supervision] = []

    def start(code: str, **options: Any) -> Supervision:
        supervisions.append(Supervision(code, **options))
        return supervisions[-1]

    yield start
    for supervision in supervisions:
        await supervision.process.stop(0)
        await asyncio.gather(supervision.task, return_exceptions=True)


@pytest.mark.parametrize(
    ("number", "status", "how", "times"),
    [
        (signal.SIGKILL, 0, "was killed by SIGKILL", 1),
        # A process that was told to end, or lost its peer, always restarts at once.
        (signal.SIGTERM, 0, "ended with status 0", 4),
        (signal.SIGTERM, 75, "ended with status 75", 4),
    ],
)
async def test_a_process_that_is_ended_is_started_again(
    supervise, tmp_path: Path, number: signal.Signals, status: int, how: str, times: int
) -> None:
    supervision, pid = supervise(NOTE_TERM.format(file=str(tmp_path / "end"), status=status)), 0
    for _ in range(times):
        pid = await supervision.until_up()
        supervision.output.clear()
        os.kill(pid, number)
    assert await supervision.until_up() != pid
    assert supervision.reports == [f"thing {how}; starting it again in 0.01 s"] * times


def children() -> set[int]:
    """The processes that this one has started, in all its threads."""
    return {int(pid) for listed in Path("/proc/self/task").glob("*/children") for pid in listed.read_text().split()}


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A standby is made as soon as a process runs."""
    monkeypatch.setattr("quire_cli.supervisor.process._STANDBY_AFTER_S", 0.01)


async def standby_of(supervision: Supervision, others: set[int]) -> int:
    """The pid of the standby, once it waits."""
    pid = await supervision.until_up()
    await until_true(lambda: len(children() - others) == 2)
    return (children() - others - {pid}).pop()


@pytest.mark.usefixtures("at_once")
async def test_a_standby_takes_the_place_of_a_process_that_dies_and_has_a_standby_itself(supervise) -> None:
    others = children()
    supervision = supervise(STAND_BY, wants_standby=lambda: True)
    for _ in range(2):
        standby = await standby_of(supervision, others)
        supervision.output.clear()
        supervision.process.kill_once()
        assert await supervision.until_up() == standby
        assert supervision.output[0] == "up as a standby without a listener"
    # One that has died meanwhile is not missed.
    os.kill(await standby_of(supervision, others), signal.SIGKILL)
    supervision.output.clear()
    supervision.process.kill_once()
    assert await supervision.until_up() in children()
    assert supervision.output[0] == "up  without a listener"
    await standby_of(supervision, others)
    await supervision.process.stop(30)
    assert children() == others


@pytest.mark.usefixtures("at_once")
async def test_a_standby_ends_with_its_supervisor_and_is_made_when_it_is_wanted(supervise) -> None:
    others, wants = children(), asyncio.Event()
    supervision = supervise(STAND_BY, wants_standby=wants.is_set)
    await supervision.until_up()
    await asyncio.sleep(0.1)
    assert len(children() - others) == 1
    wants.set()
    standby = await standby_of(supervision, others)
    supervision.process.kill()
    await asyncio.wait_for(supervision.task, 30)
    assert not is_alive(standby)


@pytest.mark.usefixtures("at_once")
async def test_a_standby_whose_socket_was_given_up_does_not_serve(supervise) -> None:
    port = ReservedPort.reserve("127.0.0.1", 0)
    with closing(SharedListener(port.address)) as listener:
        others = children()
        supervision = supervise(STAND_BY, wants_standby=lambda: True, listener=listener)
        standby = await standby_of(supervision, others)
        # No process accepted connections: the socket is closed when this one ends, and the next one gets another.
        supervision.output.clear()
        supervision.process.kill_once()
        assert await supervision.until_up() != standby
        assert supervision.output[0] == "up  with a listener"
        await until_true(lambda: not is_alive(standby))
        await standby_of(supervision, others)
        listener.begin("thing")
        supervision.output.clear()
        supervision.process.kill_once()
        await supervision.until_up()
        assert supervision.output[0] == "up as a standby with a listener"
    port.release()


@contextmanager
def unread_stderr(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Our stderr is a pipe whose reader has gone."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    with monkeypatch.context() as patch, os.fdopen(write_end, "w") as pipe:
        patch.setattr(sys, "stderr", pipe)
        yield
        # Text that could not be written would be tried again when the file is closed.
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), write_end)


async def test_a_stderr_that_nobody_reads_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys; print('going', file=sys.stderr); print('up', flush=True); sys.exit(1)"
    with unread_stderr(monkeypatch):
        supervision = Supervision(code, report_on_stderr)
        await until_true(lambda: supervision.task.done() or len(supervision.output) >= 3)
        assert not supervision.task.done()
        await supervision.process.stop(0)
        await asyncio.gather(supervision.task, return_exceptions=True)


async def test_status_2_is_final_and_its_reason_is_carried_and_not_printed(
    supervise, capfd: pytest.CaptureFixture[str]
) -> None:
    supervision = supervise(REFUSE)
    with pytest.raises(ServiceRefused, match=r"^quire thing: error: no room$"):
        await asyncio.wait_for(supervision.task, 30)
    assert capfd.readouterr().err == "before\nafter\n"
    assert supervision.process.starts == 1
    with pytest.raises(RuntimeError, match="does not run"):
        _ = supervision.process.pid
    with pytest.raises(ServiceRefused, match=r"^quire thing: error: it refused its configuration$"):
        await asyncio.wait_for(supervise("import sys; sys.exit(2)").task, 30)


def num_open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def fail_at_the_limit(*_: object, **__: object) -> None:
    raise OSError(errno.EMFILE, "Too many open files")


def fail_to_start_a_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize(
    ("owner", "name", "failure"),
    [
        (os, "pipe", fail_at_the_limit),
        (subprocess.Popen, "__init__", fail_at_the_limit),
        (threading.Thread, "start", fail_to_start_a_thread),
    ],
    ids=["no pipe", "no process", "no thread"],
)
async def test_a_process_that_dies_while_none_can_be_started_is_started_once_one_can(
    supervise, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, failure: Callable[..., None]
) -> None:
    supervision = supervise("print('up', flush=True)\n" + WAIT_FOR_SIGNAL)
    pid = await supervision.until_up()
    supervision.output.clear()
    open_files = num_open_files()
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failure)
        os.kill(pid, signal.SIGKILL)
        await until_true(lambda: supervision.task.done() or len(supervision.reports) >= 4)
    assert not supervision.task.done()
    assert all("cannot be started: [Errno" in line for line in supervision.reports[1:4])
    assert supervision.reports[1].endswith("; trying again in 0.02 s")
    assert await supervision.until_up() != pid
    await until_true(lambda: num_open_files() <= open_files)


async def test_stop_lets_the_process_end_by_itself_or_kills_it(supervise, tmp_path: Path) -> None:
    file = tmp_path / "end"
    supervision = supervise(NOTE_TERM.format(file=str(file), status=0))
    pid = await supervision.until_up()
    await supervision.process.stop(60)
    assert file.read_text() == "terminated"
    assert not is_alive(pid)
    assert supervision.reports == []
    await supervision.process.stop(60)
    stubborn = supervise(IGNORE_TERM)
    pid = await stubborn.until_up()
    async with asyncio.timeout(30):
        await stubborn.process.stop(0.1)
    assert not is_alive(pid)


async def test_kill_takes_the_children_of_the_process_too(supervise) -> None:
    code = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, 'up', sep='\\n', flush=True)"
    supervision = supervise(f"{code}\n{WAIT_FOR_SIGNAL}")
    await supervision.until_up()
    grandchild = int(supervision.output[0])
    supervision.process.kill()
    await until_true(lambda: not is_alive(grandchild))


async def test_a_process_has_its_own_group_for_ctrl_c_and_our_session_for_its_niceness_to_count(supervise) -> None:
    pid = await supervise('print("up", flush=True); ' + WAIT_FOR_SIGNAL).until_up()
    assert os.getpgid(pid) == pid
    assert os.getsid(pid) == os.getsid(0)


async def test_stop_during_the_wait_before_a_restart_returns_at_once(supervise) -> None:
    supervision = supervise("import sys; sys.exit(1)")
    supervision.process._backoff = RestartBackoff(first_s=300.0)
    await until_true(lambda: supervision.reports)
    async with asyncio.timeout(30):
        await supervision.process.stop(60)
    assert supervision.task.done()


async def test_cancelling_the_supervision_kills_the_process(supervise) -> None:
    supervision = supervise("print('up', flush=True)\n" + WAIT_FOR_SIGNAL)
    pid = await supervision.until_up()
    supervision.task.cancel()
    await asyncio.wait([supervision.task], timeout=30)
    assert not is_alive(pid)


async def test_a_line_of_any_length_and_bytes_does_no_harm(supervise) -> None:
    code = "import os; os.write(1, b'\\xff\\n'); print('x' * 1_000_000); print('up', flush=True)"
    supervision = supervise(f"{code}\n{WAIT_FOR_SIGNAL}")
    await supervision.until_up()
    assert supervision.output[0] == "\ufffd"
    assert max(map(len, supervision.output)) < 1_000_000


# Prints "up" when it listens, stops itself, and never answers.
SERVICE = """
import asyncio, os, signal, sys
from quire.rpc.server import RpcServer
async def serve():
    server = await RpcServer.start(sys.argv[1], lambda _: None, [])
    print("up", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    await asyncio.Event().wait()
asyncio.run(serve())
"""


async def test_a_service_that_hangs_is_killed_and_started_again(tmp_path_factory: pytest.TempPathFactory) -> None:
    socket = tmp_path_factory.mktemp("w") / "s"
    command = [sys.executable, "-c", SERVICE, f"unix:{socket}"]
    reports: list[str] = []
    output: list[str] = []
    spec = ServiceSpec("thing", lambda: command, dict(os.environ), output.append)
    supervised = SupervisedProcess(spec, report=lambda line: None, backoff=RestartBackoff(first_s=0.01))
    limits = HangLimits(hang_timeout_s=0.9, start_timeout_s=300.0)
    tasks = [supervised.start(), asyncio.create_task(watch(supervised, socket, limits, reports.append))]
    try:
        await until_true(lambda: "up" in output)
        output.clear()
        await until_true(lambda: supervised.starts > 1 and "up" in output)
        assert set(reports) == {"thing answers no health check for 0.9 s; killing it"}
    finally:
        tasks[1].cancel()
        await supervised.stop(0)
        await asyncio.gather(*tasks, return_exceptions=True)
