"""Checks on the device that a worker's decode graphs and swaps give the same tokens and log probabilities as plain
steps. All memory that was not written is NaN."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from bench.gpu_checks import Check
from bench.gpu_model import config_of, make_model
from bench.gpu_rig import BLOCK_SIZE, GREEDY, Rig
from worker_svc.device.replay import CudaGraphRecorder, GraphRecorder
from worker_svc.models.base import CausalLM
from worker_svc.step import StepOutput

Answer = tuple[int, float]
NUM_ROWS = 13
# Maximum difference of log probabilities, which rounding explains.
LIMIT = 1e-4
_SAMPLING = replace(GREEDY, logprobs=0)
_SMALL = {"vocab_size": 2000, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8}
_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
_FEW = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "max_position_embeddings": 1024}


class Again:
    """A recorder for machines without a GPU: a replay does the work again."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        work()
        return work


def runner_checks(device: str, seed: int) -> Iterator[Check]:
    """Checks in float32, in which batches of other sizes give the same tokens."""
    on_gpu = device == "cuda"
    place = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    config = config_of("llama-1b") | _SMALL | _HEADS | ({} if on_gpu else _FEW)
    model = make_model(config, place, torch.float32)
    rng = np.random.default_rng(seed)
    recorder = CudaGraphRecorder(place) if on_gpu else Again()
    yield check_graphs(model, recorder, rng, longest=1500 if on_gpu else 60)
    yield check_swaps(model, rng, blocks_a_row=64 if on_gpu else 4, rounds=8 if on_gpu else 2)


def check_graphs(model: CausalLM, recorder: GraphRecorder, rng: np.random.Generator, longest: int) -> Check:
    """Random decode batches of rows of random lengths, with graphs and without."""
    columns = -(-(longest + 32) // BLOCK_SIZE)
    prompts = [rng.integers(3, 2000, int(rng.integers(1, longest))).tolist() for _ in range(NUM_ROWS)]
    batches = [rng.permutation(NUM_ROWS)[: int(rng.integers(1, NUM_ROWS + 1))].tolist() for _ in range(30)]
    found = []
    for each in (None, recorder):
        rig = _make_rig(model, NUM_ROWS, NUM_ROWS * columns, recorder=each)
        lengths = [len(prompt) for prompt in prompts]
        for row, prompt in enumerate(prompts):
            table = range(row * columns, (row + 1) * columns)
            rig.step([row], [len(prompt)], [0], assign={row: (prompt, table)})
        for rows in batches:
            rig.step(rows, [1] * len(rows), [lengths[row] for row in rows])
            for row in rows:
                lengths[row] += 1
        found.append([answer for output in rig.drain() for answer in _answers(output).values()])
    return _compare("decode graphs", *found)


def check_swaps(model: CausalLM, rng: np.random.Generator, blocks_a_row: int, rounds: int) -> Check:
    """A row is swapped out and in again and again, while other rows overwrite its blocks at once."""
    length = (blocks_a_row - 2) * BLOCK_SIZE
    prompts = [rng.integers(3, 2000, length).tolist() for _ in range(3)]
    found = [_run_swaps(model, prompts, blocks_a_row, rounds, swapped=swapped) for swapped in (False, True)]
    return _compare("swaps beside steps", *found)


def _run_swaps(
    model: CausalLM, prompts: Sequence[list[int]], blocks: int, rounds: int, *, swapped: bool
) -> list[Answer]:
    """The answers of row 0, which is swapped or stays, and of row 1, which decodes meanwhile."""
    rig = _make_rig(model, 3, 3 * blocks, num_host_blocks=blocks)
    steady, first, second = (list(range(part * blocks, (part + 1) * blocks)) for part in range(3))
    host = range(blocks)
    tokens, length, found = [*prompts[0]], len(prompts[0]), []
    rig.step([0, 1], [length] * 2, [0, 0], assign={0: (prompts[0], first), 1: (prompts[1], steady)})
    for count in range(rounds):
        found += _last_answers(rig)
        tokens.append(found[-2][0])
        if not swapped:
            rig.step([1], [1], [length + count])
            rig.step([0], [1], [len(tokens) - 1])
            continue
        leaving = {"release": [0], "swap_out": list(zip(first, host, strict=True)), "written": first}
        rig.step([2], [length], [0], assign={2: (prompts[2], first)}, **leaving)
        rig.step([1], [1], [length + count], release=[2])
        coming = list(zip(host, second, strict=True))
        first, second = second, first
        rig.step([0], [1], [len(tokens) - 1], assign={0: (tokens, first)}, swap_in=coming)
    return found + _last_answers(rig)


def _last_answers(rig: Rig) -> list[Answer]:
    """The answers of rows 0 and 1, once all steps are done."""
    last = {row: answer for output in rig.drain() for row, answer in _answers(output).items()}
    return [last[0], last[1]]


def _make_rig(model: CausalLM, num_rows: int, num_blocks: int, **options: Any) -> Rig:
    rig = Rig(model, num_rows=num_rows, num_blocks=num_blocks, sampling=_SAMPLING, **options)
    for layer in (*rig.pool.gpu, *rig.pool.host):
        layer.fill_(torch.nan)
    return rig


def _answers(output: StepOutput) -> dict[int, Answer]:
    """Answers by row; a row whose logits were not finite has no log probability."""
    logprobs: dict[int, float] = {}
    if output.logprobs is not None:
        with_logprobs = output.rows[output.logprobs.samples].tolist()
        logprobs = dict(zip(with_logprobs, output.logprobs.columns.chosen_logprobs.tolist(), strict=True))
    rows = zip(output.rows.tolist(), output.token_ids.tolist(), strict=True)
    return {row: (token, logprobs.get(row, math.nan)) for row, token in rows}


def _compare(name: str, expected: Sequence[Answer], actual: Sequence[Answer]) -> Check:
    """The largest difference of log probabilities; infinite if tokens differ, NaN if one is NaN."""
    differences = [
        abs(one[1] - other[1]) if one[0] == other[0] else math.inf for one, other in zip(expected, actual, strict=True)
    ]
    return Check(name, "float32", float(np.max(differences)), LIMIT)
