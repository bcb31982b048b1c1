"""Quantized weights as packages save them: bitsandbytes, ModelOpt, AutoRound, HQQ and torchao.

Codes stay codes if their scales are of 32 inputs or more, or of 16 in NVFP4. Others are expanded, and so are codes with
zeros between two codes.
"""

import json
import math
from typing import Any

import torch
from safetensors import safe_open

from quire_kernels.packed_weight import CodedWeight, Coding, GroupScales
from worker_svc.quantized_formats import OF_OCTETS, awq, gptq, nvfp4, octets, of_octets
from worker_svc.quantized_module import FLOATS, Block, Configuration, ExpandedWeight, Module, QuantizedWeight
from worker_svc.weights import StoredTensor

_BITSANDBYTES_4_BITS = ("nf4", "fp4")
_HQQ_PACKINGS = {"8bit_u8": (8, 1), "4bit_u8": (4, 2), "2bit_u8": (2, 4), "1bit_u8": (1, 8), "3bit_32": (3, 10)}
"""Bits of a code, and codes of a byte or word: the first rows are in the highest bits."""
_TORCHAO_OCTETS = ("Int8Tensor", "IntxUnpackedToInt8Tensor", "Float8Tensor")


def bitsandbytes(module: Module) -> QuantizedWeight:
    """LLM.int8: weight [out, in] and SCB, the largest number of each output, whose code is 127. NF4 and FP4: see
    `_four_bits`."""
    if not module.has("SCB"):
        return _four_bits(module)
    weight = module.tensor("weight", ("I8",), (None, None))
    if module.has("weight_format") and (layout := _number(module, "weight_format")) != 0:
        raise module.error(f"has weight_format {layout}; expected 0, rows one after the other")
    largest = module.tensor("SCB", ("F32",), (weight.shape[0],))
    return module.weight(
        Coding.INT8,
        weight.shape,
        Block(1, weight.shape[1]),
        rows=octets(weight),
        scales=lambda: largest.read().unsqueeze(1) / 127,
    )


def _four_bits(module: Module) -> QuantizedWeight:
    """weight, bytes under any dtype, with the first of two codes in the upper half; the numbers of the codes are in
    weight.quant_map. Blocks of the flat weight have a scale each, weight.absmax, or its code: then nested_quant_map has
    the numbers of those, less an offset, and nested_absmax their scales."""
    kind = next((each for each in _BITSANDBYTES_4_BITS if module.has(f"weight.quant_state.bitsandbytes__{each}")), None)
    if kind is None:
        raise module.error(f"has no weight.quant_state.bitsandbytes__ of {' or '.join(_BITSANDBYTES_4_BITS)}")
    state = _state(module, module.tensor(f"weight.quant_state.bitsandbytes__{kind}", ("U8",), (None,)))
    shape = state.sizes("shape", 2)
    if shape[1] % 2:
        raise module.error(f"has {shape[1]} inputs; expected a multiple of 2")
    count = shape[0] * shape[1]
    block = min(state.sizes("blocksize")[0], count)
    num_blocks = -(-count // block)
    weight = module.tensor("weight", ("U8", "I8", *FLOATS), (None, 1), (1, None), (None, None))
    if weight.num_bytes != -(-count // 2):
        raise module.error(f"has a weight of {weight.num_bytes} bytes; expected {-(-count // 2)} for shape {shape}")
    numbers = module.tensor("weight.quant_map", ("F32",), (16,))
    if module.shape_of("weight.absmax") == (shape[1] // block, shape[0]):
        raise module.error(
            "has scales in the order of a CPU: bitsandbytes saved the model after it had run there, and then reads "
            "its scales wrongly, too; save it before it runs, or with bnb_4bit_use_double_quant"
        )
    absmax = module.tensor("weight.absmax", ("F32", "U8"), (num_blocks,))
    nested: tuple[StoredTensor, StoredTensor] | None = None
    nested_block, offset = 0, 0.0
    if absmax.dtype == "U8":
        nested_block, offset = min(state.sizes("nested_blocksize")[0], num_blocks), state.number("nested_offset")
        nested = (
            module.tensor("weight.nested_quant_map", ("F32",), (256,)),
            module.tensor("weight.nested_absmax", ("F32",), (-(-num_blocks // nested_block),)),
        )

    def decode() -> CodedWeight:
        scales = absmax.read()
        if nested is not None:
            of_codes, of_blocks = (each.read() for each in nested)
            scales = of_codes[scales.int()] * of_blocks.repeat_interleave(nested_block)[:num_blocks] + offset
        codes = weight.read().contiguous().view(torch.uint8).flatten()
        # A block may end within a row.
        group = math.gcd(block, shape[1])
        scales = scales.repeat_interleave(block // group)[: count // group].view(shape[0], -1)
        rows = (codes << 4 | codes >> 4).view(shape[0], -1)
        return CodedWeight(Coding.TABLE4, rows, GroupScales(scales, None, group, table=numbers.read()))

    return module.decoded(Coding.TABLE4, shape, decode)


def modelopt(module: Module) -> QuantizedWeight:
    """FP8: weight [out, in] and weight_scale for all. NVFP4: weight [out, in / 2], weight_scale for each 16 inputs,
    and weight_scale_2, which multiplies these. hf_quant_config.json has the fields within "quantization"."""
    config = module.config if module.config.get("quant_algo") else module.config.part("quantization")
    algorithm = config.one_of("quant_algo", ("FP8", "NVFP4"))
    if module.has("pre_quant_scale"):
        raise module.error("has pre_quant_scale; inputs with scales are not read")
    if algorithm == "FP8":
        weight = module.tensor("weight", ("F8_E4M3",), (None, None))
        return of_octets(module, weight, "weight_scale", None, rounds_inputs=True)
    config.one_of("group_size", (16,), 16)
    packed = module.tensor("weight", ("U8",), (None, None))
    of_all = module.tensor("weight_scale_2", ("F32",), (), (1,))
    return nvfp4(module, packed, lambda: float(of_all.read()))


def auto_round(module: Module) -> QuantizedWeight:
    """The layouts of GPTQ and AWQ. extra_config has fields of single modules."""
    config = module.config
    packing = config.one_of("packing_format", ("auto_round:auto_gptq", "auto_round:auto_awq"))
    config.one_of("data_type", ("int",), "int")
    of_modules = config.part("extra_config")
    for name in filter(module.is_meant, of_modules.fields):
        module.config = Configuration(config.file, {**config.fields, **of_modules.part(name).fields}, config.name)
    return gptq(module) if packing == "auto_round:auto_gptq" else awq(module)


def hqq(module: Module) -> ExpandedWeight:
    """W_q, codes of groups, one group in each column (axis 0) or row (axis 1); scale and zero of each. The other
    fields, shape among them, are tensors of one number or text."""
    if module.has("scale_q") or module.has("zero_q"):
        raise module.error("has scales or zeros that are quantized, too; these are not read")
    packing = bytes(module.tensor("packing", ("U8",), (None,)).read().tolist()).decode("ascii", "replace")
    if packing not in _HQQ_PACKINGS:
        raise module.error(f"has packing {packing!r:.80}; supported: {', '.join(_HQQ_PACKINGS)}")
    bits, per_word = _HQQ_PACKINGS[packing]
    shape = tuple(module.tensor("shape", ("I64", "I32"), (2,)).read().tolist())
    axis, group = _number(module, "axis"), _number(module, "group_size")
    if axis not in (0, 1) or group < 1 or min(shape) < 1 or shape[0] * shape[1] % group:
        raise module.error(f"has axis {axis} and group_size {group} for shape {list(shape)}")
    count = shape[0] * shape[1] // group
    rows, columns = (group, count) if axis == 0 else (count, group)
    words = module.tensor("W_q", ("U8", "I32", *FLOATS), (None, None))
    of_groups = (1, count) if axis == 0 else (count, 1)
    scale, zero = (module.tensor(kind, FLOATS, of_groups) for kind in ("scale", "zero"))
    word = torch.int32 if bits == 3 else torch.uint8
    if words.num_bytes != -(-rows // per_word) * columns * word.itemsize:
        raise module.error(f"has {words.num_bytes} bytes of codes; expected {rows} rows of {columns} in {packing}")

    def expand() -> torch.Tensor:
        packed = words.read().flatten().view(word).view(-1, columns)
        shifts = range(bits * (per_word - 1), -1, -bits)
        codes = torch.cat([packed >> shift & (1 << bits) - 1 for shift in shifts])[:rows]
        return codes.float().sub_(zero.read().float()).mul_(scale.read().float()).reshape(shape)

    return module.expanded(f"HQQ with {bits} bits", shape, expand)


def torchao(module: Module) -> QuantizedWeight | ExpandedWeight:
    """The header of the file has the type of each weight, and its block_size. Types with a byte for a number:
    _weight_qdata [out, in], _weight_scale and perhaps _weight_zero_point for each block. Int4Tensor: _weight_qdata
    [out, in / 2], with zeros [groups, out] that are added after the product with the scale."""
    kind, fields = _torchao_type(module)
    if module.has("_weight_act_pre_scale"):
        raise module.error("has _weight_act_pre_scale; inputs with scales are not read")
    block = Block(*fields.sizes("block_size", 2))
    if kind == "Int4Tensor":
        return _torchao_int4(module, block)
    if kind not in _TORCHAO_OCTETS:
        raise module.error(f"is a {kind!r:.80} of torchao; supported: {', '.join((*_TORCHAO_OCTETS, 'Int4Tensor'))}")
    weight = module.tensor("_weight_qdata", tuple(OF_OCTETS), (None, None))
    shape = weight.shape
    grid = Block(min(block.outputs, shape[0]), min(block.inputs, shape[1])).grid(shape)
    scales = module.tensor("_weight_scale", FLOATS, grid, (grid[0] * grid[1],), *([()] if grid == (1, 1) else []))
    zeros: StoredTensor | None = None
    if module.has("_weight_zero_point"):
        zeros = module.tensor("_weight_zero_point", ("I8",), grid, (grid[0] * grid[1],))
    return module.weight(
        OF_OCTETS[weight.dtype],
        shape,
        Block(min(block.outputs, shape[0]), min(block.inputs, shape[1])),
        rows=octets(weight),
        scales=lambda: scales.read().view(grid),
        zeros=None if zeros is None else lambda: zeros.read().view(grid).view(torch.uint8) ^ 0x80,
    )


def _torchao_int4(module: Module, block: Block) -> ExpandedWeight:
    packed = module.tensor("_weight_qdata", ("I8", "U8"), (None, None))
    out_features, in_features = packed.shape[0], 2 * packed.shape[1]
    if block.outputs != 1 or in_features % block.inputs:
        raise module.error(f"has blocks of {block.outputs} outputs and {block.inputs} inputs")
    grid = (in_features // block.inputs, out_features)
    scales, zeros = (module.tensor(f"_weight_{kind}", FLOATS, grid) for kind in ("scale", "zero_point"))

    def expand() -> torch.Tensor:
        codes = packed.read().view(torch.uint8)
        signed = torch.stack((codes & 15, codes >> 4), -1).flatten(1).short()
        numbers = ((signed ^ 8) - 8).float().unflatten(1, (-1, block.inputs))
        scale, zero = (each.read().float().t().unsqueeze(-1) for each in (scales, zeros))
        return numbers.mul_(scale).add_(zero).flatten(1)

    return module.expanded("torchao's int4", (out_features, in_features), expand)


def _torchao_type(module: Module) -> tuple[str, "_State"]:
    """The type of a weight and its fields, from the header of its file."""
    stored = module.tensor("_weight_qdata", ("I8", "U8", "F8_E4M3", "I32"), (None, None))
    with safe_open(stored.file, framework="pt") as opened:
        text = (opened.metadata() or {}).get(f"{module.name_in_file}.weight", "")
    described = _State(module, _object(module, text, "header"))
    fields = described.get("_data")
    return str(described.get("_type")), _State(module, fields if isinstance(fields, dict) else {})


class _State:
    """A JSON object about one module."""

    def __init__(self, module: Module, fields: dict[str, Any]) -> None:
        self._module = module
        self._fields = fields

    def get(self, name: str) -> Any:
        return self._fields.get(name)

    def number(self, name: str) -> float:
        """Raises ConfigurationError if it is none."""
        value = self.get(name)
        if type(value) not in (int, float):
            raise self._module.error(f"has {name} {value!r:.80}; expected a number")
        return float(value)

    def sizes(self, name: str, count: int = 1) -> tuple[int, ...]:
        """That many numbers above 0. Raises ConfigurationError."""
        value = self.get(name)
        sizes = value if isinstance(value, list) else [value]
        if len(sizes) != count or not all(type(size) is int and size > 0 for size in sizes):
            raise self._module.error(f"has {name} {value!r:.80}; expected {count} numbers above 0")
        return tuple(sizes)


def _state(module: Module, stored: StoredTensor) -> _State:
    return _State(module, _object(module, bytes(stored.read().tolist()).decode("utf-8", "replace"), "quant_state"))


def _object(module: Module, text: str, place: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise module.error(f"has a {place} that is no JSON object: {text!r:.80}")
    return fields


def _number(module: Module, kind: str) -> int:
    """The number in a tensor of one."""
    return int(module.tensor(kind, ("U8", "I32", "I64"), (), (1,)).read().item())
