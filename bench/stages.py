"""The time of each stage of a forward pass on the CPU: each kind of operation by itself, over all layers, with its
floor. The floor is the longer of two times: reading the same number of bytes as fast as the same threads can, and the
same number of products with operands in registers.

Parts and whole are recordings of the same model over the same tensors, run in turn; the least time of the runs counts.
"""

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench.models import write_model
from bench.peak import Peak
from bench.report import Series, write_results
from quire.runtime.settings import ConfigurationError
from quire_kernels import ops
from quire_kernels.checks import dtype_written_to
from quire_kernels.cpu.bindings import ProductShape
from quire_kernels.cpu.library import Operation
from quire_kernels.packed_weight import Quantization
from quire_kernels.recording import RecordedCall, Recording, record
from worker_svc.device.kv_pool import PoolRequest, allocate_pool, pool_geometry
from worker_svc.device.replay import room_for
from worker_svc.models.base import NativeCausalLM
from worker_svc.models.registry import load_model

_BLOCK_SIZE = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64], help="sequences that decode together")
    parser.add_argument("--context", type=int, default=256, help="tokens of each sequence")
    parser.add_argument("--prompt", type=int, help="tokens of one prompt, computed at once, instead of decodes")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--quantization", choices=[each.value for each in Quantization], default="none")
    parser.add_argument("--kv-cache-dtype", choices=("auto", "int8"), default="auto")
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--model", type=Path, help="model; default: a LLaMA of 160M, random weights")


def main(arguments: argparse.Namespace) -> None:
    if arguments.num_threads is not None:
        torch.set_num_threads(arguments.num_threads)
    with tempfile.TemporaryDirectory() as made:
        directory = arguments.model
        if directory is None:
            directory = Path(made)
            write_model("llama-160m", directory)
        model = load_model(
            directory,
            device=torch.device("cpu"),
            dtype=torch.bfloat16,
            quantization=Quantization(arguments.quantization),
        )
    if not isinstance(model, NativeCausalLM):
        raise ConfigurationError(f"--model is {directory}; expected a model of Quire's own code")
    pool_dtype = torch.int8 if arguments.kv_cache_dtype == "int8" else model.dtype
    if arguments.prompt is not None:
        passes, batches = Passes.of_prompt(model, arguments.prompt, pool_dtype), [1]
    else:
        passes, batches = Passes(model, max(arguments.batches), arguments.context, pool_dtype), arguments.batches
    series, kept = [], []
    for batch in batches:
        stages, machine = measure(passes, batch, arguments.runs, arguments.quantization)
        kept.append(floors(batch, stages, machine))
        what = "sequences" if arguments.prompt is None else "prompt"
        print(
            f"\n{batch} {what} of {passes.context} tokens; the threads read {machine.gigabytes:.1f} GB/s, products in "
            f"registers do {machine.gigaflops:.0f} GFLOP/s"
        )
        floors_ms = {stage.name: machine.floor_ms(stage) for stage in stages[1:]}
        floors_ms[stages[0].name] = sum(floors_ms.values())
        for stage in stages:
            floor = floors_ms[stage.name]
            work = f"{stage.read_bytes / 1e6:7.1f} MB, {stage.flops / 1e9:7.2f} GFLOP"
            share = f"   {work}, at least {floor:6.2f} ms: {stage.best_ms / floor:.2f} of it" if floor else ""
            print(f"{stage.name:<28} {stage.best_ms:7.2f} ms{share}", flush=True)
        series += [stage.series(batch) for stage in stages]
    write_results(
        arguments.out,
        "Stages of a forward pass on the CPU",
        series,
        context=passes.context,
        prompt=arguments.prompt is not None,
        quantization=arguments.quantization,
        kv_cache_dtype=arguments.kv_cache_dtype,
        floors=kept,
    )


@dataclass(frozen=True, slots=True)
class Stage:
    """One kind of operation of all layers.

    Attributes:
        read_bytes: bytes of weights, or of keys and values; 0 if neither is read.
        flops: operations of its products; 0 if there are none.
    """

    name: str
    read_bytes: int
    flops: int
    times_ms: tuple[float, ...]

    @property
    def best_ms(self) -> float:
        return min(self.times_ms)

    def series(self, batch: int) -> Series:
        return Series(f"{self.name}, {batch} seqs", "ms", self.times_ms)


@dataclass(frozen=True, slots=True)
class Machine:
    """Peak rates of the processor with the threads of the pass.

    Attributes:
        gigabytes: a second, read from memory.
        gigaflops: a second, by products whose operands stay in registers.
    """

    gigabytes: float
    gigaflops: float

    def floor_ms(self, stage: Stage) -> float:
        """The least time of one stage. A pass takes at least the sum over its stages, which run one after the other."""
        return max(stage.read_bytes / self.gigabytes, stage.flops / self.gigaflops) / 1e6


def floors(batch: int, stages: Sequence[Stage], machine: Machine) -> dict[str, Any]:
    """Inputs from which the floors of a batch are computed."""
    work = {stage.name: {"read_bytes": stage.read_bytes, "flops": stage.flops} for stage in stages}
    return {"batch": batch, "gigabytes_per_s": machine.gigabytes, "gigaflops_per_s": machine.gigaflops, "work": work}


class Passes:
    """A model's layers, recorded over a pool that holds `num_rows` sequences of `context` tokens, or up to a block
    less, so that the number of sequences that have just filled a block is as in service. The last `num_new` tokens of
    each are computed, as a chunk, or `one_by_one`: each as a row of one token, as drafts are verified.
    """

    def __init__(
        self,
        model: NativeCausalLM,
        num_rows: int,
        context: int,
        dtype: torch.dtype,
        num_new: int = 1,
        *,
        one_by_one: bool = False,
    ) -> None:
        self.context, self.num_new, self._rows_each = context, num_new, num_new if one_by_one else 1
        blocks = -(-context // _BLOCK_SIZE)
        geometry = pool_geometry(model, PoolRequest(_BLOCK_SIZE, num_rows * blocks, None, 0, 0, dtype), None)
        num_blocks = num_rows * (blocks + geometry.state_blocks)
        geometry = replace(geometry, num_gpu_blocks=num_blocks)
        pool = allocate_pool(geometry, torch.device("cpu"), dtype)
        caches = pool.layers_of(model)
        if caches.pages is not None:
            caches.pages.view(torch.float32).normal_()
        fill_pool(caches.kv_caches, model.head_dim)
        num_tokens = num_rows * num_new
        room_rows = num_rows * self._rows_each
        self._room = room_for(model, pool, blocks * _BLOCK_SIZE, num_tokens=num_tokens, num_rows=room_rows)
        shorter = (torch.arange(num_rows) + _BLOCK_SIZE // 2) % _BLOCK_SIZE
        self._lengths = context - (shorter if num_new == 1 else torch.zeros_like(shorter))
        self._fill(num_rows, blocks, num_blocks)
        hidden = model.embed(self._room)
        self.recording = record(num_tokens, lambda: _ignore(model.run_layers(hidden, self._room)))
        self._block_bytes, self._state_bytes = geometry.block_bytes, geometry.state_blocks * geometry.block_bytes

    @classmethod
    def of_prompt(cls, model: NativeCausalLM, num_tokens: int, dtype: torch.dtype) -> "Passes":
        """Computes all tokens of one sequence at once."""
        return cls(model, 1, num_tokens, dtype, num_new=num_tokens)

    def run(self, part: Recording, num_rows: int) -> None:
        """Runs a part of the recording, for the first rows."""
        part.run(num_rows * self.num_new, num_rows * self._rows_each)

    def kv_bytes(self, num_rows: int) -> int:
        """Bytes that attention of the first rows reads."""
        return int(self._lengths[:num_rows].sum()) * self._block_bytes // _BLOCK_SIZE

    def state_bytes(self, num_rows: int) -> int:
        """Bytes that the layers with states of the first rows read and write."""
        return 2 * num_rows * self._state_bytes

    def attention_flops(self, num_rows: int, num_heads: int, head_dim: int) -> int:
        """Operations of one layer: products of queries with keys, and of weights with values."""
        seen = self._lengths[:num_rows, None] - torch.arange(self.num_new)
        return 4 * num_heads * head_dim * int(seen.sum())

    def _fill(self, num_rows: int, blocks: int, num_blocks: int) -> None:
        room, attention, order = self._room, self._room.groups[0], torch.randperm(num_blocks)
        tables = order[: num_rows * blocks].view(num_rows, blocks)
        if room.states is not None:
            room.states.tables.copy_(order[num_rows * blocks :].view(num_rows, -1))
            room.states.query_start_loc.copy_(torch.arange(num_rows + 1) * self.num_new)
            room.states.seq_lens.copy_(self._lengths)
            room.states.checkpoints.fill_(-1)
        room.token_ids.zero_()
        row = torch.arange(num_rows).repeat_interleave(self.num_new)
        last = (self._lengths[:, None] - self.num_new + torch.arange(self.num_new)).flatten()
        room.positions.copy_(last)
        attention.block_tables.copy_(tables.repeat_interleave(self._rows_each, 0))
        last_blocks = tables[row, last // _BLOCK_SIZE]
        attention.slot_mapping.copy_(last_blocks * _BLOCK_SIZE + last % _BLOCK_SIZE)
        of_row = self.num_new // self._rows_each
        attention.query_start_loc.copy_(torch.arange(num_rows * self._rows_each + 1) * of_row)
        attention.seq_lens.copy_(last[of_row - 1 :: of_row] + 1)


def fill_pool(layers: Sequence[torch.Tensor], head_dim: int) -> None:
    """Writes keys and values, or latents, of a normal distribution to all blocks, as in service.

    Args:
        layers: [lines_per_token, num_blocks, num_kv_heads, block_size, D] each, or a packed form of D in a pool of
            another dtype.
    """
    for layer in layers:
        num_lines, num_blocks, num_heads, block_size, _ = layer.shape
        shape = num_blocks * block_size, num_heads, head_dim
        dtype = dtype_written_to(layer) or torch.bfloat16
        lines, slots = [torch.randn(shape).to(dtype) for _ in range(num_lines)], torch.arange(shape[0])
        if num_lines == 1:
            ops.cache_latents(lines[0], layer, slots)
        else:
            ops.reshape_and_cache(lines[0], lines[1], layer, slots)


def measure(passes: Passes, batch: int, runs: int, quantization: str) -> tuple[list[Stage], Machine]:
    """The stages, the whole pass first, and the peak rates of the processor: the best of the same runs."""
    parts = {"all layers": passes.recording}
    read_bytes, flops = Counter[str](), Counter[str]()
    for call in passes.recording.calls:
        name = _name(call)
        if name not in parts:
            parts[name] = passes.recording.part(lambda each, name=name: _name(each) == name)
            if call.operation is Operation.PAGED_ATTENTION:
                read_bytes[name] = passes.kv_bytes(batch)
            elif call.operation is Operation.LINEAR_RECURRENCE:
                read_bytes[name] = passes.state_bytes(batch)
        if call.operation is Operation.PRODUCT:
            shape = ProductShape.of(call.arguments)
            read_bytes[name] += shape.weight_bytes
            flops[name] += 2 * shape.in_features * shape.out_features * batch * passes.num_new
        elif call.operation is Operation.PAGED_ATTENTION:
            flops[name] += passes.attention_flops(batch, call.arguments.num_heads, call.arguments.head_dim)
    for work in (read_bytes, flops):
        work["all layers"] = work.total()
    times: dict[str, list[float]] = {name: [] for name in parts}
    reads, rates = list[float](), list[float]()
    with tempfile.TemporaryDirectory() as made:
        peak = Peak(Path(made), torch.get_num_threads(), is_int8=quantization == Quantization.INT8_DYNAMIC.value)
        for _ in range(runs):
            for name, part in parts.items():
                times[name].append(_seconds(lambda part=part: passes.run(part, batch)) * 1e3)
            reads.append(peak.gigabytes())
            rates.append(peak.gigaflops())
    stages = [Stage(name, read_bytes[name], flops[name], tuple(each)) for name, each in times.items()]
    return stages, Machine(max(reads), max(rates))


def _name(call: RecordedCall) -> str:
    if call.operation is not Operation.PRODUCT:
        return call.operation.name.lower()
    shape = ProductShape.of(call.arguments)
    return f"product {shape.in_features} x {shape.out_features}"


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _ignore(_: torch.Tensor) -> None:
    """Drops the result of a recording."""
