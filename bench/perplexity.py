"""What the formats of files cost and bring: sizes, perplexity of quire-tiny's held-out text, and tokens a second.

GGUF files are written by `quire quantize`; those in AWQ, GPTQ and FP8 are rounded to the nearest number. Perplexity is
that of `bench quality`; so is speed: decode steps of one stream of a larger model without sampling, of all variants in
turn.
"""

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from bench import rounded_models
from bench.models import write_model
from bench.quality import perplexity, speeds
from bench.quality_variants import PagedModel, Variant
from bench.report import median_ratio, write_results
from kernels.packed_weight import Quantization
from quire.model_directory import weight_files
from quire.model_source import resolve_model
from worker_svc.gguf_writer import write_gguf

_FORMATS = ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "IQ4_XS", "Q4_0")
_BASE = "bfloat16"
_WITHOUT_INT8 = ("FP8",)
"""Formats that are not multiplied with int8 tokens."""


@dataclass(frozen=True, slots=True)
class _Choice:
    """A file, None for the directory, and how it is served."""

    format: str | None
    variant: Variant


def _choices() -> Iterator[_Choice]:
    """One of the directory in bfloat16 has the name that `speeds` compares with."""
    yield _Choice(None, Variant("float32", torch.float32))
    for quantization in Quantization:
        name = _BASE if quantization is Quantization.NONE else quantization.value
        yield _Choice(None, Variant(name, torch.bfloat16, quantization))
    for format in (*_FORMATS, *rounded_models.FORMATS):
        yield _Choice(format, Variant(format, torch.bfloat16))
        if format not in _WITHOUT_INT8:
            yield _Choice(format, Variant(f"{format}, int8-dynamic", torch.bfloat16, Quantization.INT8_DYNAMIC))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--context", type=int, default=256, help="tokens of the sequence")
    parser.add_argument("--runs", type=int, default=9, help="of the speeds; 0 measures no speeds")
    parser.add_argument("--steps", type=int, default=16, help="decode steps of one run")
    parser.add_argument("--models", type=Path, help="directory that keeps the files; one that is there is not written")
    parser.add_argument(
        "--pause",
        action="store_true",
        help="wait for a line on stdin before speeds are measured: the machine gets quiet",
    )
    parser.add_argument("--out", type=Path, help="write the figures as JSON")


def main(arguments: argparse.Namespace) -> None:
    choices = [*_choices()]
    with tempfile.TemporaryDirectory() as made:
        directory = arguments.models or Path(made)
        sources = {"quire-tiny": resolve_model(None)}
        if arguments.runs:
            sources["llama-160m"] = directory / "llama-160m"
            if not sources["llama-160m"].exists():
                write_model("llama-160m", sources["llama-160m"])
        sizes, perplexities, models = {}, {}, {}
        for choice in choices:
            name = choice.variant.name
            files = {model: _file(source, choice.format, directory) for model, source in sources.items()}
            sizes[name] = {model: _num_bytes(file) for model, file in files.items()}
            perplexities[name] = perplexity(choice.variant, files["quire-tiny"])
            change = perplexities[name] / perplexities.get(_BASE, perplexities[name]) - 1
            print(f"{name:<24} {sizes[name]} perplexity {perplexities[name]:.5f}   {change:+.3%}", flush=True)
            if arguments.runs:
                models[name] = PagedModel(
                    files["llama-160m"], choice.variant, num_rows=1, num_tokens=arguments.context + 1
                )
        if arguments.pause:
            input("ready\n")
        series = speeds(models, 1, arguments) if arguments.runs else []
    if arguments.out is not None:
        facts = {"bytes": sizes, "perplexity": perplexities}
        if arguments.runs:
            base = next(each for each in series if each.name.startswith(_BASE))
            ratios = {each.name: median_ratio(each, base) for each in series}
            facts |= {"ratio_to_bfloat16": ratios, "context": arguments.context}
        write_results(arguments.out, "Formats of GGUF files: size, quality and speed", series, **facts)


def _file(model: Path, format: str | None, directory: Path) -> Path:
    if format is None:
        return model
    if format in rounded_models.FORMATS:
        rounded = directory / f"{model.name}-{format}"
        if not rounded.exists():
            rounded_models.write_rounded(model, rounded, format)
        return rounded
    file = directory / f"{model.name}-{format}.gguf"
    if not file.exists():
        write_gguf(model, file, format, lambda *_: None)
    return file


def _num_bytes(model: Path) -> int:
    return sum(file.stat().st_size for file in weight_files(model))
