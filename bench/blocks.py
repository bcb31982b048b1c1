"""Attention over paged blocks of each size compared with contiguous memory, and the time to move a sequence's blocks to
host memory or to compute them again, for the paper's figures 18a and 19a, on this machine.

The decode kernel reads the same keys and values through tables of shuffled blocks, and as one block a sequence, which
is contiguous memory. The worker's pools move the blocks. All contestants take turns, so that drift of the machine
affects all of them alike. The model of the moved blocks and of the prefill is llama-160m.
"""

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from bench.attention_problems import Heads
from bench.in_process import InProcessEngine
from bench.kernels import Contestants, make_decode, measure
from bench.models import write_model
from bench.report import Series, write_results
from quire.load import fixed, take
from quire_kernels import ops
from quire_kernels.cpu.bindings import CpuKernels
from quire_kernels.cpu.library import Library
from worker_svc.settings import WorkerSettings

_LAYERS, _MODEL = 12, Heads(12, 12, 64)
"""Layers and heads of llama-160m, the model whose blocks move."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--contexts", type=int, nargs="*", default=[256, 1024], help="tokens of each row")
    parser.add_argument("--batch", type=int, default=8, help="rows that decode together")
    parser.add_argument("--heads", type=int, default=40, help="heads of 128, as in OPT-13B")
    parser.add_argument("--moved-tokens", type=int, default=1024, help="tokens of the moved sequence; 0: none")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--num-threads", type=int, default=torch.get_num_threads())


def main(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(arguments.num_threads)
    kernels, series = CpuKernels(Library()), list[Series]()
    with torch.inference_mode():
        for context in arguments.contexts:
            series += attention(kernels, context, arguments)
        if arguments.moved_tokens:
            series += moves(arguments)
    if arguments.moved_tokens:
        series.append(prefill(arguments))
    write_results(arguments.out, "attention and moves by block size", series)


def attention(kernels: CpuKernels, context: int, arguments: argparse.Namespace) -> list[Series]:
    """Milliseconds of one layer's decode by block size."""
    heads = Heads(arguments.heads, arguments.heads, 128)

    def decode(block_size: int) -> Callable[[], object]:
        return partial(make_decode(heads, arguments.batch, context, block_size), kernels)

    contestants = {f"blocks of {size}": decode(size) for size in arguments.block_sizes}
    return _series(f"attention, {context} tokens", {**contestants, "contiguous": decode(context)}, arguments.runs)


def moves(arguments: argparse.Namespace) -> list[Series]:
    """Milliseconds to move all blocks of a sequence from one pool to another."""

    def move(block_size: int) -> Callable[[], object]:
        num_blocks = -(-arguments.moved_tokens // block_size)
        shape = (2, num_blocks, _MODEL.kv, block_size, _MODEL.size)
        source, target = ([torch.zeros(shape, dtype=torch.bfloat16) for _ in range(_LAYERS)] for _ in range(2))
        pairs = torch.stack((torch.randperm(num_blocks), torch.randperm(num_blocks)), 1)
        return lambda: ops.swap_blocks(source, target, pairs)

    contestants = {f"blocks of {size}": move(size) for size in arguments.block_sizes}
    return _series(f"move, {arguments.moved_tokens} tokens", contestants, arguments.runs)


def prefill(arguments: argparse.Namespace) -> Series:
    """Milliseconds to compute the sequence again."""
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as directory:
        write_model("llama-160m", Path(directory))
        settings = WorkerSettings(
            model=directory,
            device="cpu",
            num_gpu_blocks=2 * arguments.moved_tokens // 16,
            max_num_batched_tokens=2048,
            swap_space=0,
            num_threads=arguments.num_threads,
        )
        engine = InProcessEngine(settings)
    work = take(fixed(arguments.moved_tokens, 1, vocab_size=1000), 1, seed=0)
    engine.run(work)
    times = tuple(1e3 * engine.run(work) for _ in range(arguments.runs))
    series = Series(f"prefill, {arguments.moved_tokens} tokens", "ms", times)
    print(series, flush=True)
    return series


def _series(name: str, contestants: Contestants, runs: int) -> list[Series]:
    seconds = measure(contestants, runs)
    series = [Series(f"{name}, {way}", "ms", tuple(each * 1e3 for each in times)) for way, times in seconds.items()]
    print(*series, sep="\n", flush=True)
    return series
