"""What drafts cost a worker and gain: processor time of its steps, with and without `--speculate`.

Model runners in one process decode the same requests, step by step in turn, so that whatever else runs on the machine
slows all alike: the time of the processor for each token repeats within about 1 percent where times of servers differ
by a third. Two runners are without drafts; what these differ by is noise. Steps run a fixed number of passes. Not
measured: messages, scheduler and gateway, and how long threads wait for each other. With several threads, set
`OMP_WAIT_POLICY=PASSIVE`, as `quire worker` does: a thread that spins takes processor time, too.

- free: stories, sampled, and nothing that is known before
- JSON: records under a schema, which has no end before the tokens end
- wrong: an answer of another request is predicted
- right: the answer is predicted as it comes
- mixed: a third of each
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
from tokenizers import Tokenizer

from bench.report import Series, median_ratio, write_results
from bench.speculation import SCHEMA
from quire.common.v1.common_pb2 import Constraint, SamplingParameters
from quire.model_source import resolve_model
from worker_svc import step as steps
from worker_svc.device.device_loop import DeviceLoop
from worker_svc.device.runner import ModelRunner
from worker_svc.settings import WorkerSettings
from worker_svc.startup import build_worker
from worker_svc.step import Int32Array

_STORIES = ("free", "wrong", "right", "mixed")
_TASKS = (*_STORIES, "JSON")
_SIDES = {"off": "off", "off again": "off", "drafts": "auto"}
_MAX_DRAFTS = 7
_BLOCK_SIZE = 16
_NONE, _NO_PAIRS, _NO_DELTAS = np.zeros(0, np.int32), np.zeros((0, 2), np.int32), np.zeros((0, 3), np.int32)
_NO_SEALS = steps.SealedBlocks(_NONE, np.zeros((0, 32), np.uint8))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, help="model directory, with quire-tiny's texts; none takes quire-tiny")
    parser.add_argument("--num-threads", type=int, help="of the worker")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--passes", type=int, default=4, help="how many times a step runs the model")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=8, help="in each of which all rows get new requests")
    parser.add_argument("--tasks", nargs="+", choices=_TASKS, default=list(_TASKS))
    parser.add_argument("--out", type=Path, help="write the figures as JSON")


@dataclass(frozen=True, slots=True)
class Asked:
    prompt: Int32Array
    seed: int
    predicted: Int32Array | None = None
    constraint: steps.RowConstraint | None = None


def main(arguments: argparse.Namespace) -> None:
    sides = [Side(name, drafts, arguments) for name, drafts in _SIDES.items()]
    rows, rounds = arguments.rows, arguments.rounds
    asked = {
        made: made(rows * rounds + 1) for made in {_records if each == "JSON" else _stories for each in arguments.tasks}
    }
    answers: dict[object, list[Int32Array]] = {}
    for made, all_of_them in asked.items():
        of_made = answers[made] = []
        for start in range(0, len(all_of_them), rows):
            of_made += run(sides[:1], all_of_them[start : start + rows], arguments.max_tokens)
    series: list[Series] = []
    ratios: dict[str, dict[str, float]] = {}
    for task in arguments.tasks:
        made = _records if task == "JSON" else _stories
        for side in sides:
            side.micros.clear()
        for start in range(0, rows * rounds, rows):
            numbers = range(start, start + rows)
            requests = [replace(asked[made][each], predicted=_predicted(task, each, answers[made])) for each in numbers]
            said = run(sides, requests, arguments.max_tokens)
            if any((one != answers[made][number]).any() for one, number in zip(said, numbers, strict=True)):
                raise SystemExit("another text than without drafts")
        of_task = [Series(f"{task}, {side.name}", "us/token", tuple(side.micros)) for side in sides]
        ratios[task] = {
            side.name: round(median_ratio(of_task[0], each), 4) for side, each in zip(sides, of_task, strict=True)
        }
        series += of_task
        print(*of_task, f"{task}: {ratios[task]}", sep="\n", flush=True)
    if arguments.out is not None:
        write_results(arguments.out, "processor time of steps with drafts", series, ratios=ratios)


def _stories(count: int) -> list[Asked]:
    directory = resolve_model(None)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    texts = [each for each in (directory / "heldout.txt").read_text().split("\n\n") if len(each) > 300]
    prompts = [np.array(tokenizer.encode(" ".join(each.split()[:7])).ids, np.int32) for each in texts]
    return [Asked(prompts[number % len(prompts)], number) for number in range(count)]


def _records(count: int) -> list[Asked]:
    tokenizer = Tokenizer.from_file(str(resolve_model(None) / "tokenizer.json"))
    message = Constraint(json_schema=json.dumps(SCHEMA | {"minItems": 99, "maxItems": 99}), no_white_space=True)
    constraint = steps.RowConstraint(message, ())
    prompts = [
        tokenizer.encode(f"Question: Give me the customers of shop {each}.\nAnswer:").ids for each in range(count)
    ]
    return [Asked(np.array(ids, np.int32), seed, constraint=constraint) for seed, ids in enumerate(prompts)]


def _predicted(task: str, number: int, answers: Sequence[Int32Array]) -> Int32Array | None:
    kind = _STORIES[number % 3] if task == "mixed" else task
    return {"wrong": answers[number + 1], "right": answers[number]}.get(kind)


def run(sides: Sequence["Side"], requests: Sequence[Asked], max_tokens: int) -> list[Int32Array]:
    """Runs the requests on each side, a step of each in turn. Their answers, which must be the same on all sides."""
    for side in sides:
        side.start(requests)
    left, number = list(sides), 0
    while left:
        number += 1
        # Each is the first one at times.
        for side in np.roll(np.array(left, object), number).tolist():
            side.step()
        left = [side for side in left if side.num_tokens < max_tokens]
    answers = [[np.array(each[:max_tokens], np.int32) for each in side.end()] for side in sides]
    for others in answers[1:]:
        if any((one != other).any() for one, other in zip(answers[0], others, strict=True)):
            raise SystemExit("the texts of two sides differ")
    return answers[0]


class Side:
    """A worker's model runner. `micros` has for each round the microseconds of the processor for a token."""

    def __init__(self, name: str, drafts: str, arguments: argparse.Namespace) -> None:
        self.name, self.drafts, self.arguments = name, drafts, arguments
        self.micros: list[float] = []
        rows, length = self.arguments.rows, self.arguments.max_tokens + 64 + self.arguments.passes * (1 + _MAX_DRAFTS)
        self._blocks_each = -(-length // _BLOCK_SIZE)
        settings = WorkerSettings(
            model=self.arguments.model,
            num_threads=self.arguments.num_threads,
            speculate=(self.drafts,),
            multi_step_ms=1000.0,
            block_size=_BLOCK_SIZE,
            num_gpu_blocks=rows * self._blocks_each,
            max_num_seqs=max(rows, 64),
        )
        self._runner = cast(ModelRunner, build_worker(settings, DeviceLoop()).runner)
        self._num_steps, self._spent_s, self._num_drawn = 0, 0.0, 0
        self._said: list[list[int]] = []
        self._lengths = _NONE

    @property
    def num_tokens(self) -> int:
        """Of the shortest answer."""
        return min(map(len, self._said))

    def start(self, requests: Sequence[Asked]) -> None:
        """Computes the prompts."""
        assign = tuple(
            steps.AssignRow(
                row,
                asked.prompt,
                np.arange(row * self._blocks_each, (row + 1) * self._blocks_each, dtype=np.int32),
                steps.RowSampling(
                    SamplingParameters(temperature=0.7, top_p=1.0),
                    asked.seed,
                    constraint=asked.constraint,
                    predicted=asked.predicted,
                ),
                len(asked.prompt),
            )
            for row, asked in enumerate(requests)
        )
        rows, lengths = np.arange(len(requests), dtype=np.int32), np.array([len(each.prompt) for each in requests])
        release = np.arange(len(self._said), dtype=np.int32)
        batch = steps.Batch(rows, lengths.astype(np.int32), np.zeros_like(rows), np.stack((rows, rows), 1))
        output = self._launch(steps.RowChanges(release, assign, _NO_PAIRS, (), (), _NO_DELTAS), batch)
        self._said = [[each] for each in output.token_ids.tolist()]
        self._lengths = (lengths + 1).astype(np.int32)
        self._spent_s, self._num_drawn = 0.0, 0

    def step(self) -> None:
        """Decodes, several times."""
        passes, rows = self.arguments.passes, np.arange(len(self._said), dtype=np.int32)
        growth = passes * (1 + (_MAX_DRAFTS if self.drafts != "off" else 0)) - 1
        ones, samples = np.ones_like(rows), np.stack((rows, rows), 1)
        batch = steps.Batch(rows, ones, self._lengths - 1, samples, np.full_like(rows, growth), passes)
        before = time.process_time()
        output = self._launch(steps.RowChanges(_NONE, (), _NO_PAIRS, (), (), _NO_DELTAS), batch)
        self._spent_s += time.process_time() - before
        counts = output.num_tokens if len(output.num_tokens) else ones
        for said, drawn in zip(self._said, np.split(output.token_ids, np.cumsum(counts)[:-1]), strict=True):
            said += drawn.tolist()
        self._lengths = (self._lengths + counts).astype(np.int32)
        self._num_drawn += int(counts.sum())

    def end(self) -> list[list[int]]:
        """The answers. Notes what they took."""
        self.micros.append(1e6 * self._spent_s / self._num_drawn)
        return self._said

    def _launch(self, changes: steps.RowChanges, batch: steps.Batch) -> steps.StepOutput:
        self._num_steps += 1
        moves = steps.CacheOperations(_NO_PAIRS, _NO_PAIRS, _NO_PAIRS)
        step = steps.Step(self._num_steps, 0, moves, changes, batch, _NO_SEALS)
        return self._runner.launch(steps.AdmittedStep(step, _NONE)).wait()
