"""Tiny models of embeddings with random weights, as sentence-transformers saves them."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from safetensors.torch import save_file

_TEXT = "the a of in to cat dog sat ran on mat hat big small red blue once upon time there was"
WORDS = _TEXT.split()
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_PIECES = [*_SPECIAL, *WORDS, *_LETTERS, *(f"##{letter}" for letter in _LETTERS)]
_SIZES = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
_WINDOWS = {"num_hidden_layers": 3, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
FAMILIES: Mapping[str, Callable[..., transformers.PretrainedConfig]] = {
    "bert": transformers.BertConfig,
    "roberta": transformers.RobertaConfig,
    "xlm-roberta": transformers.XLMRobertaConfig,
    "camembert": transformers.CamembertConfig,
    "mpnet": transformers.MPNetConfig,
    "distilbert": transformers.DistilBertConfig,
    "nomic_bert": transformers.NomicBertConfig,
    "gte": transformers.GteConfig,
    "modernbert": lambda **sizes: transformers.ModernBertConfig(
        **{**sizes, **_WINDOWS}, cls_token_id=2, sep_token_id=3, local_attention=10
    ),
    "gemma3_text": lambda **sizes: transformers.Gemma3TextConfig(
        **{**sizes, **_WINDOWS},
        use_bidirectional_attention=True,
        sliding_window=10,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=12,
    ),
}
RANKERS = tuple(family for family in FAMILIES if family not in ("nomic_bert", "gemma3_text"))


def make_embedding_model(
    path: Path,
    family: str = "bert",
    *,
    modules: Sequence[tuple[str, Mapping[str, Any]]] | None = (("Pooling", {"pooling_mode_mean_tokens": True}),),
    settings: Mapping[str, Any] | None = None,
    max_seq_length: int | None = 32,
    max_positions: int = 64,
    hidden_size: int = 48,
) -> Path:
    """Writes a model.

    Args:
        modules: after the encoder, each with its config.json; None writes no modules.json.
        settings: config_sentence_transformers.json.
    """
    sizes = {"max_position_embeddings": max_positions, **_SIZES, "pad_token_id": 0, "hidden_size": hidden_size}
    _write_model(path, transformers.AutoModel, FAMILIES[family](vocab_size=len(_PIECES), **sizes), max_positions)
    if modules is not None:
        _write_modules(path, modules, hidden_size)
        length = {} if max_seq_length is None else {"max_seq_length": max_seq_length}
        _write(path / "sentence_bert_config.json", {**length, "do_lower_case": False})
    if settings is not None:
        _write(path / "config_sentence_transformers.json", settings)
    return path


def make_ranking_model(path: Path, family: str = "bert", *, activation: str | None = None, types: bool = False) -> Path:
    """Writes a cross-encoder, whose texts have at most 62 tokens. `activation` is the function of its scores; with
    `types` it is told which text a token is of."""
    config = FAMILIES[family](vocab_size=len(_PIECES), max_position_embeddings=64, **_SIZES, pad_token_id=0)
    config.num_labels = 1
    if activation is not None:
        config.sentence_transformers = {"activation_fn": activation, "version": "6.2.0"}
    inputs = ["input_ids", *(["token_type_ids"] if types else []), "attention_mask"]
    _write_model(path, transformers.AutoModelForSequenceClassification, config, 62, model_input_names=inputs)
    return path


def _write_model(path: Path, kind: Any, config: transformers.PretrainedConfig, max_tokens: int, **fields) -> None:
    torch.manual_seed(len(config.model_type))
    encoder = kind.from_config(config)
    # Sums grow from layer to layer where a layer begins with norms; scores must stay as small as in trained models.
    spread = 0.1 if "layer_types" in config.to_dict() else 0.3
    lowest = -0.5 if config.model_type == "gemma3_text" else 0.5
    for parameter in encoder.parameters():
        parameter.data.normal_(0, spread) if parameter.dim() > 1 else parameter.data.uniform_(lowest, lowest + 1)
    encoder.save_pretrained(path)
    model = tokenizers.models.WordPiece({piece: place for place, piece in enumerate(_PIECES)}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", ends
    )
    # As published models have them; neither may have an effect on a vector.
    tokenizer.enable_truncation(16)
    tokenizer.enable_padding(length=16)
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=max_tokens, **fields, **dict(zip(names, _SPECIAL, strict=True))
    ).save_pretrained(path)


def _write_modules(path: Path, modules: Sequence[tuple[str, Mapping[str, Any]]], size: int) -> None:
    listed = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for number, (kind, config) in enumerate(modules, 1):
        folder = f"{number}_{kind}"
        (path / folder).mkdir()
        if kind == "Pooling":
            config = {"word_embedding_dimension": size, **config}
        if config:
            _write(path / folder / "config.json", config)
        if kind == "Dense":
            tensors = {"linear.weight": torch.randn(config["out_features"], config["in_features"]) / 4}
            if config["bias"]:
                tensors["linear.bias"] = torch.randn(config["out_features"])
            save_file(tensors, path / folder / "model.safetensors")
        type_name = f"sentence_transformers.models.{kind}"
        listed.append({"idx": number, "name": str(number), "path": folder, "type": type_name})
    _write(path / "modules.json", listed)


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")
