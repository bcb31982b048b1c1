"""`quire top` and `quire status --watch` over the feed of a gateway."""

import asyncio
import io
import json
import os
import pty
import signal
import struct
import sys
import termios
from fcntl import ioctl
from pathlib import Path

import pytest
from rich.console import Console
from rich.screen import Screen

from gateway.api.ui.watch_messages import frame_object
from gateway.auth.caller import Access
from quire.scheduler.v1 import scheduler_pb2
from quire_cli.feed import Deployment
from quire_cli.main import main
from quire_cli.top import picture, sparkline
from tests.support.fake_scheduler import FakeScheduler
from tests.support.gateway_process import running_gateway
from tests.support.hub import LocalHub
from tests.support.keys import KeysFile


def make_frame(seconds: float, generated: int) -> scheduler_pb2.WatchResponse:
    frame = scheduler_pb2.WatchResponse(unix_seconds=seconds)
    numbers = frame.numbers
    numbers.ready = True
    numbers.running_requests, numbers.waiting_requests, numbers.swapped_requests = 3, 2, 1
    numbers.running_sequences, numbers.max_num_seqs, numbers.preemptions = 5, 8, 4
    numbers.generated_tokens = generated
    numbers.gpu_pool.total_blocks, numbers.gpu_pool.used_blocks = 200, 50
    numbers.disk_blocks, numbers.requests_moved_out = 1200, 3
    frame.steps.add(step_id=17, num_decodes=5, plan_us=250)
    frame.waiting.add(request_id="[bold]evil", reason=scheduler_pb2.WAIT_REASON_BLOCKS, waited_ms=1500)
    numbers.first_token_ms_p50, numbers.first_token_ms_p95 = 42, 90
    return frame


@pytest.fixture
async def url(tmp_path, monkeypatch):
    """The URL of a gateway whose scheduler has generated 100 tokens a second for two seconds."""
    monkeypatch.delenv("QUIRE_API_KEY", raising=False)
    scheduler = FakeScheduler(frames=[make_frame(1.0, 0), make_frame(3.0, 200)])
    await scheduler.start()
    async with running_gateway(scheduler) as running:
        yield running.http_url
    await scheduler.stop()


async def test_without_a_terminal_top_prints_one_plain_snapshot_of_each_replica(capsys):
    frames = [make_frame(1.0, 0), make_frame(3.0, 200)]
    schedulers = [FakeScheduler(frames=list(frames)) for _ in range(2)]
    for scheduler in schedulers:
        await scheduler.start()
    async with running_gateway(*schedulers) as running:
        assert await asyncio.to_thread(main, ["top", "--url", running.http_url]) == 0
    for scheduler in schedulers:
        await scheduler.stop()
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.startswith(f"quire-tiny at {running.http_url}")
    said = "ready, running 3, waiting 2, swapped 1, 100 tokens/s, first token 42 ms, KV 25%, preemptions 4"
    said += ", 1,200 blocks on disk, 3 requests moved out"
    assert lines == [f"replica {each.address}: {said}" for each in schedulers]


def make_deployment(num_replicas: int) -> Deployment:
    """Replicas with one step and one waiting request each; if there are several, the last one has not sent anything
    yet."""
    deployment = Deployment()
    addresses = [f"unix:/tmp/quire-{index}/scheduler.sock" for index in range(num_replicas)]
    replicas = [{"address": each, "connected": True, "ready": True, "problem": None} for each in addresses]
    deployment.add_event("gateway", {"model": "m", "version": "1", "replicas": replicas})
    for address in addresses[: max(1, num_replicas - 1)]:
        deployment.add_event("frame", frame_object(address, make_frame(1.0, 0)))
    return deployment


def drawn(deployment: Deployment, width: int, height: int) -> list[str]:
    """The lines on a screen of this size."""
    console = Console(width=width, height=height, record=True, file=io.StringIO())
    console.print(Screen(picture(deployment, "http://h:1", width, height)))
    return [line.rstrip() for line in console.export_text().splitlines()]


def test_a_wide_terminal_shows_everything_and_reads_no_markup():
    text = "\n".join(drawn(make_deployment(1), 200, 40))
    assert all(each in text for each in ("[bold]evil", "blocks", "5/8", "25%", "█████░", "0.25 ms", "Ctrl-C ends"))


@pytest.mark.parametrize("num_replicas", [1, 3])
def test_a_smaller_terminal_shows_fewer_columns_and_none_is_cut_and_a_tiny_one_sentences(num_replicas):
    for width in (64, 80, 120):
        _, _, titles, *rest = drawn(make_deployment(num_replicas), width, 40)
        assert {"replica", "health", "running", "waiting", "tokens/s", "KV"} <= set(titles.split())
        assert "…" not in titles
        assert any(line.lstrip().startswith("unix:/") and " ready " in line and " 25% " in f"{line} " for line in rest)
    for width, height in ((20, 5), (63, 24)):
        lines = drawn(make_deployment(num_replicas), width, height)
        assert len(lines) <= height
        assert max(map(len, lines)) <= width
        assert ("running 3" in " ".join(lines)) or num_replicas > 1
        assert ("scheduler.sock" in "".join(lines)) == (num_replicas > 1)


def test_a_role_stands_beside_the_health():
    deployment = make_deployment(1)
    (replica,) = deployment.gateway["replicas"]
    replica["role"] = "prefill"
    assert any(" ready, prefill " in line for line in drawn(deployment, 120, 40))


def test_history_is_bars_of_eight_heights_with_gaps_where_nothing_is_known() -> None:
    assert sparkline(range(5), [0, 1, None, 4, 8], 6, 1) == " ▁▂ ▅█"
    assert sparkline(range(3), [5, 8, 0], 2, 1) == "█▁"
    assert sparkline([], [], 3, 1) == "   "
    # Each column shows two samples.
    assert sparkline(range(6), [0, 2, None, None, 3, 5], 4, 2) == " ▃ █"


def test_the_charts_of_ten_minutes_fit_a_terminal_of_80_columns_and_24_lines() -> None:
    deployment = make_deployment(1)
    (address,) = deployment.replicas
    names = ("generated", "computed", "ttft50", "running", "waiting", "swapped", "rows", "used", "preemptions")
    samples = [{"at": 2.0 * index, "down": False, **dict.fromkeys(names, 0.5)} for index in range(300)]
    deployment.replicas[address].samples.clear()
    deployment.add_event("history", {"replica": address, "samples": samples})
    lines = drawn(deployment, 80, 24)
    charts = [line for line in lines if "█" * 50 in line]
    assert [line.split("  ")[0] for line in charts] == [
        *("tokens/s", "computed/s", "first token", "running", "waiting", "swapped", "rows", "KV", "preempted/s"),
    ]
    assert any(line.endswith("the last 10 min") for line in lines)
    assert "Ctrl-C ends" in lines
    assert max(map(len, lines)) <= 80
    # Tables get the remaining lines.
    for height, num_tables in ((24, 0), (28, 1), (32, 2)):
        lines = drawn(deployment, 80, height)
        assert (
            sum(line.startswith(("requests that wait at unix:", "last steps of unix:")) for line in lines) == num_tables
        )
        assert "Ctrl-C ends" in lines


def test_replicas_that_the_gateway_no_longer_has_are_not_shown() -> None:
    deployment = Deployment()
    for address in ("unix:/tmp/a", "unix:/tmp/b"):
        replicas = [{"address": address, "connected": True, "ready": True, "problem": None}]
        deployment.add_event("gateway", {"model": "m", "version": "1", "replicas": replicas})
        assert list(deployment.replicas) == [address]


def test_an_address_that_is_no_gateway_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["top", "--url", "http://127.0.0.1:1"]) == 1
    assert capsys.readouterr().err.startswith("quire top: error: no gateway answers (http://127.0.0.1:1: ")
    with LocalHub({}) as other:
        other.status = 200
        assert main(["top", "--url", other.endpoint]) == 1
        message = f"{other.endpoint} answers, but not as a gateway of Quire does"
        assert capsys.readouterr().err == f"quire top: error: {message}\n"
    for url, problem in (
        ("http://h:99999", "Port out of range 0-65535\n"),
        ("http://[h", "Invalid IPv6 URL\n"),
        ("ftp://x", "expected http://HOST:PORT"),
    ):
        assert main(["top", "--url", url]) == 2
        assert capsys.readouterr().err.startswith(f'quire top: error: --address: "{url}" is not valid: {problem}')
    missing = tmp_path / "ca.pem"
    assert main(["top", "--url", "https://127.0.0.1:1", "--tls-ca-file", str(missing)]) == 2
    assert capsys.readouterr().err == f"quire top: error: {missing} cannot be used for TLS: No such file or directory\n"


async def test_only_operators_watch(capsys, tmp_path, monkeypatch):
    scheduler, keys = FakeScheduler(frames=[make_frame(1.0, 0), make_frame(3.0, 200)]), KeysFile(tmp_path / "keys.json")
    tenant, operator = keys.add("acme"), keys.add("staff", access=Access(is_operator=True))
    await scheduler.start()
    async with running_gateway(scheduler, keys_files=(keys.path,)) as running:
        for key, status, message in ((None, 1, "QUIRE_API_KEY"), (tenant, 1, "for operators"), (operator, 0, "")):
            if key is None:
                monkeypatch.delenv("QUIRE_API_KEY", raising=False)
            else:
                monkeypatch.setenv("QUIRE_API_KEY", key)
            assert await asyncio.to_thread(main, ["top", "--url", running.http_url]) == status
            assert message in capsys.readouterr().err
    await scheduler.stop()


async def read_until(descriptor: int, text: str) -> str:
    """The output of a program to its terminal up to `text`."""
    loop, found = asyncio.get_running_loop(), ""
    try:
        async with asyncio.timeout(60):
            while text not in found:
                found += (await loop.run_in_executor(None, os.read, descriptor, 65536)).decode(errors="replace")
    except (TimeoutError, OSError) as error:
        raise AssertionError(f'it did not write "{text}" ({error!r}), but:\n{found}') from error
    return found


@pytest.mark.extended
async def test_top_draws_in_a_terminal_and_ctrl_c_ends_it(url):
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 160, 0, 0))
    # The size in the environment takes precedence.
    environ = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    command = [sys.executable, "-m", "quire_cli.main", "top", "--url", url]
    program = await asyncio.create_subprocess_exec(
        *command, stdin=theirs, stdout=theirs, stderr=theirs, env=environ | {"TERM": "xterm"}
    )
    os.close(theirs)
    assert "last steps of" in await read_until(ours, "requests that wait at")
    # A new size applies to the next picture.
    ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    await read_until(ours, "Ctrl-C ends")
    program.send_signal(signal.SIGINT)
    async with asyncio.timeout(60):
        assert await program.wait() == 0
    os.close(ours)


@pytest.mark.extended
async def test_status_prints_a_line_a_second_until_it_is_interrupted(url):
    program = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "quire_cli.main", "status", "--watch", "--address", url, "--format", "json"),
        stdout=asyncio.subprocess.PIPE,
    )
    assert program.stdout is not None
    async with asyncio.timeout(60):
        lines = [(await program.stdout.readline()).decode() for _ in range(2)]
        program.send_signal(signal.SIGINT)
        assert await program.wait() == 0
    numbers = [json.loads(line) for line in lines]
    assert [each["numbers"]["running_requests"] for each in numbers] == [3, 3]
    assert {each["health"] for each in numbers} == {"ready"}
    assert numbers[0]["rates"]["generated_tokens"] == 100
