"""What LoRA adapters cost decode steps: rows with several adapters, and as many rows without one, in one process.

They decode in turn, beside rows of the same model without slots of adapters.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from bench.models import write_model
from bench.report import Series, median_ratio, write_results
from kernels.packed_weight import Quantization
from quire.adapters import read_adapter
from quire.common.v1.common_pb2 import SamplingParameters
from worker_svc.adapters import AdapterSlots, adapted_linears
from worker_svc.device.kv_pool import PoolRequest, allocate_pool, pool_geometry
from worker_svc.device.runner import ModelRunner
from worker_svc.models.base import CausalLM
from worker_svc.models.registry import load_model
from worker_svc.startup import model_geometry
from worker_svc.step import (
    AdmittedStep,
    AssignRow,
    Batch,
    CacheOperations,
    RowChanges,
    RowSampling,
    SealedBlocks,
    Step,
    WorkerLimits,
)

_BLOCK_SIZE = 16
_MAX_LEN = 1024
_NO_PAIRS = np.zeros((0, 2), np.int32)
_NONE = np.zeros(0, np.int32)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 1], help="rows that decode together")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--context", type=int, default=128, help="tokens of each row at first")
    parser.add_argument("--runs", type=int, default=40, help="steps of each kind, one after the other")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--quantization", choices=[each.value for each in Quantization], default="none")
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--model", type=Path, help="default: a LLaMA of 160M, random weights")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")


def main(arguments: argparse.Namespace) -> None:
    if arguments.num_threads is not None:
        torch.set_num_threads(arguments.num_threads)
    with tempfile.TemporaryDirectory() as made:
        directory = arguments.model
        if directory is None:
            directory = Path(made) / "model"
            write_model("llama-160m", directory)

        def load() -> CausalLM:
            return load_model(
                directory,
                device=torch.device("cpu"),
                dtype=getattr(torch, arguments.dtype),
                quantization=Quantization(arguments.quantization),
            )

        model = load()
        slots = AdapterSlots(model, arguments.adapters, 256)
        for slot in range(arguments.adapters):
            adapter = _write_adapter(Path(made) / f"adapter-{slot}", model, arguments.rank, slot)
            slots.put(slot, slots.load(adapter, read_adapter(adapter).digest))
        print(f"{arguments.adapters} adapters of rank {arguments.rank}: {slots.num_bytes / 2**20:.1f} MiB", flush=True)
        without_slots = load()
    series: list[Series] = []
    ratios: dict[str, float] = {}
    for rows in arguments.rows:
        of_kinds = {
            "no slots": Decodes(without_slots, rows, 0, arguments.context),
            "no adapter": Decodes(model, rows, 0, arguments.context),
            "adapters": Decodes(model, rows, arguments.adapters, arguments.context),
        }
        times: dict[str, list[float]] = {name: [] for name in of_kinds}
        for run in range(arguments.runs + 3):
            for name, decodes in of_kinds.items():
                seconds = decodes.step()
                if run >= 3:
                    times[name].append(seconds * 1e3)
        found = {name: Series(f"{rows} rows, {name}", "ms a step", tuple(each)) for name, each in times.items()}
        for each in found.values():
            print(each, flush=True)
        for name in ("no slots", "adapters"):
            ratio = median_ratio(found["no adapter"], found[name])
            ratios[f"tokens of {rows} rows, {name}, beside no adapter"] = ratio
            print(f"{rows} rows, {name}: {ratio:.3f} of the tokens of rows without an adapter", flush=True)
        series += found.values()
    if arguments.out is not None:
        write_results(
            arguments.out,
            "Decode steps with LoRA adapters",
            series,
            ratios=ratios,
            rank=arguments.rank,
            adapters=arguments.adapters,
        )


class Decodes:
    """Greedy decode steps of some rows, which have the adapters in turn."""

    def __init__(self, model: CausalLM, num_rows: int, num_adapters: int, context: int) -> None:
        blocks = _MAX_LEN // _BLOCK_SIZE
        request = PoolRequest(_BLOCK_SIZE, num_rows * blocks, None, 0, num_rows * blocks, model.dtype)
        pool = allocate_pool(pool_geometry(model, request, None), model.device, model.dtype)
        limits = WorkerLimits(num_rows, max(num_rows, context), 2, 0, num_adapters)
        self._runner = ModelRunner(model, pool, model_geometry(model, _MAX_LEN), limits)
        self._rows = np.arange(num_rows, dtype=np.int32)
        self._length = context
        tokens = np.random.default_rng(0).integers(3, model.vocab_size, (num_rows, context), dtype=np.int32)
        table = np.arange(num_rows * blocks, dtype=np.int32).reshape(num_rows, blocks)
        sampling = RowSampling(SamplingParameters(temperature=0.0, top_p=1.0))
        for row in range(num_rows):
            slot = row % num_adapters if num_adapters else None
            assign = AssignRow(row, tokens[row], table[row], sampling, context, slot)
            self._run((assign,), self._rows[row : row + 1], context, 0)

    def step(self) -> float:
        """Seconds of a decode step of all rows."""
        began = time.perf_counter()
        self._run((), self._rows, 1, self._length)
        self._length += 1
        return time.perf_counter() - began

    def _run(self, assign: tuple[AssignRow, ...], rows: np.ndarray, count: int, computed: int) -> None:
        step = Step(
            step_id=0,
            scheduler_epoch=0,
            cache_operations=CacheOperations(_NO_PAIRS, _NO_PAIRS, _NO_PAIRS),
            row_changes=RowChanges(_NONE, assign, _NO_PAIRS, (), (), np.zeros((0, 3), np.int32)),
            batch=Batch(rows, np.full_like(rows, count), np.full_like(rows, computed), np.stack((rows, rows), axis=1)),
            sealed=SealedBlocks(_NONE, np.zeros((0, 32), np.uint8)),
        )
        self._runner.launch(AdmittedStep(step, np.zeros(1, np.int32))).wait()


def _write_adapter(directory: Path, model: CausalLM, rank: int, seed: int) -> Path:
    """Random A and B for all linear layers."""
    directory.mkdir()
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for linear in adapted_linears(model):
        for name, (num_inputs, num_outputs, _) in (next(iter(layers.items())) for layers in linear.adapted_modules):
            tensors[f"base_model.model.{name}.lora_A.weight"] = (
                torch.randn(rank, num_inputs, generator=generator) * 0.02
            )
            tensors[f"base_model.model.{name}.lora_B.weight"] = (
                torch.randn(num_outputs, rank, generator=generator) * 0.02
            )
    save_file(tensors, directory / "adapter_model.safetensors")
    targets = sorted({name.split(".")[-3] for name in tensors})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory
