"""The parts of `python -m bench moves` that time requests: first tokens by where the prompt's blocks are, streams that
move, streams beside blocks that come from disk, and streams beside long prompts with and without roles."""

import argparse
import asyncio
import contextlib
import itertools
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.report import Series, median_ratio
from gateway.app import Gateway
from gateway.replicas.members import Resolver
from gateway.settings import GatewaySettings
from quire.client import AsyncClient, GenerationOptions
from quire.rpc.address import DnsName
from quire.rpc.channel import open_channel
from quire.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from quire_cli.supervisor import LocalServer, ServeSettings

_NAME = "dns:///replicas.test:50052"
_BLOCK_SIZE = 16
_BEGUN = 20
_DISK_SETTLES_S = 0.5
"""Longer than it takes until the blocks of a prompt are on disk."""


def settings_of(model: str | None, **changes: object) -> ServeSettings:
    """A server on one thread that computes one token a step, so that each chunk of a stream is a step."""
    values = {"model": model, "grpc_port": 0, "http_port": 0, "log_level": "error", "num_threads": 1} | changes
    return ServeSettings(**{"multi_step_ms": 0, "dtype": "bfloat16", **values})


class Prompts:
    """Random prompts, each another one."""

    def __init__(self, vocab_size: int) -> None:
        self._rng, self._vocab_size = np.random.default_rng(0), vocab_size

    def draw(self, num_tokens: int) -> list[int]:
        return self._rng.integers(20, self._vocab_size, num_tokens).tolist()


async def first_token_ms(client: AsyncClient, prompt: Sequence[int]) -> tuple[float, int]:
    """The milliseconds to the first token, and how many tokens of the prompt were cached."""
    started = time.perf_counter()
    result = await client.generate(list(prompt), options(1))
    return 1e3 * (time.perf_counter() - started), result.usage.cached_tokens


def options(num_tokens: int) -> GenerationOptions:
    return GenerationOptions(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)


async def first_tokens(arguments: argparse.Namespace, model: str | None, directory: Path) -> list[Series]:
    """A prompt that is computed, then comes from the pool, and then, when others have taken its room, from disk."""
    num_blocks = 2 * (arguments.long_prompt // _BLOCK_SIZE + 2)
    settings = settings_of(
        model,
        kv_disk=directory / "first",
        num_gpu_blocks=num_blocks,
        persistent_kv_cache="off",
        tensor_parallel_size=arguments.ranks,
    )
    prompts, kept = Prompts(arguments.vocab_size), (arguments.long_prompt - 1) // _BLOCK_SIZE * _BLOCK_SIZE
    found: dict[str, list[float]] = {"computed": [], "pool": [], "disk": []}
    async with LocalServer(settings, report=lambda _: None) as server:
        await server.wait_ready()
        async with AsyncClient(server.grpc_address) as client:
            await first_token_ms(client, prompts.draw(arguments.long_prompt))
            for _ in range(arguments.runs):
                prompt = prompts.draw(arguments.long_prompt)
                for place, at_least in (("computed", 0), ("pool", kept), ("disk", kept)):
                    if place == "disk":
                        for _ in range(3):
                            await first_token_ms(client, prompts.draw(arguments.long_prompt))
                        await asyncio.sleep(_DISK_SETTLES_S)
                    milliseconds, num_cached = await first_token_ms(client, prompt)
                    # The newest block of a prompt is sealed with a step of another request.
                    assert num_cached >= at_least - _BLOCK_SIZE, f"{num_cached} tokens came from the {place}"
                    found[place].append(milliseconds)
    what = f"first token of {arguments.long_prompt}"
    return [Series(f"{what}, {place}", "ms", tuple(values)) for place, values in found.items()]


@dataclass(slots=True)
class Stream:
    """When the tokens of a stream came."""

    times: list[float] = field(default_factory=list[float])

    async def read(self, client: AsyncClient, prompt: list[int], num_tokens: int) -> None:
        async with client.generate_stream(prompt, options(num_tokens)) as chunks:
            async for _ in chunks:
                self.times.append(time.perf_counter())

    def gaps_ms(self, start: float = 0.0, end: float = float("inf")) -> np.ndarray:
        """The milliseconds between tokens, of those that end in between."""
        times = np.array(self.times)
        return 1e3 * np.diff(times)[(times[1:] >= start) & (times[1:] < end)]


async def begun(streams: Sequence[Stream], reading: "asyncio.Future[Any]") -> None:
    """Waits until all have some tokens. Raises what ended them before."""
    while min(len(each.times) for each in streams) <= _BEGUN:
        if reading.done():
            raise RuntimeError("a stream ended before it began") from reading.exception()
        await asyncio.sleep(0.002)


async def stop(reading: "asyncio.Future[Any]") -> None:
    """Ends streams. Raises what ended them before."""
    assert not reading.done(), "the streams ended too early: raise --num-beside or --num-decoded"
    reading.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await reading


class Pair:
    """Two servers and a gateway for both, which knows those in `named`."""

    def __init__(self) -> None:
        self.servers: list[LocalServer] = []
        self.named: list[LocalServer] = []
        self.client: AsyncClient

    async def _resolve(self, name: DnsName) -> list[str]:
        return [server.scheduler_address for server in self.named]

    @classmethod
    @contextlib.asynccontextmanager
    async def started(cls, model: str | None, settings: Sequence[ServeSettings]) -> AsyncIterator["Pair"]:
        pair = cls()
        async with contextlib.AsyncExitStack() as stack:
            for each in settings:
                pair.servers.append(await stack.enter_async_context(LocalServer(each, report=lambda _: None)))
            for server in pair.servers:
                await server.wait_ready()
            pair.named = list(pair.servers)
            flags = GatewaySettings(model=model, schedulers=(_NAME,), grpc_port=0, http_port=0, failover_delay=0.5)
            gateway = await Gateway.start(flags, resolver=Resolver(pair._resolve, 0.05))
            running = asyncio.create_task(gateway.run())
            try:
                pair.client = await stack.enter_async_context(AsyncClient(gateway.grpc_address))
                await pair.connect(pair.servers)
                yield pair
            finally:
                running.cancel()
                await asyncio.wait([running])
                await gateway.stop(0)

    async def connect(self, servers: list[LocalServer]) -> None:
        """The gateway knows these servers from now on, and no others."""
        self.named = servers
        for server in self.servers:
            # Each server has a gateway of its own, too.
            expected = 2 if server in servers else 1
            async with scheduler_of(server) as scheduler:
                asked = scheduler_pb2.GetStateRequest()
                while (await scheduler.GetState(asked)).connected_gateways != expected:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def scheduler_of(server: LocalServer) -> AsyncIterator[scheduler_pb2_grpc.SchedulerServiceStub]:
    async with open_channel(server.scheduler_address) as channel:
        yield scheduler_pb2_grpc.SchedulerServiceStub(channel)


async def drains(arguments: argparse.Namespace, model: str | None) -> list[Series]:
    """Drains one server after the other under streams. The pause of a stream is the longest time between two of its
    tokens from the drain on."""
    prompts = Prompts(arguments.vocab_size)
    found: dict[str, list[float]] = {}
    async with Pair.started(model, [settings_of(model), settings_of(model)]) as pair:
        for run, (what, count, length) in itertools.product(
            range(arguments.runs),
            (("streams", arguments.streams, arguments.prompt_len), ("a stream", 1, arguments.long_prompt)),
        ):
            source, target = pair.servers if run % 2 else pair.servers[::-1]
            await pair.connect([source])
            streams = [Stream() for _ in range(count)]
            reading = asyncio.gather(
                *(each.read(pair.client, prompts.draw(length), arguments.output_len) for each in streams)
            )
            await begun(streams, reading)
            await pair.connect([source, target])
            async with scheduler_of(source) as scheduler:
                began = time.perf_counter()
                await scheduler.Drain(scheduler_pb2.DrainRequest())
            took_ms = 1e3 * (time.perf_counter() - began)
            await reading
            label = f"{what} of {length} + {arguments.output_len}"
            pauses = [float(each.gaps_ms(began).max()) for each in streams]
            before = np.concatenate([each.gaps_ms(end=began)[2:] for each in streams])
            for name, values in (
                (f"pause of {label}", pauses),
                (f"drain of {label}", [took_ms]),
                (f"between tokens before, {label}", [float(np.median(before))]),
            ):
                found.setdefault(name, []).extend(values)
            os.killpg(source.process("scheduler").pid, signal.SIGKILL)
            await asyncio.sleep(0.1)
            await source.wait_ready()
    series = [Series(name, "ms", tuple(values)) for name, values in found.items()]
    for each in series:
        if each.name.startswith("pause"):
            print(f"{each.name}: p50 {np.percentile(each.values, 50):.1f} ms, p99 {np.percentile(each.values, 99):.1f}")
    return series


async def _pace(client: AsyncClient, prompts: Sequence[list[int]], every_s: float, num_tokens: int) -> int:
    """Sends these prompts, one after the other or later. Returns how many of their tokens were cached."""
    began, calls = time.perf_counter(), list[asyncio.Task[int]]()

    async def call(prompt: list[int]) -> int:
        return (await client.generate(prompt, options(num_tokens))).usage.cached_tokens

    for number, prompt in enumerate(prompts):
        await asyncio.sleep(max(0.0, began + number * every_s - time.perf_counter()))
        calls.append(asyncio.create_task(call(prompt)))
    return sum(await asyncio.gather(*calls))


async def beside_disk(arguments: argparse.Namespace, model: str | None, directory: Path) -> list[Series]:
    """Streams decode, and prompts of one token come beside them: in turn always the same one, which the pool has, and
    so many others in a circle that each must come from disk. Steps are told apart by nothing else."""
    prompts, length, num_sent = Prompts(arguments.vocab_size), arguments.long_prompt, 8
    of_prompt = length // _BLOCK_SIZE + 2
    num_blocks = arguments.streams * (arguments.prompt_len + arguments.num_beside) // _BLOCK_SIZE + 3 * of_prompt
    settings = settings_of(model, kv_disk=directory / "beside", num_gpu_blocks=num_blocks)
    others = [prompts.draw(length) for _ in range(num_blocks // of_prompt + 2)]
    circle = itertools.cycle(others)
    found: dict[str, list[float]] = {"the pool": [], "disk": []}
    num_cached = dict.fromkeys(found, 0)
    async with LocalServer(settings, report=lambda _: None) as server:
        await server.wait_ready()
        async with AsyncClient(server.grpc_address) as client:
            for prompt in others:
                await first_token_ms(client, prompt)
            await asyncio.sleep(_DISK_SETTLES_S)
            for run, place in itertools.product(range(arguments.runs), range(2)):
                place = list(found)[(run + place) % 2]
                streams = [Stream() for _ in range(arguments.streams)]
                reading = asyncio.gather(
                    *(each.read(client, prompts.draw(arguments.prompt_len), arguments.num_beside) for each in streams)
                )
                await begun(streams, reading)
                wanted = [others[0]] * num_sent if place == "the pool" else [next(circle) for _ in range(num_sent)]
                if place == "the pool":
                    await first_token_ms(client, others[0])
                start = time.perf_counter()
                num_cached[place] += await _pace(client, wanted, arguments.every, 1)
                gaps = np.concatenate([each.gaps_ms(start, time.perf_counter()) for each in streams])
                found[place].append(float(np.median(gaps)))
                await stop(reading)
    print(f"tokens from the cache: {num_cached}, of {arguments.runs * num_sent * length} each")
    series = [Series(f"between tokens beside prompts from {place}", "ms", tuple(each)) for place, each in found.items()]
    print(f"disk / pool: {median_ratio(series[1], series[0]):.3f}")
    return series


async def roles(arguments: argparse.Namespace, model: str | None) -> list[Series]:
    """Streams run on two servers while long prompts come, with the roles together and apart in turn."""
    prompts = Prompts(arguments.vocab_size)
    found: dict[str, list[float]] = {}
    pairs = {"together": ("both", "both"), "apart": ("prefill", "decode")}
    async with contextlib.AsyncExitStack() as stack:
        started = {
            name: await stack.enter_async_context(Pair.started(model, [settings_of(model, role=each) for each in both]))
            for name, both in pairs.items()
        }
        for run, name in itertools.product(range(arguments.runs), pairs):
            pair = started[name]
            streams = [Stream() for _ in range(arguments.streams)]
            reading = asyncio.gather(
                *(each.read(pair.client, prompts.draw(64), arguments.num_decoded) for each in streams)
            )
            await begun(streams, reading)
            long = [Stream() for _ in range(arguments.num_long)]
            began = time.perf_counter()
            ends = list[asyncio.Task[None]]()
            for number, each in enumerate(long):
                await asyncio.sleep(max(0.0, began + number * arguments.every - time.perf_counter()))
                sent = time.perf_counter()
                each.times.append(sent)
                ends.append(asyncio.create_task(each.read(pair.client, prompts.draw(arguments.long_prompt), 32)))
            await asyncio.gather(*ends)
            end = time.perf_counter()
            gaps = np.concatenate([each.gaps_ms(began, end) for each in streams])
            firsts = [1e3 * (each.times[1] - each.times[0]) for each in long]
            for what, value in (
                ("between tokens p50", np.percentile(gaps, 50)),
                ("between tokens p99", np.percentile(gaps, 99)),
                ("between tokens at most", gaps.max()),
                ("first token of long prompts, median", np.median(firsts)),
            ):
                found.setdefault(f"{name}: {what}", []).append(float(value))
            await stop(reading)
            if run == 0:
                print(f"{name}: {len(gaps)} times between tokens in {end - began:.1f} s", flush=True)
    return [Series(name, "ms", tuple(values)) for name, values in found.items()]
