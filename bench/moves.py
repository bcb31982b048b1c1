"""KV that moves: what is left of it when a worker is killed, what it saves, and what it costs others.

`kill` serves a model, lets streams of long prompts run, kills the worker and counts how many of the tokens that were
computed before need not be computed again. `first` is the time to the first token of a long prompt that is computed, or
comes from the pool or from disk. `drain` is the pause of streams that move to another server with their blocks.
`beside` is the time between tokens of streams while blocks come from disk, beside that with prompts from the pool.
`roles` is that under long prompts, with two servers for both and with one for prefill and one for decode. `attention`
decodes over pools in private memory and in a file, with huge pages and without, in turn. `all` is all but `attention`.
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import moves_served
from bench.models import write_model
from bench.report import Series, write_results
from kernels import ops
from kernels.host_memory import HUGE_PAGE, collapse, lazy_zeros, map_file, populate
from quire.client import AsyncClient, GenerationOptions
from quire.rpc.channel import open_channel
from quire.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from quire_cli.supervisor import LocalServer

_HEADS, _HEAD_DIM, _BLOCK_SIZE, _LAYERS = 12, 64, 16, 2
_READY_TIMEOUT_S = 120.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("part", choices=("all", *_PARTS, "attention"))
    parser.add_argument(
        "--shape", default="llama-160m", help="of a model with random weights; quire-tiny: the embedded"
    )
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt-len", type=int, default=300, help="tokens of each stream's prompt")
    parser.add_argument("--output-len", type=int, default=300)
    parser.add_argument("--long-prompt", type=int, default=1000, help="tokens of a long prompt")
    parser.add_argument("--num-long", type=int, default=8, help="long prompts of a run of roles")
    parser.add_argument("--num-decoded", type=int, default=1500, help="tokens of each stream of roles, at most")
    parser.add_argument("--num-beside", type=int, default=900, help="tokens of each stream of beside, at most")
    parser.add_argument("--every", type=float, default=0.5, help="seconds between long prompts of beside and roles")
    parser.add_argument("--ranks", type=int, default=1, help="of the server of first")
    parser.add_argument("--runs", type=int, default=5, help="of each part, and kills")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--repeats", type=int, default=60, help="times that attention over each pool is measured")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each sequence of attention")
    parser.add_argument("--rows", type=int, default=64, help="sequences of attention")


def main(arguments: argparse.Namespace) -> None:
    if arguments.part == "attention":
        _measure_attention(arguments)
        return
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as directory:
        model, arguments.vocab_size = None, 500
        if arguments.shape != "quire-tiny":
            write_model(arguments.shape, Path(directory))
            model, arguments.vocab_size = directory, 30000
        series: list[Series] = []
        for part in _PARTS if arguments.part == "all" else (arguments.part,):
            found = asyncio.run(_PARTS[part](arguments, model, Path(directory)))
            print(*found, sep="\n", flush=True)
            series += found
    if arguments.out is not None:
        flags = {name: value for name, value in vars(arguments).items() if name not in ("out", "repeats", "context")}
        write_results(arguments.out, "KV that moves", series, **flags)


async def _kill(arguments: argparse.Namespace, model: str | None, directory: Path) -> list[Series]:
    trace = directory / "steps.json"
    found: dict[str, list[float]] = {"kept": [], "computed again": [], "longest pause": []}
    # One token a step, so that the trace says how many are computed.
    settings = moves_served.settings_of(model, persistent_kv_cache="on", trace_steps=str(trace))
    async with LocalServer(settings, report=lambda _: None) as server:
        for number in range(arguments.runs):
            await server.wait_ready()
            before, again, pause_s = await _kill_once(server, trace, arguments, number)
            print(f"{before} tokens computed before the kill, {again} of them again; longest pause {pause_s:.2f} s")
            for name, value in zip(found, (100 * (1 - again / before), again, pause_s), strict=True):
                found[name].append(value)
    units = ("%", "tokens", "s")
    return [
        Series(f"after a kill, {name}", unit, tuple(values))
        for (name, values), unit in zip(found.items(), units, strict=True)
    ]


_Part = Callable[[argparse.Namespace, str | None, Path], Coroutine[Any, Any, list[Series]]]
_PARTS: dict[str, _Part] = {
    "kill": _kill,
    "first": moves_served.first_tokens,
    "drain": lambda arguments, model, _: moves_served.drains(arguments, model),
    "beside": moves_served.beside_disk,
    "roles": lambda arguments, model, _: moves_served.roles(arguments, model),
}


async def _kill_once(
    server: LocalServer, trace: Path, arguments: argparse.Namespace, number: int
) -> tuple[int, int, float]:
    """How many tokens were computed before a kill, how many of them were computed again, and the longest pause."""
    rng = np.random.default_rng(number)
    options = GenerationOptions(max_tokens=arguments.output_len, temperature=0.0, ignore_eos=True)
    received, pauses = [0] * arguments.streams, [0.0] * arguments.streams

    async def read(client: AsyncClient, index: int) -> None:
        prompt, last = rng.integers(20, arguments.vocab_size, arguments.prompt_len).tolist(), time.monotonic()
        async with client.generate_stream(prompt, options) as stream:
            async for _ in stream:
                now = time.monotonic()
                if received[index]:
                    pauses[index] = max(pauses[index], now - last)
                received[index], last = received[index] + 1, now

    async with AsyncClient(server.grpc_address) as client, open_channel(server.scheduler_address) as channel:
        scheduler = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        reading = asyncio.gather(*(read(client, index) for index in range(arguments.streams)))
        while min(received) < arguments.output_len // 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        os.killpg(server.process("worker").pid, signal.SIGKILL)
        asked = scheduler_pb2.GetStateRequest(include_sequences=True)
        while (state := await scheduler.GetState(asked)).workers[0].attached:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        num_tokens = [each.num_tokens for each in state.sequences]
        await reading
    # The newest token of each is not computed yet.
    num_before = sum(num_tokens) - len(num_tokens)
    num_to_come = arguments.streams * (arguments.prompt_len + arguments.output_len) - sum(num_tokens)
    return num_before, _computed_since_attach(trace) - num_to_come, max(pauses)


def _computed_since_attach(trace: Path) -> int:
    events = [json.loads(line.rstrip(",")) for line in trace.read_text().splitlines() if line.endswith(",")]
    attached = max(place for place, event in enumerate(events) if event["name"] == "replica")
    return sum(event["args"]["num_tokens"] for event in events[attached:] if event["name"] == "plan")


def _measure_attention(arguments: argparse.Namespace) -> None:
    num_columns = -(-arguments.context // _BLOCK_SIZE)
    num_blocks = arguments.rows * num_columns
    shape = (2, num_blocks, _HEADS, _BLOCK_SIZE, _HEAD_DIM)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(num_blocks, generator=generator).to(torch.int32).view(arguments.rows, num_columns)
    pools = {name: [make(shape) for _ in range(_LAYERS)] for name, make in _MAKERS.items()}
    for layers in pools.values():
        for layer in layers:
            layer.copy_(torch.randn(shape, generator=generator).to(torch.bfloat16))
    huge = [line for line in Path("/proc/meminfo").read_text().splitlines() if "HugePages:" in line]
    print(f"{arguments.rows} rows of {arguments.context} tokens, {_LAYERS} layers; {'; '.join(huge)}")
    query = torch.randn((arguments.rows, _HEADS, _HEAD_DIM), generator=generator).to(torch.bfloat16)
    starts = torch.arange(arguments.rows + 1, dtype=torch.int32)
    lengths = torch.full((arguments.rows,), arguments.context, dtype=torch.int32)
    seconds: dict[str, list[float]] = {name: [] for name in pools}
    for _ in range(arguments.repeats):
        for name, layers in pools.items():
            started = time.perf_counter()
            for layer in layers:
                ops.paged_attention(
                    query,
                    layer,
                    order,
                    starts,
                    lengths,
                    scale=0.125,
                    max_query_len=1,
                    max_seq_len=arguments.context,
                )
            seconds[name].append(time.perf_counter() - started)
    private = statistics.median(seconds["private, huge pages"])
    for name, times in seconds.items():
        median = statistics.median(times)
        print(f"{name}: {1e3 * median:.2f} ms, {median / private:.3f} of private, least {1e3 * min(times):.2f} ms")


def _private(shape: tuple[int, ...]) -> torch.Tensor:
    return lazy_zeros(shape, torch.bfloat16)


def _in_file(shape: tuple[int, ...], *, collapses: bool) -> torch.Tensor:
    num_bytes = 2 * int(np.prod(shape))
    whole = -(-num_bytes // HUGE_PAGE) * HUGE_PAGE
    file = os.memfd_create("bench")
    os.ftruncate(file, whole)
    memory = map_file(file, whole)
    os.close(file)
    assert populate(memory, 0, whole)
    if collapses:
        assert collapse(memory, 0, whole), "this system makes no huge pages of a file in memory"
    return memory[:num_bytes].view(torch.bfloat16).view(shape)


_MAKERS: dict[str, Callable[[tuple[int, ...]], torch.Tensor]] = {
    "private, huge pages": _private,
    "file, huge pages": lambda shape: _in_file(shape, collapses=True),
    "file, small pages": lambda shape: _in_file(shape, collapses=False),
}
