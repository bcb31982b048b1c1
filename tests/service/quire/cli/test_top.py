"""`quire top` and `quire status --watch` over the feed of a gateway."""

import asyncio
import io
import os
import pty
import signal
import struct
import sys
import termios
from fcntl import ioctl

import pytest
from rich.console import Console

from gateway.auth.caller import Access
from quire.cli.feed import Deployment
from quire.cli.main import main
from quire.cli.top import picture
from quire.scheduler.v1 import scheduler_pb2
from tests.support.fake_scheduler import FakeScheduler
from tests.support.gateway_process import running_gateway
from tests.support.keys import KeysFile


def make_frame(seconds: float, generated: int) -> scheduler_pb2.WatchResponse:
    frame = scheduler_pb2.WatchResponse(unix_seconds=seconds)
    numbers = frame.numbers
    numbers.ready = True
    numbers.running_requests, numbers.waiting_requests, numbers.swapped_requests = 3, 2, 1
    numbers.running_sequences, numbers.max_num_seqs, numbers.preemptions = 5, 8, 4
    numbers.generated_tokens = generated
    numbers.gpu_pool.total_blocks, numbers.gpu_pool.used_blocks = 200, 50
    frame.steps.add(step_id=17, num_decodes=5, plan_us=250)
    frame.waiting.add(request_id="[bold]evil", reason=scheduler_pb2.WAIT_REASON_BLOCKS, waited_ms=1500)
    frame.ended.add(queue_ms=30, prefill_ms=12)
    return frame


@pytest.fixture
async def url(tmp_path, monkeypatch):
    """Of a gateway whose scheduler has generated 100 tokens a second for two seconds."""
    monkeypatch.delenv("QUIRE_API_KEY", raising=False)
    scheduler = FakeScheduler(frames=[make_frame(1.0, 0), make_frame(3.0, 200)])
    await scheduler.start()
    async with running_gateway(scheduler) as running:
        yield running.http_url
    await scheduler.stop()


async def test_without_a_terminal_top_prints_one_plain_snapshot(url, capsys):
    assert await asyncio.to_thread(main, ["top", "--url", url]) == 0
    head, line = capsys.readouterr().out.splitlines()
    assert head.startswith(f"quire-tiny at {url}")
    assert line.endswith(
        "ready, running 3, waiting 2, swapped 1, 100 tokens/s, first token 42 ms, KV 25%, preemptions 4"
    )


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_picture_fits_any_terminal_and_reads_no_markup(width):
    deployment = Deployment()
    replicas = [{"address": "s:1", "connected": True, "ready": True, "problem": None}]
    deployment.take("gateway", {"model": "m", "version": "1", "replicas": replicas})
    frame = make_frame(1.0, 0)
    waiting = {"request_id": "[bold]evil", "tokens_to_compute": 9, "waited_ms": 1500, "reason": "blocks"}
    step = {
        "step_id": 17,
        "num_decodes": 5,
        "num_chunk_tokens": 0,
        "num_entered": 0,
        "num_preempted": 0,
        "num_copied": 0,
        "plan_us": 250,
    }
    numbers = {each.name: getattr(frame.numbers, each.name) for each in frame.numbers.DESCRIPTOR.fields}
    numbers["gpu_pool"] = {"total_blocks": 200, "used_blocks": 50}
    deployment.take(
        "frame",
        {
            "replica": "s:1",
            "unix_seconds": 1.0,
            "numbers": numbers,
            "waiting": [waiting],
            "steps": [step],
            "ended": [],
        },
    )
    console = Console(width=width, height=40, record=True, file=io.StringIO())
    console.print(picture(deployment, "http://h:1", 40))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= width
    if width == 200:
        text = "\n".join(lines)
        assert all(each in text for each in ("[bold]evil", "blocks", "5/8", "25%", "0.25 ms"))


async def test_errors_are_one_line(url, capsys, tmp_path):
    assert await asyncio.to_thread(main, ["top", "--url", "http://127.0.0.1:1"]) == 1
    assert capsys.readouterr().err.startswith("quire top: error: no gateway answers (http://127.0.0.1:1: ")
    assert main(["top", "--url", "ftp://x"]) == 2
    assert "expected http://HOST:PORT" in capsys.readouterr().err


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
    """What a program wrote to its terminal, until it says this."""
    loop, found = asyncio.get_running_loop(), ""
    async with asyncio.timeout(60):
        while text not in found:
            found += (await loop.run_in_executor(None, os.read, descriptor, 65536)).decode(errors="replace")
    return found


@pytest.mark.extended
async def test_top_draws_in_a_terminal_and_ctrl_c_ends_it(url):
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 160, 0, 0))
    environ = os.environ | {"TERM": "xterm"}
    program = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "quire.cli.main",
        "top",
        "--url",
        url,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environ,
    )
    os.close(theirs)
    assert "last steps of" in await read_until(ours, "who waits at")
    # Another size is drawn at the next picture.
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
        *("-m", "quire.cli.main", "status", "--watch", "--url", url),
        stdout=asyncio.subprocess.PIPE,
    )
    assert program.stdout is not None
    async with asyncio.timeout(60):
        lines = [(await program.stdout.readline()).decode() for _ in range(2)]
        program.send_signal(signal.SIGINT)
        assert await program.wait() == 0
    assert all("running 3, waiting 2" in line for line in lines)
