"""Tiny models that give vectors or scores, with random weights, as sentence-transformers saves them."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from safetensors.torch import save_file

from quire.model_files.model_source import resolve_model

Modules = Sequence[tuple[str, Mapping[str, Any] | None]]
"""The modules after the transformer, each with its config.json if it has one."""

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
_DECODER_SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 2,
}
DECODERS = {
    "qwen3": (transformers.Qwen3Config, {"head_dim": 16}),
    "qwen2": (transformers.Qwen2Config, {}),
    "mistral": (transformers.MistralConfig, {"head_dim": 16, "sliding_window": None}),
    "gemma2": (transformers.Gemma2Config, {"head_dim": 16, "sliding_window": 64}),
}
PAIR_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'system' %}<|system|>{{ message.content }}<|end|>"
    "{% elif message.role == 'query' %}<|user|>Query: {{ message.content }}"
    "{% elif message.role == 'document' %}\nDocument: {{ message.content }}<|end|>{% endif %}{% endfor %}"
    "<|assistant|>\nyes or no:"
)


def make_embedding_model(
    path: Path,
    family: str = "bert",
    *,
    modules: Modules | None = (("Pooling", {"pooling_mode_mean_tokens": True}),),
    settings: Mapping[str, Any] | None = None,
    max_seq_length: int | None = 32,
    max_positions: int = 64,
    hidden_size: int = 48,
) -> Path:
    """Writes an encoder.

    Args:
        modules: None writes no modules.json.
        settings: config_sentence_transformers.json.
    """
    sizes = {"max_position_embeddings": max_positions, **_SIZES, "pad_token_id": 0, "hidden_size": hidden_size}
    _write_model(path, transformers.AutoModel, FAMILIES[family](vocab_size=len(_PIECES), **sizes), max_positions)
    length = {} if max_seq_length is None else {"max_seq_length": max_seq_length}
    _write_files(path, hidden_size, modules, {**length, "do_lower_case": False}, settings)
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


def make_decoder(
    path: Path,
    family: str = "qwen3",
    *,
    modules: Modules | None = (("Pooling", {"pooling_mode": "lasttoken"}), ("Normalize", {})),
    task: str = "ForCausalLM",
    settings: Mapping[str, Any] | None = None,
    of_transformer: Mapping[str, Any] | None = None,
    template: str | None = None,
    **fields: Any,
) -> Path:
    """Writes a decoder, whose texts end with a special token.

    Args:
        modules: None writes no modules.json.
        task: the end of the name of the class that is saved, such as "Model".
        settings: config_sentence_transformers.json.
        of_transformer: sentence_bert_config.json.
        template: the chat template.
        fields: of config.json.
    """
    kind, own = DECODERS[family]
    tokenizer = tokenizers.Tokenizer.from_file(str(resolve_model(None) / "tokenizer.json"))
    config = kind(vocab_size=tokenizer.get_vocab_size(), **{**_DECODER_SIZES, **own, **fields})
    name = type(config).__name__.removesuffix("Config")
    torch.manual_seed(len(name))
    model = getattr(transformers, f"{name}{task}")(config)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2) if parameter.dim() > 1 else parameter.data.uniform_(0.5, 1.5)
    model.save_pretrained(path)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("$A </s>", "$A $B </s>", [("</s>", 2)])
    names: dict[str, Any] = {"pad_token": "<pad>", "eos_token": "</s>", "chat_template": template}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=1 << 17, padding_side="left", **names
    ).save_pretrained(path)
    of_transformer = of_transformer or {"max_seq_length": 480, "do_lower_case": False}
    _write_files(path, config.hidden_size, modules, of_transformer, settings)
    return path


def _write_files(
    path: Path,
    size: int,
    modules: Modules | None,
    of_transformer: Mapping[str, Any],
    settings: Mapping[str, Any] | None,
) -> None:
    """The files of sentence-transformers; the first module has vectors of this size."""
    if settings is not None:
        _write(path / "config_sentence_transformers.json", settings)
    if modules is None:
        return
    listed = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for number, (kind, config) in enumerate(modules, 1):
        folder, package = f"{number}_{kind}", "sentence_transformers.models"
        if kind == "LogitScore":
            package = "sentence_transformers.cross_encoder.modules.logit_score"
        (path / folder).mkdir()
        if config is not None:
            of_size = {"word_embedding_dimension": size} if kind == "Pooling" else {}
            _write(path / folder / "config.json", of_size | {**config})
        if config is not None and kind == "Dense":
            inputs, outputs = config["in_features"], config["out_features"]
            tensors = {"linear.weight": torch.randn(outputs, inputs) * inputs**-0.5}
            if config["bias"]:
                tensors["linear.bias"] = torch.randn(outputs)
            save_file(tensors, path / folder / "model.safetensors")
        listed.append({"idx": number, "name": str(number), "path": folder, "type": f"{package}.{kind}"})
    _write(path / "modules.json", listed)
    _write(path / "sentence_bert_config.json", of_transformer)


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")
