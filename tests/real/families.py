"""Tiny models of every causal type of transformers, made from the defaults of its configuration."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from quire.model_files.architectures import MISSING_PARTS
from tests.support.models import MAX_LENGTH, VOCAB_SIZE, randomize

TYPES: Mapping[str, str] = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

# Sizes of fields, by the names that configurations give them. A default that is smaller stays.
_SIZES = {
    VOCAB_SIZE: "vocab_size vocab_size_per_layer_input unpadded_vocab_size decoder_vocab_size",
    MAX_LENGTH: "max_position_embeddings n_positions n_ctx max_seq_len model_max_length max_target_positions "
    "context_length index_topk attention_chunk_size original_max_position_embeddings floor_scale",
    64: "hidden_size d_model n_embd embedding_size emb_dim dim_model input_embedding_size output_embedding_size "
    "word_embed_proj_dim lru_width embedding_dim backbone_hidden_size",
    96: "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner dff dim_ff d_inner feed_forward_size "
    "ffn_hidden_size intermediate_size_mlp dense_intermediate_size shared_intermediate_size",
    48: "moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size "
    "moe_shared_expert_intermediate_size expert_ffn_hidden_size",
    24: "q_lora_rank kv_lora_rank o_lora_rank",
    20: "sliding_window attention_window_size window_size sliding_window_size",
    16: "head_dim global_head_dim swa_head_dim qk_nope_head_dim v_head_dim index_head_dim linear_key_head_dim "
    "linear_value_head_dim mamba_d_head mamba_head_dim attention_head_dim kv_channels d_head dim_head mamba_d_state "
    "state_size ssm_state_size attention_head_size hidden_size_per_layer_input linear_head_dim mamba_headdim "
    "ple_embed_dim router_hidden_size",
    8: "qk_rope_head_dim rotary_dim laurel_rank mamba_chunk_size chunk_size num_mem_blocks adapter_rank d_rel",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads "
    "swa_num_attention_heads num_experts n_routed_experts num_local_experts moe_num_experts linear_num_value_heads "
    "linear_num_heads num_decoder_attention_heads num_encoder_attention_heads attention_heads mamba_n_heads "
    "mamba_num_heads n_mamba_heads rel_extent",
    2: "num_key_value_heads num_kv_heads swa_num_key_value_heads num_experts_per_tok moe_topk moe_k "
    "num_experts_per_token index_n_heads linear_num_key_heads mamba_n_groups n_groups mamba_ngroups num_query_groups "
    "zero_expert_num num_kv_shared_layers",
    1: "n_group topk_group num_expert_group first_k_dense_replace num_dense_layers num_nextn_predict_layers "
    "n_shared_experts moe_num_shared_experts num_shared_experts encoder_layers num_encoder_layers",
}
_SIZE_OF = {name: size for size, names in _SIZES.items() for name in names.split()}
_NUM_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers")
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id", "video_token_id", "audio_token_id")
_TOKEN_IDS = dict(zip(_TOKENS, (1, 2, 0, 3, 4, 5), strict=True))
_MAX_LAYERS = 6

_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
_ROUTED = {**_EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
_HYBRID = ["linear_attention", "hybrid", "linear_attention", "hybrid"]
_TWICE = {"attention_hidden_size": 128, "attention_head_dim": 32}
_CONVOLUTIONS = {"num_hidden_layers": 3, "layer_types": ["conv", "conv", "full_attention"]}
_DECODER = {"is_decoder": True}
# Fields that the rules above cannot derive for a type.
_FIELDS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        (
            *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie"),
            *("megatron-bert", "rembert", "roberta", "roberta-prelayernorm", "roformer", "xlm-roberta"),
            "xlm-roberta-xl",
        ),
        _DECODER,
    ),
    "blt": {
        f"{part}_config": {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
        for part in ("patcher", "encoder", "decoder", "global")
    },
    "bamba": {"mamba_n_heads": 8, "num_hidden_layers": 2, "attn_layer_indices": [1]},
    "cohere_compass_text": {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": None},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {**_ROUTED, "first_k_dense_replace": 1},
    "dots1": {**_ROUTED, "n_shared_experts": 1},
    "dots3_note": {"vision_config": {"hidden_size": 64, "adapter_in_dim": 64, "adapter_out_dim": 64}},
    "dots3_note_text": {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "indexed_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "head_dim": 24,
        "per_layer_config": {"0": {"num_attention_heads": 2, "num_key_value_heads": 2}},
    },
    "granitemoehybrid": {"mamba_n_heads": 8, "num_hidden_layers": 2, "layer_types": ["mamba", "attention"]},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "jamba": {"num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
    "lfm2": _CONVOLUTIONS,
    "lfm2_moe": _CONVOLUTIONS,
    "lfm3": {
        "num_hidden_layers": 3,
        "layer_types": ["conv", "sliding_attention", "full_attention"],
        "head_dim": 16,
    },
    "mamba2": {"num_heads": 8, "n_groups": 1},
    "minimax_m3_vl_text": {
        "num_hidden_layers": 2,
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse"],
        "index_block_size": 16,
        "index_topk_blocks": 2,
    },
    "ministral": {"head_dim": 16},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "qwen4_exp_text": {
        **dict.fromkeys(("indexer_kv_heads", "indexer_compress_ratio"), 1),
        "indexer_n_heads": 2,
        "indexer_head_dim": 16,
        "indexer_budget": MAX_LENGTH,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {**_DECODER, "axial_pos_shape": [16, 32], "axial_pos_embds_dim": [32, 32]},
    "roc_bert": {**_DECODER, "shape_vocab_size": 16, "pronunciation_vocab_size": 16},
    "xmod": {**_DECODER, "languages": ["en"], "default_language": "en"},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": _HYBRID, **_TWICE},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": _HYBRID, "n_mamba_heads": 8, "num_mem_blocks": 1, **_TWICE},
}


def tiny_model(model_type: str, directory: Path) -> PreTrainedModel:
    """Writes a random model of this type into the directory; returns it in float32."""
    config = tiny_config(model_type)
    model = _model_class(config)(config).eval()
    randomize(model, seed=0)
    model.save_pretrained(directory)
    return model


def write_config(model_type: str, directory: Path) -> None:
    """Writes config.json of such a model only."""
    config = tiny_config(model_type)
    config.architectures = [_model_class(config).__name__]
    config.save_pretrained(directory)


def _model_class(config: PreTrainedConfig) -> Any:
    """The class of published models: with all parts, if there are parts in addition to the language model."""
    mappings: list[Any] = [MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING] if "text_config" in config.sub_configs else []
    classes = (mapping.get(type(config), None) for mapping in (*mappings, MODEL_FOR_CAUSAL_LM_MAPPING))
    return next(each for each in classes if each is not None)


def tiny_config(model_type: str) -> PreTrainedConfig:
    """The default configuration of a type with small sizes. It keeps one layer of each kind."""
    config_class = CONFIG_MAPPING[model_type]
    return config_class(**{**_shrunk(config_class()), **_FIELDS.get(model_type, {})})


def _shrunk(config: PreTrainedConfig) -> dict[str, Any]:
    """Fields that make a configuration small."""
    values = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    fields: dict[str, Any] = {}
    for name, value in values.items():
        size = _SIZE_OF.get(name)
        if isinstance(value, PreTrainedConfig):
            fields[name] = {**_shrunk(value), "model_type": value.model_type}
        elif name == "head_dim" and value is not None and value == values.get("qk_rope_head_dim"):
            fields[name] = _SIZE_OF["qk_rope_head_dim"]
        elif name.endswith("key_value_heads") and value == values.get("num_attention_heads"):
            fields[name] = _SIZE_OF["num_attention_heads"]
        elif size is not None and isinstance(value, int) and not isinstance(value, bool) and value > size:
            fields[name] = size
        elif size is not None and isinstance(value, list):
            fields[name] = [min(each, size) for each in value]
        elif name in _TOKEN_IDS and value is not None:
            fields[name] = _TOKEN_IDS[name]
    depth_name = next((name for name in _NUM_LAYERS if isinstance(values.get(name), int)), None)
    if depth_name is not None:
        depth = values[depth_name]
        per_layer = {name: value for name, value in values.items() if isinstance(value, list) and len(value) == depth}
        kept = _one_of_each_kind(list(zip(*(map(str, value) for value in per_layer.values()), strict=True)), depth)
        fields[depth_name] = len(kept)
        fields |= {name: [fields.get(name, value)[index] for index in kept] for name, value in per_layer.items()}
    return fields


def _one_of_each_kind(kinds: list[tuple[str, ...]], depth: int) -> list[int]:
    """The layers to keep of a model, in order; at least two if there are two."""
    first = [index for index, kind in enumerate(kinds) if kind not in kinds[:index]][:_MAX_LAYERS]
    return first if len(first) > 1 else list(range(min(2, depth)))


_NOT_COUNTED = "layers attend through transformers' attention interface"
_WITHIN = "which is not supported within another model"
_ENCODER = "has an encoder; decoders are served"
_PLACES = "it does not count positions from 0"


def _lacking(part: str) -> tuple[str, ...]:
    """The types of transformers that lack a part in Quire; a model for images with such a language model, too."""
    types = [kind for kind, each in MISSING_PARTS.items() if each == part]
    found = dict.fromkeys(kind for each in types for kind in (each, each.removesuffix("_text")))
    return tuple(kind for kind in found if kind in TYPES)


REFUSED: dict[str, tuple[str, ...]] = {
    **{f"it needs {part}": types for part in MISSING_PARTS.values() if (types := _lacking(part))},
    _NOT_COUNTED: (*("big_bird", "cpmant", "git", "megatron-bert", "rembert", "roformer", "trocr", "xlm", "xlnet"),),
    _WITHIN: ("emu3", "llama4", "mllama"),
    _ENCODER: (
        *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp", "pegasus", "plbart"),
        *("prophetnet", "whisper"),
    ),
    _PLACES: (
        *("camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
    ),
    "is not supported; supported are": ("bert-generation", "reformer"),
    "it makes an attention mask of its own": ("doge",),
    "its attention takes block_indices, which paged attention does not have": ("minimax_m3_vl_text",),
    "its configuration does not say how many layers it has": ("blt",),
    "its layers have keys of 2 and of 4 heads, for 2 heads of queries": ("dots3_note_text",),
}
"""Types that are not served, by a part of the line that refuses them. A type that becomes served is taken out."""

NOT_TRIED = {
    "dots3_note": "its text model is tried as dots3_note_text",
    "gemma3n": "its text model is tried as gemma3n_text; its part for images needs timm",
    "gemma4_assistant": "drafts tokens from the states of another model",
    "gemma4_unified_assistant": "drafts tokens from the states of another model",
    "musicgen": "generates sound",
    "musicgen_melody": "generates sound",
}
"""Types in the mapping that do not generate text, or need another model for it."""

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
_BEGIN, _END = "<!-- Made by `python -m tests.real.families`: begin -->\n", "<!-- end -->\n"


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, 120, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def documented(text: str) -> str:
    """docs/models.md with the table of families as it is here."""
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    refused = {model_type for types in REFUSED.values() for model_type in types}
    equal = sorted(TYPES.keys() - refused - NOT_TRIED.keys())
    rows: list[tuple[str, Sequence[str]]] = [(f"...{line}", types) for line, types in REFUSED.items()]
    for part in dict.fromkeys(MISSING_PARTS.values()):
        foreign = [kind for kind, each in MISSING_PARTS.items() if each == part and kind not in TYPES]
        foreign = [kind for kind in foreign if kind.removesuffix("_text") not in TYPES]
        rows += [(f"not in transformers, and refused: it needs {part}", foreign)] if foreign else []
    for reason in dict.fromkeys(NOT_TRIED.values()):
        rows.append((f"not tried: {reason}", [name for name in NOT_TRIED if NOT_TRIED[name] == reason]))
    lines = [
        f"{len(equal)} of the {len(TYPES)} causal types of transformers {transformers.__version__} are equal:",
        "",
        *_wrapped(f"{_quoted(equal)}."),
        "",
        "The others are refused, by a line with this part. A type that is published with further parts, for images or",
        "sound, is tried with them; its language model may be equal when it is saved on its own.",
        "",
        *(row for line, names in rows for row in _wrapped(f"- {line}: {_quoted(names)}", "  ")),
    ]
    return before + _BEGIN + "\n" + "\n".join(lines) + "\n\n" + _END + after


if __name__ == "__main__":
    DOCUMENT.write_text(documented(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
