"""Several tokens a step: the same requests to servers that differ in `--speculate` alone, in turn, with one stream and
with many.

The text must be the same to the bit, or the benchmark fails. Texts are quire-tiny's, which may run within a larger
shape (`--shape`), so that steps cost what those of the shape cost:

- free: stories, sampled, and nothing that is known before
- JSON: records under a schema, whose names are forced or were there before
- quote: the answer is predicted as it comes
- rename: a word of the answer is another one wherever it is in the prediction
- reformat: the answer is JSON, which is predicted with other white space
- wrong: an answer of another request is predicted

A third server has the flags of the first one: what these two differ by is noise.

Predictions are made of answers that servers gave before: how much of a prediction is right is what the task says, and
does not depend on what the model can. Ratios are those of the seconds of the same requests, one by one with one stream
and round by round with several.

`--exact N` measures nothing: it compares the texts of N requests of all tasks, in groups of `--streams` in turn.
"""

import argparse
import asyncio
import itertools
import json
import os
import shlex
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from bench.padded_models import PADDED_SHAPES, write_padded_model
from bench.report import Series, median_ratio, write_results
from quire.client import AsyncClient, Constraint, GenerationOptions, RequestCompleted, TokenChunk
from quire.model_source import resolve_model
from quire.settings import load_settings
from quire_cli.supervisor import LocalServer, ServeSettings

SCHEMA = {
    "type": "array",
    "minItems": 3,
    "maxItems": 3,
    "items": {
        "type": "object",
        "properties": {
            "customer_name": {"enum": ["Anna", "Ben", "Emma", "Maria", "Max", "Pip"]},
            "favourite_animal": {"enum": ["bear", "cat", "dragon", "hedgehog", "horse", "rabbit"]},
            "number_of_orders": {"type": "integer", "minimum": 0, "maximum": 999},
            "is_subscribed_to_newsletter": {"type": "boolean"},
        },
        "required": ["customer_name", "favourite_animal", "number_of_orders", "is_subscribed_to_newsletter"],
        "additionalProperties": False,
    },
}
_MIXED = "mixed"
_NUM_WARM_UPS = 2
_NUM_COMPARED = 384


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, help="model directory, with quire-tiny's texts; none takes quire-tiny")
    parser.add_argument("--shape", choices=PADDED_SHAPES, help="runs quire-tiny within a model of this shape")
    parser.add_argument("--drafts", default="prediction,grammar,ngram", help="`--speculate` of the second server")
    parser.add_argument("--draft-model", type=Path, help="of the second server; a LLaMA smaller than --draft-shape")
    parser.add_argument("--draft-shape", choices=PADDED_SHAPES, help="runs the draft model within one of this shape")
    parser.add_argument("--serve", default="", metavar="FLAGS", help="flags of `quire serve` for both, as one string")
    parser.add_argument("--tasks", nargs="+", choices=(*_TASKS, _MIXED), default=[*_TASKS, _MIXED])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64], help="requests at once")
    parser.add_argument("--requests", type=int, default=8, help="of each task with one stream")
    parser.add_argument("--rounds", type=int, default=5, help="with several streams, which all requests of a round are")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--exact", type=int, metavar="N", help="compare the texts of so many requests instead")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")


def main(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as directory:
        model = arguments.model
        if arguments.shape is not None:
            model = Path(directory) / arguments.shape
            write_padded_model(arguments.shape, model)
        draft_model = arguments.draft_model
        if arguments.draft_shape is not None:
            draft_model = Path(directory) / f"draft-{arguments.draft_shape}"
            write_padded_model(arguments.draft_shape, draft_model, arguments.draft_model)
        asyncio.run(_measure(arguments, model, draft_model))


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, and the tokens of its answer once it is known."""

    prompt: str
    options: GenerationOptions
    answer: str = ""
    token_ids: tuple[int, ...] = ()

    def predicting(self, prediction: str) -> "Asked":
        return replace(self, options=replace(self.options, prediction=prediction))


@dataclass(slots=True)
class Side:
    """One server, and what it did with the requests of one task."""

    client: AsyncClient
    worker_pid: int
    busy: list[float] = field(default_factory=list[float])
    """Seconds of processors that the worker took for each round: what a busy machine adds to times is not in them."""
    seconds: list[float] = field(default_factory=list[float])
    gaps: list[float] = field(default_factory=list[float])
    num_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    async def ask(self, asked: Asked) -> Asked:
        """The request with its answer. Counts tokens and the times between them."""
        token_ids: list[int] = []
        texts: list[str] = []
        last: float | None = None
        async for event in self.client.generate_stream(asked.prompt, asked.options):
            if isinstance(event, TokenChunk):
                now = time.perf_counter()
                if last is not None:
                    self.gaps.append(now - last)
                self.gaps += [0.0] * (len(event.token_ids) - 1)
                last = now
                token_ids += event.token_ids
                texts.append(event.text)
            elif isinstance(event, RequestCompleted):
                self.num_drafted += event.usage.drafted_tokens
                self.num_accepted += event.usage.accepted_draft_tokens
        self.num_tokens += len(token_ids)
        if asked.token_ids and asked.token_ids != tuple(token_ids):
            raise SystemExit(f"another text than without drafts: {''.join(texts)!r}, not {asked.answer!r}")
        return replace(asked, answer="".join(texts), token_ids=tuple(token_ids))

    async def ask_all(self, requests: Sequence[Asked]) -> None:
        """All at once; counts how long they take together."""
        started, busy = time.perf_counter(), _processor_seconds(self.worker_pid)
        await asyncio.gather(*map(self.ask, requests))
        self.seconds.append(time.perf_counter() - started)
        self.busy.append(_processor_seconds(self.worker_pid) - busy)


def _processor_seconds(pid: int) -> float:
    """What all threads of a process have used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def stories(seed: int, max_tokens: int) -> Iterator[Asked]:
    """Stories that begin as those of the held-out text, one after the other, each with a seed of its own."""
    text = (resolve_model(None) / "heldout.txt").read_text()
    beginnings = [" ".join(each.split()[:7]) for each in text.split("\n\n") if len(each) > 300]
    while True:
        for beginning in beginnings:
            yield Asked(beginning, GenerationOptions(temperature=0.7, seed=seed, max_tokens=max_tokens))
            seed += 1


def records(seed: int, max_tokens: int) -> Iterator[Asked]:
    """Records under a schema, sampled."""
    constraint = Constraint(json_schema=json.dumps(SCHEMA), no_white_space=True)
    while True:
        options = GenerationOptions(temperature=1.0, seed=seed, max_tokens=max_tokens, constraint=constraint)
        yield Asked(f"Question: Give me the customers of shop {seed}.\nAnswer:", options)
        seed += 1


def renamed(text: str) -> str:
    """The text with another word for the one that is in it most often."""
    words = Counter(word for word in text.replace(".", " ").replace(",", " ").split() if len(word) > 2)
    return text.replace(words.most_common(1)[0][0], "Rumpelstiltskin") if words else text


def reformatted(text: str) -> str:
    """JSON, maybe cut off, with white space."""
    for short, spaced in (("{", "{\n    "), (",", ", "), (":", ": "), ("}", "\n}")):
        text = text.replace(short, spaced)
    return text


Requests = Callable[[int, int], Iterator[Asked]]
Prediction = Callable[[Asked, Asked], str | None]
"""Of a request and the next one."""

_TASKS: dict[str, tuple[Requests, Prediction]] = {
    "free": (stories, lambda asked, other: None),
    "JSON": (records, lambda asked, other: None),
    "quote": (stories, lambda asked, other: asked.answer),
    "rename": (stories, lambda asked, other: renamed(asked.answer)),
    "reformat": (records, lambda asked, other: reformatted(asked.answer)),
    "wrong": (stories, lambda asked, other: other.answer),
}


async def _measure(arguments: argparse.Namespace, model: Path | None, draft_model: Path | None) -> None:
    flags = [*shlex.split(arguments.serve), *(["--model", str(model)] if model is not None else [])]
    async with AsyncExitStack() as stack:
        sides: list[tuple[AsyncClient, int]] = []
        for drafts in ("off", arguments.drafts, "off")[: 2 if arguments.exact is not None else 3]:
            own = ["--grpc-port=0", "--http-port=0", f"--speculate={drafts}"]
            if drafts != "off" and draft_model is not None:
                own.append(f"--draft-model={draft_model}")
            settings = load_settings(ServeSettings, [*flags, *own], None, program="quire serve")
            server = await stack.enter_async_context(LocalServer(settings))
            await server.wait_ready()
            client = await stack.enter_async_context(AsyncClient(server.grpc_address))
            sides.append((client, server.process("worker").pid))
        measured = _Measured(arguments, sides)
        if arguments.exact is not None:
            await measured.compare(arguments.exact)
            return
        for streams in arguments.streams:
            for task in arguments.tasks:
                if streams > 1 or task != _MIXED:
                    await measured.run(task, streams)
    if arguments.out is not None:
        facts = {"shape": arguments.shape, "drafts": arguments.drafts, "serve": arguments.serve}
        if draft_model is not None:
            facts |= {"draft_model": draft_model.name, "draft_shape": arguments.draft_shape}
        write_results(arguments.out, "several tokens a step", measured.series, tasks=measured.tasks, **facts)


class _Measured:
    """All figures so far."""

    def __init__(self, arguments: argparse.Namespace, sides: Sequence[tuple[AsyncClient, int]]) -> None:
        self.series: list[Series] = []
        self.tasks: dict[str, dict[str, float]] = {}
        self._arguments = arguments
        self._sides = sides
        self._answered: dict[str, list[Asked]] = {}

    async def run(self, task: str, streams: int) -> None:
        """One task with so many streams."""
        arguments, sides = self._arguments, [Side(*each) for each in self._sides]
        num_rounds = arguments.requests if streams == 1 else arguments.rounds
        requests = await self._requests(task, streams * (num_rounds + _NUM_WARM_UPS))
        for index in range(num_rounds + _NUM_WARM_UPS):
            if index == _NUM_WARM_UPS:
                sides = [Side(*each) for each in self._sides]
            of_round = requests[index * streams : (index + 1) * streams]
            # Each is the first one in every third round.
            for turn in range(len(sides)):
                await sides[(index + turn) % len(sides)].ask_all(of_round)
        self._note(f"{streams} stream{'s' * (streams > 1)}, {task}", *sides)

    async def compare(self, count: int) -> None:
        """Asks the server with drafts so many requests, some of each task, and prints how many were equal so far, after
        each group."""
        side, num_equal, streams = Side(*self._sides[1]), 0, itertools.cycle(self._arguments.streams)
        # One part after the other, so that a run that is ended early has some of each task.
        for end in itertools.chain(range(_NUM_COMPARED, count, _NUM_COMPARED), [count]):
            requests = (await self._requests(_MIXED, end))[num_equal:]
            while requests:
                of_group, requests = requests[: (size := next(streams))], requests[size:]
                await side.ask_all(of_group)
                num_equal += len(of_group)
                print(
                    f"{num_equal} equal texts, {side.num_tokens} tokens; of {side.num_drafted} verified drafts "
                    f"{side.num_accepted} were right",
                    flush=True,
                )

    async def _requests(self, task: str, count: int) -> list[Asked]:
        """Answered ones, with the predictions of the task."""
        if task == _MIXED:
            of_tasks = [await self._requests(each, -(-count // len(_TASKS))) for each in _TASKS]
            return [each for of_one in zip(*of_tasks, strict=True) for each in of_one][:count]
        make, predict = _TASKS[task]
        answered = self._answered.setdefault(make.__name__, [])
        made = make(self._arguments.seed, self._arguments.max_tokens)
        fresh = [next(made) for _ in range(count + 1)][len(answered) :]
        for start in range(0, len(fresh), 64):
            part = fresh[start : start + 64]
            # Both, so that both have the prompts in their caches.
            plain, *others = [await asyncio.gather(*map(Side(*each).ask, part)) for each in self._sides]
            if any(each != plain for each in others):
                raise SystemExit("the text with drafts differs from the text without")
            answered += plain
        predictions = [predict(asked, other) for asked, other in itertools.pairwise(answered)]
        return [
            asked if prediction is None else asked.predicting(prediction)
            for asked, prediction in zip(answered, predictions, strict=False)
        ][:count]

    def _note(self, name: str, plain: Side, drafting: Side, again: Side) -> None:
        sides = {"plain": plain, "drafts": drafting, "plain again": again}
        series = [Series(f"{name}, {label}", "s", tuple(side.seconds)) for label, side in sides.items()]
        self.series += series
        p99 = [1e3 * float(np.percentile(side.gaps, 99)) for side in sides.values()]
        rates = [side.num_tokens / sum(side.seconds) for side in (plain, drafting)]
        figures = {
            "ratio": median_ratio(*series[:2]),
            "ratio, plain again": median_ratio(series[0], series[2]),
            "ratio by processor time": sum(plain.busy) / sum(drafting.busy),
            "ratio by processor time, plain again": sum(plain.busy) / sum(again.busy),
            "tokens/s, plain": rates[0],
            "tokens/s, drafts": rates[1],
            "p99 between tokens, plain, ms": p99[0],
            "p99 between tokens, drafts, ms": p99[1],
            "p99 between tokens, plain again, ms": p99[2],
            "drafts per token": drafting.num_drafted / drafting.num_tokens,
            "right drafts per token": drafting.num_accepted / drafting.num_tokens,
        }
        self.tasks[name] = {key: round(value, 4) for key, value in figures.items()}
        print(
            f"{name:<22} {figures['ratio']:5.2f} times (plain again {figures['ratio, plain again']:.2f})   "
            f"{rates[0]:7.1f} and {rates[1]:7.1f} tok/s   "
            f"by processor time {figures['ratio by processor time']:.2f} "
            f"({figures['ratio by processor time, plain again']:.2f})   p99 {p99[0]:5.1f}, {p99[1]:5.1f} "
            f"and {p99[2]:5.1f} ms   drafts a token {figures['drafts per token']:.2f}, right "
            f"{figures['right drafts per token']:.2f}",
            flush=True,
        )
