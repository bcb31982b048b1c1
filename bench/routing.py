"""What routing finds in prefix caches: two replicas on this machine, a gateway for each policy, the same load.

Conversations of several turns behind one system prompt; prompts that share one of some prefixes, which together are
more than the pool of one replica holds; conversations while replicas are killed (scheduler and worker by SIGKILL) and
come back empty; and conversations while a third, new replica is added to the name that the gateways follow. In each run
the policies take turns with the same load, each with other tokens, so that nothing is cached from before. Reported are
the part of all prompt tokens that came from caches, and the mean and the median time to the first token. Few requests
wait for their first token when a replica is killed, and one of them can double the mean of a short run.
"""

import argparse
import asyncio
import contextlib
import itertools
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

import numpy as np

from bench.report import Series, median_ratio, write_results
from gateway.app import Gateway
from gateway.replicas.members import Resolver
from gateway.replicas.routing import RoutingPolicy
from gateway.settings import GatewaySettings
from quire.client import AsyncClient, GenerationOptions
from quire.load import Chat, Constant, Dataset, LoadRequest, Report, make_report, shared_prefix, take
from quire.load.requests import FIRST_TOKEN_ID, frozen
from quire.rpc.address import DnsName
from quire_cli.bench.driver import Driver, Pacing
from quire_cli.bench.grpc_client import GrpcServer
from quire_cli.supervisor import LocalServer, ServeSettings

_TIMEOUT_S = 300
_NAME = "dns:///replicas.test:50052"
_MAX_LEN = 1000
_VOCAB_SIZE = 2000
_POLICIES = (RoutingPolicy.ROUND_ROBIN, RoutingPolicy.AFFINITY, RoutingPolicy.CACHE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shape", default="llama-160m", help="of a model with random weights; quire-tiny: the embedded"
    )
    parser.add_argument("--runs", type=int, default=3, help="interleaved runs of each policy")
    parser.add_argument("--requests", type=int, default=60, help="of one run")
    parser.add_argument("--concurrency", type=int, default=6, help="requests, or conversations, at once")
    parser.add_argument("--blocks", type=int, default=320, help="of each replica's pool, of 16 tokens")
    parser.add_argument(
        "--kills", type=float, default=4.0, help="seconds from one kill to the next, and to the addition"
    )
    parser.add_argument("--loads", nargs="+", choices=_LOADS, default=list(_LOADS))
    parser.add_argument("--out", type=Path, help="write the figures as JSON")


def main(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as directory:
        model = None
        if arguments.shape != "quire-tiny":
            # Imports torch, which the gateways in this process need not.
            from bench.models import write_model

            write_model(arguments.shape, Path(directory))
            model = directory
        asyncio.run(_measure(arguments, model))


class Conversations:
    """Conversations that all begin with the same system prompt of 10 blocks."""

    name = "conversations"

    def requests(self, seed: int) -> Iterator[LoadRequest]:
        chat = Chat(Constant(80), Constant(24), _MAX_LEN, _VOCAB_SIZE, 800, mean_turns=6.0, max_turns=7, delay_s=0.3)
        system = np.random.default_rng(seed).integers(FIRST_TOKEN_ID, _VOCAB_SIZE, 160, dtype=np.int32)
        for request in chat.requests(seed):
            yield replace(request, prompt=frozen(np.concatenate((system, request.token_ids))))


@dataclass(frozen=True)
class _Renamed:
    """A load whose tokens are others, so that nothing of it was cached before: all else is the same."""

    load: Dataset
    by: int

    @property
    def name(self) -> str:
        return self.load.name

    def requests(self, seed: int) -> Iterator[LoadRequest]:
        for request in self.load.requests(seed):
            drawn = (request.token_ids - FIRST_TOKEN_ID + self.by) % (_VOCAB_SIZE - FIRST_TOKEN_ID)
            yield replace(request, prompt=frozen((drawn + FIRST_TOKEN_ID).astype(np.int32)))


def _prefixes() -> Dataset:
    # An odd number: they come in turn, and an even one would suit two replicas in turn.
    return shared_prefix(512, Constant(40), Constant(16), _MAX_LEN, _VOCAB_SIZE, num_prefixes=13)


class _Change(Enum):
    """What happens to replicas meanwhile."""

    NONE = "none"
    KILLED = "killed"
    ADDED = "added"


_LOADS: dict[str, tuple[Callable[[], Dataset], _Change]] = {
    "conversations": (Conversations, _Change.NONE),
    "shared prefixes": (_prefixes, _Change.NONE),
    "conversations, kills": (Conversations, _Change.KILLED),
    "conversations, one added": (Conversations, _Change.ADDED),
}


class _Replicas:
    """Servers of one thread each, whose schedulers have one DNS name; their own gateways have nothing to do."""

    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings
        self.servers: list[LocalServer] = []

    async def resolve(self, name: DnsName) -> list[str]:
        """The addresses of the name, for the gateways."""
        return [server.scheduler_address for server in self.servers]

    @contextlib.asynccontextmanager
    async def started(self) -> AsyncIterator[LocalServer]:
        """Another server, which the name does not have yet."""
        async with LocalServer(self._settings, report=lambda _: None) as server:
            await server.wait_ready()
            yield server


async def _measure(arguments: argparse.Namespace, model: str | None) -> None:
    numbers = itertools.count(1)
    series: list[Series] = []
    table: dict[str, dict[str, float]] = {}
    settings = ServeSettings(
        model=model, grpc_port=0, http_port=0, log_level="error", num_gpu_blocks=arguments.blocks, num_threads=1
    )
    replicas = _Replicas(settings)
    async with contextlib.AsyncExitStack() as stack:
        replicas.servers = [await stack.enter_async_context(replicas.started()) for _ in range(2)]
        gateways = {policy: await stack.enter_async_context(_gateway(replicas, policy, model)) for policy in _POLICIES}
        for name in arguments.loads:
            make_load, change = _LOADS[name]
            runs: dict[RoutingPolicy, list[Report]] = {policy: [] for policy in _POLICIES}
            for run in range(arguments.runs):
                turn = run % len(_POLICIES)
                for policy in _POLICIES[turn:] + _POLICIES[:turn]:
                    load = _Renamed(make_load(), 97 * next(numbers))
                    async with _changing(replicas, change, arguments.kills, first=run):
                        runs[policy].append(await _run(gateways[policy], load, run, arguments))
                    for server in replicas.servers:
                        await server.wait_ready()
            series += _summarize(name, runs, table)
    if arguments.out is not None:
        facts = {name: getattr(arguments, name) for name in ("shape", "requests", "concurrency", "blocks", "kills")}
        write_results(arguments.out, "Routing over two replicas", series, loads=table, **facts)


def _summarize(name: str, runs: dict[RoutingPolicy, list[Report]], table: dict[str, dict[str, float]]) -> list[Series]:
    """Prints one load and adds it to the table."""
    hits = {
        policy: Series(f"{name}, {policy.value}", "% hit", tuple(map(_hit_rate, reports)))
        for policy, reports in runs.items()
    }
    table[name] = {}
    made = [*hits.values()]
    for kind, value_of in {"mean": _mean_ttft_ms, "median": _median_ttft_ms}.items():
        ttft = {
            policy: Series(f"{name}, {policy.value}", f"ms {kind} TTFT", tuple(map(value_of, reports)))
            for policy, reports in runs.items()
        }
        made += ttft.values()
        for policy in _POLICIES[:-1]:
            ratio = median_ratio(ttft[RoutingPolicy.CACHE], ttft[policy])
            table[name][f"{kind} TTFT against {policy.value}"] = ratio
    print(*made, table[name], sep="\n", flush=True)
    return made


def _hit_rate(report: Report) -> float:
    return 100 * (report.cached_tokens or 0) / report.prompt_tokens


def _mean_ttft_ms(report: Report) -> float:
    assert report.ttft is not None
    return 1e3 * report.ttft.mean


def _median_ttft_ms(report: Report) -> float:
    assert report.ttft is not None
    return 1e3 * report.ttft.p50


async def _run(address: str, load: Dataset, seed: int, arguments: argparse.Namespace) -> Report:
    """One run. RuntimeError where a request fails."""
    server = GrpcServer(address, model=None, api_key=None, tls=None, sampling={"temperature": 0.0}, ignore_eos=True)
    pacing = Pacing(max_concurrency=arguments.concurrency, is_closed=True, duration_s=None, timeout_s=_TIMEOUT_S)
    driver = Driver(server, pacing, lambda *_: None)
    try:
        await server.connect()
        await driver.run(take(load, arguments.requests, seed))
    finally:
        await server.close()
    report = make_report(driver.outcome.records, request_rate=float("inf"), client_cpu_s=driver.outcome.cpu_s)
    if report.errors:
        raise RuntimeError(f"requests failed: {driver.outcome.messages}")
    return report


@contextlib.asynccontextmanager
async def _gateway(replicas: _Replicas, policy: RoutingPolicy, model: str | None) -> AsyncIterator[str]:
    """A gateway in this process; yields its address."""
    settings = GatewaySettings(
        model=model, schedulers=(_NAME,), routing=policy.value, grpc_port=0, http_port=0, failover_delay=0.5
    )
    gateway = await Gateway.start(settings, resolver=Resolver(replicas.resolve, 0.1))
    running = asyncio.create_task(gateway.run())
    try:
        async with AsyncClient(gateway.grpc_address) as client:
            await client.generate("Warm up", GenerationOptions(max_tokens=4))
        yield gateway.grpc_address
    finally:
        running.cancel()
        await asyncio.wait([running])
        await gateway.stop(0)


@contextlib.asynccontextmanager
async def _changing(replicas: _Replicas, change: _Change, interval_s: float, *, first: int) -> AsyncIterator[None]:
    """Kills one replica after the other while the block runs, or adds another one, which goes when the block ends."""
    if change is _Change.NONE:
        yield
        return
    async with contextlib.AsyncExitStack() as stack:
        if change is _Change.KILLED:
            changing = _kill(replicas.servers, interval_s, first)
        else:
            changing = _add(replicas, await stack.enter_async_context(replicas.started()), interval_s)
        task = asyncio.create_task(changing)
        two = list(replicas.servers)
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])
            replicas.servers[:] = two


async def _kill(servers: Sequence[LocalServer], interval_s: float, first: int) -> None:
    for number in itertools.count(first):
        server = servers[number % len(servers)]
        await asyncio.sleep(interval_s)
        for name in ("scheduler", "worker"):
            # It may be between its end and its next start.
            with contextlib.suppress(RuntimeError, ProcessLookupError):
                os.kill(server.process(name).pid, signal.SIGKILL)
        await server.wait_ready()


async def _add(replicas: _Replicas, server: LocalServer, after_s: float) -> None:
    await asyncio.sleep(after_s)
    replicas.servers.append(server)
