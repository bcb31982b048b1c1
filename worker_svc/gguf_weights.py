"""The weights of a GGUF file, by the names and in the layout that transformers gives them.

A quantized tensor is given as the file has it to layers that multiply it so (`coded`). For others it is brought to
float32 by the package `gguf` when it is read, a few rows at a time on all processors; they round it to the dtype that
is served.
"""

import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quire.model_files.gguf_header import GgufFields, GgufHeader, GgufTensor
from quire.runtime.processors import num_processors
from quire.runtime.settings import ConfigurationError
from quire_kernels.packed_weight import CodedWeight, Coding
from worker_svc.gguf_names import (
    BY_KEY,
    BY_VALUE,
    CONVOLUTIONS,
    DECAYS_OF_STATES,
    DIFFERENT,
    FLAT,
    FROM_VALUES,
    JOINED,
    LAYERS,
    NORMS_FROM_1,
    OF_CONFIGURATION,
    OF_KEYS,
    ROTATED,
    ROTATED_HEADS,
    ROTATES_NEIGHBOURS,
    ROWS,
    TRANSPOSED,
    TURNS_VALUES,
    USUAL,
    WITHOUT_KIND,
)

_CHUNK_ELEMENTS = 1 << 22
_MAX_EXPERTS = 1 << 14
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}

_CODINGS = {coding.value for coding in Coding} - {Coding.NVFP4.value}

_BLOCK = re.compile(r"blk\.(?P<number>\d+)\.(?P<rest>.+)")
_EXPERT = re.compile(r"(?P<base>ffn_\w+)\.(?P<number>\d+)")
# Converters may merge these tensors into one (--fuse-qkv, --fuse-gate-up-exps), which has their rows in this order.
_FUSED = {"attn_qkv": ("attn_q", "attn_k", "attn_v"), "ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps")}


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
    _run: int
    """Inputs that stay together if `_arrange` only moves rows and runs of inputs; 0 if it does more."""

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
        if not self._run or self.dtype not in _CODINGS or len(self._stored.shape) != 2:
            return None
        if self._run % Coding(self.dtype).group[0]:
            return None
        # Copy on write, since torch takes no memory that must not be written to.
        data = np.memmap(self.file, np.uint8, "c", self._stored.start, (self.num_bytes,))
        coding, rows = Coding(self.dtype), self._arrange(torch.from_numpy(data).view(self._stored.shape[0], -1))
        return _mxfp4(rows) if coding is Coding.MXFP4 else CodedWeight(coding, rows)

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


def _mxfp4(rows: torch.Tensor) -> CodedWeight:
    """Rows of blocks: an exponent, then 16 bytes with the codes of inputs i and i + 16 each."""
    blocks = rows.unflatten(1, (-1, 17))
    octets = blocks[..., 1:]
    codes = torch.cat((octets & 15, octets >> 4), -1)
    return CodedWeight.of_fp4(
        Coding.MXFP4, (codes[..., 0::2] | codes[..., 1::2] << 4).flatten(1), blocks[..., 0].contiguous()
    )


@dataclass(frozen=True, slots=True)
class JoinedWeight:
    """A tensor of transformers that the file has in two, with the attributes of `GgufWeight`."""

    first: GgufWeight
    second: GgufWeight

    @property
    def file(self) -> Path:
        """The file of the first part."""
        return self.first.file

    @property
    def name(self) -> str:
        return self.first.name

    @property
    def dtype(self) -> str:
        return self.first.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        shape, other = self.first.shape, self.second.shape
        if len(shape) == 3:
            # The keys' part of each head is transposed.
            return (shape[0] * (shape[2] + other[1]), shape[1])
        return (shape[0] + other[0], *shape[1:])

    @property
    def num_bytes(self) -> int:
        return self.first.num_bytes + self.second.num_bytes

    def read(self) -> torch.Tensor:
        """As `GgufWeight.read`."""
        first, second = self.first.read(), self.second.read()
        if first.dim() == 3:
            first = first.transpose(1, 2)
        joined = torch.cat((first, second.to(first.dtype)), dim=first.dim() - 2)
        return joined.reshape(self.shape)

    def coded(self) -> CodedWeight | None:
        """As `GgufWeight.coded`; None, too, if the parts are coded differently."""
        first, second = self.first.coded(), self.second.coded()
        if first is None or second is None or first.kind != second.kind:
            return None
        return CodedWeight.joined([first, second])


def _fit(first: Sequence[int], second: Sequence[int]) -> bool:
    """Whether tensors of these shapes are parts of one, as in `JoinedWeight`."""
    return len(first) == len(second) > 1 and first[0] == second[0] and first[1] == second[-1]


def _join(found: Mapping[str, GgufWeight]) -> dict[str, GgufWeight | JoinedWeight]:
    """The tensors with one in place of two for each of `JOINED`."""
    joined: dict[str, GgufWeight | JoinedWeight] = dict(found)
    for whole, (first, second) in JOINED.items():
        for name in [name for name in found if name.endswith(first)]:
            other = name.removesuffix(first) + second
            one, two = found[name], found.get(other)
            if two is None or not _fit(one.shape, two.shape):
                raise ConfigurationError(f"{one.file}: tensor {one.name} lacks its other part, or does not fit to it")
            del joined[name], joined[other]
            joined[name.removesuffix(first) + whole] = JoinedWeight(one, two)
    return joined


def gguf_weights(file: Path, header: GgufHeader | None = None) -> Mapping[str, GgufWeight | JoinedWeight]:
    """The tensors of a file, or of all parts of the model, by the names of transformers. A `header` was read already.

    Raises:
        ConfigurationError: the file is damaged, a tensor has a type that is not read, or a name that is not known.
    """
    header = header or GgufHeader.read(file)
    layout = _Layout(header)
    scales = _scales(each for each in header.tensors.values() if not layout.names_whole(each))
    found: dict[str, GgufWeight] = {}
    for tensor in header.tensors.values():
        # The last belongs to weights in NVFP4, as the scales do.
        if tensor.name in (*OF_CONFIGURATION, *scales) or tensor.name.endswith(".input_scale"):
            continue
        if layout.is_of_drafts(tensor):
            continue
        kind, num_bytes = _kind_of(tensor), _num_bytes(tensor)
        of_scale = tensor.name.removesuffix(".weight") + ".scale"
        scale, parts = scales.get(of_scale, (1.0,)), list(layout.parts(tensor))
        num_experts = 1 + max((part.expert for part in parts), default=0)
        if len(scale) not in (1, num_experts):
            expected = f"expected 1 or {num_experts}, one for each expert"
            raise ConfigurationError(f"{tensor.file}: tensor {of_scale} has {len(scale)} numbers; {expected}")
        for part in parts:
            part_bytes = num_bytes * part.num_rows // part.of_rows
            stored = replace(tensor, shape=part.shape, start=tensor.start + num_bytes * part.first_row // part.of_rows)
            factor = scale[part.expert if len(scale) > 1 else 0]
            way, run = part.way, part.way.run if factor == 1 else 0
            arrange = _scaled(way.arrange, factor)
            found[part.name] = GgufWeight(tensor.name, kind.name, way.shape, part_bytes, stored, arrange, run)
    return _join(found)


def _num_bytes(tensor: GgufTensor) -> int:
    """Bytes of the tensor in its file. Raises ConfigurationError if the file ends before."""
    elements_per_block, block_bytes = _gguf().GGML_QUANT_SIZES[_kind_of(tensor)]
    num_bytes = math.prod(tensor.shape) // elements_per_block * block_bytes
    if tensor.start + num_bytes > tensor.file.stat().st_size or tensor.shape[-1] % elements_per_block:
        raise ConfigurationError(f"{tensor.file}: tensor {tensor.name} ends after the file; it is cut short")
    return num_bytes


def _scales(tensors: Iterable[GgufTensor]) -> Mapping[str, Sequence[float]]:
    """Factors of weights in NVFP4: one number, or one for each expert."""
    found: dict[str, Sequence[float]] = {}
    for tensor in tensors:
        if tensor.name.endswith(".scale"):
            if _kind_of(tensor).name != "F32" or len(tensor.shape) != 1:
                raise ConfigurationError(f"{tensor.file}: tensor {tensor.name} is not a list of numbers in F32")
            found[tensor.name] = np.fromfile(tensor.file, "<f4", _num_bytes(tensor) // 4, offset=tensor.start).tolist()
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
        way: To the layout in transformers.
    """

    name: str
    shape: tuple[int, ...]
    first_row: int
    num_rows: int
    of_rows: int
    expert: int
    way: "_Way"


@dataclass(frozen=True, slots=True)
class _Way:
    """From the layout of a file to the one of transformers.

    Attributes:
        arrange: Makes one from the other.
        shape: In transformers.
        run: As in `GgufWeight`.
    """

    arrange: Callable[[torch.Tensor], torch.Tensor]
    shape: tuple[int, ...]
    run: int


class _Layout:
    """How the tensors of a model are named and laid out, by its architecture."""

    def __init__(self, header: GgufHeader) -> None:
        self._header = header
        self._architecture = header.metadata.get("general.architecture", "")
        self._names = {**USUAL, **DIFFERENT.get(self._architecture, {})}
        self._joins_inputs = any(name.endswith(".ssm_in.weight") for name in header.tensors)
        self._first_of_drafts = self._layers_but("nextn_predict_layers")
        self._first_without_keys = self._layers_but("attention.shared_kv_layers")

    def is_of_drafts(self, tensor: GgufTensor) -> bool:
        """Whether it is of the layers after the model's, which draft tokens."""
        block = _BLOCK.fullmatch(tensor.name)
        return block is not None and int(block["number"]) >= self._first_of_drafts

    def _layers_but(self, name: str) -> float:
        """The number of layers without the last ones, which the field counts; without the field no layer is one."""
        if f"{self._architecture}.{name}" not in self._header.metadata:
            return math.inf
        fields = GgufFields(self._header)
        return fields.size("block_count") - fields.own(name, int, "a whole number")

    def names_whole(self, tensor: GgufTensor) -> bool:
        """Whether the tensor has a name that includes its kind."""
        block = _BLOCK.fullmatch(tensor.name)
        return block is not None and block["rest"] in self._names

    def parts(self, tensor: GgufTensor) -> Iterator[_Part]:
        """The parts of a tensor: one; several if it has all experts, or if a converter has merged tensors; none if the
        layer reads the keys of an earlier one, and they are keys or values. ConfigurationError if its name is not
        known."""
        block = _BLOCK.fullmatch(tensor.name)
        base, _, kind = (tensor.name if block is None else block["rest"]).rpartition(".")
        # The corrections of HY3's experts have a name without a kind.
        base, kind = (base, kind) if base else (kind, "bias")
        if block is not None and self.names_whole(tensor):
            base, kind = block["rest"], "weight"
        prefix = "" if block is None else f"{LAYERS.get(self._architecture, 'model.layers')}.{block['number']}."
        bases = _FUSED[base] if base in _FUSED and base not in self._names else (base,)
        names = [self._name(each) for each in bases]
        if kind not in ("weight", "bias") or None in names:
            raise self._error(tensor, f"is not known in models of {self._architecture}")
        if base in BY_KEY and not self._joins_inputs:
            yield from self._parts_by_key(tensor, prefix, BY_KEY[base])
            return
        layer = 0 if block is None else int(block["number"])
        shares, experts, shape = self._shares(bases, layer), 1, tensor.shape
        if "*" in str(names[0]):
            if len(shape) not in (2, 3) or shape[0] > _MAX_EXPERTS:
                raise self._error(tensor, f"has shape {list(shape)}, which does not fit experts")
            experts, shape = shape[0], shape[1:]
        if shape[0] % sum(shares):
            raise self._error(tensor, f"has {shape[0]} rows, which do not divide into {', '.join(bases)}")
        has_keys = layer < self._first_without_keys
        for expert in range(experts):
            first = expert * shape[0]
            for each, name, share in zip(bases, names, shares, strict=True):
                num_rows = shape[0] * share // sum(shares)
                full_name = prefix + self._full_name(name, kind).replace("*", str(expert))
                part_shape = (num_rows, *shape[1:])
                if has_keys or each not in OF_KEYS:
                    way = self._way(each, full_name, part_shape)
                    yield _Part(full_name, part_shape, first, num_rows, experts * shape[0], expert, way)
                first += num_rows

    def _parts_by_key(self, tensor: GgufTensor, prefix: str, bases: Sequence[str]) -> Iterator[_Part]:
        """The parts of a tensor that has, for each head of key, as many rows of one part and then of the next one."""
        keys, (num_rows, *others) = GgufFields(self._header).size("ssm.group_count"), tensor.shape
        if num_rows % (keys * len(bases)):
            raise self._error(tensor, f"has {num_rows} rows, of {keys} heads of key")

        def pick(number: int) -> Callable[[torch.Tensor], torch.Tensor]:
            return lambda stored: stored.unflatten(0, (keys, len(bases), -1))[:, number].flatten(0, 1)

        for number, base in enumerate(bases):
            way = _Way(pick(number), (num_rows // len(bases), *others), others[-1])
            name = prefix + self._full_name(self._name(base), "weight")
            yield _Part(name, tensor.shape, 0, num_rows, num_rows, 0, way)

    def _name(self, base: str) -> str | None:
        if (expert := _EXPERT.fullmatch(base)) is not None and f"{expert['base']}_exps" in self._names:
            # Files of before 2024 have a tensor for each expert.
            return self._names[f"{expert['base']}_exps"].replace("*", expert["number"])
        return self._names.get(base)

    @staticmethod
    def _full_name(name: str | None, kind: str) -> str:
        return name if name is not None and name.endswith(WITHOUT_KIND) else f"{name}.{kind}"

    def _shares(self, bases: Sequence[str], layer: int) -> Sequence[int]:
        if len(bases) != 3:
            return (1,) * len(bases)
        fields, heads = GgufFields(self._header), self._heads("head_count")
        if not fields.has("attention.head_count_kv"):
            return (heads,) * 3
        count = fields.size("block_count")
        kv_heads = fields.sizes("attention.head_count_kv", count, minimum=0)[min(layer, count - 1)]
        return (heads, kv_heads, kv_heads)

    def _heads(self, name: str) -> int:
        fields = GgufFields(self._header)
        return fields.size_of_some(f"attention.{name}", fields.size("attention.head_count"))

    def _way(self, base: str, name: str, shape: tuple[int, ...]) -> _Way:
        if TRANSPOSED.search(name):
            return _Way(lambda stored: stored.T, shape[::-1], 0)
        if self._architecture in ROTATES_NEIGHBOURS and base in (*ROTATED, *ROTATED_HEADS):
            heads = self._heads(ROTATED[base]) if base in ROTATED else 1
            return _Way(lambda stored: _split_halves(stored, heads), shape, shape[-1])
        if self._architecture in NORMS_FROM_1 and name.endswith("norm.weight") and base not in FLAT:
            return _Way(lambda stored: stored - 1, shape, 0)
        if name.endswith(ROWS):
            return _Way(lambda stored: stored.view(1, -1), (1, shape[-1]), shape[-1])
        turn = self._turn(base, shape)
        if base in CONVOLUTIONS and len(shape) == 2:
            return _Way(lambda stored: turn.arrange(stored).unsqueeze(1), (shape[0], 1, shape[1]), 0)
        if base in FLAT:
            flat = (math.prod(shape),) if self._architecture not in DECAYS_OF_STATES or base != "ssm_a" else shape
            if base != "ssm_a":
                return _Way(lambda stored: stored.flatten(), flat, 0)
            # The file has the decay itself, transformers the logarithm of its opposite.
            return _Way(lambda stored: turn.arrange(stored).reshape(flat).neg().log(), flat, 0)
        return turn

    def _turn(self, base: str, shape: tuple[int, ...]) -> _Way:
        """The order of the heads of value, if the file may have another one."""
        as_it_is = _Way(lambda stored: stored, shape, shape[-1])
        if self._architecture not in TURNS_VALUES or base not in (*BY_VALUE, FROM_VALUES):
            return as_it_is
        fields = GgufFields(self._header)
        keys, values = fields.size("ssm.group_count"), fields.size("ssm.time_step_rank")
        sizes = shape[-1:] if base == FROM_VALUES else (min(shape[0], fields.size("ssm.inner_size")),)
        if keys == values:
            return as_it_is
        if values % keys or sizes[0] % values:
            raise ConfigurationError(
                f"{self._header.path}: {base} of {values} heads, of {keys} keys, is {sizes[0]} wide"
            )
        if base == FROM_VALUES:
            return _Way(lambda stored: _turned(stored.T, keys, values).T.contiguous(), shape, shape[-1] // values)
        (count,) = sizes
        first = shape[0] - count
        return _Way(lambda stored: torch.cat((stored[:first], _turned(stored[first:], keys, values))), shape, shape[-1])

    def _error(self, tensor: GgufTensor, problem: str) -> ConfigurationError:
        return ConfigurationError(f"{tensor.file}: tensor {tensor.name} {problem}")


def _scaled(arrange: Callable[[torch.Tensor], torch.Tensor], scale: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return arrange if scale == 1 else lambda stored: arrange(stored * scale)


def _turned(stored: torch.Tensor, num_keys: int, num_values: int) -> torch.Tensor:
    """Rows of heads of value. The file has the first head of each key, then the second of each."""
    of_heads = stored.unflatten(0, (num_values // num_keys, num_keys, -1))
    return of_heads.transpose(0, 1).flatten(0, 2)


def _split_halves(stored: torch.Tensor, num_heads: int) -> torch.Tensor:
    """The rows of each head, whose pairs that rotate together are neighbours in llama.cpp and half a head apart in
    transformers."""
    pairs = stored.view(num_heads, stored.shape[0] // num_heads // 2, 2, *stored.shape[1:])
    return pairs.transpose(1, 2).reshape(stored.shape)
