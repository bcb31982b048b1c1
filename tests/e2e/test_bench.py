"""`quire bench` against all processes, over both of their APIs, and against the servers in bench/peers."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from quire.load import LoadResult
from tests.support.serving import Served, forked

ROOT = Path(__file__).resolve().parents[2]
COMMAND = (sys.executable, "-m", "quire_cli.main")
SHORT = ("--dataset=fixed", "--prompt-len=12", "--output-len=6", "--warm-up-requests=1")


@contextlib.asynccontextmanager
async def process_of(*command: str, **environ: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Killed at the end of the block, where it has not ended."""
    process = await asyncio.create_subprocess_exec(
        *command, env={**os.environ, **environ}, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def bench_command() -> tuple[str, ...]:
    return (*forked("quire_cli.main", "quire_cli.bench.command", "httpx"), "bench")


async def bench(*flags: str, command: tuple[str, ...] = ()) -> tuple[int, str, str]:
    """Exit status, stdout and stderr; of a fork, unless a command is given."""
    async with process_of(*(command or bench_command()), *flags) as process:
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
    status, stdout, stderr = await bench(*SHORT, grpc_of(served), *flags, command=(*COMMAND, "bench"))
    assert status == 0, stderr
    for text in ("TTFT mean, ms", "normalized mean", "goodput/s (e2e=100000ms)", "cached tokens", "preemptions"):
        assert text in stdout
    assert "20/s: 6 of 6 requests" in stderr
    result = LoadResult.read(out)
    slow, at_once = (run.report for run in result.runs)
    for report in (slow, at_once):
        assert (report.completed, report.errors, report.slo_share) == (6, {}, 1.0)
        # What the runs before have cached is not used again.
        assert (report.prompt_tokens, report.output_tokens, report.cached_tokens) == (72, 36, 0)
        assert report.preemptions == 0
        assert report.client_cpu_share is not None
        assert report.client_cpu_share > 0
    assert slow.request_rate == 20
    assert result.facts["model"] == "quire-tiny"
    assert {"version", "commit", "client_machine", "flags", "load", "server", "command"} <= result.facts.keys()
    assert "normalized latency" in picture.read_text()


@pytest.mark.extended
async def test_samples_beams_prefixes_and_conversations_over_grpc(served: Served, tmp_path: Path) -> None:
    samples = await measured(tmp_path / "n.json", *SHORT, grpc_of(served), "--num-requests=2", "--n=3")
    assert samples.runs[0].report.output_tokens == 2 * 3 * 6
    beams = await measured(tmp_path / "b.json", *SHORT, grpc_of(served), "--num-requests=1", "--beam-width=2")
    assert beams.runs[0].report.output_tokens == 6
    flags = ("--dataset=shared-prefix", "--prefix-len=64", "--prompt-len=4", "--output-len=2", "--max-concurrency=1")
    prefixes = await measured(tmp_path / "p.json", *flags, grpc_of(served), "--num-requests=4")
    assert (prefixes.runs[0].report.cached_tokens or 0) >= 3 * 48
    flags = ("--dataset=chat", "--mean-turns=4", "--length-scale=0.2", "--num-requests=8", "--max-concurrency=2")
    report = (await measured(tmp_path / "c.json", *flags, grpc_of(served))).runs[0].report
    assert report.completed == 8
    assert (report.cached_tokens or 0) > 0


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


@pytest.mark.extended
async def test_a_file_of_texts_and_messages_over_both(served: Served, tmp_path: Path) -> None:
    path = tmp_path / "load.jsonl"
    lines: list[dict[str, Any]] = [
        {"prompt": "Once upon a time", "arrival_s": 0},
        {"messages": [{"role": "user", "content": "What is the capital of France?"}], "arrival_s": 0.1},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    for name, where in (("grpc", (grpc_of(served),)), ("http", http_of(served))):
        flags = (f"--dataset={path}", "--output-len=5", "--warm-up-requests=0", *where)
        report = (await measured(tmp_path / f"{name}.json", *flags)).runs[0].report
        assert (report.completed, report.output_tokens) == (2, 10)
        assert report.request_rate == 10


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


@pytest.mark.parametrize("backend", ["grpc", pytest.param("openai", marks=pytest.mark.extended)])
async def test_an_interrupt_ends_the_requests_and_reports_those_that_have_ended(
    served: Served, tmp_path: Path, backend: str
) -> None:
    where = (grpc_of(served),) if backend == "grpc" else http_of(served)
    out = tmp_path / "a.json"
    flags = (*SHORT, *where, "--max-concurrency=2", "--duration=600", f"--out={out}")
    before = (await served.state()).steps
    async with process_of(*bench_command(), *flags) as process:
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


# As much of openvino_genai as the server uses: every step makes one token of each request.
OPENVINO_GENAI = """
import enum

GenerationStatus = enum.Enum("GenerationStatus", "RUNNING FINISHED")
class SchedulerConfig: pass
class GenerationConfig: pass
class Output: generated_ids = [7]

class Handle:
    def __init__(self, left):
        self.left, self.unread = left, 0
    def can_read(self):
        return self.unread > 0
    def read(self):
        self.unread -= 1
        return {0: Output()}
    def get_status(self):
        return GenerationStatus.RUNNING if self.left else GenerationStatus.FINISHED

class ContinuousBatchingPipeline:
    def __init__(self, model, scheduler, device, hints):
        self.handles = []
    def add_request(self, number, prompt, config):
        assert prompt.data.shape[0] == 1
        self.handles.append(Handle(config.max_new_tokens))
        return self.handles[-1]
    def step(self):
        for handle in self.handles:
            if handle.left:
                handle.left -= 1
                handle.unread += 1
"""
OPENVINO = """
class Tensor:
    def __init__(self, data):
        self.data = data
"""


@pytest.mark.extended
async def test_openvino_is_measured_through_its_server(tmp_path: Path) -> None:
    (tmp_path / "openvino_genai.py").write_text(OPENVINO_GENAI)
    (tmp_path / "openvino.py").write_text(OPENVINO)
    program = str(ROOT / "bench" / "peers" / "openvino_genai_server.py")
    flags = ("--dataset=fixed", "--prompt-len=5", "--output-len=9", "--num-requests=12", "--max-concurrency=4")
    async with process_of(sys.executable, program, "model", "0", PYTHONPATH=str(tmp_path)) as server:
        assert server.stdout is not None
        url = (await server.stdout.readline()).decode().removeprefix("ready ").strip()
        report = (await measured(tmp_path / "a.json", "--backend=openai", f"--url={url}", *flags)).runs[0].report
    assert (report.completed, report.output_tokens, report.errors) == (12, 108, {})
    assert report.itl is not None
    assert report.itl.count == 12 * 8
