"""Small models with random weights and a tokenizer that works, in directories as transformers writes them."""

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

PAD, BOS, EOS = "<pad>", "<s>", "</s>"
VOCAB_SIZE = 320
MAX_LENGTH = 512

# Name of a shape -> (family, what differs from the family's base below). Head size is hidden size / heads.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2-tied-32": ("gpt2", {}),
    "gpt2-untied-64": ("gpt2", {"n_embd": 128, "n_head": 2, "tie_word_embeddings": False, "n_inner": 96}),
    "gpt2-80": ("gpt2", {"n_embd": 160, "n_head": 2, "scale_attn_by_inverse_layer_idx": True}),
    "opt-pre-norm-32": ("opt", {}),
    "opt-post-norm-projected-64": (
        "opt",
        {"hidden_size": 128, "num_attention_heads": 2, "word_embed_proj_dim": 48, "do_layer_norm_before": False},
    ),
    "opt-untied-80": ("opt", {"hidden_size": 160, "num_attention_heads": 2, "tie_word_embeddings": False}),
    "llama-gqa-untied-32": ("llama", {}),
    "llama-mha-tied-64": (
        "llama",
        {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": True},
    ),
    "llama-mqa-80": ("llama", {"hidden_size": 160, "num_attention_heads": 2, "num_key_value_heads": 1}),
    "llama-gqa-explicit-128": ("llama", {"head_dim": 128, "attention_bias": True, "mlp_bias": True}),
}

_BASE: dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel], dict[str, Any]]] = {
    "gpt2": (
        GPT2Config,
        GPT2LMHeadModel,
        {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": MAX_LENGTH},
    ),
    "opt": (
        OPTConfig,
        OPTForCausalLM,
        {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "ffn_dim": 128,
            "max_position_embeddings": MAX_LENGTH,
            "word_embed_proj_dim": None,
        },
    ),
    "llama": (
        LlamaConfig,
        LlamaForCausalLM,
        {
            "hidden_size": 128,
            "intermediate_size": 192,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": MAX_LENGTH,
        },
    ),
}


def make_shape(directory: Path, shape: str, *, seed: int = 0) -> PreTrainedModel:
    """Writes the model of SHAPES by this name, with its tokenizer, into `directory` and returns it."""
    family, overrides = SHAPES[shape]
    return make_model(directory, family, seed=seed, **overrides)


def make_model(
    directory: Path, family: str, *, seed: int = 0, max_shard_size: str = "1GB", **overrides: Any
) -> PreTrainedModel:
    """Writes a model with random weights, and a tokenizer, into `directory`; returns the model in float32.

    Args:
        family: "gpt2", "opt" or "llama".
        max_shard_size: small ones give several files and an index.
        overrides: fields of the family's configuration.
    """
    config_class, model_class, base = _BASE[family]
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = config_class(**{"vocab_size": VOCAB_SIZE, **special, **base, **overrides})
    model = model_class(config).eval()
    randomize(model, seed)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    make_tokenizer().save_pretrained(directory)
    return model


def randomize(model: PreTrainedModel, seed: int) -> None:
    """Gives every parameter, biases and norms too, values that matter to the output."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                is_norm_weight = name.endswith("weight")
                parameter.copy_(1 + 0.2 * noise if is_norm_weight else 0.1 * noise)
            else:
                parameter.copy_(noise * (2.0 / sum(parameter.shape)) ** 0.5 * 1.5)


@cache
def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with VOCAB_SIZE tokens: any text can be encoded and comes back unchanged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sentences(), trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise RuntimeError(f"the tokenizer has {tokenizer.get_vocab_size()} tokens; expected {VOCAB_SIZE}")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def _sentences() -> Iterator[str]:
    subjects = ("the cat", "a small bird", "my old friend", "the river", "one page")
    verbs = ("reads", "follows", "remembers", "carries", "turns")
    for subject in subjects:
        for verb in verbs:
            for other in subjects:
                yield f"{subject} {verb} {other}."


def edit_config(directory: Path, **fields: Any) -> None:
    """Gives fields of config.json other values."""
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def edit_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    """Changes what model.safetensors has."""
    path = directory / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})
