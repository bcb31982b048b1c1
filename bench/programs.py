"""Programs over one cached prefix beside the same calls that share nothing: the four of `examples/programs`.

Each begins with a document of `--document` tokens and runs eight branches at once: eight judgements, a tree of thoughts
of eight, eight samples, eight conversations. Without sharing each call has a text of its own before the document, which
is not pinned, and samples are requests of their own; so the same tokens are generated, and all of each prompt is
computed. Both sides run in turn, each time with another document, so that nothing is cached from before.
"""

import argparse
import asyncio
import itertools
import runpy
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.models import SHAPES, write_model
from bench.report import Series, median_ratio, write_results
from quire.client import AsyncClient, ChatMessage, Generation, GenerationOptions
from quire.programs import Costs, Program, Prompt, join
from quire_cli.supervisor import LocalServer, ServeSettings

_EXAMPLES = Path(__file__).parent.parent / "examples" / "programs"
_BRANCHES = 8
_WORDS = ("fox", "river", "tree", "shy", "morning", "walked", "sang", "deep", "stone", "bird", "slowly", "home")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="model directory; none makes one of the shape")
    parser.add_argument("--shape", choices=SHAPES, default="llama-160m", help="of a model with random weights")
    parser.add_argument("--document", type=int, default=1000, help="tokens of the prefix")
    parser.add_argument("--runs", type=int, default=3, help="interleaved runs of each side")
    parser.add_argument("--programs", nargs="+", choices=_PROGRAMS, default=list(_PROGRAMS))
    parser.add_argument("--out", type=Path, help="write the figures as JSON")


def main(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as directory:
        if arguments.model is None:
            write_model(arguments.shape, Path(directory))
        asyncio.run(_measure(arguments, arguments.model or directory))


class _Unshared(Program):
    """A program whose calls have no beginning in common."""

    _numbers = itertools.count()

    async def ask(self, prompt: Prompt, options: GenerationOptions) -> Generation:
        beginning = f"{next(self._numbers)} "
        if isinstance(prompt, str):
            prompt = beginning + prompt
        else:
            first, *others = prompt
            prompt = (replace(first, content=f"{beginning}{first.content}"), *others)
        return await super().ask(prompt, options)

    async def logprobs(self, token_ids: Sequence[int], start: int) -> list[float]:
        beginning = await self.tokenize(f"{next(self._numbers)} ", add_special_tokens=False)
        return await super().logprobs((*beginning, *token_ids), start + len(beginning))


Work = Callable[[Program], Awaitable[object]]


def _example(name: str) -> dict[str, Any]:
    return runpy.run_path(str(_EXAMPLES / f"{name}.py"))


async def _judge(program: Program) -> None:
    await _example("judge_one_document")["judge_all"](program)


async def _think(program: Program) -> None:
    await _example("tree_of_thought")["think"](program)


async def _vote(program: Program) -> None:
    if isinstance(program, _Unshared):
        await join(program.branch().gen(seed=seed) for seed in range(_BRANCHES))
    else:
        await _example("self_consistency")["vote"](program)


async def _talk(program: Program) -> None:
    talk = _example("conversation")["talk"]
    await join(talk(program) for _ in range(_BRANCHES))


_PROGRAMS: dict[str, tuple[Work, bool]] = {
    "judging": (_judge, False),
    "tree of thoughts": (_think, False),
    "self-consistency": (_vote, True),
    "conversations": (_talk, True),
}
"""What each does, and whether its prefix is a message of a conversation."""


async def _measure(arguments: argparse.Namespace, model: str) -> None:
    settings = ServeSettings(model=model, grpc_port=0, http_port=0, log_level="warning", kv_cache_memory=2 << 30)
    series: list[Series] = []
    table: dict[str, dict[str, float]] = {}
    async with LocalServer(settings) as server:
        await server.wait_ready()
        async with AsyncClient(server.grpc_address) as client:
            documents = _Documents(client, arguments.document)
            await client.generate("Warm up", GenerationOptions(max_tokens=4))
            for name in arguments.programs:
                shared, unshared = _Side(Program), _Side(_Unshared)
                for _ in range(arguments.runs):
                    for side in (shared, unshared):
                        await side.run(name, await documents.next())
                pair = [Series(f"{name}, {label}", "s", tuple(side.seconds))
                        for label, side in (("sharing", shared), ("without", unshared))]  # fmt: skip
                series += pair
                table[name] = {"ratio": median_ratio(*pair), **shared.facts("sharing"), **unshared.facts("without")}
                print(*pair, f"sharing / without: {table[name]['ratio']:.2f}", table[name], sep="\n", flush=True)
    if arguments.out is not None:
        facts = {"shape": arguments.shape, "document_tokens": arguments.document, "branches": _BRANCHES}
        write_results(arguments.out, "Programs over one cached prefix", series, programs=table, **facts)


class _Side:
    """The runs of one kind of program."""

    def __init__(self, kind: type[Program]) -> None:
        self.seconds: list[float] = []
        self._kind = kind
        self._costs = Costs()

    async def run(self, name: str, prefix: "tuple[AsyncClient, str]") -> None:
        """One run."""
        work, is_chat = _PROGRAMS[name]
        client, document = prefix
        options = GenerationOptions(temperature=0, max_tokens=16)
        begun_with: str | list[ChatMessage] = [ChatMessage("system", document)] if is_chat else document
        started = time.perf_counter()
        async with self._kind(client, begun_with, options, pin=self._kind is Program) as program:
            await work(program)
        self.seconds.append(time.perf_counter() - started)
        self._costs = program.costs

    def facts(self, label: str) -> dict[str, float]:
        """Of the last run, in tokens."""
        costs = self._costs
        return {
            f"{label}: {name}": value
            for name, value in (
                ("calls", costs.calls),
                ("prompt tokens", costs.prompt_tokens),
                ("cached tokens", costs.cached_tokens),
                ("generated tokens", costs.generated_tokens),
            )
        }


class _Documents:
    """Documents of a given length, each another one."""

    def __init__(self, client: AsyncClient, num_tokens: int) -> None:
        self._client = client
        self._num_tokens = num_tokens
        self._numbers = itertools.count(1)

    async def next(self) -> tuple[AsyncClient, str]:
        number = next(self._numbers)
        words = (_WORDS[(place * place + number * place) % len(_WORDS)] for place in range(self._num_tokens))
        whole = await self._client.tokenize(f"Document {number}: {' '.join(words)}")
        text = await self._client.detokenize(whole.token_ids[: self._num_tokens])
        return self._client, text


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    main(parser.parse_args())
