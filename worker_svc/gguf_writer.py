"""Writes a model as a GGUF file, its matrices in a type or a mix of types that llama.cpp has a name for."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from quire.model_files.gguf_fields import check_read_back, metadata_of, rotation_factors
from quire.model_files.gguf_header import GgufHeader, GgufTensor
from quire.model_files.model_directory import ModelDirectory
from quire.runtime.settings import ConfigurationError
from worker_svc.gguf_codes import Array, encode
from worker_svc.models.decoder import DecoderConfig
from worker_svc.models.gpt2_opt import GPT2Config
from worker_svc.models.registry import FAMILIES
from worker_svc.models.rope import RopeConfig
from worker_svc.weights import DTYPE_BYTES, Checkpoint, Progress, StoredTensor

_ALIASES = {"Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}
# The type of most matrices, and the type of the matrices that lose most by rounding.
_MIXES = {
    "Q4_K_M": ("Q4_K", "Q6_K"),
    "Q4_K_S": ("Q4_K", "Q5_K"),
    "Q5_K_M": ("Q5_K", "Q6_K"),
    "Q5_K_S": ("Q5_K", "Q5_K"),
    "IQ4_XS": ("IQ4_XS", "Q5_K"),
}
_PLAIN = ("Q8_0", "BF16", "F16", "F32")
FORMATS = (*_MIXES, "Q6_K", "Q5_0", "Q5_1", "Q4_0", "Q4_1", *_PLAIN, *_ALIASES)
# Where rows are no multiple of 256.
_OF_SHORT_BLOCKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "IQ4_XS": "IQ4_NL"}
_NEVER_CODED = re.compile(r".*(norm|ffn_gate_inp|ffn_gate_inp_shexp|position_embd)\.weight|.*\.bias")
_EXPERT = re.compile(r"(?P<before>.*experts)\.(?P<number>\d+)(?P<after>\..*)")
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight")
"""Ends of its names."""
_NO_WEIGHTS = re.compile(r"(.*\.)?(attn\.(masked_)?bias|rotary_emb\.inv_freq)")


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    shape: tuple[int, ...]
    read: Callable[[], Array]
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32

    @property
    def num_bytes(self) -> int:
        elements, num_bytes = gguf.GGML_QUANT_SIZES[self.kind]
        return math.prod(self.shape) // elements * num_bytes


def write_gguf(directory: Path, file: Path, format: str, progress: Progress) -> None:
    """Writes the model of a directory, or of another GGUF file, to `file`, which appears once it is whole.

    Args:
        format: one of FORMATS.
        progress: Called with the bytes that are written, and with the bytes of all.

    Raises:
        ConfigurationError: one line: the part of the model that GGUF files cannot hold, or why nothing can be written.
    """
    model, format = _as_served(ModelDirectory.open(directory)), _ALIASES.get(format, format)
    metadata = metadata_of(model)
    model, stored = _with_head(model, Checkpoint.of_model(model).tensors)
    tensors = _tensors(model, stored, metadata["general.architecture"], format)
    described = {each.name: GgufTensor(each.name, each.kind, each.shape, file, 0, 0) for each in tensors}
    _check_served_alike(model, check_read_back(model, GgufHeader(file, metadata, described)))
    for name, factors in rotation_factors(model).items():
        tensors.insert(0, _Tensor(name, (len(factors),), lambda factors=factors: np.array(factors, np.float32)))
    writer = gguf.GGUFWriter(None, metadata.pop("general.architecture"))
    writer.add_file_type(gguf.LlamaFileType[f"{'ALL' if format == 'F32' else 'MOSTLY'}_{format}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in metadata.items():
        add.get(type(value), writer.add_array)(key, value)
    for each in tensors:
        writer.add_tensor_info(each.name, each.shape, np.dtype(np.float32), each.num_bytes, each.kind)
    partial = file.with_name(f"{file.name}.partial")
    try:
        try:
            writer.write_header_to_file(partial)
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            done, total = 0, sum(each.num_bytes for each in tensors)
            for each in tensors:
                writer.write_tensor_data(encode(each.read(), each.kind.name))
                progress(done := done + each.num_bytes, total)
            writer.close()
            partial.rename(file)
        finally:
            # Before close, which fails if buffered content cannot be written.
            partial.unlink(missing_ok=True)
            writer.close()
    except OSError as error:
        # numpy says only how much it has written.
        reason = error.strerror or f"{error}; is the disk full?"
        raise ConfigurationError(f"cannot write {file}: {reason}") from error


def _as_served(model: ModelDirectory) -> ModelDirectory:
    """The model with a complete configuration: with the workers' defaults for missing fields, and with one of several
    forms of a field."""
    family = FAMILIES.get(model.architecture)
    match None if family is None else family.read_config(model.config):
        case GPT2Config() as config:
            return replace(model, config={**model.config, **_fields_of_gpt2(config)})
        case DecoderConfig() as config:
            return replace(model, config={**model.config, **_fields_of_decoder(config)})
        case _:
            return model


def _fields_of_gpt2(config: GPT2Config) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "n_embd": config.hidden_size,
        "n_inner": config.inner_size,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_positions": config.max_positions,
        "layer_norm_epsilon": config.layer_norm_eps,
        "tie_word_embeddings": config.tied,
    }


def _fields_of_decoder(config: DecoderConfig) -> dict[str, Any]:
    found: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": config.activation,
        "hidden_activation": config.activation,
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "max_position_embeddings": config.rope.max_positions,
        "tie_word_embeddings": config.tied,
        "rope_scaling": None,
        "rope_parameters": _rope_section(config.rope),
    }
    windows = [window for window in config.sliding_windows if window is not None]
    if windows or config.sliding_rope is None:
        found["sliding_window"] = windows[0] if windows else None
    if config.sliding_rope is not None:
        sections = {"full_attention": config.rope, "sliding_attention": config.sliding_rope}
        found["rope_parameters"] = {kind: _rope_section(rope) for kind, rope in sections.items()}
        found["layer_types"] = [
            "full_attention" if window is None else "sliding_attention" for window in config.sliding_windows
        ]
    return found


def _rope_section(rope: RopeConfig) -> dict[str, Any]:
    section = {name: value for name, value in rope.fields.values.items() if value is not None}
    section |= {"rope_type": rope.rope_type, "rope_theta": rope.theta}
    if rope.rope_type in ("llama3", "longrope", "yarn"):
        section["original_max_position_embeddings"] = rope.original_max_positions
    return section


def _check_served_alike(model: ModelDirectory, read_back: Mapping[str, Any]) -> None:
    """Raises ConfigurationError where workers take a configuration that was read back for another model. Rotations are
    checked as they are written."""
    families = FAMILIES[model.architecture], FAMILIES[read_back["architectures"][0]]
    ours, theirs = (
        family.read_config(config) for family, config in zip(families, (model.config, read_back), strict=True)
    )
    for field in fields(ours):
        if field.name in ("rope", "sliding_rope"):
            continue
        expected, found = (getattr(each, field.name) for each in (ours, theirs))
        if expected != found:
            raise ConfigurationError(
                f"{model.path}: {field.name} is {expected!r:.80}, and a GGUF file of such a model means {found!r:.80}"
            )


def _with_head(
    model: ModelDirectory, tensors: Mapping[str, StoredTensor]
) -> tuple[ModelDirectory, dict[str, StoredTensor]]:
    """The model and its tensors as workers take them: a matrix that embedding and head share may be stored only as the
    head, and a head that differs from the embedding is not shared, even if the configuration says so."""
    stored = dict(tensors)
    embedding = next((tensor for name, tensor in stored.items() if name.endswith(_EMBEDDINGS)), None)
    if (head := stored.get(_HEAD)) is None:
        return model, stored
    if embedding is None:
        stored[_EMBEDDING] = stored.pop(_HEAD)
    elif model.config.get("tie_word_embeddings"):
        if not torch.equal(head.read(), embedding.read()):
            return replace(model, config={**model.config, "tie_word_embeddings": False}), stored
        del stored[_HEAD]
    return model, stored


def _tensors(
    model: ModelDirectory, stored: Mapping[str, StoredTensor], architecture: str, format: str
) -> list[_Tensor]:
    """In the order of layers, with the names, layouts and types of the file."""
    num_layers = model.config.get("num_hidden_layers") or model.config["n_layer"]
    (arch,) = (arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, num_layers)
    sources: dict[str, list[StoredTensor]] = {}
    for name in sorted(stored, key=lambda name: [int(part) if part.isdigit() else -1 for part in name.split(".")]):
        expert = _EXPERT.fullmatch(name)
        base, _, suffix = (name if expert is None else expert["before"] + expert["after"]).rpartition(".")
        if _NO_WEIGHTS.fullmatch(name):
            continue
        written = names.get_name(base)
        if written is None or stored[name].dtype not in (*DTYPE_BYTES, *gguf.GGMLQuantizationType.__members__):
            problem = "has no name in GGUF files" if written is None else f"has dtype {stored[name].dtype}"
            raise ConfigurationError(f"{stored[name].file}: tensor {name} {problem}; it cannot be written")
        sources.setdefault(f"{written}.{suffix}", []).append(stored[name])
    has_output = "output.weight" in sources
    found: list[_Tensor] = []
    for name, parts in sources.items():
        shape = parts[0].shape if len(parts) == 1 and "_exps" not in name else (len(parts), *parts[0].shape)
        arrange = _arrangement(name, architecture, model.config)
        if architecture == "gpt2" and len(shape) == 2 and name.startswith("blk."):
            shape = shape[::-1]
        layer = int(name.split(".")[1]) if name.startswith("blk.") else 0
        kind = _kind(name, format, layer, model.config, has_output)
        found.append(
            _Tensor(
                name,
                shape,
                lambda parts=parts, arrange=arrange, shape=shape: _read(parts, arrange).reshape(shape),
                _fitting(kind, shape),
            )
        )
    return found


def _read(parts: Sequence[StoredTensor], arrange: Callable[[Array], Array]) -> Array:
    read = [arrange(part.read().float().numpy()) for part in parts]
    return np.ascontiguousarray(read[0] if len(read) == 1 else np.stack(read))


def _arrangement(name: str, architecture: str, config: Mapping[str, Any]) -> Callable[[Array], Array]:
    """Converts the layout of transformers to the file's: the inverse of the conversion in `worker_svc.gguf_weights`."""
    base = name.split(".")[-2]
    if architecture == "gpt2" and base in ("attn_qkv", "attn_output", "ffn_up", "ffn_down"):
        return lambda stored: stored.T
    if architecture == "llama" and base in ("attn_q", "attn_k"):
        num_heads = config["num_attention_heads"]
        num_heads = num_heads if base == "attn_q" else config.get("num_key_value_heads") or num_heads
        return lambda stored: stored.reshape(num_heads, 2, -1, *stored.shape[1:]).swapaxes(1, 2).reshape(stored.shape)
    if architecture.startswith("gemma") and base.endswith("_norm"):
        return lambda stored: stored + 1
    return lambda stored: stored


def _kind(name: str, format: str, layer: int, config: Mapping[str, Any], has_output: bool) -> str:
    """The type of a matrix, as llama.cpp mixes them: the last and some layers in between have more bits."""
    if _NEVER_CODED.fullmatch(name):
        return "F32"
    usual, long = _MIXES.get(format, (format, format))
    if format in _PLAIN:
        return usual
    if name == ("output.weight" if has_output else "token_embd.weight"):
        return "Q6_K"
    num_layers, base = config.get("num_hidden_layers") or config["n_layer"], name.split(".")[-2]
    is_first, has_8_experts = layer < num_layers // 8, config.get("num_local_experts", config.get("num_experts")) == 8
    is_chosen = is_first or layer >= 7 * num_layers // 8 or (layer - num_layers // 8) % 3 == 2
    if base in ("attn_v", "attn_k") and has_8_experts:
        return "Q8_0"
    if base == "attn_output" and has_8_experts and usual in ("Q4_K", "IQ4_XS"):
        return "Q5_K"
    match format, base:
        case (("Q4_K_M" | "Q5_K_M"), ("attn_v" | "ffn_down" | "ffn_down_exps")):
            return long if is_chosen else usual
        case (("Q4_K_S" | "IQ4_XS"), ("ffn_down" | "ffn_down_exps")):
            return long if is_first else usual
        case "Q4_K_S", "attn_v":
            return long if layer < 4 else usual
        case "IQ4_XS", "attn_v":
            kv_heads = config.get("num_key_value_heads") or config["num_attention_heads"]
            return long if config["num_attention_heads"] >= 4 * kv_heads else usual
        case (("Q4_K_M" | "Q5_K_M"), "attn_qkv"):
            return "Q5_K" if format == "Q4_K_M" else "Q6_K"
    return usual


def _fitting(kind: str, shape: Sequence[int]) -> gguf.GGMLQuantizationType:
    """The type, or one whose blocks the rows are a multiple of. Vectors are float32."""
    if len(shape) == 1:
        kind = "F32"
    for each in (kind, _OF_SHORT_BLOCKS.get(kind, kind), "F16"):
        if shape[-1] % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[each]][0] == 0:
            return gguf.GGMLQuantizationType[each]
    raise AssertionError("blocks of float16 are single numbers")
