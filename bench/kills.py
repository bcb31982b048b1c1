"""Durable streams of every kind while processes are killed and stopped and links are cut, for as long as one likes.

Two gateways, a scheduler and a worker serve quire-tiny. Each caller streams the same request again and again: greedy,
sampled, several samples, the best of several, beam search, stop strings, log probabilities, a JSON schema, penalties,
chat. Every few seconds one of the faults happens, and the next one waits until requests succeed again. Each answer must
be the one that the same request got before the first fault, log probabilities to the bit, each token must come once and
in order, and at the end no block may be in use. Exits with 1 where that did not hold.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import os
import random
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from bench.report import Series, write_results
from quire.client import (
    AsyncClient,
    BeamSearch,
    ChatMessage,
    Constraint,
    GenerationOptions,
    SequenceFinished,
    TokenChunk,
)
from quire.rpc.channel import open_channel
from quire.rpc.errors import QuireError
from quire.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from quire_cli.supervisor import LocalServer, ServeSettings

_NUM_TOKENS = 160
_STREAM_TIMEOUT_S, _READY_TIMEOUT_S = 180.0, 90.0
_CHUNK_BYTES = 64 * 1024

_SCHEMA = {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 30, "maxItems": 40}

_KINDS: dict[str, GenerationOptions] = {
    "greedy": GenerationOptions(temperature=0.0, max_tokens=_NUM_TOKENS, ignore_eos=True),
    "sampled": GenerationOptions(temperature=1.0, max_tokens=_NUM_TOKENS, ignore_eos=True),
    "three samples": GenerationOptions(temperature=1.0, n=3, max_tokens=_NUM_TOKENS, ignore_eos=True),
    "best of four": GenerationOptions(temperature=1.0, n=2, best_of=4, max_tokens=_NUM_TOKENS // 2),
    "beams": GenerationOptions(n=2, beam_search=BeamSearch(4), max_tokens=_NUM_TOKENS // 2),
    "stop strings": GenerationOptions(temperature=0.8, stop=("zebra", " and the"), max_tokens=_NUM_TOKENS),
    "log probabilities": GenerationOptions(temperature=0.7, logprobs=3, max_tokens=_NUM_TOKENS, ignore_eos=True),
    "a JSON schema": GenerationOptions(
        temperature=0.9, constraint=Constraint(json_schema=_SCHEMA), max_tokens=_NUM_TOKENS
    ),
    "penalties": GenerationOptions(temperature=0.9, frequency_penalty=0.5, top_p=0.95, max_tokens=_NUM_TOKENS),
    "chat": GenerationOptions(temperature=0.9, max_tokens=_NUM_TOKENS, ignore_eos=True),
}


class Link:
    """A port before the gateways' own, whose connections can be reset."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._open: set[asyncio.StreamWriter] = set()
        self.address = ""

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator["Link"]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = "{}:{}".format(*server.sockets[0].getsockname()[:2])
        try:
            yield self
        finally:
            server.close()
            self.reset()

    def reset(self) -> None:
        for writer in self._open:
            writer.transport.abort()
        self._open.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self._target.rpartition(":")
        try:
            there, back = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()
            return
        self._open |= {writer, back}
        with contextlib.suppress(OSError):
            await asyncio.gather(_pass_on(reader, back), _pass_on(there, writer))
        self._open -= {writer, back}


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.closing(writer):
        while data := await reader.read(_CHUNK_BYTES):
            writer.write(data)
            await writer.drain()


@dataclass(slots=True)
class Collected:
    """One sequence, as far as it has come."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    end: str = ""
    logprobs: list[float] = field(default_factory=list)


Output = dict[int, Collected]
"""The sequences of an answer by their index."""


@dataclass(frozen=True, slots=True)
class Caller:
    """One who streams the same request again and again."""

    number: int
    client: AsyncClient

    @property
    def kind(self) -> str:
        return list(_KINDS)[self.number % len(_KINDS)]

    async def stream(self) -> Output:
        """Raises RuntimeError where a token comes twice, too early or not at all."""
        options = _KINDS[self.kind]
        if options.beam_search is None:
            options = _with_seed(options, self.number)
        prompt = f"Once upon a time, story {self.number}"
        if self.kind == "chat":
            stream = self.client.chat_stream([ChatMessage("user", prompt)], options, durable=True)
        else:
            stream = self.client.generate_stream(prompt, options, durable=True)
        sequences: Output = {}
        async with stream:
            async for event in stream:
                if isinstance(event, TokenChunk):
                    sequence = sequences.setdefault(event.sequence_index, Collected())
                    if event.offset != len(sequence.token_ids):
                        raise RuntimeError(f"a chunk at {event.offset} came after {len(sequence.token_ids)} tokens")
                    sequence.token_ids += event.token_ids
                    sequence.text += event.text
                    sequence.logprobs += [each.chosen.logprob for each in event.logprobs]
                elif isinstance(event, SequenceFinished):
                    sequence = sequences.setdefault(event.sequence_index, Collected())
                    if sequence.end:
                        raise RuntimeError("a sequence ended twice")
                    sequence.end = event.finish_reason
        if stream.completed is None or not all(each.end for each in sequences.values()):
            raise RuntimeError("the stream ended early")
        return sequences


@dataclass(slots=True)
class Findings:
    num_streams: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    recovery_s: list[float] = field(default_factory=list)


Fault = Callable[[LocalServer, Link, random.Random], Awaitable[None]]


def _kill(*names: str, within_s: float = 0.0) -> Fault:
    async def happen(server: LocalServer, link: Link, rng: random.Random) -> None:
        for name in rng.sample(names, len(names)):
            _signal(server, name, signal.SIGKILL)
            await asyncio.sleep(rng.uniform(0, within_s))

    return happen


def _stop(name: str) -> Fault:
    async def happen(server: LocalServer, link: Link, rng: random.Random) -> None:
        _signal(server, name, signal.SIGSTOP)
        await asyncio.sleep(rng.uniform(0.2, 4))
        _signal(server, name, signal.SIGCONT)

    return happen


async def _cut_links(server: LocalServer, link: Link, rng: random.Random) -> None:
    link.reset()


def _signal(server: LocalServer, name: str, number: signal.Signals) -> None:
    # It may be between its end and its next start.
    with contextlib.suppress(RuntimeError, ProcessLookupError):
        os.kill(server.process(name).pid, number)


_FAULTS: dict[str, Fault] = {
    "kill gateway": _kill("gateway"),
    "kill gateway-1": _kill("gateway-1"),
    "kill scheduler": _kill("scheduler"),
    "kill worker": _kill("worker"),
    "kill both gateways": _kill("gateway", "gateway-1"),
    "kill scheduler and worker": _kill("scheduler", "worker", within_s=0.5),
    "kill gateway and scheduler": _kill("gateway", "scheduler", within_s=0.05),
    "kill everything": _kill("gateway", "gateway-1", "scheduler", "worker"),
    "stop gateway": _stop("gateway"),
    "stop scheduler": _stop("scheduler"),
    "stop worker": _stop("worker"),
    "cut links": _cut_links,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--streams", type=int, default=16, help="streams at once")
    parser.add_argument("--interval", type=float, default=2.0, help="seconds of service between two faults, at most")
    parser.add_argument("--faults", nargs="+", choices=[*_FAULTS], default=[*_FAULTS], help="which faults happen")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--speculate", default="auto", help="as in quire serve")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")


def main(arguments: argparse.Namespace) -> None:
    findings = asyncio.run(_run(arguments))
    for fault, count in sorted(findings.faults.items()):
        print(f"{count:>5} x {fault}")
    if findings.recovery_s:
        print(
            f"served again after {statistics.median(findings.recovery_s):.1f} s, {max(findings.recovery_s):.1f} at most"
        )
    print(f"{findings.num_streams} streams ended as before the first fault")
    for failure, count in findings.failures.items():
        print(f"{count:>5} x {failure}")
    if arguments.out is not None:
        series = [Series("served again after a fault", "s", tuple(findings.recovery_s))]
        facts = {"num_streams": findings.num_streams, "faults": findings.faults, "failures": findings.failures}
        write_results(arguments.out, "durable streams through kills, stops and cuts", series, **facts)
    if findings.failures:
        sys.exit(1)


async def _run(arguments: argparse.Namespace) -> Findings:
    settings = ServeSettings(
        grpc_port=0,
        http_port=0,
        gateways=2,
        dtype=arguments.dtype,
        speculate=tuple(arguments.speculate.split(",")),
        num_gpu_blocks=512,
        log_level="error",
    )
    findings = Findings()
    async with LocalServer(settings, report=lambda line: None) as server:
        await server.wait_ready()
        async with Link(server.grpc_address).listening() as link, contextlib.AsyncExitStack() as stack:
            callers = [
                Caller(number, await stack.enter_async_context(AsyncClient(link.address)))
                for number in range(arguments.streams)
            ]
            expected = await asyncio.gather(*(caller.stream() for caller in callers))
            ends_at = time.monotonic() + arguments.seconds
            async with asyncio.TaskGroup() as group:
                for caller, output in zip(callers, expected, strict=True):
                    group.create_task(_stream_until(ends_at, caller, output, findings))
                await _let_faults_happen(ends_at, server, link, arguments, findings)
        blocks = await _blocks_in_use(server)
        if blocks:
            findings.failures[f"{blocks} blocks are in use at the end"] += 1
    return findings


async def _let_faults_happen(
    ends_at: float, server: LocalServer, link: Link, arguments: argparse.Namespace, findings: Findings
) -> None:
    rng = random.Random(arguments.seed)
    while time.monotonic() < ends_at:
        await asyncio.sleep(rng.uniform(0.1, arguments.interval))
        name = rng.choice(arguments.faults)
        await _FAULTS[name](server, link, rng)
        findings.faults[name] += 1
        began = time.monotonic()
        try:
            async with asyncio.timeout(_READY_TIMEOUT_S):
                await _wait_served(server)
        except TimeoutError:
            findings.failures[f"not served {_READY_TIMEOUT_S:.0f} s after: {name}"] += 1
            return
        findings.recovery_s.append(time.monotonic() - began)


async def _wait_served(server: LocalServer) -> None:
    while True:
        try:
            async with AsyncClient(server.grpc_address) as client:
                await client.generate("a", GenerationOptions(max_tokens=1), timeout_s=_READY_TIMEOUT_S)
            return
        except QuireError:
            await asyncio.sleep(0.05)


async def _stream_until(ends_at: float, caller: Caller, expected: Output, findings: Findings) -> None:
    while time.monotonic() < ends_at:
        try:
            async with asyncio.timeout(_STREAM_TIMEOUT_S):
                output = await caller.stream()
        except (QuireError, RuntimeError, TimeoutError) as error:
            findings.failures[f"{caller.kind}: {type(error).__name__} {error}"] += 1
            await asyncio.sleep(0.2)
            continue
        if output == expected:
            findings.num_streams += 1
        else:
            findings.failures[f"{caller.kind}: another answer than before"] += 1


async def _blocks_in_use(server: LocalServer) -> int:
    """What is in use once requests that were left behind have had their time."""
    async with open_channel(server.scheduler_address) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        in_use = 0
        for _ in range(150):
            state = await stub.GetState(scheduler_pb2.GetStateRequest(), wait_for_ready=True, timeout=30)
            in_use = state.gpu_pool.used_blocks
            if not in_use:
                break
            await asyncio.sleep(0.5)
        return in_use


def _with_seed(options: GenerationOptions, seed: int) -> GenerationOptions:
    return dataclasses.replace(options, seed=seed)
