"""Tokens drawn from logits on the CPU: milliseconds for all rows of a step, by parameters, vocabulary and spread.

Logits are normally distributed, rounded to bfloat16: `spread` 1 is a model of random weights, whose nucleus is most of
the vocabulary; 6 is nearer to what trained ones say.
"""

import argparse
import time
from itertools import product
from pathlib import Path

import numpy as np
import torch

from bench.report import Series, write_results
from quire.common.v1.common_pb2 import SamplingParameters
from worker_svc.sampling.sampler import draw
from worker_svc.sampling.sampling_table import SamplingColumns
from worker_svc.step import RowSampling

_PARAMETERS = {
    "greedy": SamplingParameters(temperature=0, top_p=1),
    "temperature": SamplingParameters(temperature=0.8, top_p=1),
    "top-p": SamplingParameters(temperature=0.8, top_p=0.95),
    "top-k, top-p": SamplingParameters(temperature=0.8, top_p=0.95, top_k=40),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--vocab-size", type=int, nargs="+", default=[32_000, 151_936])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--spread", type=float, nargs="+", default=[1.0, 6.0])
    parser.add_argument("--num-threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")


def main(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(arguments.num_threads)
    series: list[Series] = []
    for vocab_size, num_rows, spread in product(arguments.vocab_size, arguments.rows, arguments.spread):
        for each in _measure(vocab_size, num_rows, spread, arguments.runs):
            print(each)
            series.append(each)
    if arguments.out is not None:
        write_results(arguments.out, "Tokens drawn on the CPU", series, num_threads=arguments.num_threads)


@torch.inference_mode()
def _measure(vocab_size: int, num_rows: int, spread: float, runs: int) -> list[Series]:
    """The parameters in turn."""
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn((num_rows, vocab_size), generator=generator) * spread).bfloat16().float()
    times: dict[str, list[float]] = {name: [] for name in _PARAMETERS}
    for _ in range(runs + 1):
        for name, parameters in _PARAMETERS.items():
            times[name].append(_draw_time(logits, parameters))
    at = f"{num_rows} x {vocab_size}, {spread:g}"
    return [Series(f"{at}: {name}", "ms", tuple(each[1:])) for name, each in times.items()]


def _draw_time(logits: torch.Tensor, parameters: SamplingParameters) -> float:
    num_rows = len(logits)
    columns, positions = SamplingColumns.empty(num_rows), np.arange(num_rows)
    for row in range(num_rows):
        columns.put(row, RowSampling(parameters, seed=row), num_prompt_tokens=0)
    start = time.perf_counter()
    draw(logits, columns, positions)
    return (time.perf_counter() - start) * 1e3
