"""GGUF files of encoders, written with the package `gguf` by its own table of names, as llama.cpp's converter does."""

import json
from pathlib import Path
from typing import Any

import gguf
import tokenizers
from safetensors.torch import load_file

from tests.support.gguf_files import names_in_files, numbers_of, set_fields, write_and_close

ARCHITECTURES = {
    "bert": "bert",
    "roberta": "bert",
    "nomic_bert": "nomic-bert",
    "modernbert": "modern-bert",
    "gemma3_text": "gemma-embedding",
}
"""By model_type."""


def write_encoder_gguf(
    file: Path,
    directory: Path,
    pooling: gguf.PoolingType | None = gguf.PoolingType.MEAN,
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
) -> Path:
    """Writes the encoder of a directory, its head if it ranks, and its linear layers; returns `file`. `pooling` None is
    for rerankers, where llama.cpp's converter writes no field."""
    config = json.loads((directory / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(file, architecture)
    first_position = config["pad_token_id"] + 1 if config["model_type"] == "roberta" else 0
    fields = numbers_of(config)
    fields |= {"attention.causal": False, "context_length": config["max_position_embeddings"] - first_position}
    if pooling is not None:
        fields["pooling_type"] = pooling.value
    if "rms_norm_eps" in config:
        fields |= {"attention.layer_norm_rms_epsilon": config["rms_norm_eps"]}
        fields |= {"attention.value_length": config["head_dim"]}
    else:
        fields["attention.layer_norm_epsilon"] = config.get("layer_norm_eps", config.get("norm_eps"))
    rope = config.get("rope_parameters") or {}
    if rope:
        fields["rope.freq_base"] = rope.get("full_attention", rope)["rope_theta"]
    if "sliding_attention" in rope:
        fields["rope.freq_base_swa"] = rope["sliding_attention"]["rope_theta"]
        fields["attention.sliding_window"] = config.get("sliding_window", config.get("local_attention"))
        fields["attention.sliding_window_pattern"] = [each == "sliding_attention" for each in config["layer_types"]]
    set_fields(writer, fields, f"{architecture}.")
    _add_word_piece(writer, directory)
    names = names_in_files(architecture)
    for name, data in _tensors(directory, config["model_type"]):
        base, _, suffix = name.rpartition(".")
        if base == "embeddings.position_embeddings":
            data = data[first_position:]
        if architecture == "gemma-embedding" and "norm" in base:
            data = data + 1
        stored = names.get_name(base) or names.get_name(f"model.{base}")
        assert stored is not None, name
        is_coded = data.ndim > 1 and not stored.startswith(("position", "token_types"))
        writer.add_tensor(
            f"{stored}.{suffix}",
            gguf.quantize(data, quantization) if is_coded else data,
            raw_dtype=quantization if is_coded and quantization is not gguf.GGMLQuantizationType.F32 else None,
        )
    write_and_close(writer)
    return file


def _tensors(directory: Path, model_type: str) -> Any:
    for name, data in load_file(directory / "model.safetensors").items():
        # The converter leaves out what no vector needs.
        name = name.removeprefix(f"{model_type}.")
        if not name.startswith(("pooler.", "cls.")):
            is_head = name in ("classifier.weight", "classifier.bias")
            yield name.replace("classifier", "classifier.out_proj") if is_head else name, data.float().numpy()
    for number, folder in enumerate(sorted(directory.glob("*_Dense")), 2):
        yield f"dense_{number}_out.weight", load_file(folder / "model.safetensors")["linear.weight"].numpy()


def _add_word_piece(writer: gguf.GGUFWriter, directory: Path) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    texts = {token_id: piece for piece, token_id in vocabulary.items()}
    # As the converter fills places without a token.
    pieces = [texts.get(token_id, f"[PAD{token_id}]") for token_id in range(max(texts) + 1)]
    is_special = [piece.startswith("[") and piece.endswith("]") for piece in pieces]
    writer.add_tokenizer_model("bert")
    writer.add_token_list(
        [
            piece if special else piece.removeprefix("##") if piece.startswith("##") else f"\u2581{piece}"
            for piece, special in zip(pieces, is_special, strict=True)
        ]
    )
    writer.add_token_type_count(json.loads((directory / "config.json").read_text()).get("type_vocab_size", 1))
    writer.add_token_types([gguf.TokenType.CONTROL if each else gguf.TokenType.NORMAL for each in is_special])
    writer.add_bos_token_id(vocabulary["[CLS]"])
    writer.add_unk_token_id(vocabulary["[UNK]"])
    writer.add_sep_token_id(vocabulary["[SEP]"])
    writer.add_pad_token_id(vocabulary["[PAD]"])
