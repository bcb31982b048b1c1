"""Constraints of generated text: compares two libraries, and measures what constrained rows cost a worker's steps.

`--tokenizer` takes several files. Without it a vocabulary of 128,000 tokens is trained first, which takes minutes
(`--keep` writes it for the next time). The other library is measured if it is installed: `pip install xgrammar`.
"""

import argparse
import importlib.util
import json
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from bench.grammar_schemas import all_schemas
from bench.report import Series, write_results
from quire.common.v1.common_pb2 import Constraint
from quire.constraints.json_schema import ConstraintError
from quire.constraints.matcher import MaskMaker, Template, Vocabulary
from quire.model_files.model_directory import ModelDirectory
from quire.model_files.model_source import resolve_model

_LARGE = 128_000
_SPECIAL = ("<pad>", "<s>", "</s>")
_EOS = 2
_MAX_TOKENS = 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokenizer", type=Path, nargs="+", help="tokenizer.json files")
    parser.add_argument("--keep", type=Path, help="file to write the trained vocabulary to")
    parser.add_argument("--steps", type=int, default=0, help="number of worker steps to measure instead")
    parser.add_argument("--first-request", type=int, default=0, help="rounds of fresh servers to measure instead")
    parser.add_argument("--model", type=Path, help="model directory of the fresh servers")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--schema", choices=("plain", "bounded"), default="plain", help="schema of constrained rows")
    parser.add_argument("--layers", type=int, default=12, help="layers of the worker's model, which is 768 wide")
    parser.add_argument("--runs", type=int, default=3, help="texts of each schema")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")


def main(arguments: argparse.Namespace) -> None:
    if arguments.first_request:
        if arguments.model is None:
            raise SystemExit("--first-request needs --model")
        from bench.grammar_first_request import measure_first_requests

        measure_first_requests(arguments.model, arguments)
        return
    with tempfile.TemporaryDirectory() as made:
        files = arguments.tokenizer
        if files is None:
            files = [arguments.keep or Path(made) / "tokenizer.json"]
            train(_LARGE).save(str(files[0]))
        if arguments.steps:
            # Imports torch.
            from bench.grammar_steps import measure_steps

            measure_steps(files[0], arguments)
            return
        series, facts, texts = [], {}, draw_texts(arguments.runs)
        for file in files:
            name = file.parent.name if file.stem == "tokenizer" else file.stem
            measured = list(_measure(json.loads(file.read_text()), texts))
            for each in measured:
                series += each.series(name)
                facts[f"{name}, {each.library}"] = each.facts()
                print(f"{name}: {each}", flush=True)
        if arguments.out is not None:
            write_results(arguments.out, "Masks of two libraries over JSON schemas", series, libraries=facts)


def train(size: int) -> tokenizers.Tokenizer:
    """Trains a byte-level vocabulary on this Python's own sources and packages."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(_SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    texts = (file.read_text(errors="replace") for file in files)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


@dataclass(frozen=True, slots=True)
class Measured:
    """One library with one vocabulary. Times in microseconds."""

    library: str
    refused: list[str]
    rejected: list[str]
    """Schemas with a valid text whose tokens were not all accepted."""
    compile_us: list[float]
    mask_us: list[float]
    consume_us: list[float]

    def series(self, vocabulary: str) -> list[Series]:
        named = {"compile": self.compile_us, "mask": self.mask_us, "consume": self.consume_us}
        return [
            Series(f"{vocabulary}, {self.library}: {what}, {label}", "us", (value,))
            for what, values in named.items()
            for label, value in zip(("p50", "p99", "max"), _quantiles(values), strict=True)
        ]

    def facts(self) -> dict[str, Any]:
        return {"refused": self.refused, "rejected": self.rejected, "masks": len(self.mask_us)}

    def __str__(self) -> str:
        shown = {"compile": self.compile_us, "mask": self.mask_us, "consume": self.consume_us}
        times = "; ".join(f"{name} {'/'.join(f'{each:.0f}' for each in _quantiles(v))} us" for name, v in shown.items())
        failed = f"refused {self.refused}, rejected {self.rejected}"
        return f"{self.library}: {times} (p50/p99/max), mask mean {np.mean(self.mask_us):.0f} us; {failed}"


def _quantiles(values: list[float]) -> tuple[float, float, float]:
    return float(np.median(values)), float(np.percentile(values, 99)), max(values)


def _measure(content: dict[str, Any], drawn: dict[str, list[str]]) -> Iterator[Measured]:
    """Each library makes the masks for the same tokens: texts of the schemas, as the tokenizer spells them."""
    vocabulary = Vocabulary.of_tokenizer(content, None, [_EOS])
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
    texts = {name: [tokenizer.encode(text, add_special_tokens=False).ids for text in drawn[name]] for name in drawn}
    libraries = [("llguidance", _llguidance(vocabulary))]
    if importlib.util.find_spec("xgrammar") is not None:
        libraries.append(("xgrammar", _xgrammar(vocabulary)))
    for library, compile_schema in libraries:
        yield _measure_library(library, compile_schema, texts)


Session = tuple[Callable[[], None], Callable[[int], bool]]
"""Makes the next mask, and advances by a token, which may be refused."""


def _measure_library(
    library: str, compile_schema: Callable[[str], Callable[[], Session]], texts: dict[str, list[list[int]]]
) -> Measured:
    measured = Measured(library, [], [], [], [], [])
    for name, schema in all_schemas().items():
        started = time.perf_counter()
        try:
            begin = compile_schema(json.dumps(schema))
        except (ConstraintError, RuntimeError):
            measured.refused.append(name)
            continue
        measured.compile_us.append((time.perf_counter() - started) * 1e6)
        for text in texts[name]:
            fill, consume = begin()
            for token_id in text:
                started = time.perf_counter()
                fill()
                masked = time.perf_counter()
                is_accepted = consume(token_id)
                measured.mask_us.append((masked - started) * 1e6)
                measured.consume_us.append((time.perf_counter() - masked) * 1e6)
                if not is_accepted:
                    measured.rejected.append(name)
                    break
    return measured


def draw_texts(count: int) -> dict[str, list[str]]:
    """Texts that are valid under each schema, drawn at random from the embedded model's tokens, as compact JSON."""
    vocabulary = Vocabulary.of_model(ModelDirectory.open(resolve_model(None)), None)
    maker, rng = MaskMaker(vocabulary, 1), np.random.default_rng(0)
    texts: dict[str, list[str]] = {}
    for name, schema in all_schemas().items():
        template = Template.of(Constraint(json_schema=json.dumps(schema)), vocabulary)
        drawn = (_draw(template, maker, rng) for _ in range(20 * count))
        texts[name] = list(islice((text for text in drawn if text is not None), count))
    return texts


def _draw(template: Template, maker: MaskMaker, rng: np.random.Generator) -> str | None:
    """A random text; None if it is too long, or has a number beyond the range of double precision."""
    vocabulary = template.vocabulary
    matcher, drawn = template.matcher(tuple(vocabulary.eos)), list[int]()
    for _ in range(_MAX_TOKENS):
        bits = np.unpackbits(maker.make([matcher], [False])[0].view(np.uint8), bitorder="little")
        token_id = int(rng.choice(np.flatnonzero(bits)))
        if token_id in vocabulary.eos:
            value = json.loads(vocabulary.tokenizer.decode_str(drawn))
            try:
                return json.dumps(value, ensure_ascii=False, allow_nan=False)
            except ValueError:
                return None
        drawn.append(token_id)
        matcher.consume(token_id)
    return None


def _llguidance(vocabulary: Vocabulary) -> Callable[[str], Callable[[], Session]]:
    maker = MaskMaker(vocabulary, 1)

    def compile_schema(schema: str) -> Callable[[], Session]:
        template = Template.of(Constraint(json_schema=schema), vocabulary)

        def begin() -> Session:
            matcher = template.matcher((_EOS,))

            def consume(token_id: int) -> bool:
                matcher.consume(token_id)
                return matcher.error is None

            return lambda: _ignore(maker.make([matcher], [False])), consume

        return begin

    return compile_schema


def _xgrammar(vocabulary: Vocabulary) -> Callable[[str], Callable[[], Session]]:
    import torch
    import xgrammar  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    info = xgrammar.TokenizerInfo(vocabulary.token_bytes, stop_token_ids=[_EOS])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    bits = xgrammar.allocate_token_bitmask(1, info.vocab_size)

    def compile_schema(schema: str) -> Callable[[], Session]:
        compiled = compiler.compile_json_schema(schema, strict_mode=False)

        def begin() -> Session:
            matcher = xgrammar.GrammarMatcher(compiled)
            return lambda: _ignore(matcher.fill_next_token_bitmask(bits)), matcher.accept_token

        return begin

    return compile_schema


def _ignore(_: object) -> None:
    """Makes a call without a result of an expression."""
