"""GGUF files of small models, written with the package `gguf` by its own table of names."""

import functools
import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
from safetensors.torch import load_file

_NUMBERS = {
    "context_length": ("max_position_embeddings", "n_positions"),
    "block_count": ("num_hidden_layers", "n_layer"),
    "embedding_length": ("hidden_size", "n_embd"),
    "feed_forward_length": ("intermediate_size", "n_inner"),
    "attention.head_count": ("num_attention_heads", "n_head"),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.key_length": ("head_dim",),
    "attention.sliding_window": ("sliding_window",),
    "expert_count": ("num_local_experts", "num_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
}
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_ARCHITECTURES = {"mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "gemma3_text": "gemma3"}
"""Architectures whose name is not the type of the model."""
_MOST_LAYERS = 8
_EXPERT = re.compile(r"(.*experts)\.\d+\.(.*)")
_TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")


_Stored = tuple[np.ndarray, gguf.GGMLQuantizationType | None]
Quantize = Callable[[str, np.ndarray], _Stored]


def write_gguf(
    file: Path,
    directory: Path,
    *,
    quantization: gguf.GGMLQuantizationType | Quantize = gguf.GGMLQuantizationType.F32,
    pre: str = "gpt-2",
    further: dict[str, Any] | None = None,
    template: str | None = None,
    tensors_per_part: int = 0,
    fused: bool = False,
) -> Path:
    """Writes the model of a directory to `file` as llama.cpp would; returns the file, or the first of its parts.

    Args:
        quantization: type of matrices, or a function of a matrix's name in the file; vectors stay float32.
        further: additional or changed metadata, by whole keys; "rope" are the factors of rotations.
        fused: joins tensors as the converter's --fuse-qkv and --fuse-gate-up-exps do.
    """
    config = json.loads((directory / "config.json").read_text())
    model_type: str = config["model_type"]
    architecture = _ARCHITECTURES.get(model_type, model_type)
    further = dict(further or {})
    factors = further.pop("rope", None)
    writer = gguf.GGUFWriter(file, architecture, split_max_tensors=tensors_per_part)
    writer.add_name(directory.name)
    if config.get("use_sliding_window") is False:
        config["sliding_window"] = None
    for key, names in _NUMBERS.items():
        value = next((config[name] for name in names if config.get(name) is not None), None)
        if value is None and key == "feed_forward_length":
            value = 4 * config["n_embd"]
        if value is not None:
            writer.add_uint32(f"{architecture}.{key}", value)
    if architecture == "gpt2":
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    else:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        rope = config.get("rope_parameters") or config
        writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    _add_rotation(writer, architecture, config)
    for name in _CAPS:
        if config.get(name) is not None:
            writer.add_float32(f"{architecture}.{name}", config[name])
    _add_tokenizer(writer, directory, pre)
    if template is not None:
        writer.add_chat_template(template)
    kinds = {
        bool: writer.add_bool,
        str: writer.add_string,
        int: writer.add_uint32,
        float: writer.add_float32,
        list: writer.add_array,
    }
    for key, value in further.items():
        # The writer takes each key once.
        writer.kv_data[0].pop(key, None)
        kinds[type(value)](key, value)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))
    tensors = dict(_stored_tensors(architecture, directory, config, quantization))
    for name, (data, raw) in (_fuse(tensors) if fused else tensors).items():
        writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return next(iter(sorted(file.parent.glob(f"{file.stem}-00001-of-*.gguf"))), file)


def _add_rotation(writer: gguf.GGUFWriter, architecture: str, config: dict[str, Any]) -> None:
    """The rotation of Phi-3: of a part of each head, with factors for short and long texts."""
    rope = config.get("rope_parameters") or {}
    if (share := rope.get("partial_rotary_factor")) is not None:
        head_dim = config["hidden_size"] // config["num_attention_heads"]
        writer.add_rope_dimension_count(int(head_dim * share))
    if rope.get("rope_type") != "longrope":
        return
    length, original = config["max_position_embeddings"], config["original_max_position_embeddings"]
    writer.add_rope_scaling_orig_ctx_len(original)
    writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(length / original) / math.log(original)))
    for kind in ("long", "short"):
        writer.add_tensor(f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], np.float32))


def _add_tokenizer(writer: gguf.GGUFWriter, directory: Path, pre: str) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    content = json.loads(tokenizer.to_str())
    names = {index: token for token, index in tokenizer.get_vocab(with_added_tokens=True).items()}
    tokens = [names[index] for index in range(len(names))]
    added = {each["content"]: each["special"] for each in content["added_tokens"]}
    is_piece = content["model"]["byte_fallback"]
    of_added = {True: gguf.TokenType.CONTROL, False: gguf.TokenType.USER_DEFINED, None: gguf.TokenType.NORMAL}
    kinds = [of_added[added.get(token)] for token in tokens]
    if is_piece:
        kinds = [
            gguf.TokenType.BYTE if token.startswith("<0x") else kind for token, kind in zip(tokens, kinds, strict=True)
        ]
        kinds[0] = gguf.TokenType.UNKNOWN
        ranks = {"".join(pair): -rank for rank, pair in enumerate(content["model"]["merges"], start=1)}
        writer.add_token_scores([float(ranks.get(token, -1e9)) for token in tokens])
        writer.add_unk_token_id(0)
    else:
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges([" ".join(pair) for pair in content["model"]["merges"]])
    writer.add_tokenizer_model("llama" if is_piece else "gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(tokens.index("<s>"))
    writer.add_eos_token_id(tokens.index("</s>"))


_FUSED = {"attn_qkv": ("attn_q", "attn_k", "attn_v"), "ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps")}


def _fuse(tensors: dict[str, _Stored]) -> dict[str, _Stored]:
    """Joins the rows of tensors that converters may merge, one after the other."""
    kept = dict(tensors)
    for fused, parts in _FUSED.items():
        for name in [name for name in tensors if f".{parts[0]}." in name]:
            pieces = [kept.pop(name.replace(parts[0], part)) for part in parts]
            joined = np.concatenate([data for data, _ in pieces], axis=-min(pieces[0][0].ndim, 2))
            kept[name.replace(parts[0], fused)] = (joined, pieces[0][1])
    return kept


@functools.cache
def _names_in_files(kind: gguf.MODEL_ARCH) -> gguf.TensorNameMap:
    return gguf.get_tensor_name_map(kind, _MOST_LAYERS)


def _stored_tensors(
    architecture: str, directory: Path, config: dict[str, Any], quantization: gguf.GGMLQuantizationType | Quantize
) -> Iterator[tuple[str, _Stored]]:
    """Names and contents as in the file, with the type of each quantized tensor."""
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    table = _names_in_files(kind)
    for name, data in _tensors(directory):
        base, _, suffix = name.rpartition(".")
        stored = table.get_name(base)
        assert stored is not None, name
        if architecture == "gpt2" and name.endswith(_TRANSPOSED):
            data = np.ascontiguousarray(data.T)
        if architecture == "llama" and "_proj" in name and (".q_proj" in name or ".k_proj" in name):
            heads = config["num_attention_heads" if ".q_proj" in name else "num_key_value_heads"]
            data = data.reshape(heads, 2, -1, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            data = data + 1
        raw = None
        if data.ndim > 1 and quantization is not gguf.GGMLQuantizationType.F32 and "gate_inp" not in stored:
            data = np.ascontiguousarray(data)
            if isinstance(quantization, gguf.GGMLQuantizationType):
                data, raw = gguf.quantize(data, quantization), quantization
            else:
                data, raw = quantization(stored, data)
        yield f"{stored}.{suffix}", (data, raw)


def _tensors(directory: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Tensors of the files of a directory; a layer's experts are joined in one."""
    experts: dict[str, list[np.ndarray]] = {}
    for file in sorted(directory.glob("*.safetensors")):
        content = load_file(file)
        for name in sorted(content, key=lambda name: [int(part) if part.isdigit() else 0 for part in name.split(".")]):
            data = content[name].float().numpy()
            if (expert := _EXPERT.fullmatch(name)) is None:
                yield name, data
            else:
                experts.setdefault(f"{expert[1]}.{expert[2]}", []).append(data)
    for name, parts in experts.items():
        yield name, np.stack(parts)
