"""quire-tiny within a larger shape: its text, at what each step of the shape costs.

Random weights cost as much as trained ones, but their text is nonsense that no drafter could guess, or that repeats. So
the weights of quire-tiny are put into matrices of the shape and all others are 0: what is added are zeros, and the
model says what quire-tiny says, but for rounding. Heads are twice as wide: their rotary frequencies contain those of
the narrow ones.
"""

import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from bench.models import SHAPES
from quire.model_source import resolve_model

PADDED_SHAPES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama-160m": (LlamaConfig, LlamaForCausalLM, SHAPES["llama-160m"]),
    "llama-40m": (
        LlamaConfig,
        LlamaForCausalLM,
        {
            "vocab_size": 32000,
            "hidden_size": 384,
            "intermediate_size": 1536,
            "num_hidden_layers": 6,
            "num_attention_heads": 6,
            "num_key_value_heads": 6,
        },
    ),
    "qwen2-0.5b": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {
            "vocab_size": 151936,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
        },
    ),
}
_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
_CONSTANT, _CONSTANT_WEIGHT = 1e-3, 1e6
"""One value of the hidden states is the same for all tokens. By it the tokens that quire-tiny lacks get a low logit."""


def write_padded_model(shape: str, directory: Path, source: Path | None = None) -> None:
    """Writes a model of this shape in bfloat16 into the directory. `source` has a smaller LLaMA with quire-tiny's
    tokenizer; without it quire-tiny is taken."""
    config_type, model_type, sizes = PADDED_SHAPES[shape]
    source = source or resolve_model(None)
    small = LlamaConfig.from_pretrained(source)
    tiny = {name.removeprefix("model."): each.float() for name, each in load_file(source / "model.safetensors").items()}
    width = int(sizes["hidden_size"])
    config = config_type(
        **sizes | {"max_position_embeddings": 1024, "tie_word_embeddings": False},
        rms_norm_eps=1e-5 * small.hidden_size / width,
        bos_token_id=1,
        eos_token_id=[2, 6],
        pad_token_id=0,
    )
    model = model_type(config)
    state = {name.removeprefix("model."): each for name, each in model.state_dict().items()}
    with torch.no_grad():
        for each in state.values():
            each.zero_()
        _fill(state, tiny, config, small)
    model.bfloat16().save_pretrained(directory)
    for name in _FILES:
        shutil.copy(source / name, directory / name)


def _fill(state: dict[str, Tensor], tiny: dict[str, Tensor], config: Any, small: Any) -> None:
    width, narrow, head_dim, num_groups = (
        config.hidden_size,
        small.hidden_size,
        small.head_dim,
        small.num_key_value_heads,
    )
    embedded = tiny["embed_tokens.weight"]
    vocab = len(embedded)
    # The mean over more values is lower by this.
    norm_scale = math.sqrt(narrow / width)
    state["embed_tokens.weight"][:vocab, :narrow] = embedded
    state["embed_tokens.weight"][:vocab, narrow] = _CONSTANT
    state["lm_head.weight"][:vocab, :narrow] = embedded
    state["lm_head.weight"][vocab:, narrow] = -1
    state["norm.weight"][:narrow] = tiny["norm.weight"] * norm_scale
    state["norm.weight"][narrow] = _CONSTANT_WEIGHT
    queries, keys = _places(config, small)
    for layer in range(small.num_hidden_layers):
        of_layer = f"layers.{layer}."
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            state[of_layer + name][:narrow] = tiny[of_layer + name] * norm_scale
        for name in ("mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"):
            rows, columns = tiny[of_layer + name].shape
            state[of_layer + name][:rows, :columns] = tiny[of_layer + name]
        attention = of_layer + "self_attn."
        # Scores are divided by the root of the head's width.
        state[attention + "q_proj.weight"][queries, :narrow] = tiny[attention + "q_proj.weight"] * math.sqrt(2)
        copies = len(keys) // (num_groups * head_dim)
        for name in ("k_proj.weight", "v_proj.weight"):
            heads = tiny[attention + name].view(num_groups, head_dim, narrow)
            state[attention + name][keys, :narrow] = heads.repeat_interleave(copies, 0).reshape(-1, narrow)
        state[attention + "o_proj.weight"][:narrow, queries] = tiny[attention + "o_proj.weight"]


def _places(config: Any, small: Any) -> tuple[Tensor, Tensor]:
    """Rows of the larger query projection for those of the small one; of the key projection, for each of its heads as
    often as the larger model needs copies of it."""
    num_keys = config.num_key_value_heads or config.num_attention_heads
    group = config.num_attention_heads // num_keys
    num_groups, narrow_dim = small.num_key_value_heads, small.head_dim
    small_group = small.num_attention_heads // num_groups
    copies = -(-small_group // group)
    head_dim = 2 * narrow_dim
    pairs = torch.arange(narrow_dim // 2) * 2
    within = torch.cat((pairs, pairs + narrow_dim))
    query_heads = [
        (index * copies + place // group) * group + place % group
        for index in range(num_groups)
        for place in range(small_group)
    ]
    queries = torch.cat([head * head_dim + within for head in query_heads])
    keys = torch.cat([head * head_dim + within for head in range(num_groups * copies)])
    return queries, keys
