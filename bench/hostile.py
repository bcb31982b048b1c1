"""Runs ordinary requests during an attack, and checks that the callers of bench/hostile_callers.py do not affect them.

Starts a server on quire-tiny in float32. Half of the ordinary requests use gRPC, half HTTP: `quire_torture` sends them
and judges the answers: each must equal the answer before the attack. `/health` is requested ten times a
second, each time by a new connection, and the memory of the gateway is read once a second. Exits with 1 if a request
failed or changed, if `/health` was not answered or took half a second or longer at the 99th percentile, or if the
gateway was restarted or exceeded its memory limit.
"""

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from bench.cluster import held_by
from bench.report import Series, write_results
from bench.traffic import Gateways, draw
from quire.rpc.address import TcpAddress, parse_address
from quire_cli.supervisor import LocalServer, ServeSettings
from quire_torture.faults import Place
from quire_torture.link import Link
from quire_torture.oracle import Verdict
from quire_torture.report import as_json, findings, first_outputs, table
from quire_torture.run import Plan, Report, Torture
from quire_torture.traffic import draw_calls

_KINDS = ("durable greedy", "completion stream", "durable sampled", "seeded")
_HUNG_S = 300.0
_HEALTH_EVERY_S, _MEMORY_EVERY_S, _HEALTH_TIMEOUT_S = 0.1, 1.0, 30.0
_FULL = ("HTTP 429", "RESOURCE_EXHAUSTED")
"""Errors of a server that is full and says so, which is no failure: nothing was accepted."""


@dataclass(slots=True)
class Watched:
    """Observations of the gateway during the attack."""

    failures: Counter[str] = field(default_factory=Counter)
    health_s: list[float] = field(default_factory=list)
    gateway_mib: list[float] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=600, help="length of the attack")
    parser.add_argument("--callers", type=int, default=50, help="hostile callers at once")
    parser.add_argument("--streams", type=int, default=16, help="ordinary requests at once")
    parser.add_argument("--max-health-s", type=float, default=0.5, help="bound on /health at the 99th percentile")
    parser.add_argument("--max-gateway-mib", type=float, default=250, help="bound on the gateway's resident memory")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", help="kinds of hostile callers; all if absent")


def main(arguments: argparse.Namespace) -> None:
    torture, report, watched, answers, num_restarts = asyncio.run(_run(arguments))
    health_p99 = float(np.percentile(watched.health_s, 99))
    peak_mib = max(watched.gateway_mib)
    for kind, counted in answers.items():
        print(f"{kind:<26}", ", ".join(f"{count} x {answer}" for answer, count in counted.items()))
    reports = {"undisturbed": torture.undisturbed, "during the attack": report}
    print(*table(reports), *first_outputs(reports), *findings(reports), sep="\n")
    faults = [f"{count} x {failure}" for failure, count in (watched.failures + report.errors).items()]
    faults = [each for each in faults if not any(full in each for full in _FULL)]
    if wrong := {each.call.number for each in report.wrongs if each.finding.verdict is not Verdict.ERROR}:
        faults.append(f"{len(wrong)} requests have a wrong answer")
    if health_p99 >= arguments.max_health_s:
        faults.append(f"/health took {health_p99:.2f} s at the 99th percentile")
    if peak_mib > arguments.max_gateway_mib:
        faults.append(f"the gateway had {peak_mib:.0f} MiB")
    if num_restarts:
        faults.append(f"{num_restarts} processes were restarted")
    print(f"/health p99 {health_p99:.3f} s; the gateway had {peak_mib:.0f} MiB at most", *faults, sep="\n")
    facts = {
        **as_json(torture.plan, reports, {}),
        "faults": faults,
        "health_p99_s": health_p99,
        "peak_gateway_mib": peak_mib,
        "answers": answers,
    }
    series = [
        Series("/health", "s", (float(np.median(watched.health_s)),)),
        Series("memory of the gateway", "MiB", (float(np.median(watched.gateway_mib)),)),
    ]
    write_results(arguments.out, "ordinary streams while hostile callers send", series, **facts)
    if faults:
        sys.exit(1)


async def _run(arguments: argparse.Namespace) -> tuple[Torture, Report, Watched, dict[str, dict[str, int]], int]:
    # Settings that docs/security.md advises for untrusted callers.
    settings = ServeSettings(grpc_port=0, http_port=0, dtype="float32", max_streams_per_connection=256)
    plan = Plan("", arguments.seed, arguments.streams, max_s=arguments.seconds, hung_s=_HUNG_S)
    async with LocalServer(settings) as server:
        await server.wait_ready()
        processes = [server.process(name) for name in ("gateway", "scheduler", "worker")]
        http_address = parse_address(server.http_address)
        assert isinstance(http_address, TcpAddress)
        async with Gateways.connected([server.grpc_address], [server.http_address]) as gateways:
            questions = draw(arguments.seed, arguments.streams, _KINDS)
            place = Place(0, Link(lambda: server.http_address), lambda: False)
            torture, watched = Torture(plan, place, gateways, print, questions), Watched()
            async with torture.prepared():
                attack = await _start_attack(server, arguments)
                watching = [
                    asyncio.create_task(_watch_health(http_address, watched)),
                    asyncio.create_task(_watch_memory(server, watched)),
                ]
                report = await torture.run(draw_calls(plan.seed, questions, plan.limits))
                output, _ = await attack.communicate()
                for task in watching:
                    task.cancel()
        return torture, report, watched, json.loads(output), sum(process.starts - 1 for process in processes)


async def _start_attack(server: LocalServer, arguments: argparse.Namespace) -> asyncio.subprocess.Process:
    flags = [f"--{name}={getattr(arguments, name)}" for name in ("callers", "seconds", "seed")]
    flags += [f"--http={server.http_address}", f"--grpc={server.grpc_address}"]
    if arguments.kinds:
        flags += ["--kinds", *arguments.kinds]
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.hostile_callers", *flags, stdout=asyncio.subprocess.PIPE
    )


async def _watch_health(address: TcpAddress, watched: Watched) -> None:
    """Requests /health by a new connection each time, as load balancers do."""
    request = f"GET /health HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n".encode()
    while True:
        started = time.monotonic()
        try:
            async with asyncio.timeout(_HEALTH_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(address.host, address.port)
                with contextlib.closing(writer):
                    writer.write(request)
                    answer = await reader.read()
            if not answer.startswith(b"HTTP/1.1 200"):
                watched.failures[f"/health: {answer[:100]!r}"] += 1
        except OSError as error:
            watched.failures[f"/health: {type(error).__name__} {error}"] += 1
        watched.health_s.append(time.monotonic() - started)
        await asyncio.sleep(_HEALTH_EVERY_S)


async def _watch_memory(server: LocalServer, watched: Watched) -> None:
    while True:
        # Between its end and its next start the gateway has no process.
        with contextlib.suppress(RuntimeError):
            if (held := held_by(server.process("gateway").pid)) is not None:
                watched.gateway_mib.append(held.resident_mib)
        await asyncio.sleep(_MEMORY_EVERY_S)
