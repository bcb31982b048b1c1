"""The cost of exactness: tokens per second with a promise kept, over tokens per second without it, in turn in one run.

- `steps`: what a worker does in each step so that no text depends on the batch, against the same worker without it.
- `products`: all products of a step, against oneDNN's, which sums in an order that depends on the shape. Quire has no
  products without the promise: so this is no cost, but says whether a library that promises nothing is faster.
- `drafts`: a pass that verifies drafts as rows of one token each, against a pass that computes them as a chunk.
- `seals`: the inventory of blocks whose content is final, against a scheduler and a worker that keep none.
- `pool`: a KV pool in a file that outlives its worker, against private memory: two workers.
- `moves`: what steps do so that requests can move between replicas, against the same without it. Nothing moves.
- `fairness`: the policy `fair` with a tenant for each stream, against the same without charges.

Core and runner are in one process, with one pass a step and without text and clients, so that each share of a step
weighs more than in service. Patches of the running code (`exactness.diff`) switch off what no flag does, for single
steps in a random order of both kinds. `--out` keeps the figures of other parts.
"""

import argparse
import gc
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random

import torch

from bench.in_process import InProcessEngine
from bench.kernels import make_products, measure, products_of
from bench.models import write_model
from bench.report import Series, add_results
from bench.stages import Passes
from quire.load import LoadRequest, fixed, take
from quire_kernels.cpu.bindings import CpuKernels
from quire_kernels.cpu.library import Library
from quire_kernels.packed_weight import Quantization
from scheduler_svc.core.config import PolicyKind
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step import StepPlan
from tests.sim.known_faults import read_faults
from tests.sim.mutation import Patch, patched
from worker_svc.models.base import NativeCausalLM
from worker_svc.models.registry import load_model
from worker_svc.settings import WorkerSettings

PATCHES = {each.name: each.patches for each in read_faults(Path(__file__).with_suffix(".diff").read_text())}
_CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "processor": time.process_time}
_TITLE = "the price of exactness"
_BLOCK, _WARM_UP, _ROUNDS, _PAIRS = 16, 4, 5, 16
_OUTPUT = 2 * _ROUNDS * _PAIRS + 2 * _WARM_UP
_CONTEXT, _MOST_DRAFTED, _LEAST_ROUNDS = 256, 256, 5

Rate = Callable[[], float]
"""Runs once; returns tokens, or passes, per second."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS], help="what to measure")
    parser.add_argument("--shapes", nargs="+", default=["llama-160m", "qwen2-0.5b"])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--seconds", type=float, default=20, help="of each figure, and at least 5 rounds")
    parser.add_argument("--files", type=Path, help="directory for models, which otherwise vanish")
    parser.add_argument(
        "--clock",
        choices=_CLOCKS,
        default="wall",
        help="processor: time that the process takes of processors, for machines with other work; with one thread",
    )
    parser.add_argument("--num-threads", type=int, default=torch.get_num_threads())


def main(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(arguments.num_threads)
    with ExitStack() as stack:
        files = arguments.files or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for shape in arguments.shapes:
            if not (model := files / shape).exists():
                write_model(shape, model)
            for part in arguments.parts:
                for streams, ratios, rate in PARTS[part](part, shape, model, arguments):
                    series = Series(f"{part}, {shape}, {streams}", "on / off", tuple(round(each, 4) for each in ratios))
                    print(f"{series}   {rate:.1f}/s", flush=True)
                    add_results(arguments.out, _TITLE, [series], rates={series.name: rate})
                gc.collect()


Found = Iterator[tuple[int, list[float], float]]
"""For each number of streams the ratios of all rounds, and the median of the rates with the promise."""


def alternate(kept: Rate, without: Rate, seconds: float) -> tuple[list[float], float]:
    """The ratios of all rounds, which have the one order and the other in turn, and the median of `kept`."""
    sides, rates = (kept, without), list[list[float]]()
    for side in sides:
        side()
    began = time.perf_counter()
    while len(rates) < _LEAST_ROUNDS or time.perf_counter() - began < seconds:
        order = (0, 1) if len(rates) % 2 else (1, 0)
        found = {index: sides[index]() for index in order}
        rates.append([found[0], found[1]])
    return [on / off for on, off in rates], statistics.median(on for on, _ in rates)


def _of_steps(part: str, shape: str, model: Path, arguments: argparse.Namespace) -> Found:
    """Decodes of one engine, or of two if the pools differ."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        other = _engine(model, max(arguments.streams), None)
        engine = _engine(model, max(arguments.streams), Path(directory) / "pool") if part == "pool" else other
        config = replace(engine.config, policy=PolicyKind.FAIR if part == "fairness" else PolicyKind.FCFS)
        for streams in arguments.streams:
            work = _work(streams)

            def begin(work: Sequence[LoadRequest] = work) -> tuple[Iterator[StepPlan], Iterator[StepPlan]]:
                kept = engine.steps(Scheduler(config), work)
                return kept, kept if other is engine else other.steps(Scheduler(config), work)

            clock = _CLOCKS[arguments.clock]
            ratios, seconds = alternate_steps(begin, PATCHES.get(part, ()), arguments.seconds, clock)
            yield streams, ratios, streams / seconds


def _work(streams: int) -> list[LoadRequest]:
    """Streams that fill their blocks in different steps."""
    work = take(fixed(2 * _BLOCK, _OUTPUT, vocab_size=30_000), streams, seed=0)
    return [replace(each, prompt=each.token_ids[: _BLOCK + index % _BLOCK]) for index, each in enumerate(work)]


def alternate_steps(
    begin: Callable[[], tuple[Iterator[object], Iterator[object]]],
    patches: Sequence[Patch],
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[list[float], float]:
    """The ratios of all rounds, and the median of a step's seconds with the promise. A round has as many steps of the
    first iterator as of the second, whose steps run patched, in a random order. Both may be one iterator. Steps that
    something else on the machine disturbs, which take half as long again as the median, are left out."""
    random, ratios, of_kept = Random(0), list[float](), list[float]()
    began = time.perf_counter()
    while not ratios or time.perf_counter() - began < seconds:
        sides = begin()
        for _ in range(_WARM_UP):
            for side in dict.fromkeys(sides):
                next(side)
        for _ in range(_ROUNDS):
            order, times = [0, 1] * _PAIRS, (list[float](), list[float]())
            random.shuffle(order)
            for index in order:
                with patched(*(patches if index else ())):
                    started = clock()
                    next(sides[index])
                    times[index].append(clock() - started)
            limit = 1.5 * statistics.median(times[0] + times[1])
            kept, without = (statistics.fmean(each for each in side if each < limit) for side in times)
            ratios.append(without / kept)
            of_kept.append(kept)
    return ratios, statistics.median(of_kept)


@cache
def _engine(model: Path, most: int, pool_file: Path | None) -> InProcessEngine:
    """An engine whose pool is populated, so that nothing else of the process runs with its steps."""
    settings = WorkerSettings(
        model=str(model),
        device="cpu",
        num_gpu_blocks=most * (_OUTPUT // _BLOCK + 4),
        max_num_seqs=most,
        max_model_len=_OUTPUT + 4 * _BLOCK,
        num_threads=torch.get_num_threads(),
        swap_space=0,
        speculate=("off",),
        multi_step_ms=0,
        kv_cache_file=pool_file,
        persistent_kv_cache="off" if pool_file is None else "on",
    )
    engine = InProcessEngine(settings)
    for thread in threading.enumerate():
        if thread.name == "populate":
            thread.join()
    return engine


def _drafts(_: str, shape: str, model: Path, arguments: argparse.Namespace) -> Found:
    """All layers of a pass with up to 7 drafts for each stream and 256 tokens in all."""
    loaded = load_model(model, device=torch.device("cpu"), dtype=torch.bfloat16)
    assert isinstance(loaded, NativeCausalLM)
    clock = _CLOCKS[arguments.clock]
    for streams in arguments.streams:
        num_new = min(8, max(2, _MOST_DRAFTED // streams))
        rows, chunk = (
            Passes(loaded, streams, _CONTEXT, loaded.dtype, num_new, one_by_one=is_kept) for is_kept in (True, False)
        )
        kept, without = _passes(rows, streams, clock), _passes(chunk, streams, clock)
        yield streams, *alternate(kept, without, arguments.seconds)


def _passes(passes: Passes, streams: int, clock: Callable[[], float]) -> Rate:
    def run() -> float:
        started = clock()
        passes.run(passes.recording, streams)
        return 1 / (clock() - started)

    return run


def _products(_: str, shape: str, model: Path, arguments: argparse.Namespace) -> Found:
    """The products of all layers and of the head, one after the other; and the share of a row's numbers that differ if
    the row is computed with 63 others."""
    kernels, runs = CpuKernels(Library()), 3 * _LEAST_ROUNDS
    with torch.inference_mode():
        for layer in products_of(shape):
            x, weight = (torch.randn(rows, layer.in_features).bfloat16() for rows in (64, layer.out_features))
            packed = kernels.pack_weight(weight, False, Quantization.NONE)
            ways = {
                "kernels": lambda x, packed=packed: kernels.product(x, packed, None, "identity", torch.bfloat16),
                "torch": lambda x, weight=weight: torch.nn.functional.linear(x, weight),
            }
            changed = {name: float((way(x)[:1] != way(x[:1].clone())).float().mean()) for name, way in ways.items()}
            print(f"{shape}, {layer.name}: share of numbers that depend on the batch: {changed}", flush=True)
            add_results(arguments.out, _TITLE, [], changed={f"{shape}, {layer.name}": changed})
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            raise SystemExit("oneDNN has no bfloat16 on this processor: leave products out of --parts")
        for streams in arguments.streams:
            seconds = {"kernels": [0.0] * runs, "oneDNN": [0.0] * runs}
            for layer in products_of(shape):
                count, contestants = make_products(kernels, layer, streams)
                for name, times in measure({name: contestants[name] for name in seconds}, runs).items():
                    of_layer = [each * layer.count / count for each in times]
                    seconds[name] = [sum(pair) for pair in zip(seconds[name], of_layer, strict=True)]
            kept, without = seconds.values()
            ratios = [off / on for on, off in zip(kept, without, strict=True)]
            yield streams, ratios, streams / statistics.median(kept)


PARTS = {
    "steps": _of_steps,
    "products": _products,
    "drafts": _drafts,
    "seals": _of_steps,
    "pool": _of_steps,
    "moves": _of_steps,
    "fairness": _of_steps,
}
