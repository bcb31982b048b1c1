"""Quire beside other engines: the same model, the same requests, the same machine, one after the other, several times.

Quire is measured from its clients, through all services; the others run within their callers. Each runs all requests at
once in two rounds; the second, warm one counts. Its prompts are new to every engine: nothing is cached.
"""

import argparse
import asyncio
import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.report import Series, median_ratio, write_results
from bench.through_services import stream_all
from bench.workload import Lengths, WorkItem, draw_workload
from quire.client import AsyncClient
from quire.local import LocalServer, ServeSettings

_PROGRAMS = {"openvino": "openvino_genai_peer.py", "vllm": "vllm_peer.py"}
_TIMEOUT_S = 900


@dataclass(frozen=True, slots=True)
class Peer:
    """Another engine: the interpreter that has it, and the model as it takes it."""

    name: str
    python: str
    model: str

    @classmethod
    def parse(cls, text: str) -> "Peer":
        """NAME=PYTHON:MODEL. Raises ValueError."""
        name, _, rest = text.partition("=")
        python, _, model = rest.partition(":")
        if name not in _PROGRAMS or not (python and model):
            raise ValueError(f"{text!r} is not NAME=PYTHON:MODEL with a name among {', '.join(_PROGRAMS)}")
        return cls(name, python, model)


@dataclass(frozen=True, slots=True)
class Round:
    """What one engine made of the requests of a round."""

    seconds: float
    num_tokens: int
    first_token_s: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="model directory, for Quire")
    parser.add_argument(
        "--peer", type=Peer.parse, action="append", default=[], help="NAME=PYTHON:MODEL; may be repeated"
    )
    parser.add_argument("--vocab-size", type=int, default=8000, help="of what tokens of prompts are drawn")
    parser.add_argument("--requests", type=int, default=64, help="requests at once")
    parser.add_argument("--runs", type=int, default=5, help="interleaved runs of each engine")
    parser.add_argument("--scale", type=float, default=0.5, help="scale of the chat-like lengths")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")


def main(arguments: argparse.Namespace) -> None:
    rounds: dict[str, list[Round]] = {name: [] for name in ("quire", *(peer.name for peer in arguments.peer))}
    for run in range(arguments.runs):
        work = [make_work(arguments, 2 * run), make_work(arguments, 2 * run + 1)]
        rounds["quire"].append(asyncio.run(_run_quire(arguments.model, work)))
        for peer in arguments.peer:
            rounds[peer.name].append(_run_peer(peer, work))
        print(f"run {run + 1}:", {name: round(_speed(each[-1]), 1) for name, each in rounds.items()}, flush=True)
    _report(arguments, rounds)


def make_work(arguments: argparse.Namespace, number: int) -> list[WorkItem]:
    """The requests of a round: always of the same lengths, never with the same prompts."""
    lengths = Lengths(prompt_mean=161 * arguments.scale, output_mean=338 * arguments.scale)
    first, size = 10, arguments.vocab_size - 20
    return [
        WorkItem([first + (token - first + 37 * number) % size for token in item.prompt], item.num_output_tokens)
        for item in draw_workload(arguments.requests, arguments.vocab_size, lengths)
    ]


async def _run_quire(model: str, rounds: Sequence[Sequence[WorkItem]]) -> Round:
    settings = ServeSettings(
        model=model,
        dtype="bfloat16",
        grpc_port=0,
        http_port=0,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        kv_cache_memory=4 << 30,
        log_level="warning",
    )
    async with LocalServer(settings) as server:
        await server.wait_ready()
        async with AsyncClient(server.grpc_address) as client:
            views = [await stream_all(client, work) for work in rounds]
    return Round(views[-1].seconds, views[-1].num_tokens, views[-1].median_first_token_s)


def _run_peer(peer: Peer, rounds: Sequence[Sequence[WorkItem]]) -> Round:
    """Raises RuntimeError where the engine fails or leaves tokens out."""
    program = Path(__file__).with_name("peers") / _PROGRAMS[peer.name]
    job = {"model": peer.model, "rounds": [[[item.prompt, item.num_output_tokens] for item in work] for work in rounds]}
    ended = subprocess.run(
        [peer.python, str(program)], input=json.dumps(job) + "\n", capture_output=True, text=True, timeout=_TIMEOUT_S
    )
    if ended.returncode:
        raise RuntimeError(f"{peer.name} ended with {ended.returncode}: {ended.stderr[-2000:]}")
    answer: Mapping[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    wanted = sum(item.num_output_tokens for item in rounds[-1])
    if answer["num_tokens"] != wanted:
        raise RuntimeError(f"{peer.name} made {answer['num_tokens']} of {wanted} tokens")
    return Round(**answer)


def _speed(each: Round) -> float:
    return each.num_tokens / each.seconds


def _report(arguments: argparse.Namespace, rounds: Mapping[str, Sequence[Round]]) -> None:
    speeds = {
        name: Series(f"{name}, output tokens", "tok/s", tuple(map(_speed, each))) for name, each in rounds.items()
    }
    first = [
        Series(f"{name}, first token", "s", tuple(one.first_token_s for one in each)) for name, each in rounds.items()
    ]
    ratios = {name: median_ratio(speeds["quire"], series) for name, series in speeds.items() if name != "quire"}
    print(*speeds.values(), *first, *(f"quire / {name}: {ratio:.3f}" for name, ratio in ratios.items()), sep="\n")
    if arguments.out is not None:
        facts = {"ratios": ratios, "rounds": {name: [asdict(one) for one in each] for name, each in rounds.items()}}
        write_results(arguments.out, "output tokens beside other engines", (*speeds.values(), *first), **facts)
