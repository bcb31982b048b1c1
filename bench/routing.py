"""What routing finds in prefix caches: two replicas on this machine, a gateway for each policy, the same kind of load.

Conversations of several turns behind one system prompt; prompts that share one of some prefixes, which together are
more than the pool of one replica holds; and conversations while replicas are killed (scheduler and worker by SIGKILL)
and come back empty. The policies take turns, each time with other tokens, so that nothing is cached from before.
Reported are the part of all prompt tokens that came from caches, and the mean time to the first token.
"""

import argparse
import asyncio
import contextlib
import itertools
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from bench.report import Series, median_ratio, write_results
from gateway.app import Gateway
from gateway.replicas.routing import RoutingPolicy
from gateway.settings import GatewaySettings
from quire.cli.bench.driver import Driver, Pacing
from quire.cli.bench.grpc_client import GrpcServer
from quire.client import AsyncClient, GenerationOptions
from quire.load import Chat, Constant, Dataset, LoadRequest, Report, make_report, shared_prefix, take
from quire.load.requests import FIRST_TOKEN_ID, frozen
from quire.local import LocalServer, ServeSettings

_TIMEOUT_S = 300
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
    parser.add_argument("--kills", type=float, default=8.0, help="seconds from one kill to the next")
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


class _Conversations:
    """Conversations that all begin with the same system prompt of 10 blocks."""

    name = "conversations"

    def requests(self, seed: int) -> Iterator[LoadRequest]:
        chat = Chat(Constant(80), Constant(24), _MAX_LEN, _VOCAB_SIZE, 800, mean_turns=6.0, max_turns=7, delay_s=0.3)
        system = np.random.default_rng(seed).integers(FIRST_TOKEN_ID, _VOCAB_SIZE, 160, dtype=np.int32)
        for request in chat.requests(seed):
            yield replace(request, prompt=frozen(np.concatenate((system, request.token_ids))))


def _prefixes() -> Dataset:
    # An odd number: they come in turn, and an even one would suit two replicas in turn.
    return shared_prefix(512, Constant(40), Constant(16), _MAX_LEN, _VOCAB_SIZE, num_prefixes=13)


_LOADS: dict[str, tuple[Callable[[], Dataset], bool]] = {
    "conversations": (_Conversations, False),
    "shared prefixes": (_prefixes, False),
    "conversations, kills": (_Conversations, True),
}
"""What arrives, and whether replicas are killed meanwhile."""


async def _measure(arguments: argparse.Namespace, model: str | None) -> None:
    seeds = itertools.count(1)
    series: list[Series] = []
    table: dict[str, dict[str, float]] = {}
    async with _replicas(model, arguments.blocks) as replicas, contextlib.AsyncExitStack() as stack:
        addresses = tuple(replica.scheduler_address for replica in replicas)
        gateways = {policy: await stack.enter_async_context(_gateway(addresses, policy, model)) for policy in _POLICIES}
        for name in arguments.loads:
            make_load, has_kills = _LOADS[name]
            runs: dict[RoutingPolicy, list[Report]] = {policy: [] for policy in _POLICIES}
            for _ in range(arguments.runs):
                for policy, address in gateways.items():
                    async with _killing(replicas, arguments.kills if has_kills else None):
                        runs[policy].append(await _run(address, make_load(), next(seeds), arguments))
                    for replica in replicas:
                        await replica.wait_ready()
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
    ttft = {
        policy: Series(f"{name}, {policy.value}", "ms TTFT", tuple(map(_mean_ttft_ms, reports)))
        for policy, reports in runs.items()
    }
    best = ttft[RoutingPolicy.CACHE]
    table[name] = {f"TTFT against {policy.value}": median_ratio(best, ttft[policy]) for policy in _POLICIES[:-1]}
    print(*hits.values(), *ttft.values(), table[name], sep="\n", flush=True)
    return [*hits.values(), *ttft.values()]


def _hit_rate(report: Report) -> float:
    return 100 * (report.cached_tokens or 0) / report.prompt_tokens


def _mean_ttft_ms(report: Report) -> float:
    assert report.ttft is not None
    return 1e3 * report.ttft.mean


async def _run(address: str, load: Dataset, seed: int, arguments: argparse.Namespace) -> Report:
    """One run. RuntimeError where a request fails."""
    server = GrpcServer(address, model=None, api_key=None, tls=None, temperature=0.0, ignore_eos=True)
    pacing = Pacing(max_concurrency=arguments.concurrency, is_closed=True, duration_s=None, timeout_s=_TIMEOUT_S)
    driver = Driver(server, pacing, lambda _: None)
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
async def _replicas(model: str | None, num_blocks: int) -> AsyncIterator[list[LocalServer]]:
    """Two servers of one thread each; their own gateways have nothing to do."""
    settings = ServeSettings(
        model=model, grpc_port=0, http_port=0, log_level="error", num_gpu_blocks=num_blocks, num_threads=1
    )
    async with contextlib.AsyncExitStack() as stack:
        servers = [LocalServer(settings, report=lambda _: None) for _ in range(2)]
        for server in servers:
            await stack.enter_async_context(server)
        for server in servers:
            await server.wait_ready()
        yield servers


@contextlib.asynccontextmanager
async def _gateway(addresses: tuple[str, ...], policy: RoutingPolicy, model: str | None) -> AsyncIterator[str]:
    """A gateway in this process; yields its address."""
    settings = GatewaySettings(
        model=model, schedulers=addresses, routing=policy.value, grpc_port=0, http_port=0, failover_delay=0.5
    )
    gateway = await Gateway.start(settings)
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
async def _killing(replicas: Sequence[LocalServer], interval_s: float | None) -> AsyncIterator[None]:
    """Kills one replica after the other while the block runs."""
    if interval_s is None:
        yield
        return

    async def kill() -> None:
        for replica in itertools.cycle(replicas):
            await asyncio.sleep(interval_s)
            for name in ("scheduler", "worker"):
                # It may be between its end and its next start.
                with contextlib.suppress(RuntimeError, ProcessLookupError):
                    os.kill(replica.process(name).pid, signal.SIGKILL)
            await replica.wait_ready()

    task = asyncio.create_task(kill())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
