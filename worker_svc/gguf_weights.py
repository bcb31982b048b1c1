"""The weights of a GGUF file, by the names and in the layout that transformers gives them.

A quantized tensor is given as the file has it to layers that multiply it so (`coded`). For others it is brought to
float32 by the package `gguf` when it is read, a few rows at a time on all processors; they round it to the dtype that
is served.
"""

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kernels.packed_weight import CodedWeight, Coding
from quire.model_files.gguf_header import GgufFields, GgufHeader, GgufTensor
from quire.runtime.processors import num_processors
from quire.runtime.settings import ConfigurationError

_CHUNK_ELEMENTS = 1 << 22
_MAX_EXPERTS = 1 << 14
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}

_CODINGS = {coding.value for coding in Coding}

_BLOCK = re.compile(r"blk\.(?P<number>\d+)\.(?P<rest>.+)")
_EXPERT = re.compile(r"(?P<base>ffn_\w+)\.(?P<number>\d+)")
_OF_LLAMA = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Converters may merge these tensors into one (--fuse-qkv, --fuse-gate-up-exps), which has their rows in this order.
_FUSED = {"attn_qkv": ("attn_q", "attn_k", "attn_v"), "ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps")}
# "*" is the number of an expert; all are one tensor in the file.
_OF_MIXTRAL = _OF_LLAMA | {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.*.w1",
    "ffn_down_exps": "block_sparse_moe.experts.*.w2",
    "ffn_up_exps": "block_sparse_moe.experts.*.w3",
}
_OF_QWEN_WITH_EXPERTS = _OF_LLAMA | {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.*.gate_proj",
    "ffn_up_exps": "mlp.experts.*.up_proj",
    "ffn_down_exps": "mlp.experts.*.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_OF_GEMMA_2 = _OF_LLAMA | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OF_PHI_3 = _OF_LLAMA | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_OF_GPT2 = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_NAMES = {
    "llama": _OF_MIXTRAL,
    "mistral": _OF_MIXTRAL,
    **dict.fromkeys(("qwen2", "qwen3", "qwen2vl", "qwen3vl"), _OF_LLAMA),
    "qwen2moe": _OF_QWEN_WITH_EXPERTS,
    "qwen3moe": _OF_QWEN_WITH_EXPERTS,
    "gemma": _OF_LLAMA,
    "gemma2": _OF_GEMMA_2,
    "gemma3": _OF_GEMMA_2,
    "phi3": _OF_PHI_3,
    "gpt2": _OF_GPT2,
}
# Their numbers are part of the configuration.
_OF_CONFIGURATION = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_LAYERS = {"gpt2": "transformer.h"}
_TRANSPOSED = re.compile(r"(attn|mlp)\.c_\w+\.weight")
_ROTATED = {"attn_q": "head_count", "attn_k": "head_count_kv"}
# For these, a file has the factors of norms, and transformers has the factors minus 1.
_GEMMA = ("gemma", "gemma2", "gemma3")


@dataclass(frozen=True, slots=True)
class GgufWeight:
    """A tensor of the file, as the checkpoint of a model directory has it.

    Attributes:
        name: The tensor's name there.
        dtype: The name of its type, "Q4_K" for example.
        shape: As transformers has it.
        num_bytes: In the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    _stored: GgufTensor
    _arrange: Callable[[torch.Tensor], torch.Tensor]
    _has_rows: bool
    """Whether `_arrange` only moves rows."""

    @property
    def file(self) -> Path:
        """The file."""
        return self._stored.file

    def read(self) -> torch.Tensor:
        """The tensor on the CPU, in its own dtype if it is not quantized, else in float32. Its memory is its own, or a
        mapped file's."""
        return self._arrange(self._dequantized())

    def coded(self) -> CodedWeight | None:
        """The matrix as the file has it, in mapped memory; None if it is no matrix of a `Coding`, or is not stored row
        by row as in transformers."""
        if not self._has_rows or self.dtype not in _CODINGS or len(self._stored.shape) != 2:
            return None
        # Copy on write, since torch takes no memory that must not be written to.
        data = np.memmap(self.file, np.uint8, "c", self._stored.start, (self.num_bytes,))
        return CodedWeight(Coding(self.dtype), self._arrange(torch.from_numpy(data).view(self._stored.shape[0], -1)))

    def _dequantized(self) -> torch.Tensor:
        data = np.memmap(self.file, np.uint8, "r", self._stored.start, (self.num_bytes,))
        shape = self._stored.shape
        if (plain := _PLAIN.get(self.dtype)) is not None:
            # Copy on write, since torch takes no memory that must not be written to.
            writable = np.memmap(self.file, np.uint8, "c", self._stored.start, (self.num_bytes,))
            return torch.from_numpy(writable).view(plain).view(shape)
        gguf = _gguf()
        kind = gguf.GGMLQuantizationType(self._stored.ggml_type)
        rows = data.reshape(math.prod(shape[:-1]), -1)
        # Not by torch: each thread here would have an OpenMP team of its own, bound to the steps' processors.
        result = np.empty((rows.shape[0], shape[-1]), np.float32)
        step = max(_CHUNK_ELEMENTS // shape[-1], 1)

        def bring(start: int) -> None:
            # A scale may be NaN, in a damaged file.
            with np.errstate(all="ignore"):
                result[start : start + step] = gguf.dequantize(rows[start : start + step], kind)

        with ThreadPoolExecutor(num_processors()) as threads:
            list(threads.map(bring, range(0, rows.shape[0], step)))
        return torch.from_numpy(result).view(shape)


def gguf_weights(file: Path, header: GgufHeader | None = None) -> Mapping[str, GgufWeight]:
    """The tensors of a file, or of all parts of the model, by the names of transformers. A `header` was read already.

    Raises:
        ConfigurationError: the file is damaged, a tensor has a type that is not read, or a name that is not known.
    """
    header = header or GgufHeader.read(file)
    layout, scales = _Layout(header), _scales(header)
    found: dict[str, GgufWeight] = {}
    for tensor in header.tensors.values():
        if tensor.name in _OF_CONFIGURATION or tensor.name.endswith((".scale", ".input_scale")):
            # The last two belong to weights in NVFP4.
            continue
        kind, num_bytes = _kind_of(tensor), _num_bytes(tensor)
        of_scale = tensor.name.removesuffix(".weight") + ".scale"
        scale, parts = scales.get(of_scale, (1.0,)), list(layout.parts(tensor))
        num_experts = 1 + max(part.expert for part in parts)
        if len(scale) not in (1, num_experts):
            expected = f"expected 1 or {num_experts}, one for each expert"
            raise ConfigurationError(f"{tensor.file}: tensor {of_scale} has {len(scale)} numbers; {expected}")
        for part in parts:
            part_bytes = num_bytes * part.num_rows // part.of_rows
            stored = replace(tensor, shape=part.shape, start=tensor.start + num_bytes * part.first_row // part.of_rows)
            factor = scale[part.expert if len(scale) > 1 else 0]
            arrange, has_rows = _scaled(part.arrange, factor), factor == 1 and not part.is_transposed
            shape = part.shape[::-1] if part.is_transposed else part.shape
            if part.name.endswith("shared_expert_gate.weight"):
                # A matrix of one row, which converters may have made a vector.
                shape = (1, part.shape[-1])
            found[part.name] = GgufWeight(tensor.name, kind.name, shape, part_bytes, stored, arrange, has_rows)
    return found


def _num_bytes(tensor: GgufTensor) -> int:
    """Bytes of the tensor in its file. Raises ConfigurationError if the file ends before."""
    elements_per_block, block_bytes = _gguf().GGML_QUANT_SIZES[_kind_of(tensor)]
    num_bytes = math.prod(tensor.shape) // elements_per_block * block_bytes
    if tensor.start + num_bytes > tensor.file.stat().st_size or tensor.shape[-1] % elements_per_block:
        raise ConfigurationError(f"{tensor.file}: tensor {tensor.name} ends after the file; it is cut short")
    return num_bytes


def _scales(header: GgufHeader) -> Mapping[str, Sequence[float]]:
    """Factors of weights in NVFP4: one number, or one for each expert."""
    found: dict[str, Sequence[float]] = {}
    for name, tensor in header.tensors.items():
        if name.endswith(".scale"):
            if _kind_of(tensor).name != "F32" or len(tensor.shape) != 1:
                raise ConfigurationError(f"{tensor.file}: tensor {name} is not a list of numbers in F32")
            found[name] = np.fromfile(tensor.file, "<f4", _num_bytes(tensor) // 4, offset=tensor.start).tolist()
    return found


def _gguf() -> Any:
    """The package, which only models in GGUF files need."""
    try:
        import gguf
    except ImportError as error:
        raise ConfigurationError("GGUF files are read by the package gguf; pip install 'quire-llm[gguf]'") from error
    return gguf


def _kind_of(tensor: GgufTensor) -> Any:
    gguf = _gguf()
    try:
        kind = gguf.GGMLQuantizationType(tensor.ggml_type)
    except ValueError:
        raise ConfigurationError(
            f"{tensor.file}: tensor {tensor.name} has type {tensor.ggml_type}, which this release of gguf does not know"
        ) from None
    if not _is_read(kind):
        raise ConfigurationError(f"{tensor.file}: tensor {tensor.name} is {kind.name}, which is not read")
    return kind


@functools.cache
def _is_read(kind: Any) -> bool:
    if kind.name in _PLAIN:
        return True
    gguf = _gguf()
    try:
        # A single block of zeros: types that are not implemented raise an error.
        gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class _Part:
    """The rows of a tensor that are a tensor of their own in transformers.

    Attributes:
        name: In transformers.
        shape: In the file.
        first_row: Index in the tensor, counted as if all its dimensions but the last were one.
        expert: Index of the expert, 0 if there are no experts.
        arrange: Converts the file's layout to the layout in transformers.
    """

    name: str
    shape: tuple[int, ...]
    first_row: int
    num_rows: int
    of_rows: int
    expert: int
    arrange: Callable[[torch.Tensor], torch.Tensor]

    @property
    def is_transposed(self) -> bool:
        return _TRANSPOSED.search(self.name) is not None


class _Layout:
    """How the tensors of a model are named and laid out, by its architecture."""

    def __init__(self, header: GgufHeader) -> None:
        self._header = header
        self._architecture = header.metadata.get("general.architecture", "")
        self._names = _NAMES.get(self._architecture, {})

    def parts(self, tensor: GgufTensor) -> Iterator[_Part]:
        """The parts of a tensor: one; several if it has all experts, or if a converter has merged tensors.
        ConfigurationError if its name is not known."""
        block = _BLOCK.fullmatch(tensor.name)
        base, _, kind = (tensor.name if block is None else block["rest"]).rpartition(".")
        prefix = "" if block is None else f"{_LAYERS.get(self._architecture, 'model.layers')}.{block['number']}."
        bases = _FUSED[base] if base in _FUSED and base not in self._names else (base,)
        names = [self._name(each) for each in bases]
        if kind not in ("weight", "bias") or None in names:
            raise self._error(tensor, f"is not known in models of {self._architecture}")
        shares, experts, shape = self._shares(bases), 1, tensor.shape
        if "*" in str(names[0]):
            if len(shape) != 3 or shape[0] > _MAX_EXPERTS:
                raise self._error(tensor, f"has shape {list(shape)}, which does not fit experts")
            experts, shape = shape[0], shape[1:]
        if shape[0] % sum(shares):
            raise self._error(tensor, f"has {shape[0]} rows, which do not divide into {', '.join(bases)}")
        for expert in range(experts):
            first = expert * shape[0]
            for each, name, share in zip(bases, names, shares, strict=True):
                num_rows = shape[0] * share // sum(shares)
                full_name = prefix + f"{name}.{kind}".replace("*", str(expert))
                arrange = self._arrangement(each, full_name)
                yield _Part(full_name, (num_rows, *shape[1:]), first, num_rows, experts * shape[0], expert, arrange)
                first += num_rows

    def _name(self, base: str) -> str | None:
        if (expert := _EXPERT.fullmatch(base)) is not None and f"{expert['base']}_exps" in self._names:
            # Files of before 2024 have a tensor for each expert.
            return self._names[f"{expert['base']}_exps"].replace("*", expert["number"])
        return self._names.get(base)

    def _shares(self, bases: Sequence[str]) -> Sequence[int]:
        if len(bases) == 3:
            heads, kv_heads = self._heads("head_count"), self._heads("head_count_kv")
            return (heads, kv_heads, kv_heads)
        return (1,) * len(bases)

    def _heads(self, name: str) -> int:
        fields = GgufFields(self._header)
        return fields.size(f"attention.{name}", fields.size("attention.head_count"))

    def _arrangement(self, base: str, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        if _TRANSPOSED.search(name):
            return lambda stored: stored.T
        if self._architecture in ("llama", "mistral") and base in _ROTATED:
            heads = self._heads(_ROTATED[base])
            return lambda stored: _split_halves(stored, heads)
        if self._architecture in _GEMMA and base.endswith("_norm"):
            return lambda stored: stored - 1
        if base == "ffn_gate_inp_shexp":
            return lambda stored: stored.view(1, -1)
        return lambda stored: stored

    def _error(self, tensor: GgufTensor, problem: str) -> ConfigurationError:
        return ConfigurationError(f"{tensor.file}: tensor {tensor.name} {problem}")


def _scaled(arrange: Callable[[torch.Tensor], torch.Tensor], scale: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return arrange if scale == 1 else lambda stored: arrange(stored * scale)


def _split_halves(stored: torch.Tensor, num_heads: int) -> torch.Tensor:
    """The rows of each head, whose pairs that rotate together are neighbours in llama.cpp and half a head apart in
    transformers."""
    pairs = stored.view(num_heads, stored.shape[0] // num_heads // 2, 2, *stored.shape[1:])
    return pairs.transpose(1, 2).reshape(stored.shape)
