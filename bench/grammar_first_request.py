"""Measures how much longer the first constrained request of a fresh server waits than the second one.

Each round starts two servers with a new folder for tables of vocabularies: the first server finds no tables, the second
finds the tables of the first. Every request has a schema of its own.
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np

from bench.report import Series, write_results
from quire.client import AsyncClient, Constraint, GenerationOptions
from quire_cli.supervisor import LocalServer, ServeSettings

_REQUESTS = ("first", "second", "third")
_KINDS = ("no tables on disk", "tables on disk")


def measure_first_requests(model: Path, arguments: argparse.Namespace) -> None:
    """Prints and writes the figures of `arguments.first_request` rounds."""
    times: dict[str, list[float]] = {}
    schemas = _schemas()
    for _ in range(arguments.first_request):
        with tempfile.TemporaryDirectory() as folder:
            os.environ["HF_HOME"] = folder
            for kind in _KINDS:
                for name, seconds in asyncio.run(_times(model, schemas)).items():
                    times.setdefault(f"{kind}: {name}", []).append(seconds * 1e3)
    series = [Series(name, "ms", tuple(values)) for name, values in times.items()]
    print(*series, sep="\n")
    more = {kind: _more(times, kind) for kind in _KINDS}
    for kind, ms in more.items():
        print(f"{kind}: the first request takes {ms:.0f} ms more than the second (median)")
    if arguments.out is not None:
        facts = {"model": model.name, "first_minus_second_ms": more}
        write_results(arguments.out, "First constrained requests of fresh servers", series, **facts)


def _more(times: dict[str, list[float]], kind: str) -> float:
    return float(np.median(np.subtract(times[f"{kind}: first"], times[f"{kind}: second"])))


async def _times(model: Path, schemas: Iterator[str]) -> dict[str, float]:
    """Seconds until the server is ready, and of its first requests."""
    started = time.perf_counter()
    times: dict[str, float] = {}
    settings = ServeSettings(model=str(model), grpc_port=0, http_port=0, dtype="float32", max_model_len=512)
    async with LocalServer(settings) as server:
        await server.wait_ready()
        times["ready"] = time.perf_counter() - started
        async with AsyncClient(server.grpc_address) as client:
            # The first request connects, and has no constraint.
            await client.generate("Once", GenerationOptions(max_tokens=4))
            for name in _REQUESTS:
                begun = time.perf_counter()
                options = GenerationOptions(constraint=Constraint(json_schema=next(schemas)), max_tokens=8)
                await client.generate("Once", options)
                times[name] = time.perf_counter() - begun
    return times


def _schemas() -> Iterator[str]:
    for number in count(time.time_ns()):
        properties = {f"{name}_{number}": {"type": kind} for name, kind in (("name", "string"), ("age", "integer"))}
        yield json.dumps({"type": "object", "properties": properties, "required": [*properties]})
