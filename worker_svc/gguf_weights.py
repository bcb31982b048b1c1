"""The weights of a GGUF file, by the names and in the layout that transformers gives them.

A quantized tensor is brought to float32 by the package `gguf` when it is read, a few rows at a time on all processors;
the layers then round it to the dtype that is served.
"""

import math
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quire.gguf_header import GgufHeader, GgufTensor
from quire.processors import num_processors
from quire.settings import ConfigurationError

_CHUNK_ELEMENTS = 1 << 22
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}

_BLOCK = re.compile(r"blk\.(?P<number>\d+)\.(?P<rest>.+)")
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
_LAYERS = {"gpt2": "transformer.h"}
_TRANSPOSED = re.compile(r"(attn|mlp)\.c_\w+\.weight")
_ROTATED = {"attn_q": "head_count", "attn_k": "head_count_kv"}


@dataclass(frozen=True, slots=True)
class GgufWeight:
    """A tensor of the file, as the checkpoint of a model directory has it.

    Attributes:
        file: The file.
        name: The tensor's name there.
        dtype: The name of its type, "Q4_K" for example.
        shape: As transformers has it.
        num_bytes: In the file.
    """

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    _stored: GgufTensor
    _arrange: Callable[[torch.Tensor], torch.Tensor]

    def read(self) -> torch.Tensor:
        """The tensor on the CPU, in its own dtype where it is not quantized, else in float32. Its memory is its own, or
        a mapped file's."""
        return self._arrange(self._dequantized())

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
        result = torch.empty(rows.shape[0], shape[-1])
        step = max(_CHUNK_ELEMENTS // shape[-1], 1)

        def bring(start: int) -> None:
            part = gguf.dequantize(rows[start : start + step], kind)
            result[start : start + step] = torch.from_numpy(part)

        with ThreadPoolExecutor(num_processors()) as threads:
            list(threads.map(bring, range(0, rows.shape[0], step)))
        return result.view(shape)


def gguf_weights(file: Path) -> Mapping[str, GgufWeight]:
    """The tensors of a file by the names of transformers.

    Raises:
        ConfigurationError: the file is damaged, a tensor has a type that is not read, or a name that is not known.
    """
    header, gguf = GgufHeader.read(file), _gguf()
    architecture = header.metadata["general.architecture"]
    found: dict[str, GgufWeight] = {}
    for tensor in header.tensors.values():
        if tensor.name == "rope_freqs.weight":
            # Part of the configuration.
            continue
        name, arrange = _translated(header, architecture, tensor)
        kind = _kind_of(header, tensor)
        elements_per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        num_bytes = math.prod(tensor.shape) // elements_per_block * block_bytes
        if tensor.start + num_bytes > file.stat().st_size or tensor.shape[-1] % elements_per_block:
            raise ConfigurationError(f"{file}: tensor {tensor.name} ends after the file; it is cut short")
        shape = tensor.shape[::-1] if _TRANSPOSED.search(name) else tensor.shape
        found[name] = GgufWeight(file, tensor.name, kind.name, shape, num_bytes, tensor, arrange)
    return found


def _gguf() -> Any:
    """The package, which only models in GGUF files need."""
    try:
        import gguf
    except ImportError as error:
        raise ConfigurationError("GGUF files are read by the package gguf; pip install 'quire[gguf]'") from error
    return gguf


def _kind_of(header: GgufHeader, tensor: GgufTensor) -> Any:
    gguf = _gguf()
    try:
        kind = gguf.GGMLQuantizationType(tensor.ggml_type)
    except ValueError:
        raise ConfigurationError(
            f"{header.path}: tensor {tensor.name} has type {tensor.ggml_type}, which this release of gguf does not know"
        ) from None
    if kind.name in _PLAIN:
        return kind
    try:
        # A single block of zeros: types that are not implemented raise an error.
        gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        raise ConfigurationError(f"{header.path}: tensor {tensor.name} is {kind.name}, which is not read") from None
    return kind


def _translated(
    header: GgufHeader, architecture: str, tensor: GgufTensor
) -> tuple[str, Callable[[torch.Tensor], torch.Tensor]]:
    """The name in transformers, and how the layout becomes the one there."""
    block = _BLOCK.fullmatch(tensor.name)
    base, _, kind = (tensor.name if block is None else block["rest"]).rpartition(".")
    known = (_OF_GPT2 if architecture == "gpt2" else _OF_LLAMA).get(base)
    if known is None or kind not in ("weight", "bias"):
        raise ConfigurationError(f"{header.path}: tensor {tensor.name} is not known in models of {architecture}")
    name = f"{known}.{kind}"
    if block is not None:
        name = f"{_LAYERS.get(architecture, 'model.layers')}.{block['number']}.{name}"
    if _TRANSPOSED.search(name):
        return name, lambda stored: stored.T
    if architecture in ("llama", "mistral") and base in _ROTATED:
        heads = header.metadata.get(f"{architecture}.attention.{_ROTATED[base]}")
        heads = heads or header.metadata[f"{architecture}.attention.head_count"]
        return name, lambda stored: _split_halves(stored, heads)
    return name, lambda stored: stored


def _split_halves(stored: torch.Tensor, num_heads: int) -> torch.Tensor:
    """The rows of each head, whose pairs that rotate together are neighbours in llama.cpp and half a head apart in
    transformers."""
    pairs = stored.view(num_heads, stored.shape[0] // num_heads // 2, 2, *stored.shape[1:])
    return pairs.transpose(1, 2).reshape(stored.shape)
