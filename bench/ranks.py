"""What ranks cost: one worker with all threads, and as many ranks of one thread each, in turn through all services.

On one machine both have the same cores, so no more than 1.00 is to be had; ranks pay on machines of their own.
"""

import argparse
import asyncio
import tempfile
from pathlib import Path

from bench.models import SHAPES, write_model
from bench.report import Series, median_ratio, write_results
from bench.served import send_at_once
from bench.split import make_work
from quire_cli.supervisor import LocalServer, ServeSettings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=SHAPES, default="llama-160m", help="shape of a model with random weights")
    parser.add_argument("--ranks", type=int, default=2, help="ranks, and threads of the one worker")
    parser.add_argument("--requests", type=int, default=16, help="requests at once")
    parser.add_argument("--runs", type=int, default=5, help="interleaved runs of each side")
    parser.add_argument("--scale", type=float, default=0.25, help="scale of the chat-like lengths")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")


def main(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as directory:
        write_model(arguments.shape, Path(directory))
        one, several = asyncio.run(_compare(arguments, directory))
    ratio = median_ratio(several, one)
    print(one, several, f"ranks / one worker: {ratio:.3f} (median of run-by-run ratios)", sep="\n")
    if arguments.out is not None:
        write_results(arguments.out, "what ranks cost on the same cores", (one, several), ratio=ratio)


async def _compare(arguments: argparse.Namespace, model: str) -> tuple[Series, Series]:
    one, several = [], []
    async with _server(arguments, model, ranks=1) as alone, _server(arguments, model, ranks=arguments.ranks) as shared:
        for run in range(arguments.runs + 1):
            speeds = await _speed(alone, arguments, run), await _speed(shared, arguments, run)
            if run > 0:  # the first one only warms up
                one.append(speeds[0])
                several.append(speeds[1])
    return (
        Series(f"one worker, {arguments.ranks} threads", "tok/s", tuple(one)),
        Series(f"{arguments.ranks} ranks, one thread each", "tok/s", tuple(several)),
    )


def _server(arguments: argparse.Namespace, model: str, ranks: int) -> LocalServer:
    settings = ServeSettings(
        model=model,
        dtype=arguments.dtype,
        num_threads=arguments.ranks // ranks,
        tensor_parallel_size=ranks,
        grpc_port=0,
        http_port=0,
        log_level="warning",
    )
    return LocalServer(settings)


async def _speed(server: LocalServer, arguments: argparse.Namespace, run: int) -> float:
    """Output tokens per second."""
    await server.wait_ready()
    return (await send_at_once(server.grpc_address, make_work(arguments, run))).output_tokens_per_s
