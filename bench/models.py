"""Models of real shapes with random weights, for measurements of speed only: nothing is downloaded."""

import shutil
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from quire.model_files.model_source import resolve_model

# Weights are large enough for texts that do not repeat themselves at once.
_TINY = {
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "max_position_embeddings": 40960,
}
_LLAMA_3 = {
    "model_type": "llama",
    "vocab_size": 128256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": _LLAMA_3 | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    "llama-1b": _LLAMA_3 | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
    "llama-160m": {
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 2048,
    },
    "llama-1.1b": {
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
    },
    "qwen2-0.5b": {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "max_position_embeddings": 32768,
    },
    "gemma3-1b": {
        "model_type": "gemma3_text",
        "vocab_size": 262144,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sliding_window": 512,
        "query_pre_attn_scalar": 256,
        "max_position_embeddings": 32768,
    },
    "qwen3-moe-cut": {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 8,
        "num_experts": 32,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 32768,
    },
    "qwen3.5-0.8b": {
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "tie_word_embeddings": True,
        "max_position_embeddings": 32768,
    },
    "lfm2-1.2b": {
        "model_type": "lfm2",
        "vocab_size": 65536,
        "hidden_size": 2048,
        # Two thirds of it, by a field that all these models have.
        "intermediate_size": 12288,
        "num_hidden_layers": 16,
        "layer_types": ["full_attention" if index in (2, 5, 8, 10, 12, 14) else "conv" for index in range(16)],
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "conv_L_cache": 3,
        # vLLM reads the width by these names.
        "block_dim": 2048,
        "conv_dim": 2048,
        "max_position_embeddings": 32768,
    },
    "llama-one-layer": {
        "model_type": "llama",
        "vocab_size": 4096,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 2048,
    },
    "qwen3.5-tiny": _TINY
    | {
        "model_type": "qwen3_5_text",
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 32,
    },
    "lfm2-tiny": _TINY | {"model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"]},
    "gpt-oss-cut": {
        "model_type": "gpt_oss",
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 6,
        "num_local_experts": 8,
        "num_experts_per_tok": 4,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
    },
}
"""Fields of config.json. Qwen3 30B has 48 layers of 128 experts, GPT-OSS 20B 24 layers of 32, and LLaMA 3.2 1B ties its
head to the embedding; all else is as published, except in tiny ones."""
_SPECIAL_TOKENS = ("<pad>", "<s>", "</s>")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def write_model(shape: str, directory: Path, *, whole_vocabulary: bool = False) -> None:
    """Writes a model of this shape in bfloat16 into the directory, with quire-tiny's tokenizer, or with one that has a
    text for each token of the model."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**SHAPES[shape], bos_token_id=1, eos_token_id=2, pad_token_id=0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
    if whole_vocabulary:
        _make_tokenizer(config.vocab_size).save_pretrained(directory)
    else:
        copy_tokenizer(directory)


def copy_tokenizer(directory: Path) -> None:
    """Copies quire-tiny's tokenizer into the directory of a model."""
    for name in _TOKENIZER_FILES:
        shutil.copy(resolve_model(None) / name, directory / name)


def _make_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE whose tokens are all bytes, and words of up to four letters, the shorter ones first."""
    merges: list[tuple[str, str]] = []
    words = ["\u0120", *ascii_lowercase]
    tokens = [*_SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    for word in words:
        merges += ((word, letter) for letter in ascii_lowercase[: vocab_size - len(tokens) - len(merges)])
        words += (f"{word}{letter}" for letter in ascii_lowercase) if len(words) < vocab_size else ()
    vocabulary = {token: number for number, token in enumerate([*tokens, *map("".join, merges)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = dict(zip(("pad_token", "bos_token", "eos_token"), _SPECIAL_TOKENS, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
