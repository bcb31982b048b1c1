"""Microseconds that gateway and scheduler add to a short answer, by rate of requests, and the highest rate that is
served with a 99th percentile below 20 ms.

Quire runs twice: with a worker whose model takes no time, so that all latency is what the services add, and with a
model of one layer and width 64, which stays in `--files`. Peers run already. Requests are raw bytes. They come at even
intervals whether earlier ones are answered or not, and latency counts from when a request was due.
"""

import argparse
import asyncio
import re
import sys
import time
from pathlib import Path
from typing import Any

from bench.report import Series, write_results
from bench.servers import named_server
from bench.serving import model_of, post_request
from quire.service.model_flag import ModelFlag
from quire_cli.supervisor import LocalServer, ServeSettings
from quire_cli.supervisor.commands import Programs

_SHAPE = "llama-one-layer"
_WARM_UP_S, _LIMIT_MS, _MAX_CONNECTIONS, _BISECTIONS = 1.0, 20.0, 512, 4
_LENGTH = re.compile(rb"^content-length: *(\d+)", re.IGNORECASE | re.MULTILINE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rates", type=int, nargs="+", default=[1, 100, 500], help="requests a second")
    parser.add_argument("--seconds", type=float, default=4.0, help="duration of each rate, and 5 requests at least")
    parser.add_argument("--tokens", type=int, default=4, help="output tokens of a request")
    parser.add_argument("--peer", type=named_server, action="append", default=[], metavar="NAME=URL", help="a server")
    parser.add_argument("--peer-model", default="model", help="name of the model in requests to peers")
    parser.add_argument("--files", type=Path, required=True, help="directory of the model, which is written once")


def main(arguments: argparse.Namespace) -> None:
    asyncio.run(_main(arguments))


async def _main(arguments: argparse.Namespace) -> None:
    series: list[Series] = []
    model = await asyncio.to_thread(model_of, _SHAPE, arguments.files)
    settings = ServeSettings(models=(ModelFlag("model", str(model)),), grpc_port=0, http_port=0, log_level="warning")
    no_model = Programs(worker=(sys.executable, "-m", "bench.paced_worker", "device", "0"))
    for name, programs in (("services", no_model), ("quire", Programs())):
        async with LocalServer(settings, programs=programs) as server:
            await server.wait_ready()
            series += await _measure(name, server.http_address, "model", arguments)
    for name, url in arguments.peer:
        series += await _measure(name, url.removeprefix("http://"), arguments.peer_model, arguments)
    if arguments.out is not None:
        write_results(arguments.out, "latency of a short answer", series, tokens=arguments.tokens)


async def _measure(name: str, address: str, model: str, arguments: argparse.Namespace) -> list[Series]:
    fields = {"max_tokens": arguments.tokens, "temperature": 0, "ignore_eos": True}
    request = post_request(address, "/v1/completions", {"model": model, "prompt": "Once", **fields})
    found: list[Series] = []
    callers = Callers(address, request)
    await callers.latencies_ms(50, _WARM_UP_S)
    for rate in arguments.rates:
        if latencies := await callers.latencies_ms(rate, max(arguments.seconds, 5 / rate)):
            for figure, share in (("p50", 0.5), ("p99", 0.99)):
                found.append(Series(f"{name}, {rate}/s, {figure}", "us", (1e3 * _at(latencies, share),)))
    low, high = 0.0, 64.0
    while await _is_served(callers, high, arguments.seconds):
        low, high = high, 2 * high
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if await _is_served(callers, middle, arguments.seconds) else (low, middle)
    found.append(Series(f"{name}, p99 below {_LIMIT_MS:g} ms", "1/s", (low,)))
    print(*found, sep="\n", flush=True)
    return found


async def _is_served(callers: "Callers", rate: float, seconds: float) -> bool:
    latencies = await callers.latencies_ms(rate, seconds)
    return latencies is not None and _at(latencies, 0.99) < _LIMIT_MS


def _at(values: list[float], share: float) -> float:
    return sorted(values)[int(len(values) * share)]


class Callers:
    """Connections to one server, each with one request at a time."""

    def __init__(self, address: str, request: bytes) -> None:
        self._host, _, self._port = address.rpartition(":")
        self._request = request
        self._idle: list[_Caller] = []
        self._num_running = 0

    async def latencies_ms(self, rate: float, seconds: float) -> list[float] | None:
        """The latency of each request of `rate` a second; None if the server falls behind without end."""
        first, calls = time.perf_counter(), list[asyncio.Task[float]]()
        for number in range(max(int(rate * seconds), 1)):
            due = first + number / rate
            await asyncio.sleep(max(due - time.perf_counter(), 0))
            calls.append(asyncio.create_task(self._call(due)))
            if self._num_running > _MAX_CONNECTIONS:
                await asyncio.wait(calls)
                return None
        return [1e3 * latency for latency in await asyncio.gather(*calls)]

    async def _call(self, due: float) -> float:
        self._num_running += 1
        # Servers close connections that are idle, or that had a number of requests.
        while not await self._is_answered():
            pass
        self._num_running -= 1
        return time.perf_counter() - due

    async def _is_answered(self) -> bool:
        """Sends the request over an idle connection or a new one. Returns False if the server has closed it."""
        loop = asyncio.get_running_loop()
        if not self._idle:
            self._idle.append((await loop.create_connection(_Caller, self._host, int(self._port)))[1])
        caller = self._idle.pop()
        caller.answered = loop.create_future()
        if caller.transport.is_closing():
            return False
        caller.transport.write(self._request)
        if is_answered := await caller.answered:
            self._idle.append(caller)
        return is_answered


class _Caller(asyncio.Protocol):
    transport: Any
    answered: asyncio.Future[bool] | None = None
    _received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        if found and (length := _LENGTH.search(head)) and len(body) >= int(length[1]):
            self._received = b""
            assert self.answered is not None
            if b" 200 " in head[:16]:
                self.answered.set_result(True)
            else:
                self.answered.set_exception(RuntimeError(body.decode(errors="replace")))

    def connection_lost(self, exc: Exception | None) -> None:
        if self.answered is not None and not self.answered.done():
            self.answered.set_result(False)
