"""The cost of constrained rows for a worker's steps: rows with and without a constraint decode in turn, so that drift
of the machine affects both alike."""

import argparse
import json
import shutil
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.grammar_schemas import all_schemas, closed, list_of
from bench.report import Series, median_ratio, write_results
from quire.common.v1.common_pb2 import Constraint, SamplingParameters
from quire.constraints.matcher import MaskMaker, Vocabulary
from quire.model_files.model_directory import ModelDirectory
from worker_svc import step as steps
from worker_svc.device.device_loop import DeviceLoop
from worker_svc.device.runner import ModelRunner
from worker_svc.models.registry import load_model
from worker_svc.sampling.constraints import TemplateCache
from worker_svc.settings import WorkerSettings
from worker_svc.startup import make_worker

_BLOCK_SIZE = 16
_PROMPT = 32
_STRING = {"type": "string"}
_SCHEMAS = {
    "plain": list_of(closed({"name": _STRING, "age": {"type": "integer"}, "tags": list_of(_STRING)}), 1000),
    "bounded": list_of(all_schemas()["person"], 1000),
}
"""Schemas whose texts outlast any measurement: texts of any length, and short texts, whose masks take longest."""


def measure_steps(tokenizer: Path, arguments: argparse.Namespace) -> None:
    """Prints and writes the figures of `arguments.steps` steps of each kind."""
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        vocab_size = _write_model(directory, tokenizer, arguments.layers)
        rig = _Rig(directory, arguments.rows, arguments.steps, arguments.schema)
        times = rig.run(arguments.steps)
    masks = _masks_alone(rig, arguments.rows, arguments.schema)
    plain, constrained = (Series(name, "ms", tuple(times[name])) for name in ("free rows", "constrained rows"))
    ratio = median_ratio(constrained, plain)
    alone = Series("masks alone", "ms", tuple(masks))
    cpu = Series("masks alone, of each row", "us", tuple(each * 1000 / arguments.rows for each in masks))
    print(plain, constrained, alone, cpu, f"constrained / free: {ratio:.3f}", sep="\n")
    if arguments.out is not None:
        facts = {"schema": arguments.schema, "rows": arguments.rows, "vocab_size": vocab_size, "ratio": ratio}
        write_results(arguments.out, "Steps of constrained rows", [plain, constrained, alone, cpu], **facts)


def _write_model(directory: Path, tokenizer: Path, num_layers: int) -> int:
    vocab_size = len(json.loads(tokenizer.read_text())["model"]["vocab"])
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=num_layers,
        num_attention_heads=12,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(directory)
    shutil.copy(tokenizer, directory / "tokenizer.json")
    return vocab_size


class _Rig:
    """A worker's runner without services, and two sets of rows."""

    def __init__(self, path: Path, num_rows: int, num_steps: int, schema: str) -> None:
        directory = ModelDirectory.open(path)
        model = load_model(path, device=torch.device("cpu"), dtype=torch.bfloat16)
        self._blocks = -(-(_PROMPT + num_steps + 1) // _BLOCK_SIZE)
        settings = WorkerSettings(
            model=str(path),
            block_size=_BLOCK_SIZE,
            num_gpu_blocks=2 * num_rows * self._blocks,
            max_num_seqs=2 * num_rows,
            max_num_batched_tokens=max(2048, num_rows * _PROMPT),
            device="cpu",
            cuda_graphs="off",
            swap_space=0,
        )
        self.templates = TemplateCache(partial(Vocabulary.of_model, directory, model.vocab_size))
        worker = make_worker(model, settings, DeviceLoop(), templates=self.templates)
        runner = worker.runner
        assert isinstance(runner, ModelRunner)
        self._runner = runner
        self._num_rows = num_rows
        self._schema = schema
        self._vocab_size = model.vocab_size
        self.outputs: list[list[int]] = [[] for _ in range(2 * num_rows)]
        self._num_launched = 0

    def run(self, num_steps: int) -> dict[str, list[float]]:
        """Milliseconds of each step, for free and for constrained rows."""
        sets = {"free rows": range(self._num_rows), "constrained rows": range(self._num_rows, 2 * self._num_rows)}
        for rows in sets.values():
            self._step(rows, 0, _PROMPT, self._assigned(rows))
        times: dict[str, list[float]] = {name: [] for name in sets}
        for step in range(num_steps):
            for name, rows in sets.items():
                started = time.perf_counter()
                self._step(rows, _PROMPT + step, 1, ())
                times[name].append((time.perf_counter() - started) * 1e3)
        return times

    def _assigned(self, rows: range) -> tuple[steps.AssignRow, ...]:
        rng = np.random.default_rng(0)
        message = Constraint(json_schema=json.dumps(_SCHEMAS[self._schema]))
        return tuple(
            steps.AssignRow(
                row=row,
                token_ids=rng.integers(3, self._vocab_size, _PROMPT, dtype=np.int32),
                block_table=np.arange(row * self._blocks, (row + 1) * self._blocks, dtype=np.int32),
                sampling=steps.RowSampling(
                    SamplingParameters(temperature=1.0, top_p=1.0, repetition_penalty=1.0),
                    seed=row,
                    constraint=steps.RowConstraint(message, (2,)) if row >= self._num_rows else None,
                ),
                num_prompt_tokens=_PROMPT,
            )
            for row in rows
        )

    def _step(self, rows: range, computed: int, new: int, assign: tuple[steps.AssignRow, ...]) -> None:
        none, pairs = np.zeros(0, np.int32), np.zeros((0, 2), np.int32)
        held = np.array(rows, np.int32)
        self._num_launched += 1
        step = steps.Step(
            step_id=self._num_launched,
            scheduler_epoch=0,
            cache_operations=steps.CacheOperations(pairs, pairs, pairs),
            row_changes=steps.RowChanges(none, assign, pairs, (), (), np.zeros((0, 3), np.int32)),
            batch=steps.Batch(
                held, np.full(len(held), new, np.int32), np.full(len(held), computed, np.int32),
                np.stack((held, held), axis=1),
            ),
            sealed=steps.SealedBlocks(none, np.zeros((0, steps.HASH_BYTES), np.uint8)),
        )  # fmt: skip
        output = self._runner.launch(steps.AdmittedStep(step, none)).wait()
        assert not output.failed_rows, output.refusals
        for row, token_id in zip(output.rows.tolist(), output.token_ids.tolist(), strict=True):
            self.outputs[row].append(token_id)


def _masks_alone(rig: _Rig, num_rows: int, schema: str) -> list[float]:
    """Milliseconds of all masks of each step, made again without a model."""
    template = rig.templates.get(Constraint(json_schema=json.dumps(_SCHEMAS[schema]))).result()
    maker = MaskMaker(template.vocabulary, 1)
    texts = rig.outputs[num_rows:]
    matchers = [template.matcher((2,)) for _ in texts]
    times = []
    for drawn in zip(*texts, strict=True):
        started = time.perf_counter()
        maker.make(matchers, [False] * len(matchers))
        for matcher, token_id in zip(matchers, drawn, strict=True):
            matcher.consume(token_id)
        times.append((time.perf_counter() - started) * 1e3)
    return times
