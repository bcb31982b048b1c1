"""What the load generator itself costs: processor time of `quire bench` for a streamed token, over both of its APIs.

A worker whose steps take a fixed time stands for the model, so that the tokens come at a rate that is known.
"""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from bench.paced_worker import Pace
from bench.report import Series, write_results
from quire.load import LoadResult, Report
from quire_cli.supervisor import LocalServer, ServeSettings
from quire_cli.supervisor.commands import Programs

_PROMPT_LEN = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens-per-s", type=int, default=2000, help="streamed by the worker")
    parser.add_argument("--streams", type=int, default=64, help="requests at once")
    parser.add_argument("--output-len", type=int, default=200, help="tokens of each request")
    parser.add_argument("--requests", type=int, default=128, help="requests of each run")
    parser.add_argument("--runs", type=int, default=3, help="interleaved runs")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")


def main(arguments: argparse.Namespace) -> None:
    reports = asyncio.run(_measure(arguments))
    series = []
    for backend, each in reports.items():
        us = tuple((report.client_cpu_share or 0.0) * 1e6 / report.output_tokens_per_s for report in each)
        share = tuple(value * arguments.tokens_per_s / 1e6 for value in us)
        series += [
            Series(f"{backend}, tokens streamed", "tok/s", tuple(report.output_tokens_per_s for report in each)),
            Series(f"{backend}, client for a token", "us", us),
            Series(f"{backend}, share of a core at {arguments.tokens_per_s} tok/s", "", share),
        ]
    print(*series, sep="\n")
    if arguments.out is not None:
        write_results(arguments.out, "what the load generator costs", series, streams=arguments.streams)


async def _measure(arguments: argparse.Namespace) -> dict[str, list[Report]]:
    step_ms = 1e3 * arguments.streams / arguments.tokens_per_s
    blocks = arguments.streams * ((_PROMPT_LEN + arguments.output_len) // 16 + 2)
    settings = ServeSettings(
        grpc_port=0, http_port=0, max_num_seqs=arguments.streams, num_gpu_blocks=blocks, log_level="warning"
    )
    programs = Programs(worker=(sys.executable, "-m", "bench.paced_worker", Pace.DEVICE.value, str(step_ms)))
    reports: dict[str, list[Report]] = {"grpc": [], "openai": []}
    async with LocalServer(settings, programs=programs) as server:
        await server.wait_ready()
        urls = {"grpc": server.grpc_address, "openai": f"http://{server.http_address}"}
        for _ in range(arguments.runs):
            for backend, url in urls.items():
                reports[backend].append(await _bench(arguments, backend, url))
    return reports


async def _bench(arguments: argparse.Namespace, backend: str, url: str) -> Report:
    """One run by `quire bench`, in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as directory:
        out = Path(directory) / "run.json"
        flags = {
            "backend": backend,
            "url": url,
            "dataset": "fixed",
            "prompt-len": _PROMPT_LEN,
            "output-len": arguments.output_len,
            "num-requests": arguments.requests,
            "max-concurrency": arguments.streams,
            "out": out,
        }
        command = [sys.executable, "-m", "quire_cli.main", "bench", *(f"--{name}={flags[name]}" for name in flags)]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
        if await process.wait():
            raise RuntimeError(f"quire bench ended with {process.returncode}")
        return LoadResult.read(out).runs[0].report
