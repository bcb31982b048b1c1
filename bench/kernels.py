"""Speed of the CPU kernels: decode attention compared with memory bandwidth, prefill compared with torch on contiguous
tensors, and the small operations compared with plain torch.

The contestants run in turn, again and again, so that drift of the machine affects all alike. The memory bandwidth is
that of a plain sum over 256 MB, on the same threads in the same process; every decode reads pools of that size in all,
so that caches help neither more than the other.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch.nn import functional

from bench.attention_problems import AttentionProblem, Heads, make_problem
from bench.models import SHAPES
from bench.report import Series, write_results
from quire_kernels import reference
from quire_kernels.backends import Implementation
from quire_kernels.cpu.bindings import CpuKernels
from quire_kernels.cpu.library import Library
from quire_kernels.packed_weight import Quantization
from quire_kernels.reference import ScoreRule

_BLOCK_SIZE = 16
_MEGABYTES = 256
_PARTS = ("decode", "prefill", "product", "pointwise")

Contestants = dict[str, Callable[[], object]]
MODELS = (Heads(12, 12, 64), Heads(32, 8, 128))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="+", choices=_PARTS, help="default: all parts")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64], help="rows that decode together")
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 512, 2048], help="tokens of each row")
    parser.add_argument("--prompts", type=int, nargs="+", default=[128, 512, 2048], help="tokens of a prefill")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 256, 1024], help="tokens of a product"
    )
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--num-threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--isa", help="instruction set; default: the best of this processor")


def main(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(arguments.num_threads)
    library = Library(isa=arguments.isa)
    kernels, series = CpuKernels(library), list[Series]()
    parts = arguments.parts or _PARTS
    print(f"{library.isa}, {arguments.num_threads} threads")
    with torch.inference_mode():
        if "decode" in parts:
            for heads, batch, context in product(MODELS, arguments.batches, arguments.contexts):
                series += _decode(kernels, heads, batch, context, arguments.runs)
        if "prefill" in parts:
            for heads, tokens in product(MODELS, arguments.prompts):
                series += _prefill(kernels, heads, tokens, arguments.runs)
        if "product" in parts:
            for layer, tokens in product(products_of("llama-160m"), arguments.tokens):
                series += _product(kernels, layer, tokens, arguments.runs)
        if "pointwise" in parts:
            series += _pointwise(kernels, arguments.runs)
    facts = {"isa": library.isa, "threads": arguments.num_threads, "block_size": _BLOCK_SIZE}
    write_results(arguments.out, "CPU kernels, bfloat16", series, **facts)


def _decode(kernels: Implementation, heads: Heads, batch: int, context: int, runs: int) -> list[Series]:
    """Gigabytes a second of keys and values, and of a plain sum."""
    bytes_of_call = batch * context * heads.kv * heads.size * 4
    calls = [make_decode(heads, batch, context) for _ in range(max(1, _MEGABYTES * 2**20 // bytes_of_call))]
    numbers = torch.ones(_MEGABYTES * 2**18)

    def attend(implementation: Implementation) -> Callable[[], object]:
        return lambda: [call(implementation) for call in calls]

    seconds = measure({"kernels": attend(kernels), "torch": attend(reference), "sum": numbers.sum}, runs)
    name, size = f"decode, {heads}, batch {batch}, context {context}", bytes_of_call * len(calls) / 1e9
    rates = {
        "kernels": Series(name, "GB/s", tuple(size / each for each in seconds["kernels"])),
        "torch": Series(f"{name}, plain torch", "GB/s", tuple(size / each for each in seconds["torch"])),
        "sum": Series(f"{name}, sum", "GB/s", tuple(numbers.nbytes / 1e9 / each for each in seconds["sum"])),
    }
    kept, plain = rates["kernels"].median, rates["sum"].median
    print(f"{name:<52} {kept:6.1f} GB/s  {kept / plain:4.0%} of a sum   torch {rates['torch'].median:5.1f}", flush=True)
    return list(rates.values())


def make_decode(
    heads: Heads, batch: int, context: int, block_size: int = _BLOCK_SIZE
) -> Callable[[Implementation], torch.Tensor]:
    """A call of attention for the next token of each row, over shuffled blocks."""
    return _attention_of(make_problem([(1, context)] * batch, heads, torch.bfloat16, "cpu", block_size=block_size))


def _attention_of(problem: AttentionProblem) -> Callable[[Implementation], torch.Tensor]:
    rule = ScoreRule(problem.query.shape[-1] ** -0.5)
    return lambda implementation: implementation.paged_attention(*problem.tensors, scores=rule, **problem.limits)


def _prefill(kernels: Implementation, heads: Heads, tokens: int, runs: int) -> list[Series]:
    """Milliseconds for a prompt. torch has contiguous keys, and a copy for each query head."""
    attend = _attention_of(make_problem([(tokens, tokens)], heads, torch.bfloat16, "cpu"))
    dense = torch.randn(3, 1, heads.query, tokens, heads.size).bfloat16().unbind()
    contestants: Contestants = {
        "kernels": lambda: attend(kernels),
        "torch on contiguous tensors": lambda: functional.scaled_dot_product_attention(
            dense[0], dense[1], dense[2], is_causal=True
        ),
        "plain torch": lambda: attend(reference),
    }
    return _report(f"prefill, {heads}, {tokens} tokens", contestants, runs)


def _product(kernels: CpuKernels, layer: "Layer", tokens: int, runs: int) -> list[Series]:
    """Milliseconds of one product, and gigabytes a second of a plain sum."""
    count, contestants = make_products(kernels, layer, tokens)
    numbers = torch.ones(_MEGABYTES * 2**18)
    seconds = measure({**contestants, "sum": numbers.sum}, runs)
    name = f"product, {layer.name}, {tokens} tokens"
    rates = Series(f"{name}, sum", "GB/s", tuple(numbers.nbytes / 1e9 / each for each in seconds.pop("sum")))
    series = _in_milliseconds(name, {who: [each / count for each in times] for who, times in seconds.items()})
    read = layer.out_features * layer.in_features * 2 / 1e6 / series[0].median
    print(f"{'':<46} the kernels read {read:.1f} GB/s, a sum {rates.median:.1f}", flush=True)
    return [*series, rates]


@dataclass(frozen=True, slots=True)
class Layer:
    """One product of a layer, by its sizes, and how many of it a model has."""

    name: str
    out_features: int
    in_features: int
    count: int


def products_of(shape: str) -> tuple[Layer, ...]:
    """All products of a forward pass of a shape that is built as LLaMA."""
    config = SHAPES[shape]
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    layers, kv_heads = config["num_hidden_layers"], config.get("num_key_value_heads", heads)
    return (
        Layer("query, key, value", hidden // heads * (heads + 2 * kv_heads), hidden, layers),
        Layer("attention output", hidden, hidden, layers),
        Layer("gate and up", 2 * inner, hidden, layers),
        Layer("down", hidden, inner, layers),
        Layer("head", config["vocab_size"], hidden, 1),
    )


def make_products(kernels: CpuKernels, layer: Layer, tokens: int) -> tuple[int, Contestants]:
    """The number of products of a call, and the contestants' calls: our kernel, plain torch, and oneDNN with packed
    weights if the processor has the instructions for it.

    With few tokens a call runs over weights of 256 MB in all, so that they come from memory as in a step; with many
    tokens it runs over a part of them.
    """
    of_one = layer.out_features * layer.in_features * 2
    count = max(1, _MEGABYTES * 2**20 // of_one * 64 // max(tokens, 64) // (1 if tokens <= 64 else 4))
    weights = [torch.randn(layer.out_features, layer.in_features).bfloat16() for _ in range(count)]
    ours = [kernels.pack_weight(weight, False, Quantization.NONE) for weight in weights]
    x = torch.randn(tokens, layer.in_features).bfloat16()
    contestants: Contestants = {
        "kernels": lambda: [kernels.product(x, weight, None, "identity", torch.bfloat16) for weight in ours],
        "plain torch": lambda: [functional.linear(x, weight) for weight in weights],
    }
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        packed = [torch.ops.mkldnn._reorder_linear_weight(weight, None) for weight in weights]
        one_dnn = torch.ops.mkldnn._linear_pointwise.default
        contestants["oneDNN"] = lambda: [one_dnn(x, weight, None, "none", [], "") for weight in packed]
    return count, contestants


def _pointwise(kernels: Implementation, runs: int) -> list[Series]:
    series = []
    for tokens in (1, 64, 512):
        for name, operation in _operations(tokens).items():
            contestants = {"kernels": partial(operation, kernels), "plain torch": partial(operation, reference)}
            series += _report(f"{name}, {tokens} tokens", contestants, runs)
    return series


def _operations(tokens: int) -> dict[str, Callable[[Implementation], object]]:
    """Operations of a model with 32/8 heads of 128 and 11,008 hidden units in its feed-forward layers."""
    heads, hidden = MODELS[1], 4096
    x, residual = torch.randn(2, tokens, hidden).bfloat16().unbind()
    weight, gate_up = torch.ones(hidden).bfloat16(), torch.randn(tokens, 2 * 11_008).bfloat16()
    qkv = torch.randn(tokens, heads.query + 2 * heads.kv, heads.size).bfloat16()
    query, key, value = qkv.split_with_sizes([heads.query, heads.kv, heads.kv], 1)
    cache = torch.zeros(2, tokens // _BLOCK_SIZE + 1, heads.kv, _BLOCK_SIZE, heads.size, dtype=torch.bfloat16)
    positions, table = torch.arange(tokens), torch.zeros(tokens, heads.size)
    table[:, : heads.size // 2] = 1.0  # A rotation by zero: the query is rotated in place, run after run.
    return {
        "rms_norm": lambda ops: ops.rms_norm(x, weight, 1e-5),
        "add_rms_norm": lambda ops: ops.rms_norm(x, weight, 1e-5, residual=residual),
        "layer_norm": lambda ops: ops.layer_norm(x, weight, weight, 1e-5),
        "silu_and_mul": lambda ops: ops.silu_and_mul(gate_up),
        "rotary_and_cache": lambda ops: ops.rotary_and_cache(query, key, value, positions, table, cache, positions),
        "reshape_and_cache": lambda ops: ops.reshape_and_cache(key, value, cache, positions),
    }


def _report(name: str, contestants: Contestants, runs: int) -> list[Series]:
    """Milliseconds of each contestant; the kernels come first."""
    return _in_milliseconds(name, measure(contestants, runs))


def _in_milliseconds(name: str, seconds: dict[str, list[float]]) -> list[Series]:
    series = [
        Series(name if way == "kernels" else f"{name}, {way}", "ms", tuple(each * 1e3 for each in times))
        for way, times in seconds.items()
    ]
    others = "   ".join(f"{way} {each.median:9.3f}" for way, each in zip(seconds, series, strict=True))
    print(f"{name:<46} ms: {others}", flush=True)
    return series


def measure(contestants: Contestants, runs: int) -> dict[str, list[float]]:
    """Seconds of each call, in turns. Short calls are repeated, so that the clock's resolution suffices."""
    repeats = {}
    for name, call in contestants.items():
        call()
        repeats[name] = max(1, round(0.005 / max(_seconds([call]), 1e-7)))
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(runs):
        for name, call in contestants.items():
            seconds[name].append(_seconds([call] * repeats[name]) / repeats[name])
    return seconds


def _seconds(calls: Sequence[Callable[[], object]]) -> float:
    started = time.perf_counter()
    for call in calls:
        call()
    return time.perf_counter() - started
