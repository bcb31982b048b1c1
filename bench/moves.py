"""KV that moves: what is left of it when a worker is killed, and what the memory costs that outlives it.

`kill` serves a model, lets streams of long prompts run, kills the worker and counts how many of the tokens that were
computed before need not be computed again. `attention` decodes over pools in private memory and in a file, with huge
pages and without, in turn.
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kernels import ops
from kernels.host_memory import HUGE_PAGE, collapse, lazy_zeros, map_file, populate
from quire.client import AsyncClient, GenerationOptions
from quire.rpc.channel import open_channel
from quire.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from quire_cli.supervisor import LocalServer, ServeSettings

_HEADS, _HEAD_DIM, _BLOCK_SIZE, _LAYERS = 12, 64, 16, 2
_READY_TIMEOUT_S = 120.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("part", choices=("kill", "attention"))
    parser.add_argument("--model", help="of kill; without it the embedded one")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt-len", type=int, default=300, help="tokens of each stream's prompt")
    parser.add_argument("--output-len", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=3, help="kills, or times that each pool is measured")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each sequence of attention")
    parser.add_argument("--rows", type=int, default=64, help="sequences of attention")


def main(arguments: argparse.Namespace) -> None:
    if arguments.part == "kill":
        asyncio.run(_kill(arguments))
    else:
        _measure_attention(arguments)


async def _kill(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as directory:
        trace = Path(directory) / "steps.json"
        values: dict[str, Any] = {} if arguments.model is None else {"model": arguments.model}
        # One token a step, so that the trace says how many are computed.
        settings = ServeSettings(
            grpc_port=0, http_port=0, persistent_kv_cache="on", multi_step_ms=0, trace_steps=str(trace), **values
        )
        async with LocalServer(settings) as server:
            for number in range(arguments.repeats):
                await server.wait_ready()
                before, again, pause_s = await _kill_once(server, trace, arguments, number)
                print(
                    f"{before} tokens computed before the kill, {again} of them again: {1 - again / before:.1%} kept; "
                    f"longest pause {pause_s:.2f} s"
                )


async def _kill_once(
    server: LocalServer, trace: Path, arguments: argparse.Namespace, number: int
) -> tuple[int, int, float]:
    """How many tokens were computed before a kill, how many of them were computed again, and the longest pause."""
    rng = np.random.default_rng(number)
    options = GenerationOptions(max_tokens=arguments.output_len, temperature=0.0, ignore_eos=True)
    received, pauses = [0] * arguments.streams, [0.0] * arguments.streams

    async def read(client: AsyncClient, index: int) -> None:
        prompt, last = rng.integers(20, 500, arguments.prompt_len).tolist(), time.monotonic()
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
