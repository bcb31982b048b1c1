"""quire-tiny within a larger shape: its text, at what each step of the shape costs.

Random weights cost as much as trained ones, but their text is nonsense that no drafter could guess, or that repeats. So
the weights of quire-tiny are put into matrices of the shape, and the model says what quire-tiny says, but for rounding.
Heads are twice as wide: their rotary frequencies contain those of the narrow ones.

All other weights are random, so that no two tensors are equal: there are engines that store equal ones once. They
change nothing, since each is multiplied by exactly 0. Hidden states are 0 behind the values of quire-tiny. Of the keys,
values and `up` that quire-tiny lacks, the weights for its values are 0, so that they come to 0 too; and what reads
these is random again.
"""

import math
import shutil
from collections.abc import Iterable
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
_DEVIATION = 0.02
"""Of random weights."""


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
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for each in state.values():
            each.normal_(0.0, _DEVIATION, generator=generator)
        _fill(state, tiny, config, small)
    model.bfloat16().save_pretrained(directory)
    for name in _FILES:
        shutil.copy(source / name, directory / name)


def _fill(state: dict[str, Tensor], tiny: dict[str, Tensor], config: Any, small: Any) -> None:
    """Puts the small model into random weights."""
    width, narrow = config.hidden_size, small.hidden_size
    embedded = tiny["embed_tokens.weight"]
    vocab = len(embedded)
    # The mean over more values is lower by this.
    norm_scale = math.sqrt(narrow / width)
    state["embed_tokens.weight"][:vocab] = 0
    state["embed_tokens.weight"][:vocab, :narrow] = embedded
    state["embed_tokens.weight"][:vocab, narrow] = _CONSTANT
    state["lm_head.weight"][:, : narrow + 1] = 0
    state["lm_head.weight"][:vocab, :narrow] = embedded
    state["lm_head.weight"][vocab:, narrow] = -1
    state["norm.weight"][:narrow] = tiny["norm.weight"] * norm_scale
    state["norm.weight"][narrow] = _CONSTANT_WEIGHT
    places = _Places(config, small)
    for index in range(config.num_hidden_layers):
        layer = _of_layer(state, index)
        _leave_out(layer, narrow, places)
        if index < small.num_hidden_layers:
            _fill_layer(layer, _of_layer(tiny, index), norm_scale, places)


def _of_layer(state: dict[str, Tensor], index: int) -> dict[str, Tensor]:
    prefix = f"layers.{index}."
    return {name.removeprefix(prefix): each for name, each in state.items() if name.startswith(prefix)}


def _leave_out(layer: dict[str, Tensor], narrow: int, places: "_Places") -> None:
    """Makes the layer one that adds 0 to hidden states."""
    for name in ("self_attn.k_proj.weight", "self_attn.v_proj.weight", "mlp.up_proj.weight"):
        layer[name][:, : narrow + 1] = 0
    # Keys and values may have a bias where no query has a number, and no output reads them.
    layer["self_attn.q_proj.weight"][places.spare_of_queries, : narrow + 1] = 0
    layer["self_attn.o_proj.weight"][:, places.spare_of_queries] = 0
    if "self_attn.q_proj.bias" in layer:
        layer["self_attn.q_proj.bias"][torch.cat((places.queries, places.spare_of_queries))] = 0
        for name in ("self_attn.k_proj.bias", "self_attn.v_proj.bias"):
            random = layer[name][places.spare_of_keys]
            layer[name].zero_()[places.spare_of_keys] = random


def _fill_layer(layer: dict[str, Tensor], tiny: dict[str, Tensor], norm_scale: float, places: "_Places") -> None:
    queries, keys = places.queries, places.keys
    narrow = len(tiny["input_layernorm.weight"])
    for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
        layer[name][:narrow] = tiny[name] * norm_scale
        layer[name][narrow] = 0
    gates = len(tiny["mlp.gate_proj.weight"])
    for name in ("mlp.gate_proj.weight", "mlp.up_proj.weight"):
        layer[name][:gates, :narrow] = tiny[name]
    layer["mlp.down_proj.weight"][:, :gates] = 0
    layer["mlp.down_proj.weight"][:narrow, :gates] = tiny["mlp.down_proj.weight"]
    # Scores are divided by the root of the head's width.
    layer["self_attn.q_proj.weight"][queries, :narrow] = tiny["self_attn.q_proj.weight"] * math.sqrt(2)
    for name in ("self_attn.k_proj.weight", "self_attn.v_proj.weight"):
        layer[name][keys, :narrow] = places.copied(tiny[name])
    layer["self_attn.o_proj.weight"][:, queries] = 0
    layer["self_attn.o_proj.weight"][:narrow, queries] = tiny["self_attn.o_proj.weight"]


class _Places:
    """Rows of the larger projections for those of the small ones.

    Attributes:
        queries: of the query projection.
        keys: of the key projection, for each head of the small one as often as the larger model needs copies of it.
        spare_of_queries, spare_of_keys: of each head, two that rotate together and have none of the small model's.
    """

    def __init__(self, config: Any, small: Any) -> None:
        num_keys = config.num_key_value_heads or config.num_attention_heads
        group = config.num_attention_heads // num_keys
        self._num_groups, narrow_dim = small.num_key_value_heads, small.head_dim
        small_group = small.num_attention_heads // self._num_groups
        self._copies = -(-small_group // group)
        head_dim = 2 * narrow_dim
        pairs = torch.arange(narrow_dim // 2) * 2
        within = torch.cat((pairs, pairs + narrow_dim))
        query_heads = [
            (index * self._copies + place // group) * group + place % group
            for index in range(self._num_groups)
            for place in range(small_group)
        ]
        self.queries = _rows(query_heads, within, head_dim)
        self.keys = _rows(range(self._num_groups * self._copies), within, head_dim)
        spare = torch.tensor([narrow_dim - 1, head_dim - 1])
        self.spare_of_queries = _rows(range(config.num_attention_heads), spare, head_dim)
        self.spare_of_keys = _rows(range(num_keys), spare, head_dim)

    def copied(self, projection: Tensor) -> Tensor:
        """The rows of a projection of keys or values for `keys`."""
        heads = projection.view(self._num_groups, -1, projection.shape[1])
        return heads.repeat_interleave(self._copies, 0).flatten(0, 1)


def _rows(heads: Iterable[int], within: Tensor, head_dim: int) -> Tensor:
    return torch.cat([head * head_dim + within for head in heads])
