"""`quire bench` against all processes, over both of their APIs."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path

from quire.load import LoadResult
from tests.support.forks import forked
from tests.support.serving import Served

SHORT = ("--dataset=fixed", "--prompt-len=12", "--output-len=6", "--warm-up-requests=1")


@contextlib.asynccontextmanager
async def benching(*flags: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Runs `quire bench`; kills it at the end of the block if it has not ended."""
    command = (*forked("quire_cli.main", "quire_cli.bench.command", "httpx"), "bench", *flags)
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def bench(*flags: str) -> tuple[int, str, str]:
    """Returns exit status, stdout and stderr."""
    async with benching(*flags) as process:
        stdout, stderr = await process.communicate()
    assert process.returncode is not None
    return process.returncode, stdout.decode(), stderr.decode()


async def measured(path: Path, *flags: str) -> LoadResult:
    status, _, stderr = await bench(*flags, f"--out={path}")
    assert status == 0, stderr
    return LoadResult.read(path)


def grpc_of(served: Served) -> str:
    return f"--url={served.server.grpc_address}"


def http_of(served: Served) -> tuple[str, str]:
    return "--backend=openai", f"--url=http://{served.server.http_address}"


async def test_rates_over_grpc_are_reported_drawn_and_written(served: Served, tmp_path: Path) -> None:
    out, picture = tmp_path / "a.json", tmp_path / "a.svg"
    flags = ("--request-rate=20,inf", "--num-requests=6", "--slo=e2e=100s", f"--out={out}", f"--plot={picture}")
    status, stdout, stderr = await bench(*SHORT, grpc_of(served), *flags)
    assert status == 0, stderr
    for text in ("TTFT mean, ms", "normalized mean", "goodput/s (e2e=100000ms)", "cached tokens", "preemptions"):
        assert text in stdout
    assert "20/s: 6 of 6 requests" in stderr
    result = LoadResult.read(out)
    slow, at_once = (run.report for run in result.runs)
    for report in (slow, at_once):
        assert (report.completed, report.errors, report.slo_share) == (6, {}, 1.0)
        # Prefixes that earlier runs cached are not used again.
        assert (report.prompt_tokens, report.output_tokens, report.cached_tokens) == (72, 36, 0)
        assert report.preemptions == 0
        assert report.client_cpu_share is not None
        assert report.client_cpu_share > 0
    assert slow.request_rate == 20
    assert result.facts["model"] == "quire-tiny"
    assert {"version", "commit", "client_machine", "flags", "load", "server", "command"} <= result.facts.keys()
    assert "normalized latency" in picture.read_text()


async def test_completions_and_chats_over_http(served: Served, tmp_path: Path) -> None:
    for endpoint in ("completions", "chat"):
        flags = (*SHORT, *http_of(served), f"--endpoint={endpoint}", "--num-requests=3", "--max-concurrency=2")
        result = await measured(tmp_path / f"{endpoint}.json", *flags)
        report = result.runs[0].report
        assert (report.completed, report.output_tokens, report.errors) == (3, 18, {})
        assert report.ttft is not None
        assert report.cached_tokens is not None
        assert report.preemptions is None
        assert result.facts["server"]["ignore_eos"] is True


async def test_what_cannot_be_measured_is_counted_or_told_in_one_line(served: Served, tmp_path: Path) -> None:
    path, out = tmp_path / "load.jsonl", tmp_path / "a.json"
    path.write_text('{"prompt": [5, 6], "output_len": 3}\n{"prompt": [99999999], "output_len": 3}\n')
    status, stdout, _ = await bench(f"--dataset={path}", "--warm-up-requests=0", grpc_of(served), f"--out={out}")
    assert status == 0
    assert "1 failed, INVALID_ARGUMENT" in stdout
    report = LoadResult.read(out).runs[0].report
    assert (report.completed, report.requests) == (1, 2)
    path.write_text('{"prompt": [99999999], "output_len": 3}\n')
    for flags, status, message in (
        ((grpc_of(served), f"--dataset={path}"), 1, "every request of the warm-up fails, INVALID_ARGUMENT"),
        (("--url=127.0.0.1:1",), 1, "no gateway answers at 127.0.0.1:1"),
        (("--backend=openai", "--url=http://127.0.0.1:1"), 1, "no server answers at http://127.0.0.1:1"),
        ((grpc_of(served), "--model=other"), 2, "is not served at"),
        ((*http_of(served), "--model=other"), 2, "it serves quire-tiny"),
        ((grpc_of(served), "--dataset=fixed", "--prompt-len=5000"), 2, "do not fit the model"),
    ):
        exit_status, stdout, stderr = await bench(*flags)
        assert (exit_status, stdout, stderr.count("\n")) == (status, "", 1)
        assert stderr.startswith("quire bench: error: ")
        assert message in stderr


async def test_an_interrupt_ends_the_requests_and_reports_those_that_have_ended(served: Served, tmp_path: Path) -> None:
    out = tmp_path / "a.json"
    flags = (*SHORT, grpc_of(served), "--max-concurrency=2", "--duration=600", f"--out={out}")
    before = (await served.state()).steps
    async with benching(*flags) as process:
        # Several times the steps of the warm-up and of the first requests.
        while (await served.state()).steps < before + 60:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        process.send_signal(signal.SIGINT)
        stdout, stderr = (text.decode() for text in await process.communicate())
    assert process.returncode == 130, stderr
    assert "TTFT mean, ms" in stdout
    assert "quire bench: interrupted: the report has" in stderr
    assert "Traceback" not in stderr
    result = LoadResult.read(out)
    assert result.facts["interrupted"] is True
    assert result.runs[0].report.completed > 0
