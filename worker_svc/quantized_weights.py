"""Quantized weights of safetensors files: of tools with formats of their own, of packages, and GPT-OSS's MXFP4.

The readers give one weight for the tensors of a module. Layers that multiply codes take codes as they are; for other
layers weights are brought to float32 when they are read.

The tensors of a file show which modules are quantized; modules that the configuration leaves out must not be. Some
formats round the inputs of layers, too. Here only FP8 products on a GPU do so. Elsewhere inputs keep their dtype, so
that answers are closer to the original model's; the log says so.
"""

import logging
from collections.abc import Callable, Mapping

from quire.model_files.model_directory import ModelDirectory
from quire.runtime.settings import ConfigurationError
from quire_kernels.packed_weight import CodedWeight, Coding
from worker_svc.quantized_formats import (
    MXFP4_GROUP,
    OF_OCTETS,
    awq,
    compressed,
    fp8,
    gptq,
)
from worker_svc.quantized_module import Configuration, ExpandedWeight, Module, QuantizedWeight
from worker_svc.quantized_packages import auto_round, bitsandbytes, hqq, modelopt, torchao
from worker_svc.weights import Checkpoint, SafeTensor, StoredTensor

_logger = logging.getLogger(__name__)
_WITH_INPUTS_FIRST = {"GPT2LMHeadModel", "OpenAIGPTLMHeadModel"}
"""Models whose weights are [in, out]; packages quantize them with the outputs first."""


def with_quantized_weights(
    checkpoint: Checkpoint, described: ModelDirectory, *, has_fp8_products: bool = False
) -> Checkpoint:
    """As `read_quantized_weights`, which raises, with a line in the log about inputs that stay as they are. With
    `has_fp8_products`, products round their inputs to FP8 where the format does so."""
    checkpoint = read_quantized_weights(checkpoint, described)
    fields = described.config.get("quantization_config")
    if not fields or fields.get("quant_method") == "mxfp4":
        return checkpoint
    weights = [each for each in checkpoint.tensors.values() if isinstance(each, QuantizedWeight | ExpandedWeight)]
    are_rounded = has_fp8_products and all(
        isinstance(weight, QuantizedWeight) and weight.rounds_inputs for weight in weights
    )
    config = Configuration(described.path / "config.json", fields)
    if not are_rounded and (inputs := _rounded_inputs(config)) is not None:
        _logger.warning("%s: inputs of layers are not rounded to %s, only their weights are", config.file, inputs)
    return checkpoint


def read_quantized_weights(checkpoint: Checkpoint, described: ModelDirectory) -> Checkpoint:
    """The checkpoint with a `QuantizedWeight` or an `ExpandedWeight` in the place of the tensors that it consists of.

    Raises:
        ConfigurationError: the configuration names a format that is not read, or the files contradict it.
    """
    fields = described.config.get("quantization_config")
    if not fields or any(isinstance(each, QuantizedWeight) for each in checkpoint.tensors.values()):
        return checkpoint
    config = Configuration(described.path / "config.json", fields)
    if (tool := _NOT_READ.get(str(config.get("quant_method")))) is not None:
        raise config.error("quant_method", config.get("quant_method"), f"{tool}; supported: {', '.join(_READERS)}")
    read = _READERS[config.one_of("quant_method", _READERS)]
    left_out = config.names("modules_to_not_convert") + config.names("ignore")
    tensors = dict(checkpoint.tensors)
    for name, stored in checkpoint.tensors.items():
        owner, _, kind = name.rpartition(".")
        if kind not in _KINDS and (kind != "weight" or not _has_codes(name, checkpoint.tensors)):
            continue
        module = Module(owner, checkpoint.tensors, config, stored.name.rpartition(".")[0])
        if any(map(module.is_meant, left_out)):
            raise module.error(f"is quantized, but {config.name} says that it is not")
        weight = read(module)
        for used in module.used:
            tensors.pop(used, None)
        tensors[weight.name] = _turned(weight) if described.architecture in _WITH_INPUTS_FIRST else weight
    return checkpoint.with_tensors(tensors)


def _turned(weight: QuantizedWeight | ExpandedWeight) -> ExpandedWeight:
    kind = weight.coding if isinstance(weight, ExpandedWeight) else weight.dtype
    shape = weight.shape[::-1]
    return ExpandedWeight(weight.file, weight.name, kind, shape, weight.num_bytes, lambda: weight.read().T)


def _has_codes(weight: str, tensors: Mapping[str, StoredTensor]) -> bool:
    """Whether a tensor called weight has codes: by its dtype, or by its scales in bitsandbytes, which may store bytes
    under any dtype."""
    return tensors[weight].dtype in (*OF_OCTETS, "U8") or f"{weight}.absmax" in tensors


def with_mxfp4_experts(checkpoint: Checkpoint, described: ModelDirectory) -> Checkpoint:
    """The checkpoint with a `QuantizedWeight` for each matrix of each expert that is stored in MXFP4, as in GPT-OSS.

    All experts of a layer are in one tensor: blocks [experts, out, groups, 16], two codes in a byte, and the exponents
    of scales [experts, out, groups]. Gates and ups take turns in the outputs.

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
        rows, exponents = blocks.expert(number)[outputs].flatten(1), scales.expert(number)[outputs].contiguous()
        return CodedWeight.of_fp4(Coding.MXFP4, rows, exponents)

    shape = (len(range(out_features)[outputs]), groups * MXFP4_GROUP)
    num_bytes = shape[0] * groups * (MXFP4_GROUP // 2 + 1)
    return QuantizedWeight(blocks.file, name, Coding.MXFP4.value, shape, num_bytes, False, decode)


def codings_of(checkpoint: Checkpoint) -> set[str]:
    """The encodings of its quantized weights."""
    return {tensor.dtype for tensor in checkpoint.tensors.values() if isinstance(tensor, QuantizedWeight)}


def _rounded_inputs(config: Configuration) -> str | None:
    """The type that the inputs of layers are rounded to, according to the configuration."""
    method = config.get("quant_method")
    if method == "fp8":
        return "FP8"
    if method == "modelopt":
        return str(config.get("quant_algo") or config.part("quantization").get("quant_algo"))
    if method == "bitsandbytes":
        return "8 bits (int)" if config.get("load_in_8bit") else None
    if method == "torchao":
        return "8 bits" if "DynamicActivation" in str(config.get("quant_type")) else None
    groups = config.part("config_groups")
    inputs = [groups.part(name).part("input_activations") for name in groups.fields]
    return next((f"{each.get('num_bits')} bits ({each.get('type')})" for each in inputs if each.fields), None)


_READERS: dict[str, Callable[[Module], QuantizedWeight | ExpandedWeight]] = {
    "awq": awq,
    "gptq": gptq,
    "compressed-tensors": compressed,
    "fp8": fp8,
    "bitsandbytes": bitsandbytes,
    "modelopt": modelopt,
    "auto-round": auto_round,
    "hqq": hqq,
    "torchao": torchao,
}
_KINDS = ("qweight", "weight_packed", "W_q", "_weight_qdata")
"""Names of tensors with codes, other than weight."""
_NOT_READ = {"mlx": "weights of MLX are not read, take the model that they were made of, or a GGUF file of it"}
