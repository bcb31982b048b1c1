"""Runs ordinary streams during an attack, and checks that the callers of bench/hostile_callers.py do not affect them.

Starts a server on quire-tiny in float32. Half of the ordinary streams use gRPC, half HTTP. Each sends one request again
and again, with a prompt and a seed of its own, and each answer must equal the answer before the attack. `/health` is
requested ten times a second, each time by a new connection, and the memory of the gateway is read once a second. Exits
with 1 if a stream failed or changed, if `/health` was not answered or took half a second or longer at the 99th
percentile, or if the gateway was restarted or exceeded its memory limit.
"""

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np

from bench.cluster import held_by
from bench.report import Series, write_results
from quire.client import AsyncClient, GenerationOptions
from quire.rpc.address import TcpAddress, parse_address
from quire.rpc.errors import QuireError, ResourceExhausted
from quire_cli.supervisor import LocalServer, ServeSettings
from quire_torture.client import Client, FailedError, Progress
from quire_torture.traffic import COMPLETIONS, Call, Question

_PROMPTS = ("Once upon a time", "The old man and the", "Question: What is the opposite of hot?", "In the morning she")
_MAX_TOKENS = 120
_STREAM_TIMEOUT_S = 300.0
_HEALTH_EVERY_S, _MEMORY_EVERY_S, _HEALTH_TIMEOUT_S = 0.1, 1.0, 30.0
_BACK_OFF_S = 0.5
"""Pause after the server reports that it is full, which is no failure: nothing was accepted."""


@dataclass(slots=True)
class Findings:
    """Observations during the attack."""

    num_streams: int = 0
    num_refused: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    stream_s: list[float] = field(default_factory=list)
    health_s: list[float] = field(default_factory=list)
    gateway_mib: list[float] = field(default_factory=list)


class RefusedError(Exception):
    """The server is full and reports it before it accepts the request."""


@dataclass(frozen=True, slots=True)
class OrdinaryCaller:
    """A caller that streams the same request again and again, over gRPC or over HTTP."""

    number: int
    grpc: AsyncClient
    http: httpx.AsyncClient

    async def stream(self) -> str:
        """The text of the answer. Raises RefusedError; any other error is a failure."""
        prompt, temperature = _PROMPTS[self.number % len(_PROMPTS)], 0.7 * (self.number // 4 % 2)
        if self.number % 2:
            return await self._over_http(prompt, temperature)
        options = GenerationOptions(temperature=temperature, seed=self.number, max_tokens=_MAX_TOKENS, ignore_eos=True)
        pieces: list[str] = []
        try:
            async with self.grpc.generate_stream(prompt, options) as stream:
                async for piece in stream.text:
                    pieces.append(piece)
        except ResourceExhausted as error:
            if pieces:
                raise
            raise RefusedError from error
        return "".join(pieces)

    async def _over_http(self, prompt: str, temperature: float) -> str:
        body = {"prompt": prompt, "temperature": temperature, "seed": self.number, "max_tokens": _MAX_TOKENS}
        body |= {"stream": True, "ignore_eos": True}
        call = Call(self.number, Question(self.number, "completion stream", "-", COMPLETIONS, body))
        try:
            answer = await Client(self.http, "", "", num_retries=0).send(Progress(call))
        except FailedError as error:
            if str(error) == f"HTTP {httpx.codes.TOO_MANY_REQUESTS:d}":
                raise RefusedError from error
            raise
        if answer.breaches or not answer.is_complete:
            raise FailedError("the stream ended before [DONE]", detail=str(answer.breaches))
        return answer.choices[0].text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=600, help="length of the attack")
    parser.add_argument("--callers", type=int, default=50, help="hostile callers at once")
    parser.add_argument("--streams", type=int, default=16, help="ordinary streams at once")
    parser.add_argument("--max-health-s", type=float, default=0.5, help="bound on /health at the 99th percentile")
    parser.add_argument("--max-gateway-mib", type=float, default=250, help="bound on the gateway's resident memory")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", help="kinds of hostile callers; all if absent")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")


def main(arguments: argparse.Namespace) -> None:
    findings, answers, num_restarts = asyncio.run(_run(arguments))
    health_p99 = float(np.percentile(findings.health_s, 99))
    peak_mib = max(findings.gateway_mib)
    for kind, counted in answers.items():
        print(f"{kind:<26}", ", ".join(f"{count} x {answer}" for answer, count in counted.items()))
    series = [
        Series("streams", "s", tuple(findings.stream_s)),
        Series("/health", "s", tuple(findings.health_s)),
        Series("memory of the gateway", "MiB", tuple(findings.gateway_mib)),
    ]
    print(*series, sep="\n")
    print(f"{findings.num_streams} streams ended well, {findings.num_refused} were refused before they began")
    faults = [f"{count} streams: {failure}" for failure, count in findings.failures.items()]
    if health_p99 >= arguments.max_health_s:
        faults.append(f"/health took {health_p99:.2f} s at the 99th percentile")
    if peak_mib > arguments.max_gateway_mib:
        faults.append(f"the gateway had {peak_mib:.0f} MiB")
    if num_restarts:
        faults.append(f"{num_restarts} processes were restarted")
    print(f"/health p99 {health_p99:.3f} s; the gateway had {peak_mib:.0f} MiB at most", *faults, sep="\n")
    if arguments.out is not None:
        facts = {
            "faults": faults,
            "num_streams": findings.num_streams,
            "num_refused": findings.num_refused,
            "health_p99_s": health_p99,
            "peak_gateway_mib": peak_mib,
            "answers": answers,
        }
        summary = [Series(each.name, each.unit, (each.median,)) for each in series]
        write_results(arguments.out, "ordinary streams beside hostile callers", summary, **facts)
    if faults:
        sys.exit(1)


async def _run(arguments: argparse.Namespace) -> tuple[Findings, dict[str, dict[str, int]], int]:
    # Settings that docs/security.md advises for untrusted callers.
    settings = ServeSettings(grpc_port=0, http_port=0, dtype="float32", max_streams_per_connection=256)
    async with LocalServer(settings) as server:
        await server.wait_ready()
        processes = [server.process(name) for name in ("gateway", "scheduler", "worker")]
        http_address = parse_address(server.http_address)
        assert isinstance(http_address, TcpAddress)
        limits = httpx.Limits(max_connections=arguments.streams)
        async with (
            AsyncClient(server.grpc_address) as grpc,
            httpx.AsyncClient(
                base_url=f"http://{server.http_address}", timeout=_STREAM_TIMEOUT_S, limits=limits
            ) as http,
        ):
            callers = [OrdinaryCaller(number, grpc, http) for number in range(arguments.streams)]
            expected = await asyncio.gather(*(caller.stream() for caller in callers))
            findings = Findings()
            ends_at = time.monotonic() + arguments.seconds
            attack = await _start_attack(server, arguments)
            async with asyncio.TaskGroup() as group:
                watching = [
                    group.create_task(_watch_health(http_address, findings)),
                    group.create_task(_watch_memory(server, findings)),
                ]
                streaming = [
                    group.create_task(_stream_until(ends_at, caller, text, findings))
                    for caller, text in zip(callers, expected, strict=True)
                ]
                output, _ = await attack.communicate()
                await asyncio.wait(streaming)
                for task in watching:
                    task.cancel()
        return findings, json.loads(output), sum(process.starts - 1 for process in processes)


async def _start_attack(server: LocalServer, arguments: argparse.Namespace) -> asyncio.subprocess.Process:
    flags = {
        "--http": server.http_address,
        "--grpc": server.grpc_address,
        "--callers": arguments.callers,
        "--seconds": arguments.seconds,
        "--seed": arguments.seed,
    }
    command = [str(part) for flag in flags.items() for part in flag]
    if arguments.kinds:
        command += ["--kinds", *arguments.kinds]
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.hostile_callers", *command, stdout=asyncio.subprocess.PIPE
    )


async def _stream_until(ends_at: float, caller: OrdinaryCaller, expected: str, findings: Findings) -> None:
    while (started := time.monotonic()) < ends_at:
        try:
            async with asyncio.timeout(_STREAM_TIMEOUT_S):
                text = await caller.stream()
        except RefusedError:
            findings.num_refused += 1
            await asyncio.sleep(_BACK_OFF_S)
        except (QuireError, FailedError, TimeoutError) as error:
            findings.failures[f"{type(error).__name__} {error}"] += 1
            await asyncio.sleep(_BACK_OFF_S)
        else:
            if text != expected:
                findings.failures["another text than before the attack"] += 1
            findings.num_streams += 1
            findings.stream_s.append(time.monotonic() - started)


async def _watch_health(address: TcpAddress, findings: Findings) -> None:
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
                findings.failures[f"/health: {answer[:100]!r}"] += 1
        except (OSError, TimeoutError) as error:
            findings.failures[f"/health: {type(error).__name__} {error}"] += 1
        findings.health_s.append(time.monotonic() - started)
        await asyncio.sleep(_HEALTH_EVERY_S)


async def _watch_memory(server: LocalServer, findings: Findings) -> None:
    while True:
        # Between its end and its next start the gateway has no process.
        with contextlib.suppress(RuntimeError):
            if (held := held_by(server.process("gateway").pid)) is not None:
                findings.gateway_mib.append(held.resident_mib)
        await asyncio.sleep(_MEMORY_EVERY_S)
