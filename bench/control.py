"""Speed of the control path: steps per second through all services with a worker whose model takes a fixed time.

Clients stream from the gateway over gRPC meanwhile. The ideal is one step per `--step-ms` milliseconds. The report also
has the tokens that the clients received in the same seconds.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from bench.paced_worker import Pace
from bench.report import Series, write_results
from quire.client import AsyncClient, GenerationOptions, TokenChunk
from quire.rpc.channel import open_channel
from quire.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from quire_cli.supervisor import LocalServer, ServeSettings
from quire_cli.supervisor.commands import Programs

T = TypeVar("T")

_SETTLE_S = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--step-ms", type=float, nargs="+", default=[1, 2, 5, 10], help="time of the model")
    parser.add_argument(
        "--pace", choices=[pace.value for pace in Pace], default=Pace.DEVICE.value, help="side that keeps this time"
    )
    parser.add_argument("--sequences", type=int, default=256, help="running sequences, each with a streaming client")
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of counting")
    parser.add_argument("--runs", type=int, default=3, help="interleaved runs")
    parser.add_argument("--trace", type=Path, help="write the scheduler's step trace of the last run there")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")


@dataclass(frozen=True, slots=True)
class Rates:
    """Steps of the scheduler, tokens and messages that reached clients, each per second over the same seconds."""

    steps: float
    tokens: float
    messages: float


class Audience:
    """Clients that count the tokens and messages that they get."""

    def __init__(self, client: AsyncClient, num_tokens: int) -> None:
        self.num_tokens = self.num_messages = 0
        self._client = client
        self._options = GenerationOptions(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)

    async def listen(self, prompt: list[int]) -> None:
        """Streams one request; raises RuntimeError if a token is missing or comes twice."""
        expected = 0
        async with self._client.generate_stream(prompt, self._options) as stream:
            async for event in stream:
                self.num_messages += 1
                if isinstance(event, TokenChunk):
                    if event.offset != expected:
                        raise RuntimeError(f"token {expected} was expected, {event.offset} came")
                    expected += len(event.token_ids)
                    self.num_tokens += len(event.token_ids)


def main(arguments: argparse.Namespace) -> None:
    asyncio.run(_main(arguments))


async def _main(arguments: argparse.Namespace) -> None:
    found: dict[float, list[Rates]] = {step_ms: [] for step_ms in arguments.step_ms}
    for _ in range(arguments.runs):
        for step_ms in arguments.step_ms:
            found[step_ms].append(await _measure(arguments, step_ms))
    series = []
    for step_ms, rates in found.items():
        ideal = 1e3 / step_ms
        shares = Series(f"{step_ms:g} ms, steps of the ideal", "share", tuple(each.steps / ideal for each in rates))
        tokens = Series(f"{step_ms:g} ms, tokens served", "tok/s", tuple(each.tokens for each in rates))
        messages = Series(f"{step_ms:g} ms, messages served", "1/s", tuple(each.messages for each in rates))
        series += [shares, tokens, messages]
    print(*series, sep="\n")
    if arguments.out is not None:
        write_results(
            arguments.out,
            "the control path with a paced worker",
            series,
            sequences=arguments.sequences,
            pace=arguments.pace,
        )


async def _measure(arguments: argparse.Namespace, step_ms: float) -> Rates:
    num_tokens = int((arguments.seconds + 3 * _SETTLE_S) * 1e3 / step_ms) + 100
    settings = ServeSettings(
        grpc_port=0,
        http_port=0,
        max_num_seqs=arguments.sequences,
        max_num_batched_tokens=max(2048, arguments.sequences),
        num_gpu_blocks=arguments.sequences * (num_tokens // 16 + 2),
        trace_steps=None if arguments.trace is None else str(arguments.trace),
        log_level="warning",
    )
    programs = Programs(worker=(sys.executable, "-m", "bench.paced_worker", arguments.pace, str(step_ms)))
    async with LocalServer(settings, programs=programs) as server:
        await server.wait_ready()
        async with AsyncClient(server.grpc_address) as client:
            audience = Audience(client, num_tokens)
            listeners = [audience.listen([number % 50 + 1] * 8) for number in range(arguments.sequences)]
            return await beside(_count(server.scheduler_address, audience, arguments), listeners)


async def beside(work: Coroutine[Any, Any, T], listeners: Sequence[Coroutine[Any, Any, None]]) -> T:
    """Returns the result of `work` while all of `listeners` listen; then cancels them.

    Raises a listener's error at once if it fails meanwhile, and RuntimeError if a listener ends.
    """
    working = asyncio.create_task(work)
    listening = [asyncio.create_task(listener) for listener in listeners]
    try:
        done, _ = await asyncio.wait([working, *listening], return_when=asyncio.FIRST_COMPLETED)
        for listener in done - {working}:
            await listener
            raise RuntimeError("a client's stream ended before the measurement")
        return working.result()
    finally:
        for task in (working, *listening):
            task.cancel()
        await asyncio.gather(working, *listening, return_exceptions=True)


async def _count(scheduler_address: str, audience: Audience, arguments: argparse.Namespace) -> Rates:
    channel = open_channel(scheduler_address)
    scheduler = scheduler_pb2_grpc.SchedulerServiceStub(channel)
    try:
        while (await _state(scheduler)).running_requests < arguments.sequences:  # noqa: ASYNC110 (another process)
            await asyncio.sleep(0.05)
        await asyncio.sleep(_SETTLE_S)
        started, before = time.monotonic(), await _state(scheduler)
        num_tokens, num_messages = audience.num_tokens, audience.num_messages
        await asyncio.sleep(arguments.seconds)
        seconds, after = time.monotonic() - started, await _state(scheduler)
        return Rates(
            (after.steps - before.steps) / seconds,
            (audience.num_tokens - num_tokens) / seconds,
            (audience.num_messages - num_messages) / seconds,
        )
    finally:
        await channel.close()


async def _state(scheduler: scheduler_pb2_grpc.SchedulerServiceStub) -> scheduler_pb2.GetStateResponse:
    return await scheduler.GetState(scheduler_pb2.GetStateRequest())
