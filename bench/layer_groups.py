"""Memory that a sequence takes of the KV pool when a model's layers have windows or latents, against what the
architecture needs and against a block of all layers in the widest head; and the requests that run at once in 64 GiB.

Shapes are of published models in bfloat16, by their cache layers. Admission is the scheduler's own: its core
plans steps for a device that answers at once.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.report import Series, write_results
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.request import ClientId, Handle, Request, RequestKey, RowSampling
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step import StepResult
from worker_svc.device.layer_cut import LayerCut, cut_layers
from worker_svc.models.base import CacheLayer

_BLOCK_SIZE, _NUMBER_BYTES = 16, 2
_LENGTHS = (8192, 32768, 131072)
_POOL_BYTES = 64 << 30
_MAX_MODEL_LEN = 131072 + 16


@dataclass(frozen=True, slots=True)
class Shape:
    """The layers of a published model. `widest` are numbers of a token in a layer if each has keys and values of the
    most heads and of the widest head that the model computes with."""

    layers: tuple[CacheLayer, ...]
    widest: int
    lines: int = 2

    def needed_bytes(self, num_tokens: int) -> int:
        kept = (min(num_tokens, each.window or num_tokens) * each.num_kv_heads * each.head_dim for each in self.layers)
        return sum(kept) * self.lines * _NUMBER_BYTES

    def widest_bytes(self, num_tokens: int, num_layers: int) -> int:
        return num_tokens * num_layers * self.widest * _NUMBER_BYTES


def _layers(num_layers: int, num_full: int, window: int, heads: int, dim: int) -> tuple[CacheLayer, ...]:
    """Each of the runs of windowed layers ends with a full one; there are `num_full`."""
    every = num_layers // num_full
    return tuple(
        CacheLayer(heads, dim, None if (index + 1) % every == 0 and index // every < num_full else window)
        for index in range(num_layers)
    )


SHAPES = {
    "Gemma 3 1B": Shape(_layers(26, 4, 512, 1, 256), 2 * 256),
    "Gemma 3 4B": Shape(_layers(34, 5, 1024, 4, 256), 2 * 4 * 256),
    "Gemma 3 27B": Shape(_layers(62, 10, 1024, 16, 128), 2 * 16 * 128),
    "gpt-oss 20B": Shape(_layers(24, 12, 128, 8, 64), 2 * 8 * 64),
    "Olmo 3 7B": Shape(_layers(32, 8, 4096, 32, 128), 2 * 32 * 128),
    "DeepSeek V3": Shape((CacheLayer(1, 576),) * 61, 2 * 128 * 192, lines=1),
    "GLM-4.7-Flash": Shape((CacheLayer(1, 576),) * 47, 2 * 20 * 256, lines=1),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=8000, help="prompt of each request of the admission")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")


def main(arguments: argparse.Namespace) -> None:
    series: list[Series] = []
    for name, shape in SHAPES.items():
        cut = cut_layers(shape.layers, _MAX_MODEL_LEN, _BLOCK_SIZE)
        before = LayerCut(shape.layers)
        ratios: list[str] = []
        for num_tokens in _LENGTHS:
            taken, needed = _taken_bytes(shape, cut, num_tokens), shape.needed_bytes(num_tokens)
            widest = shape.widest_bytes(num_tokens, len(shape.layers))
            series += [
                Series(f"{name}, {num_tokens}, taken", "MiB", (taken / 2**20,)),
                Series(f"{name}, {num_tokens}, taken / needed", "", (taken / needed,)),
                Series(f"{name}, {num_tokens}, all layers / needed", "", (widest / needed,)),
            ]
            ratios.append(f"{taken / needed:.3f} (all layers {widest / needed:.1f})")
        widest_block = shape.widest_bytes(_BLOCK_SIZE, len(shape.layers))
        running = _running(cut, _block_bytes(shape, cut), arguments.tokens)
        running_before = _running(before, widest_block, arguments.tokens)
        series.append(Series(f"{name}, running in 64 GiB", "requests", (running,)))
        series.append(Series(f"{name}, running in 64 GiB, all layers", "requests", (running_before,)))
        groups = f"{cut.groups.num_full} + {cut.groups.num_windowed} groups of {len(cut.slots)} layers"
        print(f"{name:<14} {groups}:", end=" ")
        print("; ".join(ratios), f"; {running} requests, {running_before} before: {running / running_before:.1f}")
    if arguments.out is not None:
        write_results(arguments.out, "memory of models with windows and latents", series)


def _block_bytes(shape: Shape, cut: LayerCut) -> int:
    numbers = sum(each.num_kv_heads * each.head_dim for each in cut.slots)
    return numbers * shape.lines * _BLOCK_SIZE * _NUMBER_BYTES


def _taken_bytes(shape: Shape, cut: LayerCut, num_tokens: int) -> int:
    """A sequence that decodes."""
    return cut.groups.max_blocks(num_tokens, _BLOCK_SIZE) * _block_bytes(shape, cut)


def _running(cut: LayerCut, block_bytes: int, num_tokens: int) -> int:
    """The maximum number of requests with a prompt of this length that run at once before one is preempted."""
    config = SchedulerConfig(
        num_blocks=_POOL_BYTES // block_bytes,
        block_size=_BLOCK_SIZE,
        max_num_seqs=2048,
        max_num_batched_tokens=2048,
        max_model_len=_MAX_MODEL_LEN,
        max_waiting_requests=4096,
        max_waiting_tokens=1 << 30,
        full_groups=cut.groups.num_full,
        windowed_groups=cut.groups.num_windowed,
        window=cut.groups.window,
    )
    scheduler, most, since = Scheduler(config), 0, 0
    # No request ends meanwhile.
    max_tokens = min(4096, config.max_len - num_tokens)
    for index in range(2048):
        key, prompt = RequestKey(ClientId(0), Handle(index)), [index] * num_tokens
        scheduler.submit(Request(key, str(index), prompt, RowSampling(seed=index), max_tokens), 0.0)
    while not scheduler.num_preemptions and len(scheduler.waiting) and (plan := scheduler.schedule(0.0)) is not None:
        scheduler.apply(StepResult(plan.step_id, np.zeros(len(plan.samples), np.int64)), 0.0)
        running = len(scheduler.running)
        if running > most:
            most, since = running, scheduler.num_steps
        elif scheduler.num_steps - since > 64:
            break
    return most
