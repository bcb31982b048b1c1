"""Model weights: safetensors files as transformers writes them, and the places where layers put them.

The headers are read and compared with the model before any tensor is loaded, so that a wrong directory is refused at
once and with one clear line.
"""

import math
import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from quire.model_files.gguf_header import SUFFIX as GGUF_SUFFIX
from quire.model_files.gguf_header import GgufHeader
from quire.model_files.model_directory import ModelDirectory, name_within, weight_files
from quire.runtime.settings import ConfigurationError
from quire_kernels.packed_weight import CodedWeight, Quantization
from worker_svc.gguf_weights import gguf_weights
from worker_svc.parallel.ranks import ALONE, Ranks

# Bytes of an element by its name in a safetensors header.
DTYPE_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
# The same for parts of quantized weights. Other dtypes are rare, and only counted.
_PART_BYTES = {"I64": 8, "I32": 4}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that a model needs, by the name that transformers gives it."""

    name: str
    shape: tuple[int, ...]


class TensorReader(Protocol):
    """Reads the tensors of a checkpoint that `Loadable.tensors` names."""

    def read(self, spec: TensorSpec) -> torch.Tensor:
        """The tensor on the CPU, in the file's dtype, or float32 if that is quantized. It may be a view of the file,
        so copy it to keep it."""
        ...

    def coded(self, spec: TensorSpec) -> CodedWeight | None:
        """The matrix as it is coded in the file, perhaps as a view of it; None if it is not coded."""
        ...


@dataclass(frozen=True, slots=True)
class MadeTensors:
    """A `TensorReader` of tensors that a function makes."""

    make: Callable[[TensorSpec], torch.Tensor]

    def read(self, spec: TensorSpec) -> torch.Tensor:
        return self.make(spec)

    def coded(self, spec: TensorSpec) -> None:
        return None


Progress = Callable[[int, int], None]
"""Called after each layer with the bytes that were read, and with the bytes of all tensors."""


class StoredTensor(Protocol):
    """A tensor in a file. `read` may return a view of the file, so copy it to keep it."""

    @property
    def file(self) -> Path: ...
    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def num_bytes(self) -> int: ...
    def read(self) -> torch.Tensor: ...
    def coded(self) -> CodedWeight | None: ...


@dataclass(frozen=True, slots=True)
class SafeTensor:
    """A tensor of a safetensors file."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    _content: Any = field(repr=False)
    """A slice of the open file, of safetensors."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * (DTYPE_BYTES | _PART_BYTES).get(self.dtype, 1)

    def read(self) -> torch.Tensor:
        return self._content[...]

    def coded(self) -> None:
        return None

    def expert(self, number: int) -> torch.Tensor:
        """The part of one expert, of a tensor that has all of them."""
        return self._content[number]


@dataclass(frozen=True, slots=True)
class _Stack:
    """A tensor that has all experts of a layer. The parts of an expert are read as if they were tensors of their own.

    Attributes:
        name: the end of its name.
        module: of the experts.
        kind: "weight" or "bias".
        inputs_first: it is stored as [experts, in, out].
    """

    name: str
    module: str
    kind: str = "weight"
    inputs_first: bool = False


_STACKS = (
    _Stack("block_sparse_moe.input_linear.weight", "block_sparse_moe"),
    _Stack("block_sparse_moe.output_linear.weight", "block_sparse_moe"),
    _Stack("mlp.experts.gate_up_proj", "mlp", inputs_first=True),
    _Stack("mlp.experts.gate_up_proj_bias", "mlp", "bias"),
    _Stack("mlp.experts.down_proj", "mlp", inputs_first=True),
    _Stack("mlp.experts.down_proj_bias", "mlp", "bias"),
    # Within the layer itself.
    _Stack("experts.gate_up_proj", ""),
    _Stack("experts.down_proj", ""),
)

_PART_OF_EXPERT = re.compile(r"(\.experts\.\d+\.)(w[123])\.")
_OTHER_NAMES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


@dataclass(frozen=True, slots=True)
class _ExpertTensor:
    """Some outputs of one expert, of a tensor that has all experts of a layer."""

    name: str
    stored: SafeTensor
    stack: _Stack
    number: int
    outputs: slice

    @property
    def file(self) -> Path:
        return self.stored.file

    @property
    def dtype(self) -> str:
        return self.stored.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        out_features, *in_features = self.stored.shape[:0:-1] if self.stack.inputs_first else self.stored.shape[1:]
        return len(range(out_features)[self.outputs]), *in_features

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES.get(self.dtype, 1)

    def read(self) -> torch.Tensor:
        stored = self.stored.expert(self.number)
        return (stored.t() if self.stack.inputs_first else stored)[self.outputs]

    def coded(self) -> None:
        return None


@dataclass(frozen=True, slots=True)
class _JoinedTensor:
    """Tensors of a file that are one here: their lines follow each other."""

    parts: tuple[StoredTensor, ...]

    @property
    def file(self) -> Path:
        return self.parts[0].file

    @property
    def name(self) -> str:
        return self.parts[0].name

    @property
    def dtype(self) -> str:
        return self.parts[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:]

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    def read(self) -> torch.Tensor:
        return torch.cat([part.read() for part in self.parts])

    def coded(self) -> None:
        return None


def _experts_of(
    name: str, stored: SafeTensor, stack: _Stack, *, alternates: bool
) -> Iterator[tuple[str, _ExpertTensor]]:
    """The parts of all experts by their names. In its outputs gates and ups take turns, or all gates come first."""
    outputs = {"down_proj": slice(None)}
    if "gate_up" in stack.name or "input" in stack.name:
        inner = stored.shape[-1 if stack.inputs_first or len(stored.shape) == 2 else 1] // 2
        gates, ups = (slice(0, None, 2), slice(1, None, 2)) if alternates else (slice(inner), slice(inner, None))
        outputs = {"gate_proj": gates, "up_proj": ups}
    before = name.removesuffix(stack.name) + (f"{stack.module}." if stack.module else "")
    for number in range(stored.shape[0]):
        for part, chosen in outputs.items():
            full_name = f"{before}experts.{number}.{part}.{stack.kind}"
            yield full_name, _ExpertTensor(name, stored, stack, number, chosen)


class Checkpoint:
    """The tensors of a model directory.

    Args:
        tensors: by the name in the file.
        base_prefix: For example "model."; a file saved from the base model only lacks it.
    """

    def __init__(self, directory: Path, tensors: Mapping[str, StoredTensor], base_prefix: str) -> None:
        self._directory = directory
        self._tensors = tensors
        self._base_prefix = base_prefix

    @classmethod
    def of_model(cls, described: ModelDirectory, *, base_prefix: str = "") -> "Checkpoint":
        """The tensors of the language model, under the names that a separate model has. Raises as `open`."""
        checkpoint = cls.open(described.path, base_prefix=base_prefix, gguf=described.gguf)
        if described.whole is None:
            return checkpoint
        names = {name: new_name for name in checkpoint.tensors if (new_name := name_within(name)) != name}
        # Older files have the language model next to the rest, not within a part of its own.
        beside = ("lm_head.",) if names else ("lm_head.", "model.")
        names |= {name: name for name in checkpoint.tensors if name.startswith(beside)}
        return checkpoint.with_tensors({new_name: checkpoint.tensors[name] for name, new_name in names.items()})

    @classmethod
    def open(cls, directory: Path, *, base_prefix: str, gguf: GgufHeader | None = None) -> "Checkpoint":
        """Reads the headers of all files, except a GGUF file's if it was read already.

        Raises:
            ConfigurationError: no safetensors here, a shard that the index names is missing, a damaged file.
        """
        if directory.suffix == GGUF_SUFFIX and directory.is_file():
            return cls(directory, gguf_weights(directory, gguf), base_prefix)
        tensors: dict[str, StoredTensor] = {}
        for file in weight_files(directory):
            tensors.update(_read_header(file))
        return cls(directory, tensors, base_prefix)

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """All tensors, by their names in the file; for a GGUF file, by their names in transformers."""
        return self._tensors

    def has(self, name: str) -> bool:
        return self._stored(name) is not None

    def renamed(self, name: str, new_name: str) -> "Checkpoint":
        """The same tensors; `name`, a name in the file, is replaced by `new_name`."""
        tensors = dict(self._tensors)
        tensors[new_name] = tensors.pop(name)
        return self.with_tensors(tensors)

    def with_tensors(self, tensors: Mapping[str, StoredTensor]) -> "Checkpoint":
        """A checkpoint of the same directory that has these instead."""
        return Checkpoint(self._directory, tensors, self._base_prefix)

    def with_names(self, renamed: Mapping[str, str]) -> "Checkpoint":
        """The same with other beginnings of names, or with other parts, which begin with a dot: each one in `renamed`
        that fits, in turn. Tensors that come to have one name are joined, in the order of the first that fits."""
        if not renamed:
            return self
        parts: dict[str, dict[int, StoredTensor]] = {}
        for name, tensor in self._tensors.items():
            new_name, found = name, list[int]()
            for index, (old, new) in enumerate(renamed.items()):
                if old in new_name if old.startswith(".") else new_name.startswith(old):
                    new_name = new_name.replace(old, new, 1)
                    found.append(index)
            parts.setdefault(new_name, {})[found[0] if found else -1] = tensor
        joined = {name: [each[place] for place in sorted(each)] for name, each in parts.items()}
        return self.with_tensors(
            {name: each[0] if len(each) == 1 else _JoinedTensor(tuple(each)) for name, each in joined.items()}
        )

    def with_experts_apart(self, hidden_size: object) -> "Checkpoint":
        """The same with tensors of each expert, in the place of tensors that have all experts of a layer."""
        tensors = dict(self._tensors)
        for name, stored in self._tensors.items():
            stack = next((stack for stack in _STACKS if name.endswith(f".{stack.name}")), None)
            if stack is not None and isinstance(stored, SafeTensor) and len(stored.shape) > 1:
                del tensors[name]
                # transformers writes Qwen3-VL with outputs first, although it is published with inputs first.
                sizes, is_hidden_last = stored.shape[1:], "gate_up" in stack.name
                if sizes[0] != sizes[-1] and sizes[-1 if is_hidden_last else 0] == hidden_size:
                    stack = replace(stack, inputs_first=False)
                # As in GPT-OSS, which is the only family with biases.
                alternates = f"{name.removesuffix('_bias')}_bias" in self._tensors
                tensors.update(_experts_of(name, stored, stack, alternates=alternates))
        return self.with_tensors(tensors)

    def check(self, specs: Iterable[TensorSpec]) -> None:
        """Raises ConfigurationError for the first tensor that is missing or has an unexpected shape or dtype."""
        for spec in specs:
            stored = self._find(spec.name)
            if stored.shape != spec.shape:
                raise ConfigurationError(
                    f"{stored.file}: tensor {stored.name} has shape {list(stored.shape)}; "
                    f"config.json asks for {list(spec.shape)}"
                )
            if isinstance(stored, SafeTensor | _ExpertTensor) and stored.dtype not in DTYPE_BYTES:
                raise ConfigurationError(
                    f"{stored.file}: tensor {stored.name} has dtype {stored.dtype}; "
                    f"supported are {', '.join(DTYPE_BYTES)}"
                )

    def check_all_used(self, specs: Iterable[TensorSpec]) -> None:
        """Raises ConfigurationError for a tensor of a GGUF file that is not among the specs, which must be complete.

        Not each part that a model may have has a field in the file. Directories may have buffers that no model reads.
        """
        if self._directory.is_dir():
            return
        names = {spec.name for spec in specs}
        for name in self._tensors:
            if name not in names:
                raise self.unused(name)

    def num_bytes(self, spec: TensorSpec) -> int:
        """Size in the file; `check` has passed."""
        return self._find(spec.name).num_bytes

    def read(self, spec: TensorSpec) -> torch.Tensor:
        """The tensor on the CPU, in the file's dtype, or float32 if that is quantized. It may be a view of the file,
        so copy it to keep it."""
        return self._find(spec.name).read()

    def coded(self, spec: TensorSpec) -> CodedWeight | None:
        """The matrix as it is coded in the file; None if it is not coded."""
        return self._find(spec.name).coded()

    def _stored(self, name: str) -> StoredTensor | None:
        # llm-compressor gives the parts of experts one set of names in all families.
        other = _PART_OF_EXPERT.sub(lambda found: f"{found[1]}{_OTHER_NAMES[found[2]]}.", name)
        return next(
            (
                self._tensors[each]
                for full in (name, other)
                for each in (full, full.removeprefix(self._base_prefix))
                if each in self._tensors
            ),
            None,
        )

    def _find(self, name: str) -> StoredTensor:
        stored = self._stored(name)
        if stored is None:
            raise self.missing(name)
        return stored

    def unused(self, name: str) -> ConfigurationError:
        """The error for a tensor of a GGUF file that the model does not have."""
        stored = self._find(name)
        return ConfigurationError(
            f"{stored.file}: tensor {stored.name} is not one that this model has; such models are not read"
        )

    def missing(self, name: str) -> ConfigurationError:
        """The error for a tensor that is not there."""
        place = " from the safetensors files" if self._directory.is_dir() else ""
        return ConfigurationError(f"{self._directory}: tensor {name} is missing{place}")


def _read_header(file: Path) -> dict[str, SafeTensor]:
    """Name to description of each tensor. Opening checks that the file is as long as its header says."""
    tensors: dict[str, SafeTensor] = {}
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                entry = opened.get_slice(name)
                tensors[name] = SafeTensor(file, name, entry.get_dtype(), tuple(entry.get_shape()), entry)
    except (SafetensorError, OSError) as error:
        # It quotes the file.
        said = repr(str(error))[1:-1]
        raise ConfigurationError(f"{file}: damaged or truncated safetensors file: {said:.300}") from error
    return tensors


@dataclass(frozen=True, slots=True)
class Placement:
    """Device and dtype of the weights, and the rank whose part of them is held."""

    device: torch.device
    dtype: torch.dtype
    ranks: Ranks = ALONE
    quantization: Quantization = Quantization.NONE
    """The quantization of linear layers."""
    max_positions: int | None = None
    """The length of the longest sequence that is served; None for all positions that have the same rotation."""

    def empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, device=self.device, dtype=self.dtype)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copies a tensor, which may be a view of a mapped file, to memory of its own."""
        return self.empty(*tensor.shape).copy_(tensor)


class Loadable(nn.Module):
    """A layer that names the tensors of the checkpoint that it needs. It allocates no memory before `load`."""

    @abstractmethod
    def tensors(self) -> Iterator[TensorSpec]:
        """The tensors that `load` reads."""

    @abstractmethod
    def load(self, tensors: TensorReader) -> None:
        """Reads the tensors, one at a time, and places them."""


def frozen(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
