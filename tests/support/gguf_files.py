"""GGUF files of small models, written with the package `gguf` by its own table of names."""

import json
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
}
_TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")


def write_gguf(
    file: Path,
    directory: Path,
    *,
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    pre: str = "gpt-2",
    further: dict[str, Any] | None = None,
    template: str | None = None,
) -> Path:
    """Writes the model of a directory to `file` as llama.cpp would.

    Args:
        quantization: of matrices; vectors stay float32.
        further: more metadata, or other values, by whole keys; "rope" are the factors of rotations.
    """
    config = json.loads((directory / "config.json").read_text())
    architecture = config["model_type"]
    further = dict(further or {})
    factors = further.pop("rope", None)
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_name(directory.name)
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
        writer.add_rope_freq_base((config.get("rope_parameters") or config)["rope_theta"])
    _add_tokenizer(writer, directory, pre)
    if template is not None:
        writer.add_chat_template(template)
    kinds = {bool: writer.add_bool, str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
    for key, value in further.items():
        # The writer takes each key once.
        writer.kv_data[0].pop(key, None)
        kinds[type(value)](key, value)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))
    _add_tensors(writer, directory, config, quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


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


def _add_tensors(
    writer: gguf.GGUFWriter, directory: Path, config: dict[str, Any], quantization: gguf.GGMLQuantizationType
) -> None:
    architecture = config["model_type"]
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    table = gguf.get_tensor_name_map(kind, 64)
    for file in sorted(directory.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            base, _, suffix = name.rpartition(".")
            stored = table.get_name(base)
            assert stored is not None, name
            data = tensor.float().numpy()
            if architecture == "gpt2" and name.endswith(_TRANSPOSED):
                data = np.ascontiguousarray(data.T)
            if architecture == "llama" and "_proj" in name and (".q_proj" in name or ".k_proj" in name):
                heads = config["num_attention_heads" if ".q_proj" in name else "num_key_value_heads"]
                data = data.reshape(heads, 2, -1, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)
            raw = None
            if data.ndim > 1 and quantization is not gguf.GGMLQuantizationType.F32:
                data, raw = gguf.quantize(np.ascontiguousarray(data), quantization), quantization
            writer.add_tensor(f"{stored}.{suffix}", np.ascontiguousarray(data), raw_dtype=raw)
