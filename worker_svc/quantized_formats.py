"""Formats of quantized weights that several tools write: AWQ, GPTQ, compressed-tensors, FP8 with scales of blocks.

A reader for each format brings codes, scales and zeros into the one form of `CodedWeight`. `GroupScales` says which
numbers they stand for.
"""

import re
from collections.abc import Callable

import torch

from quire.runtime.settings import ConfigurationError
from quire_kernels.packed_weight import CodedWeight, Coding
from worker_svc.quantized_module import FLOATS, INTEGERS, Block, Configuration, Module, QuantizedWeight
from worker_svc.weights import StoredTensor

CODINGS = {4: Coding.INT4, 8: Coding.INT8}
OF_OCTETS = {"I8": Coding.INT8, "F8_E4M3": Coding.FP8}
WORD_BITS = 32
# Where AWQ has the numbers of eight neighbouring outputs in a word.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
# Orders in which compressed-tensors has quantized inputs that mix the groups; others leave them in place.
_MIXED_ORDERS = (True, "group", "dynamic")
_FP4 = ("nvfp4-pack-quantized", "mxfp4-pack-quantized")
_COMPRESSED = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision"),
    *_FP4,
)
_NVFP4_GROUP, MXFP4_GROUP = 16, 32


def _codes(words: torch.Tensor, bits: int) -> torch.Tensor:
    """[n, words] int32 -> [n, codes] uint8, the lower bits of a word first."""
    octets = words.contiguous().view(torch.uint8)
    return octets if bits == 8 else torch.stack((octets & 15, octets >> 4), -1).flatten(1)


def awq(module: Module) -> QuantizedWeight:
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
    scales = module.tensor("scales", FLOATS, (in_features // group.inputs, 8 * words))

    def rows() -> torch.Tensor:
        octets = qweight.read().view(torch.uint8)
        first, second = octets[0::2], octets[1::2]  # of the inputs of a byte
        pairs = torch.stack((first & 15 | second << 4, first >> 4 | second & 0xF0), -1).flatten(1)
        return in_order(pairs.t().contiguous())

    def in_order(outputs: torch.Tensor) -> torch.Tensor:
        return outputs.unflatten(0, (-1, 8))[:, _AWQ_PLACES].flatten(0, 1)

    shape, zeros = (8 * words, in_features), lambda: in_order(_codes(qzeros.read(), 4).t())
    return module.weight(Coding.INT4, shape, group, rows=rows, scales=lambda: scales.read().t(), zeros=zeros)


def gptq(module: Module) -> QuantizedWeight:
    """Words of several inputs: qweight [in / 8, out], scales [groups, out], g_idx [in]; zeros in words of several
    outputs, qzeros [groups, out / 8], less one in the older of two formats, where 0 becomes the largest code.

    AutoGPTQ reads that code so, too; vLLM's kernel for GPTQ takes it for 16."""
    config = module.config
    bits = config.one_of("bits", CODINGS)
    is_older = config.one_of("checkpoint_format format", ("gptq", "gptq_v2"), "gptq") == "gptq"
    if any(not rule.startswith("-:") for rule in config.part("dynamic").fields):
        raise config.error("dynamic", config.get("dynamic"), "all modules must have the same bits and groups")
    qweight = module.tensor("qweight", ("I32",), (None, None))
    in_features, out_features = qweight.shape[0] * WORD_BITS // bits, qweight.shape[1]
    group = module.group(config, in_features)
    groups = in_features // group.inputs
    qzeros = module.tensor("qzeros", ("I32",), (groups, -(-out_features * bits // WORD_BITS)))
    scales = module.tensor("scales", FLOATS, (groups, out_features))
    return module.weight(
        CODINGS[bits],
        (out_features, in_features),
        group,
        rows=lambda: qweight.read().t().contiguous().view(torch.uint8),
        scales=lambda: scales.read().t(),
        zeros=lambda: _codes(qzeros.read(), bits)[:, :out_features].t() + is_older & (1 << bits) - 1,
        group_of=module.group_of("g_idx", in_features, is_needed=groups > 1 and bool(config.get("desc_act"))),
    )


def fp8(module: Module) -> QuantizedWeight:
    """weight [out, in] in E4M3 and weight_scale_inv, one for each block or one for all; AutoFP8 has weight_scale, one
    for all."""
    weight = module.tensor("weight", ("F8_E4M3",), (None, None))
    block = _block_of(module.config, "weight_block_size")
    is_older = block is None and module.has("weight_scale")
    return of_octets(module, weight, "weight_scale" if is_older else "weight_scale_inv", block, rounds_inputs=True)


def _block_of(config: Configuration, field: str) -> Block | None:
    block = config.get(field)
    if block is None:
        return None
    if isinstance(block, str) and (sizes := re.fullmatch(r"(\d{1,9})x(\d{1,9})", block)):
        # As older releases of compressed-tensors wrote it.
        block = [int(size) for size in sizes.groups()]
    if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        raise config.error(field, block, "expected the outputs and the inputs of a block")
    return Block(*block)


def of_octets(
    module: Module, weight: StoredTensor, kind: str, block: Block | None, *, rounds_inputs: bool
) -> QuantizedWeight:
    """A weight of a byte a number, with a scale for each block, or one for all."""
    shape, has_one = weight.shape, block is None
    block = Block(*shape) if block is None else Block(min(block.outputs, shape[0]), min(block.inputs, shape[1]))
    grid = block.grid(shape)
    scales = module.tensor(kind, FLOATS, grid, *([(1,), ()] if has_one else []))
    rows, of_blocks = octets(weight), lambda: scales.read().view(grid)
    coding = OF_OCTETS[weight.dtype]
    return module.weight(coding, shape, block, rows=rows, scales=of_blocks, rounds_inputs=rounds_inputs)


def octets(weight: StoredTensor) -> Callable[[], torch.Tensor]:
    """Reads codes that are bytes; integers become 0 and more. Raises ConfigurationError for NaN."""

    def read() -> torch.Tensor:
        octets = weight.read().view(torch.uint8)
        if weight.dtype == "I8":
            return octets ^ 0x80
        if bool(((octets & 0x7F) == 0x7F).any()):
            raise ConfigurationError(f"{weight.file}: tensor {weight.name} has NaN; the file is damaged")
        return octets

    return read


def nvfp4(module: Module, packed: StoredTensor, unit: Callable[[], float]) -> QuantizedWeight:
    """E2M1 codes [out, in / 2] and weight_scale, an E4M3 scale for each 16 inputs; `unit` reads a factor on them."""
    out_features, in_features = packed.shape[0], 2 * packed.shape[1]
    if in_features % _NVFP4_GROUP:
        raise module.error(f"has {in_features} inputs; expected a multiple of {_NVFP4_GROUP}")
    scales = octets(module.tensor("weight_scale", ("F8_E4M3",), (out_features, in_features // _NVFP4_GROUP)))
    return module.decoded(
        Coding.NVFP4,
        (out_features, in_features),
        lambda: CodedWeight.of_fp4(Coding.NVFP4, packed.read(), scales(), unit()),
    )


def _compressed_fp4(module: Module, weights: Configuration) -> QuantizedWeight:
    """weight_packed [out, in / 2]: MXFP4, with exponents of scales, or NVFP4 with weight_global_scale, which its scales
    are divided by."""
    packed = module.tensor("weight_packed", ("U8",), (None, None))
    weights.one_of("num_bits", (4,))
    weights.one_of("symmetric", (True,), True)
    if weights.one_of("group_size", (_NVFP4_GROUP, MXFP4_GROUP)) == _NVFP4_GROUP:
        of_all = module.tensor("weight_global_scale", ("F32",), (1,), ())
        return nvfp4(module, packed, lambda: float(1 / of_all.read()))
    shape = (packed.shape[0], 2 * packed.shape[1])
    scales = module.tensor("weight_scale", ("U8",), Block(1, MXFP4_GROUP).grid(shape))
    return module.decoded(Coding.MXFP4, shape, lambda: CodedWeight.of_fp4(Coding.MXFP4, packed.read(), scales.read()))


def compressed(module: Module) -> QuantizedWeight:
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
    if is_packed and weights.get("type") == "float":
        return _compressed_fp4(module, weights)
    if is_packed:
        stored, bits = module.tensor("weight_packed", ("I32",), (None, None)), weights.one_of("num_bits", CODINGS)
        shape = module.tensor("weight_shape", INTEGERS, (2,)).read().tolist()
        if (shape[0], -(-shape[1] * bits // WORD_BITS)) != stored.shape:
            raise module.error(f"has weight_shape {shape}, and weight_packed has shape {list(stored.shape)}")
    else:
        stored, bits = module.tensor("weight", OF_OCTETS, (None, None)), 8
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
        return of_octets(module, stored, "weight_scale", block, rounds_inputs=rounds_inputs)
    (out_features, in_features), group = shape, Block(1, shape[1])
    if strategy == "group":
        group = module.group(weights, in_features)
    grid = group.grid(shape)
    scales = module.tensor("weight_scale", FLOATS, grid)
    zeros, is_mixed = None, weights.get("actorder") in _MIXED_ORDERS
    if has_zeros:
        words = (-(-out_features * bits // WORD_BITS), grid[1])
        zeros = module.tensor("weight_zero_point", ("I32", "I8"), grid, words)
    return module.weight(
        CODINGS[bits] if is_packed else OF_OCTETS[stored.dtype],
        shape,
        group,
        rows=(lambda: stored.read().view(torch.uint8)[:, : in_features * bits // 8]) if is_packed else octets(stored),
        scales=scales.read,
        zeros=None if zeros is None else lambda: _signed_zeros(zeros, bits, out_features),
        group_of=module.group_of("weight_g_idx", in_features, is_needed=grid[1] > 1 and is_mixed),
        rounds_inputs=rounds_inputs,
    )


def _scheme_of(module: Module) -> Configuration:
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
