"""What the split into processes costs: the same requests through all services and through one process, in turn."""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.models import SHAPES, write_model
from bench.report import Series, median_ratio, write_results
from bench.served import chat_like, send_at_once
from quire.load import LoadRequest
from quire_cli.supervisor import LocalServer, ServeSettings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="model directory; none is the embedded model")
    parser.add_argument("--shape", choices=SHAPES, help="instead: a model of this shape with random weights")
    parser.add_argument("--requests", type=int, default=64, help="requests at once")
    parser.add_argument("--runs", type=int, default=5, help="interleaved runs of each side")
    parser.add_argument("--scale", type=float, default=0.5, help="scale of the chat-like lengths")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--num-threads", type=int, help="threads of one operation in the worker")
    parser.add_argument("--serve-one-process", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")


def main(arguments: argparse.Namespace) -> None:
    if arguments.serve_one_process:
        _answer_runs(arguments)
        return
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as directory:
        if arguments.shape is not None:
            write_model(arguments.shape, Path(directory))
            arguments.model = directory
        asyncio.run(_compare(arguments))


def make_work(arguments: argparse.Namespace, run: int) -> list[LoadRequest]:
    """Other prompts in every run, so that nothing is cached; the lengths are alike."""
    return chat_like(arguments.requests, arguments.scale, longest=480, seed=run)


async def _compare(arguments: argparse.Namespace) -> None:
    settings = ServeSettings(
        model=arguments.model,
        dtype=arguments.dtype,
        num_threads=arguments.num_threads,
        grpc_port=0,
        http_port=0,
        log_level="warning",
    )
    single, split, first_token = [], [], []
    async with LocalServer(settings) as server:
        await server.wait_ready()
        with _OneProcess(arguments.model) as one_process:
            await send_at_once(server.grpc_address, make_work(arguments, run=0)[:4])
            for run in range(1, arguments.runs + 1):
                work = make_work(arguments, run)
                num_tokens = sum(request.output_len or 0 for request in work)
                print(f"run {run}: {len(work)} requests at once, {num_tokens} output tokens")
                single.append(num_tokens / await asyncio.to_thread(one_process.run, run))
                report = await send_at_once(server.grpc_address, work)
                split.append(report.output_tokens_per_s)
                first_token.append(report.ttft.p50 * 1e3 if report.ttft else 0.0)
    series = (
        Series("one process, output tokens", "tok/s", tuple(single)),
        Series("three processes, output tokens", "tok/s", tuple(split)),
        Series("three processes, first token", "ms", tuple(first_token)),
    )
    ratio = median_ratio(series[1], series[0])
    print(*series, f"three processes / one process: {ratio:.3f} (median of run-by-run ratios)", sep="\n")
    if arguments.out is not None:
        write_results(arguments.out, "what the split into processes costs", series, ratio=ratio)


class _OneProcess:
    """The in-process engine, in a process of its own that runs the workload whenever it is asked."""

    def __init__(self, model: str | None) -> None:
        self._flags = ["--serve-one-process", *(("--model", model) if model else ())]

    def __enter__(self) -> "_OneProcess":
        command = [sys.executable, *sys.orig_argv[1:], *self._flags]
        # OpenMP's threads wait as those of a worker do (ADR 0005).
        environ = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)
        self._read()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def run(self, run: int) -> float:
        """Runs the workload of this run once; returns seconds."""
        assert self._process.stdin is not None
        print(run, file=self._process.stdin, flush=True)
        return float(self._read())

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the one-process engine ended")
        return line


def _answer_runs(arguments: argparse.Namespace) -> None:
    """The child: one line when it is ready, then for each line, which names a run, the seconds that it took."""
    from bench.in_process import InProcessEngine
    from worker_svc.settings import WorkerSettings

    settings = WorkerSettings(
        model=arguments.model, dtype=arguments.dtype, num_threads=arguments.num_threads, device="cpu"
    )
    engine = InProcessEngine(settings)
    engine.run(make_work(arguments, run=0)[:4])
    print("ready", flush=True)
    for line in sys.stdin:
        print(engine.run(make_work(arguments, int(line))), flush=True)
