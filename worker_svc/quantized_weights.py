"""Quantized weights of safetensors files: AWQ, GPTQ, compressed-tensors, FP8 with scales of blocks, and MXFP4.

A reader for each format brings codes, scales and zeros into the one form of `CodedWeight`, under the name that the
weight had before it was quantized. `GroupScales` says which numbers they stand for. Layers that multiply codes take
them as they are; for others they are brought to float32 when they are read.

The tensors of a file show which modules are quantized; modules that the configuration leaves out must not be. Some
formats round the inputs of layers, too. Here only FP8 products on a GPU do so. Elsewhere inputs keep their dtype, so
that answers are closer to the original model's; the log says so.
"""

import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kernels.packed_weight import CodedWeight, Coding, GroupScales
from quire.model_files.model_directory import ModelDirectory
from quire.runtime.settings import ConfigurationError
from worker_svc.weights import Checkpoint, SafeTensor, StoredTensor

_FLOATS, _INTEGERS = ("F32", "BF16", "F16"), ("I32", "I64")
_CODINGS = {4: Coding.INT4, 8: Coding.INT8}
_OF_OCTETS = {"I8": Coding.INT8, "F8_E4M3": Coding.FP8}
_WORD_BITS = 32
# Where AWQ has the numbers of eight neighbouring outputs in a word.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
# Orders in which compressed-tensors has quantized inputs that mix the groups; others leave them in place.
_MIXED_ORDERS = (True, "group", "dynamic")
# Twice the numbers of MXFP4's codes, those above 0 first.
_TWICE_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_MXFP4_GROUP = 32
_COMPRESSED = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")
_logger = logging.getLogger(__name__)


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


def with_quantized_weights(
    checkpoint: Checkpoint, described: ModelDirectory, *, has_fp8_products: bool = False
) -> Checkpoint:
    """The checkpoint with a `QuantizedWeight` in the place of the tensors that it consists of. With `has_fp8_products`,
    products round their inputs to FP8 where the format does so.

    Raises:
        ConfigurationError: the configuration names a format that is not read, or the files contradict it.
    """
    fields = described.config.get("quantization_config")
    if not fields or any(isinstance(each, QuantizedWeight) for each in checkpoint.tensors.values()):
        return checkpoint
    config = _Configuration(described.path / "config.json", fields)
    read = _READERS[config.one_of("quant_method", _READERS)]
    left_out = config.names("modules_to_not_convert") + config.names("ignore")
    tensors = dict(checkpoint.tensors)
    for name, stored in checkpoint.tensors.items():
        owner, _, kind = name.rpartition(".")
        if kind not in ("qweight", "weight_packed") and (kind != "weight" or stored.dtype not in _OF_OCTETS):
            continue
        module = _Module(owner, checkpoint.tensors, config, stored.name.rpartition(".")[0])
        if any(map(module.is_meant, left_out)):
            raise module.error(f"is quantized, but {config.name} says that it is not")
        weight = read(module)
        for used in module.used:
            tensors.pop(used, None)
        tensors[weight.name] = weight
    weights = [each for each in tensors.values() if isinstance(each, QuantizedWeight)]
    are_rounded = has_fp8_products and all(weight.rounds_inputs for weight in weights)
    if not are_rounded and (inputs := _rounded_inputs(config)) is not None:
        _logger.warning("%s: inputs of layers are not rounded to %s, only their weights are", config.file, inputs)
    return checkpoint.with_tensors(tensors)


def with_mxfp4_experts(checkpoint: Checkpoint, described: ModelDirectory) -> Checkpoint:
    """The checkpoint with a `QuantizedWeight` for each matrix of each expert that is stored in MXFP4, as in GPT-OSS.

    All experts of a layer are in one tensor: blocks [experts, out, groups, 16], two codes in a byte, and the exponents
    of scales [experts, out, groups]. Gates and ups take turns in the outputs. There are no products with these codes;
    twice the numbers that they stand for are codes of `INT8`.

    Raises:
        ConfigurationError: blocks without scales, or of another shape or dtype.
    """
    fields = described.config.get("quantization_config")
    if not isinstance(fields, Mapping) or fields.get("quant_method") != "mxfp4":
        return checkpoint
    tensors = dict(checkpoint.tensors)
    for name, blocks in checkpoint.tensors.items():
        if not name.endswith("_blocks"):
            continue
        experts, _, module = name.removesuffix("_blocks").rpartition(".")
        scales = checkpoint.tensors.get(f"{experts}.{module}_scales")
        if not isinstance(blocks, SafeTensor) or not isinstance(scales, SafeTensor):
            raise ConfigurationError(f"{blocks.file}: tensor {experts}.{module}_scales is missing from the files")
        if scales.shape != blocks.shape[:3] or blocks.shape[3:] != (16,) or {blocks.dtype, scales.dtype} != {"U8"}:
            raise ConfigurationError(
                f"{blocks.file}: tensors {name} and {experts}.{module}_scales have shapes {list(blocks.shape)} and "
                f"{list(scales.shape)}, and dtypes {blocks.dtype} and {scales.dtype}; expected [experts, out, groups, "
                "16], the same without 16, and U8"
            )
        del tensors[name], tensors[f"{experts}.{module}_scales"]
        outputs = {"down_proj": slice(None)}
        if module == "gate_up_proj":
            outputs = {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}
        for number in range(blocks.shape[0]):
            for part, chosen in outputs.items():
                weight = _mxfp4(f"{experts}.{number}.{part}.weight", blocks, scales, number, chosen)
                tensors[weight.name] = weight
    return checkpoint.with_tensors(tensors)


def _mxfp4(name: str, blocks: SafeTensor, scales: SafeTensor, number: int, outputs: slice) -> QuantizedWeight:
    """Some outputs of the expert `number`."""
    _, out_features, groups, _ = blocks.shape

    def decode() -> CodedWeight:
        octets = blocks.expert(number)[outputs]
        codes = torch.stack((octets & 15, octets >> 4), -1).flatten(1)
        rows = torch.tensor([128 + twice for twice in _TWICE_E2M1], dtype=torch.uint8)[codes.int()]
        exponents = scales.expert(number)[outputs].int() - 128
        halves = torch.ldexp(torch.ones(exponents.shape), exponents).bfloat16()
        return CodedWeight(Coding.INT8, rows, GroupScales(halves, None, _MXFP4_GROUP))

    shape = (len(range(out_features)[outputs]), groups * _MXFP4_GROUP)
    num_bytes = shape[0] * groups * (_MXFP4_GROUP // 2 + 1)
    return QuantizedWeight(blocks.file, name, Coding.INT8.value, shape, num_bytes, False, decode)


def codings_of(checkpoint: Checkpoint) -> set[str]:
    """The encodings of its quantized weights."""
    return {tensor.dtype for tensor in checkpoint.tensors.values() if isinstance(tensor, QuantizedWeight)}


@dataclass(frozen=True, slots=True)
class _Configuration:
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

    def part(self, field: str) -> "_Configuration":
        return _Configuration(self.file, self.get(field) or {}, f"{self.name}.{field}")

    def error(self, field: str, value: Any, problem: str) -> ConfigurationError:
        return ConfigurationError(f"{self.file}: {self.name}.{field} is {value!r:.80}; {problem}")


@dataclass(frozen=True, slots=True)
class _Block:
    """The outputs and inputs that share a scale. At the end of either there may be fewer."""

    outputs: int
    inputs: int

    def grid(self, shape: Sequence[int]) -> tuple[int, int]:
        return -(-shape[0] // self.outputs), -(-shape[1] // self.inputs)


class _Module:
    """A quantized module of the checkpoint, by its name there; `name_in_file` may have the model around it, too."""

    def __init__(
        self, name: str, tensors: Mapping[str, StoredTensor], config: _Configuration, name_in_file: str
    ) -> None:
        self.name = name
        self.config = config
        self._name_in_file = name_in_file
        self._tensors = tensors
        self.used: list[str] = []
        """Names of the tensors that were asked for."""

    def is_meant(self, pattern: str) -> bool:
        """Whether a name in the configuration names this module, by either of its names."""
        return any(_is_meant(pattern, name) for name in (self.name, self._name_in_file))

    def has(self, kind: str) -> bool:
        return f"{self.name}.{kind}" in self._tensors

    def tensor(self, kind: str, dtypes: Collection[str], *shapes: tuple[int | None, ...]) -> StoredTensor:
        """One of its tensors, of one of these dtypes and shapes, where None is any size but 0.

        Raises:
            ConfigurationError: it is missing, or of another dtype or shape.
        """
        name = f"{self.name}.{kind}"
        if name not in self._tensors:
            raise ConfigurationError(f"{self.config.file.parent}: tensor {name} is missing from the safetensors files")
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

    def group(self, config: _Configuration, in_features: int) -> _Block:
        """Groups of inputs of each output, by the size in the configuration, where -1 is all."""
        size = config.get("group_size", "q_group_size")
        size = in_features if size in (None, -1) else size
        if type(size) is not int or size < 1 or in_features % size:
            raise config.error("group_size", size, f"expected -1 or a divisor of {in_features}, inputs of {self.name}")
        return _Block(1, size)

    def weight(
        self,
        coding: Coding,
        shape: Sequence[int],
        block: _Block,
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

        stored = [self._tensors[name] for name in self.used]
        return QuantizedWeight(
            stored[0].file,
            f"{self.name}.weight",
            coding.value,
            (out_features, in_features),
            sum(tensor.num_bytes for tensor in stored),
            # Blocks would need scales of blocks for inputs.
            rounds_inputs and coding is Coding.FP8 and block.inputs >= in_features,
            decode,
        )

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
        return self.tensor(kind, _INTEGERS, (in_features,)) if is_needed or self.has(kind) else None

    def error(self, problem: str) -> ConfigurationError:
        return ConfigurationError(f"{self.config.file.parent}: {self.name} {problem}")


def _is_meant(pattern: str, module: str) -> bool:
    """Whether a list of modules means this one: by its name, the end of it, a module around it, or an expression."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return f".{module}".endswith(f".{pattern}") or module.startswith(f"{pattern}.")


def _codes(words: torch.Tensor, bits: int) -> torch.Tensor:
    """[n, words] int32 -> [n, codes] uint8, the lower bits of a word first."""
    octets = words.contiguous().view(torch.uint8)
    return octets if bits == 8 else torch.stack((octets & 15, octets >> 4), -1).flatten(1)


def _awq(module: _Module) -> QuantizedWeight:
    """Words of eight outputs: qweight [in, out / 8], qzeros [groups, out / 8], scales [groups, out]."""
    config = module.config
    config.one_of("bits w_bit", (4,), 4)
    config.one_of("version format", ("gemm", "GEMM"), "gemm")
    # AutoRound writes false for symmetric codes, whose zeros it stores all the same.
    config.one_of("zero_point", (True, False), True)
    qweight = module.tensor("qweight", ("I32",), (None, None))
    in_features, words = qweight.shape
    group = module.group(config, in_features)
    qzeros = module.tensor("qzeros", ("I32",), (in_features // group.inputs, words))
    scales = module.tensor("scales", _FLOATS, (in_features // group.inputs, 8 * words))

    def rows() -> torch.Tensor:
        octets = qweight.read().view(torch.uint8)
        first, second = octets[0::2], octets[1::2]  # of the inputs of a byte
        pairs = torch.stack((first & 15 | second << 4, first >> 4 | second & 0xF0), -1).flatten(1)
        return in_order(pairs.t().contiguous())

    def in_order(outputs: torch.Tensor) -> torch.Tensor:
        return outputs.unflatten(0, (-1, 8))[:, _AWQ_PLACES].flatten(0, 1)

    shape, zeros = (8 * words, in_features), lambda: in_order(_codes(qzeros.read(), 4).t())
    return module.weight(Coding.INT4, shape, group, rows=rows, scales=lambda: scales.read().t(), zeros=zeros)


def _gptq(module: _Module) -> QuantizedWeight:
    """Words of several inputs: qweight [in / 8, out], scales [groups, out], g_idx [in]; zeros in words of several
    outputs, qzeros [groups, out / 8], less one in the older of two formats, where 0 becomes the largest code.

    AutoGPTQ reads that code so, too; vLLM's kernel for GPTQ takes it for 16."""
    config = module.config
    bits = config.one_of("bits", _CODINGS)
    is_older = config.one_of("checkpoint_format format", ("gptq", "gptq_v2"), "gptq") == "gptq"
    if any(not rule.startswith("-:") for rule in config.part("dynamic").fields):
        raise config.error("dynamic", config.get("dynamic"), "all modules must have the same bits and groups")
    qweight = module.tensor("qweight", ("I32",), (None, None))
    in_features, out_features = qweight.shape[0] * _WORD_BITS // bits, qweight.shape[1]
    group = module.group(config, in_features)
    groups = in_features // group.inputs
    qzeros = module.tensor("qzeros", ("I32",), (groups, -(-out_features * bits // _WORD_BITS)))
    scales = module.tensor("scales", _FLOATS, (groups, out_features))
    return module.weight(
        _CODINGS[bits],
        (out_features, in_features),
        group,
        rows=lambda: qweight.read().t().contiguous().view(torch.uint8),
        scales=lambda: scales.read().t(),
        zeros=lambda: _codes(qzeros.read(), bits)[:, :out_features].t() + is_older & (1 << bits) - 1,
        group_of=module.group_of("g_idx", in_features, is_needed=groups > 1 and bool(config.get("desc_act"))),
    )


def _fp8(module: _Module) -> QuantizedWeight:
    """weight [out, in] in E4M3 and weight_scale_inv, one for each block or one for all; AutoFP8 has weight_scale, one
    for all."""
    weight = module.tensor("weight", ("F8_E4M3",), (None, None))
    block = _block_of(module.config, "weight_block_size")
    is_older = block is None and module.has("weight_scale")
    return _of_octets(module, weight, "weight_scale" if is_older else "weight_scale_inv", block, rounds_inputs=True)


def _block_of(config: _Configuration, field: str) -> _Block | None:
    block = config.get(field)
    if block is None:
        return None
    if isinstance(block, str) and (sizes := re.fullmatch(r"(\d{1,9})x(\d{1,9})", block)):
        # As older releases of compressed-tensors wrote it.
        block = [int(size) for size in sizes.groups()]
    if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        raise config.error(field, block, "expected the outputs and the inputs of a block")
    return _Block(*block)


def _of_octets(
    module: _Module, weight: StoredTensor, kind: str, block: _Block | None, *, rounds_inputs: bool
) -> QuantizedWeight:
    """A weight of a byte a number, with a scale for each block, or one for all."""
    shape, has_one = weight.shape, block is None
    block = _Block(*shape) if block is None else _Block(min(block.outputs, shape[0]), min(block.inputs, shape[1]))
    grid = block.grid(shape)
    scales = module.tensor(kind, _FLOATS, grid, *([(1,), ()] if has_one else []))
    rows, of_blocks = _octets(weight), lambda: scales.read().view(grid)
    coding = _OF_OCTETS[weight.dtype]
    return module.weight(coding, shape, block, rows=rows, scales=of_blocks, rounds_inputs=rounds_inputs)


def _octets(weight: StoredTensor) -> Callable[[], torch.Tensor]:
    """Reads codes that are bytes; integers become 0 and more. Raises ConfigurationError for NaN."""

    def read() -> torch.Tensor:
        octets = weight.read().view(torch.uint8)
        if weight.dtype == "I8":
            return octets ^ 0x80
        if bool(((octets & 0x7F) == 0x7F).any()):
            raise ConfigurationError(f"{weight.file}: tensor {weight.name} has NaN; the file is damaged")
        return octets

    return read


def _compressed(module: _Module) -> QuantizedWeight:
    """weight_packed, words of several inputs, and weight_shape; or weight [out, in] with a byte per number.
    weight_scale is one number, or one for each output, group or block. Only groups have zeros; with packed weights the
    zeros are packed by outputs, too, which older releases did not do."""
    config = module.config
    config.one_of("format", _COMPRESSED)
    # "frozen" is of before the weights were compressed; older releases wrote it with compressed ones.
    config.one_of("quantization_status", ("compressed", "frozen"), "compressed")
    if config.part("sparsity_config").get("format") not in (None, "dense"):
        raise config.error("sparsity_config", config.get("sparsity_config"), "sparse weights are not read")
    if config.part("transform_config").get("config_groups"):
        raise config.error("transform_config", config.get("transform_config"), "rotated weights are not read")
    scheme = _scheme_of(module)
    scheme.one_of("format", _COMPRESSED, "mixed-precision")
    weights = scheme.part("weights")
    is_packed = module.has("weight_packed")
    if is_packed:
        stored, bits = module.tensor("weight_packed", ("I32",), (None, None)), weights.one_of("num_bits", _CODINGS)
        shape = module.tensor("weight_shape", _INTEGERS, (2,)).read().tolist()
        if (shape[0], -(-shape[1] * bits // _WORD_BITS)) != stored.shape:
            raise module.error(f"has weight_shape {shape}, and weight_packed has shape {list(stored.shape)}")
    else:
        stored, bits = module.tensor("weight", _OF_OCTETS, (None, None)), 8
        weights.one_of("num_bits", (4, 8) if stored.dtype == "I8" else (8,))
        shape = stored.shape
    weights.one_of("type", ("float",) if stored.dtype == "F8_E4M3" else ("int",), "int")
    strategy = weights.one_of(
        "strategy", ("channel", "group") if is_packed else ("tensor", "channel", "group", "block")
    )
    has_zeros = not weights.one_of("symmetric", (True, False), True)
    inputs = scheme.part("input_activations")
    rounds_inputs = inputs.get("type") == "float" and inputs.get("num_bits") == 8
    if strategy in ("tensor", "block"):
        if has_zeros:
            raise weights.error("symmetric", False, f"with strategy {strategy} only symmetric weights are read")
        block = _block_of(weights, "block_structure") if strategy == "block" else None
        return _of_octets(module, stored, "weight_scale", block, rounds_inputs=rounds_inputs)
    (out_features, in_features), group = shape, _Block(1, shape[1])
    if strategy == "group":
        group = module.group(weights, in_features)
    grid = group.grid(shape)
    scales = module.tensor("weight_scale", _FLOATS, grid)
    zeros, is_mixed = None, weights.get("actorder") in _MIXED_ORDERS
    if has_zeros:
        words = (-(-out_features * bits // _WORD_BITS), grid[1])
        zeros = module.tensor("weight_zero_point", ("I32", "I8"), grid, words)
    return module.weight(
        _CODINGS[bits] if is_packed else _OF_OCTETS[stored.dtype],
        shape,
        group,
        rows=(lambda: stored.read().view(torch.uint8)[:, : in_features * bits // 8]) if is_packed else _octets(stored),
        scales=scales.read,
        zeros=None if zeros is None else lambda: _signed_zeros(zeros, bits, out_features),
        group_of=module.group_of("weight_g_idx", in_features, is_needed=grid[1] > 1 and is_mixed),
        rounds_inputs=rounds_inputs,
    )


def _scheme_of(module: _Module) -> _Configuration:
    """The group of the configuration that a module is in. As in the package, a name of the module comes before an
    expression, and that before all linear layers; of several expressions the first in alphabetical order counts."""
    groups = module.config.part("config_groups")
    schemes = [groups.part(name) for name in groups.fields]
    of_targets = {target: scheme for scheme in schemes for target in scheme.names("targets")}
    for target in sorted(of_targets, key=lambda each: (each == "Linear", each.startswith("re:"), each)):
        if target == "Linear" or module.is_meant(target):
            return of_targets[target]
    raise module.error(f"is quantized, but is in no group of {groups.name}")


def _signed_zeros(stored: StoredTensor, bits: int, out_features: int) -> torch.Tensor:
    """[out, groups] uint8. Raises ConfigurationError for a zero that no code represents."""
    if stored.dtype == "I32":
        return _codes(stored.read().t(), bits)[:, :out_features].t()
    zeros, middle = stored.read(), 1 << (bits - 1)
    for zero in (zeros.min().item(), zeros.max().item()):
        if not -middle <= zero < middle:
            raise ConfigurationError(
                f"{stored.file}: tensor {stored.name} has {zero}; expected {-middle} to {middle - 1}"
            )
    return (zeros.short() + middle).to(torch.uint8)


def _rounded_inputs(config: _Configuration) -> str | None:
    """The type that the inputs of layers are rounded to, according to the configuration."""
    if config.get("quant_method") == "fp8":
        return "FP8"
    groups = config.part("config_groups")
    inputs = [groups.part(name).part("input_activations") for name in groups.fields]
    return next((f"{each.get('num_bits')} bits ({each.get('type')})" for each in inputs if each.fields), None)


_READERS: dict[str, Callable[[_Module], QuantizedWeight]] = {
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
}
