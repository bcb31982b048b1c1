"""Products of the sizes of a model: our kernel, oneDNN with packed weights, plain torch.

With few tokens every call runs over weights of 256 MB in all, so that they come from memory as in a step; with many
tokens it runs over a part of them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench.models import SHAPES
from kernels.cpu.bindings import CpuKernels
from kernels.packed_weight import Quantization

_BYTES = 256 * 2**20


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


def make_products(kernels: CpuKernels, layer: Layer, tokens: int) -> tuple[int, dict[str, Callable[[], object]]]:
    """The number of products of a call, and the contestants' calls; the kernels come first."""
    of_one = layer.out_features * layer.in_features * 2
    count = max(1, _BYTES // of_one * 64 // max(tokens, 64) // (1 if tokens <= 64 else 4))
    weights = [torch.randn(layer.out_features, layer.in_features).bfloat16() for _ in range(count)]
    ours = [kernels.pack_weight(weight, False, Quantization.NONE) for weight in weights]
    packed = [torch.ops.mkldnn._reorder_linear_weight(weight, None) for weight in weights]
    x = torch.randn(tokens, layer.in_features).bfloat16()
    one_dnn = torch.ops.mkldnn._linear_pointwise.default
    return count, {
        "kernels": lambda: [kernels.product(x, weight, None, "identity", torch.bfloat16) for weight in ours],
        "oneDNN": lambda: [one_dnn(x, weight, None, "none", [], "") for weight in packed],
        "plain torch": lambda: [torch.nn.functional.linear(x, weight) for weight in weights],
    }
