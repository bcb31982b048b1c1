"""Slow constraints beside ordinary streams: the gaps between the tokens of others while workers compile.

Starts a server on quire-tiny. Ordinary streams generate without a constraint, first alone, then beside callers whose
schemas are new each time and take a worker `--compile-ms` or more to compile: less than what the gateway refuses.
"""

import argparse
import asyncio
import json
import random
import string
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from bench.report import Series, write_results
from quire.client import AsyncClient, Constraint, GenerationOptions
from quire.common.v1 import common_pb2
from quire.constraints.matcher import Template, Vocabulary
from quire.model_directory import ModelDirectory
from quire.model_source import resolve_model
from quire.rpc.errors import QuireError
from quire_cli.supervisor import LocalServer, ServeSettings

_MAX_TOKENS = 400


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=15, help="of each of the two parts")
    parser.add_argument("--streams", type=int, default=8, help="ordinary streams at once")
    parser.add_argument("--callers", type=int, default=2, help="callers with slow schemas at once")
    parser.add_argument("--compile-ms", type=float, default=300, help="processor time that each schema takes at least")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")


def main(arguments: argparse.Namespace) -> None:
    num_properties = _slow_size(arguments.compile_ms)
    alone, beside, answers = asyncio.run(_run(arguments, num_properties))
    series = [Series(f"largest gap of each stream, {name}", "ms", tuple(_largest(gaps)))
              for name, gaps in (("alone", alone), ("beside slow schemas", beside))]  # fmt: skip
    p99 = {
        name: float(np.percentile(np.concatenate(gaps), 99)) for name, gaps in (("alone", alone), ("beside", beside))
    }
    print(*series, f"p99 of all gaps: {p99}", f"schemas of {num_properties} properties: {answers}", sep="\n")
    if arguments.out is not None:
        facts = {"num_properties": num_properties, "answers": answers, "p99_ms": p99}
        write_results(arguments.out, "Gaps between tokens while workers compile", series, **facts)


def _largest(gaps: Sequence[np.ndarray]) -> list[float]:
    return [float(each.max()) for each in gaps]


def _schema(num_properties: int, rng: random.Random) -> str:
    """All properties are required, so few tokens may follow at each place, and the gateway accepts it."""
    names = list({"".join(rng.choices(string.ascii_lowercase, k=8)) for _ in range(num_properties)})
    properties = {name: {"type": "string"} for name in names}
    return json.dumps({"type": "object", "properties": properties, "required": names, "additionalProperties": False})


def _slow_size(compile_ms: float) -> int:
    """How many properties a schema needs to take so long here."""
    vocabulary = Vocabulary.of_model(ModelDirectory.open(resolve_model(None)), None)
    num_properties, taken_ms = 200, 0.0
    while taken_ms < compile_ms:
        num_properties = int(num_properties * 1.15)
        message = common_pb2.Constraint(json_schema=_schema(num_properties, random.Random(0)))
        started = time.process_time()
        Template.of(message, vocabulary)
        taken_ms = (time.process_time() - started) * 1e3
    return num_properties


async def _run(
    arguments: argparse.Namespace, num_properties: int
) -> tuple[list[np.ndarray], list[np.ndarray], dict[str, int]]:
    """The gaps of each stream alone and beside slow schemas, in milliseconds, and how these were answered."""
    async with LocalServer(ServeSettings(grpc_port=0, http_port=0, dtype="float32")) as server:
        await server.wait_ready()
        async with AsyncClient(server.grpc_address) as client:
            # The first constraint starts the process that compiles on trial.
            await client.generate("Once", GenerationOptions(constraint=Constraint(regex="[a-z]{3}"), max_tokens=4))
            alone = await _stream_all(client, arguments)
            answers: dict[str, int] = {}
            callers = [
                asyncio.create_task(_call(client, num_properties, random.Random(seed), answers))
                for seed in range(arguments.callers)
            ]
            beside = await _stream_all(client, arguments)
            for caller in callers:
                caller.cancel()
            await asyncio.gather(*callers, return_exceptions=True)
    return alone, beside, answers


async def _stream_all(client: AsyncClient, arguments: argparse.Namespace) -> list[np.ndarray]:
    ends_at = time.perf_counter() + arguments.seconds
    return await asyncio.gather(*(_stream(client, seed, ends_at) for seed in range(arguments.streams)))


async def _stream(client: AsyncClient, seed: int, ends_at: float) -> np.ndarray:
    """The gaps between the tokens of one stream after the other."""
    gaps: list[float] = []
    options = GenerationOptions(temperature=1.0, seed=seed, max_tokens=_MAX_TOKENS, ignore_eos=True)
    while time.perf_counter() < ends_at:
        arrivals: list[float] = []
        async with client.generate_stream("Once upon a time", options) as stream:
            async for _ in stream.text:
                arrivals.append(time.perf_counter())
        gaps += [(later - earlier) * 1e3 for earlier, later in pairwise(arrivals)]
    return np.array(gaps)


async def _call(client: AsyncClient, num_properties: int, rng: random.Random, answers: dict[str, int]) -> None:
    while True:
        options = GenerationOptions(constraint=Constraint(json_schema=_schema(num_properties, rng)), max_tokens=4)
        try:
            await client.generate("Once", options)
            answer = "answered"
        except QuireError as error:
            answer = f"{error.code.name}: {error}"[:120]
        answers[answer] = answers.get(answer, 0) + 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    main(parser.parse_args())
