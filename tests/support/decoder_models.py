"""Tiny decoders with random weights that give vectors or scores, as sentence-transformers saves them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from safetensors.torch import save_file

from quire.model_files.model_source import resolve_model

_SIZES = {
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
CONFIGS = {
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


def make_decoder(
    path: Path,
    family: str = "qwen3",
    *,
    modules: Sequence[tuple[str, Mapping[str, Any]]] | None = (
        ("Pooling", {"pooling_mode": "lasttoken"}),
        ("Normalize", {}),
    ),
    task: str = "ForCausalLM",
    settings: Mapping[str, Any] | None = None,
    of_transformer: Mapping[str, Any] | None = None,
    template: str | None = None,
    **fields: Any,
) -> Path:
    """Writes a model, whose texts end with a special token.

    Args:
        modules: after the decoder, each with its config.json; None writes no modules.json.
        task: the end of the name of the class that is saved, such as "Model".
        settings: config_sentence_transformers.json.
        of_transformer: sentence_bert_config.json.
        template: the chat template.
        fields: of config.json.
    """
    kind, own = CONFIGS[family]
    vocabulary = resolve_model(None) / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(vocabulary))
    config = kind(vocab_size=tokenizer.get_vocab_size(), **{**_SIZES, **own, **fields})
    name = type(config).__name__.removesuffix("Config")
    torch.manual_seed(len(name))
    model = getattr(transformers, f"{name}{task}")(config)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2) if parameter.dim() > 1 else parameter.data.uniform_(0.5, 1.5)
    model.save_pretrained(path)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("$A </s>", "$A $B </s>", [("</s>", 2)])
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=1 << 17,
        pad_token="<pad>",
        eos_token="</s>",
        chat_template=template,
        padding_side="left",
    ).save_pretrained(path)
    if modules is not None:
        listed = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
        for number, (module, content) in enumerate(modules, 1):
            folder, package = f"{number}_{module}", "sentence_transformers.models"
            if module == "LogitScore":
                package = "sentence_transformers.cross_encoder.modules.logit_score"
            if module == "Pooling":
                content = {"word_embedding_dimension": config.hidden_size, **content}
            _write(path / folder / "config.json", content)
            if module == "Dense":
                size, inputs = content["out_features"], content["in_features"]
                layer = {"linear.weight": torch.randn(size, inputs) * inputs**-0.5, "linear.bias": torch.randn(size)}
                save_file(layer, path / folder / "model.safetensors")
            listed.append({"idx": number, "name": str(number), "path": folder, "type": f"{package}.{module}"})
        _write(path / "modules.json", listed)
        _write(path / "sentence_bert_config.json", of_transformer or {"max_seq_length": 480, "do_lower_case": False})
    if settings is not None:
        _write(path / "config_sentence_transformers.json", settings)
    return path


def _write(path: Path, content: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")
