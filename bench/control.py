"""Speed of the control path: steps per second through all services with a worker whose model takes a fixed time.

Compiled clients stream from the gateway over gRPC or HTTP meanwhile. The ideal is one step per `--step-ms`
milliseconds. The report also has what the clients received in the same seconds, the ages of tokens when they arrived,
and the processor time of each process.
"""

import argparse
import asyncio
import os
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path

from bench.audience import Audience, StepClock, audience
from bench.paced_worker import Pace
from bench.report import Series, write_results
from quire.rpc.channel import open_channel
from quire.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from quire_cli.supervisor import LocalServer, ServeSettings
from quire_cli.supervisor.commands import Programs
from quire_torture.processes import stat_of

_SETTLE_S = 2.0
_PROCESSES = ("worker", "scheduler", "gateway")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--front", choices=("grpc", "http"), default="grpc", help="the API of the clients")
    parser.add_argument("--step-ms", type=float, nargs="+", default=[1, 2, 5, 10], help="time of the model")
    parser.add_argument(
        "--pace", choices=[pace.value for pace in Pace], default=Pace.DEVICE.value, help="side that keeps this time"
    )
    parser.add_argument("--sequences", type=int, default=256, help="running sequences, each with a streaming client")
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of counting")
    parser.add_argument("--runs", type=int, default=3, help="interleaved runs")
    parser.add_argument("--trace", type=Path, help="write the scheduler's step trace of the last run there")


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of the same seconds, a second: steps of the scheduler, what reached clients, and processor time.

    Attributes:
        age_p50, age_p99: Milliseconds from the end of a token's step until its client had the token.
        worker, scheduler, gateway, client: Processors that each process used.
    """

    steps: float
    tokens: float
    messages: float
    age_p50: float
    age_p99: float
    worker: float
    scheduler: float
    gateway: float
    client: float


_UNITS = {"steps": "1/s", "tokens": "tok/s", "messages": "1/s", "age_p50": "ms", "age_p99": "ms"}


def main(arguments: argparse.Namespace) -> None:
    asyncio.run(_main(arguments))


async def _main(arguments: argparse.Namespace) -> None:
    found: dict[float, list[Rates]] = {step_ms: [] for step_ms in arguments.step_ms}
    for _ in range(arguments.runs):
        for step_ms in arguments.step_ms:
            found[step_ms].append(await _measure(arguments, step_ms))
    series = []
    for step_ms, rates in found.items():
        shares = tuple(each.steps * step_ms / 1e3 for each in rates)
        series.append(Series(f"{step_ms:g} ms, steps of the ideal", "share", shares))
        for field in fields(Rates):
            values = tuple(getattr(each, field.name) for each in rates)
            series.append(Series(f"{step_ms:g} ms, {field.name}", _UNITS.get(field.name, "cores"), values))
    print(*series, sep="\n")
    write_results(
        arguments.out,
        "the control path with a paced worker",
        series,
        sequences=arguments.sequences,
        pace=arguments.pace,
        front=arguments.front,
    )


async def _measure(arguments: argparse.Namespace, step_ms: float) -> Rates:
    num_tokens = int((arguments.seconds + 3 * _SETTLE_S) * 1e3 / step_ms) + 100
    settings = ServeSettings(
        grpc_port=0,
        http_port=0,
        max_num_seqs=arguments.sequences,
        max_num_batched_tokens=max(2048, arguments.sequences),
        num_gpu_blocks=arguments.sequences * (num_tokens // 16 + 4),
        trace_steps=None if arguments.trace is None else str(arguments.trace),
        log_level="warning",
    )
    programs = Programs(worker=(sys.executable, "-m", "bench.paced_worker", arguments.pace, str(step_ms)))
    async with LocalServer(settings, programs=programs) as server:
        await server.wait_ready()
        address = server.http_address if arguments.front == "http" else server.grpc_address
        async with audience(arguments.front, address, arguments.sequences, num_tokens, StepClock()) as clients:
            return await _count(server, clients, arguments)


async def _count(server: LocalServer, clients: Audience, arguments: argparse.Namespace) -> Rates:
    channel = open_channel(server.scheduler_address)
    scheduler = scheduler_pb2_grpc.SchedulerServiceStub(channel)
    try:
        while (await _state(scheduler)).running_requests < arguments.sequences:  # noqa: ASYNC110 (another process)
            await asyncio.sleep(0.05)
        await asyncio.sleep(_SETTLE_S)
        await clients.heard()
        started, before, used = time.monotonic(), await _state(scheduler), _used(server)
        await asyncio.sleep(arguments.seconds)
        heard, after = await clients.heard(), await _state(scheduler)
        seconds = time.monotonic() - started
        processors = {name: (now - used[name]) / seconds for name, now in _used(server).items()}
        return Rates(
            steps=(after.steps - before.steps) / seconds,
            tokens=heard.tokens / heard.seconds,
            messages=heard.messages / heard.seconds,
            age_p50=heard.ages_ms[0],
            age_p99=heard.ages_ms[1],
            client=heard.cpu_s / heard.seconds,
            **processors,
        )
    finally:
        await channel.close()


def _used(server: LocalServer) -> dict[str, float]:
    """Processor time of each process so far, in seconds."""
    stats = {name: stat_of(server.process(name).pid) for name in _PROCESSES}
    return {name: (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK") for name, stat in stats.items() if stat}


async def _state(scheduler: scheduler_pb2_grpc.SchedulerServiceStub) -> scheduler_pb2.GetStateResponse:
    return await scheduler.GetState(scheduler_pb2.GetStateRequest())
