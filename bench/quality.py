"""Cost and gain of int8: perplexity on quire-tiny's held-out text, and tokens a second of a larger model.

Perplexity is by teacher forcing: each text, its end included, is one prefill whose attention reads every key and value
from the pool, so that the rounding of an int8 pool counts. Speed is the rate of decode steps of the whole model without
sampling. Variants run in turn, so that drift of the machine affects all alike; ratios are taken run by run.
"""

import argparse
import math
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from tokenizers import Tokenizer

from bench.models import write_model
from bench.quality_variants import VARIANTS, PagedModel, Variant
from bench.report import Series, median_ratio, write_results
from quire.model_files.model_source import resolve_model

_BASE = "bfloat16"
_END = "</s>"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64], help="sequences that decode together")
    parser.add_argument("--context", type=int, default=256, help="tokens of each sequence")
    parser.add_argument("--runs", type=int, default=7, help="runs of each speed; 0 measures no speeds")
    parser.add_argument("--steps", type=int, default=4, help="decode steps of one run")
    parser.add_argument("--model", type=Path, help="model for speeds; default: a LLaMA of 160M, random weights")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")


def main(arguments: argparse.Namespace) -> None:
    perplexities = {variant.name: perplexity(variant) for variant in VARIANTS}
    for name, value in perplexities.items():
        print(f"{name:<34} perplexity {value:.5f}   {value / perplexities[_BASE] - 1:+.3%}", flush=True)
    title = "Int8: quality and speed"
    if not arguments.runs:
        if arguments.out is not None:
            write_results(arguments.out, title, [], perplexity=perplexities)
        return
    with tempfile.TemporaryDirectory() as made:
        directory = arguments.model
        if directory is None:
            directory = Path(made)
            write_model("llama-160m", directory)
        models = {
            variant.name: PagedModel(
                directory, variant, num_rows=max(arguments.batches), num_tokens=arguments.context + 1
            )
            for variant in VARIANTS
        }
    series = [each for batch in arguments.batches for each in speeds(models, batch, arguments)]
    kv_bytes = {name: model.bytes_of_token for name, model in models.items()}
    print("\nKV bytes of a token:", ", ".join(f"{name} {value:.0f}" for name, value in kv_bytes.items()))
    if arguments.out is not None:
        facts = {"perplexity": perplexities, "kv_bytes_of_token": kv_bytes, "context": arguments.context}
        write_results(arguments.out, title, series, **facts)


def perplexity(variant: Variant, file: Path | None = None) -> float:
    """Perplexity of the held-out texts, each by itself, with the embedded model or a file that was written from it."""
    directory = resolve_model(None)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    texts = [
        tokenizer.encode(text + _END).ids for text in (directory / "heldout.txt").read_text().strip().split("\n\n")
    ]
    model = PagedModel(file or directory, variant, num_rows=1, num_tokens=max(map(len, texts)))
    loss, count = 0.0, 0
    for text in texts:
        logprobs = model.run([text], 0)[:-1].double().log_softmax(-1)
        loss -= float(logprobs.gather(1, torch.tensor(text[1:])[:, None]).sum())
        count += len(text) - 1
    return math.exp(loss / count)


def speeds(models: Mapping[str, PagedModel], batch: int, arguments: argparse.Namespace) -> list[Series]:
    """Tokens a second of each variant, in turn. The first of the runs is not counted."""
    values: dict[str, list[float]] = {name: [] for name in models}
    for run in range(arguments.runs + 1):
        for name, model in models.items():
            speed = tokens_per_second(model, batch, arguments)
            if run:
                values[name].append(speed)
    series = {name: Series(f"{name}, {batch} seqs", "tok/s", tuple(each)) for name, each in values.items()}
    print()
    for each in series.values():
        print(f"{each}   {median_ratio(each, series[_BASE]):.2f} x {_BASE}", flush=True)
    return list(series.values())


def tokens_per_second(model: PagedModel, batch: int, arguments: argparse.Namespace) -> float:
    began = time.perf_counter()
    for _ in range(arguments.steps):
        model.run([[5]] * batch, arguments.context)
    return arguments.steps * batch / (time.perf_counter() - began)
