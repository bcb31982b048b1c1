"""The quantized modules of a checkpoint: their tensors, their part of the configuration, the weight that they become.

The tensors of a module stand for one weight, under the name that it had before it was quantized. It keeps the codes
of the file (`QuantizedWeight`), or it is expanded to numbers when it is read (`ExpandedWeight`).
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from quire.runtime.settings import ConfigurationError
from quire_kernels.packed_weight import CodedWeight, Coding, GroupScales
from worker_svc.weights import StoredTensor

FLOATS, INTEGERS = ("F32", "BF16", "F16"), ("I32", "I64")


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A matrix that is stored as several tensors of a file; `dtype` is the type of its codes."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    rounds_inputs: bool
    """Whether the format rounds the inputs of products to FP8, which products with this weight may do."""
    _decode: Callable[[], CodedWeight]

    def read(self) -> torch.Tensor:
        """[out, in] float32."""
        return self._decode().dequantized()

    def coded(self) -> CodedWeight | None:
        """The codes; None if groups are too small, or too mixed, for products with codes."""
        weight = self._decode()
        scales = weight.scales
        assert scales is not None
        if scales.values.shape[1] > 1 and scales.inputs % 32:
            return None
        return replace(weight, rounds_inputs=self.rounds_inputs)


@dataclass(frozen=True, slots=True)
class ExpandedWeight:
    """A matrix whose codes no product takes; it is brought to the served dtype when it is read.

    Attributes:
        coding: The codes' name, for the log.
        num_bytes: Size in the file.
    """

    file: Path
    name: str
    coding: str
    shape: tuple[int, ...]
    num_bytes: int
    _expand: Callable[[], torch.Tensor]

    @property
    def dtype(self) -> str:
        """The dtype of `read`, as of a tensor that the file does not quantize."""
        return "F32"

    def read(self) -> torch.Tensor:
        """[out, in] float32."""
        return self._expand()

    def coded(self) -> None:
        return None


@dataclass(frozen=True, slots=True)
class Configuration:
    """`quantization_config`, or an object in it."""

    file: Path
    fields: Mapping[str, Any]
    name: str = "quantization_config"

    def __post_init__(self) -> None:
        if not isinstance(self.fields, Mapping):
            raise ConfigurationError(f"{self.file}: {self.name} is {self.fields!r:.80}; expected an object")

    def get(self, *names: str) -> Any:
        """The first of these fields that is there; formats have renamed some."""
        return next((self.fields[name] for name in names if self.fields.get(name) is not None), None)

    def one_of(self, names: str, supported: Collection[Any], default: Any = None) -> Any:
        """The value of a field by any of its names, if it is supported."""
        field, value = names.split()[0], self.get(*names.split())
        value = default if value is None else value
        if not any(value == each and type(value) is type(each) for each in supported):
            raise self.error(field, value, f"supported: {', '.join(map(str, supported))}")
        return value

    def names(self, field: str) -> list[str]:
        """A list of names of modules, or of expressions for them."""
        names = self.get(field) or []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise self.error(field, names, "expected a list of names")
        for expression in (name.removeprefix("re:") for name in names if name.startswith("re:")):
            try:
                re.compile(expression)
            except re.error as error:
                raise self.error(field, expression, f"this is no regular expression ({error})") from error
        return names

    def part(self, field: str) -> "Configuration":
        return Configuration(self.file, self.get(field) or {}, f"{self.name}.{field}")

    def error(self, field: str, value: Any, problem: str) -> ConfigurationError:
        return ConfigurationError(f"{self.file}: {self.name}.{field} is {value!r:.80}; {problem}")


@dataclass(frozen=True, slots=True)
class Block:
    """The outputs and inputs that share a scale. At the end of either there may be fewer."""

    outputs: int
    inputs: int

    def grid(self, shape: Sequence[int]) -> tuple[int, int]:
        return -(-shape[0] // self.outputs), -(-shape[1] // self.inputs)


class Module:
    """A quantized module of the checkpoint, by its name there; `name_in_file` may have the model around it, too."""

    def __init__(
        self, name: str, tensors: Mapping[str, StoredTensor], config: Configuration, name_in_file: str
    ) -> None:
        self.name = name
        self.config = config
        self.name_in_file = name_in_file
        self._tensors = tensors
        self.used: list[str] = []
        """Names of the tensors that were asked for."""

    def is_meant(self, pattern: str) -> bool:
        """Whether a name in the configuration names this module, by either of its names. In compressed-tensors a name
        does not name the modules within it."""
        is_whole = self.config.get("quant_method") == "compressed-tensors" and not pattern.startswith("re:")
        names = (self.name, self.name_in_file)
        return pattern in names if is_whole else any(_is_meant(pattern, name) for name in names)

    def has(self, kind: str) -> bool:
        return f"{self.name}.{kind}" in self._tensors

    def shape_of(self, kind: str) -> tuple[int, ...] | None:
        """The shape of one of its tensors; None if it is missing."""
        stored = self._tensors.get(f"{self.name}.{kind}")
        return None if stored is None else stored.shape

    def tensor(self, kind: str, dtypes: Collection[str], *shapes: tuple[int | None, ...]) -> StoredTensor:
        """One of its tensors, of one of these dtypes and shapes, where None is any size but 0.

        Raises:
            ConfigurationError: it is missing, or of another dtype or shape.
        """
        name = f"{self.name}.{kind}"
        if name not in self._tensors:
            raise ConfigurationError(f"{self.config.file.parent}: tensor {name} is missing from the safetensors files")
        if name not in self.used:
            self.used.append(name)
        stored = self._tensors[name]
        if stored.dtype not in dtypes:
            raise ConfigurationError(
                f"{stored.file}: tensor {name} has dtype {stored.dtype}; expected {', '.join(dtypes)}"
            )
        for shape in shapes:
            sizes = zip(stored.shape, shape, strict=False)
            if len(shape) == len(stored.shape) and all(size == (wanted or max(size, 1)) for size, wanted in sizes):
                return stored
        expected = " or ".join(str(["any" if size is None else size for size in shape]) for shape in shapes)
        raise ConfigurationError(f"{stored.file}: tensor {name} has shape {list(stored.shape)}; expected {expected}")

    def group(self, config: Configuration, in_features: int) -> Block:
        """Groups of inputs of each output, by the size in the configuration, where -1 is all."""
        size = config.get("group_size", "q_group_size")
        size = in_features if size in (None, -1) else size
        if type(size) is not int or size < 1 or in_features % size:
            raise config.error("group_size", size, f"expected -1 or a divisor of {in_features}, inputs of {self.name}")
        return Block(1, size)

    def weight(
        self,
        coding: Coding,
        shape: Sequence[int],
        block: Block,
        *,
        rows: Callable[[], torch.Tensor],
        scales: Callable[[], torch.Tensor],
        zeros: Callable[[], torch.Tensor] | None = None,
        group_of: StoredTensor | None = None,
        rounds_inputs: bool = False,
    ) -> QuantizedWeight:
        """The weight, of functions that read its codes, [out, bytes], and its scales and zeros, [rows of blocks,
        groups]. `group_of` (g_idx) is the group of each input, if that does not follow from its place."""
        (out_features, in_features), (per_group, _) = shape, coding.group
        if in_features % per_group:
            raise self.error(f"has {in_features} inputs; expected a multiple of {per_group}")

        def decode() -> CodedWeight:
            values, inputs = scales().repeat_interleave(block.outputs, 0)[:out_features], block.inputs
            codes_of_0 = None if zeros is None else zeros()
            if codes_of_0 is not None and bool((codes_of_0 == (8 if coding is Coding.INT4 else 128)).all()):
                codes_of_0 = None
            groups = None if group_of is None else self._groups(group_of, values.shape[1], inputs)
            if groups is not None:
                values, inputs = values[:, groups], 1
                codes_of_0 = None if codes_of_0 is None else codes_of_0[:, groups]
            return CodedWeight(coding, rows(), GroupScales(values, codes_of_0, inputs))

        # Blocks would need scales of blocks for inputs.
        rounds_inputs = rounds_inputs and coding is Coding.FP8 and block.inputs >= in_features
        return self.decoded(coding, shape, decode, rounds_inputs=rounds_inputs)

    def decoded(
        self, coding: Coding, shape: Sequence[int], decode: Callable[[], CodedWeight], *, rounds_inputs: bool = False
    ) -> QuantizedWeight:
        """The weight, of a function that reads it."""
        stored = [self._tensors[name] for name in self.used]
        num_bytes, name = sum(tensor.num_bytes for tensor in stored), f"{self.name}.weight"
        return QuantizedWeight(stored[0].file, name, coding.value, tuple(shape), num_bytes, rounds_inputs, decode)

    def expanded(self, coding: str, shape: Sequence[int], expand: Callable[[], torch.Tensor]) -> ExpandedWeight:
        """The weight, of a function that computes its numbers, [out, in] float32."""
        stored = [self._tensors[name] for name in self.used]
        num_bytes = sum(tensor.num_bytes for tensor in stored)
        return ExpandedWeight(stored[0].file, f"{self.name}.weight", coding, tuple(shape), num_bytes, expand)

    def _groups(self, group_of: StoredTensor, count: int, inputs: int) -> torch.Tensor | None:
        """The group of each input; None if groups follow each other. Raises ConfigurationError."""
        groups = group_of.read().long()
        if torch.equal(groups, torch.arange(groups.shape[0]) // inputs):
            return None
        for group in (groups.min().item(), groups.max().item()):
            if not 0 <= group < count:
                raise ConfigurationError(
                    f"{group_of.file}: tensor {group_of.name} has {group}; expected groups 0 to {count - 1}"
                )
        return groups

    def group_of(self, kind: str, in_features: int, *, is_needed: bool) -> StoredTensor | None:
        """The tensor with the group of each input; without it, groups follow each other. Raises ConfigurationError if
        it is needed and missing."""
        return self.tensor(kind, INTEGERS, (in_features,)) if is_needed or self.has(kind) else None

    def error(self, problem: str) -> ConfigurationError:
        return ConfigurationError(f"{self.config.file.parent}: {self.name} {problem}")


def _is_meant(pattern: str, module: str) -> bool:
    """Whether a list of modules means this one: by its name, the end of it, a module around it, or an expression."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return f".{module}".endswith(f".{pattern}") or module.startswith(f"{pattern}.")
