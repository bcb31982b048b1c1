"""Small models with random weights and a usable tokenizer, in directories as transformers writes them."""

import copy
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

PAD, BOS, EOS = "<pad>", "<s>", "</s>"
VOCAB_SIZE = 320
MAX_LENGTH = 512

COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LENGTH,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@dataclass(frozen=True, slots=True)
class Family:
    """A causal language model of transformers.

    Attributes:
        name: the class without ForCausalLM or LMHeadModel.
        fields: of the configuration, in addition to the fields of all models.
        config: the class of the configuration, if it is not the name and Config.
        num_calls: of attention that write keys, in a forward pass; for transformers' code, all calls.
    """

    name: str
    fields: dict[str, Any] = field(default_factory=dict)
    config: str | None = None
    num_calls: int = 2


def _family(
    name: str, *shared: Mapping[str, Any], config: str | None = None, num_calls: int | None = None, **own: Any
) -> Family:
    """A family with shared fields and its own, and as many layers as have types. By default each layer calls attention
    once, unless it keeps a state or reads the keys of another layer."""
    fields: dict[str, Any] = dict(item for each in (*shared, own) for item in each.items())
    layers = fields.get("layer_types") or fields.get("layers_block_type")
    layers = layers or ["full_attention"] * fields.get("num_hidden_layers", 2)
    fields["num_hidden_layers"] = len(layers)
    count = sum(each not in ("linear_attention", "conv") for each in layers) - fields.get("num_kv_shared_layers", 0)
    return Family(name, fields, config, count if num_calls is None else num_calls)


def _yarn(factor: float, original: int, **further: Any) -> dict[str, Any]:
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, **further}


ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 20}

LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
}
# As of real models, whose products need no padding.
WIDE_LATENT = {**LATENT, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32}
_INDEX = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": MAX_LENGTH}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
EXPERTS = {**ROUTED, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}

FEW_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}

_GRANITE = {
    "attention_bias": True,
    "attention_multiplier": 0.3,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 4.0,
}

_GEMMA_4 = {
    "num_hidden_layers": 6,
    "layer_types": [*(3 * ["sliding_attention"]), "full_attention", "sliding_attention", "full_attention"],
    "sliding_window": 20,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": VOCAB_SIZE,
}

_GPT2 = {"num_attention_heads": 2, "intermediate_size": 256}
_OPT = {"num_attention_heads": 2, "ffn_dim": 128, "word_embed_proj_dim": None}
_LLAMA = {"hidden_size": 128, "intermediate_size": 192}

# The head size in the name is hidden size / heads. The first model of each family has no special features.
SHAPES: dict[str, Family] = {
    "gpt2-tied-32": _family("GPT2", _GPT2),
    "gpt2-untied-64": _family("GPT2", _GPT2, hidden_size=128, tie_word_embeddings=False, n_inner=96),
    "gpt2-80": _family("GPT2", _GPT2, hidden_size=160, scale_attn_by_inverse_layer_idx=True),
    "opt-pre-norm-32": _family("OPT", _OPT),
    "opt-post-norm-projected-64": _family(
        "OPT", _OPT, hidden_size=128, word_embed_proj_dim=48, do_layer_norm_before=False
    ),
    "opt-untied-80": _family("OPT", _OPT, hidden_size=160, tie_word_embeddings=False),
    "llama-gqa-untied-32": _family("Llama", _LLAMA),
    "llama-mha-tied-64": _family("Llama", _LLAMA, num_attention_heads=2, tie_word_embeddings=True),
    "llama-mqa-80": _family("Llama", _LLAMA, hidden_size=160, num_attention_heads=2, num_key_value_heads=1),
    "llama-gqa-explicit-128": _family("Llama", _LLAMA, head_dim=128, attention_bias=True, mlp_bias=True),
}

NATIVE: dict[str, Family] = {
    "mistral-sliding": _family("Mistral", sliding_window=20, head_dim=32),
    "mistral-full-tied": _family("Mistral", sliding_window=None, tie_word_embeddings=True),
    "qwen2-tied": _family("Qwen2", tie_word_embeddings=True),
    "qwen2-upper-layer-sliding": _family("Qwen2", use_sliding_window=True, sliding_window=17, max_window_layers=1),
    "qwen3": _family("Qwen3", head_dim=32, attention_bias=True),
    "qwen3-alternating": _family("Qwen3", ALTERNATING, head_dim=16, use_sliding_window=True),
    "mixtral": _family("Mixtral", num_local_experts=4, num_experts_per_tok=2, sliding_window=20),
    # For a window of 0 transformers makes a mask that no layer of this model uses.
    "qwen2-moe": _family("Qwen2Moe", FEW_EXPERTS, shared_expert_intermediate_size=48),
    "qwen2-moe-sliding-sparse": _family(
        "Qwen2Moe",
        FEW_EXPERTS,
        num_hidden_layers=3,
        shared_expert_intermediate_size=40,
        decoder_sparse_step=2,
        norm_topk_prob=True,
        use_sliding_window=True,
        sliding_window=17,
        max_window_layers=3,
    ),
    "qwen3-moe": _family("Qwen3Moe", FEW_EXPERTS, head_dim=16),
    "qwen3-moe-normalized-dense": _family(
        "Qwen3Moe", FEW_EXPERTS, head_dim=16, num_experts_per_tok=3, norm_topk_prob=True, mlp_only_layers=[0]
    ),
    "gemma": _family("Gemma", head_dim=32, num_key_value_heads=1),
    # Caps that change the output of random weights.
    "gemma2-capped-alternating": _family(
        "Gemma2",
        ALTERNATING,
        head_dim=32,
        query_pre_attn_scalar=40,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=1.5,
    ),
    "gemma3-alternating": _family(
        "Gemma3", ALTERNATING, config="Gemma3TextConfig", head_dim=32, query_pre_attn_scalar=40
    ),
    "phi3": _family("Phi3", sliding_window=20),
    "phi3-partial": _family(
        "Phi3", num_key_value_heads=4, rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.75}
    ),
    "gemma3-scaled": _family(
        "Gemma3",
        config="Gemma3TextConfig",
        head_dim=16,
        query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        sliding_window=9,
        final_logit_softcapping=2.0,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    ),
    # Queries grow from token 32 on.
    "ministral3": _family(
        "Ministral3",
        head_dim=16,
        sliding_window=40,
        rope_parameters=_yarn(16.0, 32, rope_theta=1e4, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.3),
    ),
    "smollm3": _family("SmolLM3", num_hidden_layers=4, use_sliding_window=True, sliding_window=20),
    "seed-oss": _family("SeedOss", head_dim=32),
    "granite": _family("Granite", _GRANITE),
    "granite-moe": _family("GraniteMoe", _GRANITE, num_local_experts=4),
    "granite-moe-shared": _family("GraniteMoeShared", _GRANITE, num_local_experts=4, shared_intermediate_size=48),
    "olmo2": _family("Olmo2", attention_bias=True),
    "olmo3-alternating": _family(
        "Olmo3",
        ALTERNATING,
        rope_parameters={
            "full_attention": _yarn(8.0, 64),
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
        },
    ),
    "exaone4": _family("Exaone4", sliding_window=None, layer_types=["full_attention"] * 2),
    "exaone4-alternating": _family("Exaone4", ALTERNATING, head_dim=32),
    "glm": _family("Glm", head_dim=16),
    "glm4": _family("Glm4", head_dim=24, rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.25}),
    "glm4-moe": _family(
        "Glm4Moe",
        ROUTED,
        head_dim=16,
        attention_bias=True,
        use_qk_norm=True,
        n_routed_experts=8,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.5,
        n_shared_experts=2,
        first_k_dense_replace=1,
    ),
    "minimax-m2": _family("MiniMaxM2", head_dim=16, num_local_experts=4, num_experts_per_tok=2, rotary_dim=8),
    "cohere": _family("Cohere", logit_scale=0.25, attention_bias=True),
    "cohere-head-norms": _family("Cohere", use_qk_norm=True),
    "cohere2-alternating": _family("Cohere2", ALTERNATING),
    "starcoder2": _family("Starcoder2", sliding_window=20),
    "stablelm": _family("StableLm"),
    "stablelm-parallel": _family("StableLm", use_parallel_residual=True, use_qkv_bias=True),
    "stablelm-head-norms": _family("StableLm", use_qkv_bias=True, qk_layernorm=True),
    "stablelm-one-head-of-keys": _family("StableLm", num_key_value_heads=1, qk_layernorm=True),
    "ernie4.5": _family("Ernie4_5", head_dim=32, use_bias=True),
    "hunyuan-dense": _family(
        "HunYuanDenseV1",
        head_dim=16,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0},
    ),
    # Latents, with heads of values that are smaller or larger than heads of keys. transformers 5.23 loses Youtu's
    # embedding of the padding token as it loads it.
    "deepseek-v2": _family("DeepseekV2", WIDE_LATENT, EXPERTS, v_head_dim=16),
    "deepseek-v2-grouped": _family(
        "DeepseekV2",
        WIDE_LATENT,
        EXPERTS,
        v_head_dim=16,
        q_lora_rank=None,
        topk_method="group_limited_greedy",
        n_routed_experts=6,
        n_group=3,
        topk_group=2,
        attention_bias=True,
    ),
    "deepseek-v3": _family("DeepseekV3", WIDE_LATENT, EXPERTS, v_head_dim=32),
    "deepseek-v3-yarn": _family(
        "DeepseekV3",
        WIDE_LATENT,
        EXPERTS,
        v_head_dim=16,
        n_routed_experts=8,
        n_group=4,
        topk_group=2,
        rope_parameters=_yarn(8.0, 32, rope_theta=1e4, mscale=1.0, mscale_all_dim=1.0),
    ),
    "glm4-moe-lite": _family("Glm4MoeLite", WIDE_LATENT, EXPERTS, v_head_dim=16),
    "minicpm3": _family("MiniCPM3", WIDE_LATENT, v_head_dim=16),
    "youtu": _family("Youtu", WIDE_LATENT, v_head_dim=24, pad_token_id=None),
    "phi-moe": _family("Phimoe", num_local_experts=4, lm_head_bias=True, attention_bias=True),
    "olmo": _family("Olmo"),
    "olmo-clamped-moe": _family("Olmoe", clip_qkv=0.5, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True),
    "flex-olmo-moe": _family("FlexOlmo", num_experts=4, num_experts_per_tok=2),
    "helium": _family("Helium", head_dim=16, attention_bias=True),
    "arcee": _family("Arcee", mlp_bias=True),
    "nemotron": _family("Nemotron", head_dim=16),
    "jais2": _family("Jais2"),
    "vault-gemma": _family("VaultGemma", ALTERNATING, head_dim=32, query_pre_attn_scalar=40),
    "cwm": _family("Cwm", ALTERNATING, head_dim=16, rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
    "dots1-moe": _family(
        "Dots1", ROUTED, ALTERNATING, n_shared_experts=1, first_k_dense_replace=1, attention_bias=True
    ),
    "ernie4.5-moe": _family(
        "Ernie4_5_Moe", moe_num_experts=4, moe_k=2, moe_intermediate_size=48, moe_num_shared_experts=1
    ),
    "hunyuan-moe": _family("HunYuanMoEV1", head_dim=16, num_experts=4, moe_topk=2),
    "ministral-alternating": _family("Ministral", ALTERNATING, head_dim=16),
    "solar-open-moe": _family("SolarOpen", ROUTED, head_dim=16, n_shared_experts=1),
    "exaone-moe": _family("ExaoneMoe", FEW_EXPERTS, ALTERNATING, num_shared_experts=1, first_k_dense_replace=1),
    "hy-v3-moe": _family("HYV3", FEW_EXPERTS, head_dim=16, num_shared_experts=2, attention_bias=True),
    # Attention sinks.
    "gpt-oss-moe": _family(
        "GptOss",
        ALTERNATING,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters=_yarn(32.0, 16, rope_theta=150000.0, truncate=False),
    ),
    # Wider heads, but fewer, in layers without a window; the last two layers read the keys and values of others.
    "gemma4-shared": _family("Gemma4", _GEMMA_4, config="Gemma4TextConfig", num_kv_shared_layers=2),
    "gemma4-wide-shared": _family(
        "Gemma4",
        _GEMMA_4,
        config="Gemma4TextConfig",
        num_kv_shared_layers=3,
        layer_types=[*(2 * ["sliding_attention", "full_attention"]), "sliding_attention", "full_attention"],
        attention_k_eq_v=False,
        use_double_wide_mlp=True,
        final_logit_softcapping=2.0,
    ),
    "gemma4-moe": _family(
        "Gemma4",
        _GEMMA_4,
        config="Gemma4TextConfig",
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=48,
    ),
    "gemma3n-shared": _family(
        "Gemma3n",
        config="Gemma3nTextConfig",
        num_kv_shared_layers=2,
        layer_types=2 * ["sliding_attention", "full_attention"],
        sliding_window=20,
        head_dim=16,
        intermediate_size=[96, 128, 96, 96],
        activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0],
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=200,
        laurel_rank=8,
    ),
    "gemma4-unified": _family(
        "Gemma4Unified",
        {name: value for name, value in _GEMMA_4.items() if "per_layer" not in name},
        config="Gemma4UnifiedTextConfig",
    ),
}

FOREIGN: dict[str, Family] = {
    "phi": _family("Phi", partial_rotary_factor=0.5),
    "falcon-new": _family("Falcon", new_decoder_architecture=True, num_kv_heads=2),
    "falcon-multi-query": _family("Falcon", multi_query=True, parallel_attn=True),
    "gpt-neox": _family("GPTNeoX", use_parallel_residual=True),
    "biogpt": _family("BioGpt"),
    "gpt-bigcode": _family("GPTBigCode", multi_query=True),
    # Own attention classes, which adapters replace.
    "gptj": _family("GPTJ", rotary_dim=8),
    "codegen": _family("CodeGen", rotary_dim=8),
    "gpt-neo-alternating": _family("GPTNeo", attention_types=[[["global", "local"], 1]], window_size=17),
    "gpt-neox-japanese": _family("GPTNeoXJapanese"),
    "gpt": _family("OpenAIGPT"),
    "xglm": _family("XGLM", ffn_dim=96),
    # Biases for 12 heads are no powers of two, and no whole numbers of bfloat16.
    "bloom": _family("Bloom", hidden_size=96, num_attention_heads=12),
    "mpt": _family("Mpt", hidden_size=96, num_attention_heads=12, max_seq_len=MAX_LENGTH, expansion_ratio=2),
    "falcon-alibi": _family("Falcon", hidden_size=96, num_attention_heads=12, alibi=True, multi_query=False),
    "falcon-alibi-multi-query": _family("Falcon", alibi=True, multi_query=True),
    # Attends to the best tokens, whose maximum number is the longest text.
    "deepseek-v32": _family("DeepseekV32", LATENT, EXPERTS, _INDEX, v_head_dim=16),
    # Layers that attend twice.
    "diffllama": _family("DiffLlama", num_calls=4),
    "longcat-flash": _family(
        "LongcatFlash",
        LATENT,
        head_dim=8,
        v_head_dim=16,
        num_layers=2,
        num_hidden_layers=4,
        ffn_hidden_size=96,
        expert_ffn_hidden_size=48,
        n_routed_experts=4,
        zero_expert_num=2,
        moe_topk=2,
    ),
    # Layers that run several times.
    "hrm-text": _family("HrmText", head_dim=16, num_hidden_layers=1, num_calls=8),
    # Its base model is not found by name.
    "llama4": _family(
        "Llama4",
        config="Llama4TextConfig",
        num_hidden_layers=4,
        head_dim=16,
        intermediate_size_mlp=96,
        num_local_experts=4,
        attention_chunk_size=MAX_LENGTH,
    ),
    "modernbert-decoder": _family("ModernBertDecoder", num_hidden_layers=4, sliding_window=20),
    # Attention sinks, with and without windows.
    "granite-swa": _family("GraniteSWA", ALTERNATING),
    "granite-moe-swa": _family("GraniteMoeSWA", ALTERNATING, num_local_experts=4),
    "flint": _family(
        "Flint", FEW_EXPERTS, ALTERNATING, head_dim=16, shared_expert_intermediate_size=48, mlp_only_layers=[0]
    ),
    # Sinks only in layers with windows, and heads of values that are smaller than heads of keys.
    "mimo-v2": _family("MiMoV2Flash", ROUTED, ALTERNATING, head_dim=16, v_head_dim=8),
    # Attends to the best tokens, or to the tokens that the layer before found.
    "hy-v4": _family(
        "HYV4", LATENT, ROUTED, _INDEX, num_hidden_layers=3, indexer_types=["full", "shared", "full"], v_head_dim=16
    ),
}

_DELTA_RULE = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}

_NO_BASE = {"rope_type": "default", "rope_theta": None}

_JAMBA = {
    "num_hidden_layers": 3,
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "num_experts": 4,
    "mamba_dt_rank": 32,
    "mamba_d_state": 16,
    "mamba_proj_bias": True,
}
_MAMBA = {"num_hidden_layers": 2, "state_size": 16, "time_step_rank": 32, "intermediate_size": 128}

_MAMBA_2 = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
}

STATES: dict[str, Family] = {
    # Layers that keep a state for each sequence.
    "qwen3.5": _family("Qwen3_5", _DELTA_RULE, config="Qwen3_5TextConfig"),
    "qwen3-next-moe": _family("Qwen3Next", _DELTA_RULE, FEW_EXPERTS, shared_expert_intermediate_size=48),
    "olmo-hybrid": _family(
        "OlmoHybrid",
        {name: value for name, value in _DELTA_RULE.items() if name != "head_dim"},
        rope_parameters=_NO_BASE,
    ),
    "kimi-linear": _family(
        "KimiLinear",
        WIDE_LATENT,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        mlp_layer_types=["dense", "sparse", "sparse"],
        linear_num_heads=4,
        linear_head_dim=32,
        v_head_dim=32,
        moe_intermediate_size=64,
        num_experts=4,
        num_experts_per_token=2,
        num_shared_experts=1,
        num_expert_group=1,
    ),
    "jamba": _family("Jamba", _JAMBA, num_calls=1),
    # No layer attends.
    "mamba": _family("Mamba", _MAMBA, num_calls=0),
    "falcon-mamba": _family("FalconMamba", _MAMBA, use_bias=True, num_calls=0),
    "mamba-2": _family("Mamba2", _MAMBA, num_heads=8, head_dim=16, n_groups=2, use_conv_bias=False, num_calls=0),
    "granite-hybrid": _family(
        "GraniteMoeHybrid",
        _GRANITE,
        _MAMBA_2,
        num_local_experts=0,
        shared_intermediate_size=48,
        position_embedding_type="rope",
        mamba_proj_bias=True,
        time_step_limit=(0.01, 0.5),
    ),
    "falcon-h1": _family(
        "FalconH1",
        mamba_d_ssm=96,
        mamba_n_heads=6,
        mamba_d_state=16,
        mamba_n_groups=2,
        mamba_rms_norm=True,
        mamba_norm_before_gate=False,
        mamba_proj_bias=True,
        projectors_bias=True,
        attention_bias=True,
        mlp_bias=True,
        embedding_multiplier=3.0,
        lm_head_multiplier=0.5,
        mlp_multipliers=[0.75, 1.5],
        key_multiplier=0.5,
        attention_in_multiplier=1.25,
        attention_out_multiplier=0.75,
        ssm_in_multiplier=0.5,
        ssm_out_multiplier=1.5,
        ssm_multipliers=[0.5, 0.75, 1.25, 1.5, 2.0],
    ),
    # Two shared blocks, the first used twice.
    "zamba2": _family(
        "Zamba2",
        layers_block_type=["hybrid", "hybrid", "linear_attention", "hybrid"],
        num_mem_blocks=2,
        num_key_value_heads=4,
        use_shared_attention_adapter=True,
        adapter_rank=1,
        use_mem_rope=True,
        add_bias_linear=True,
        n_mamba_heads=4,
        mamba_ngroups=2,
        mamba_d_state=4,
    ),
    "lfm2": _family("Lfm2", layer_types=["conv", "full_attention", "conv"], conv_bias=True),
    "lfm3": _family(
        "Lfm3",
        layer_types=["conv", "sliding_attention", "conv", "full_attention", "sliding_attention"],
        sliding_window=20,
        head_dim=16,
    ),
    "lfm2-moe": _family(
        "Lfm2Moe",
        FEW_EXPERTS,
        layer_types=["conv", "full_attention", "conv"],
        num_dense_layers=1,
        routed_scaling_factor=1.5,
    ),
}

FAMILIES = SHAPES | NATIVE | FOREIGN | STATES

_VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_PATCHES = {**_VISION, "image_size": 28, "patch_size": 14}
_QWEN_VISION = {"depth": 1, "num_heads": 2, "patch_size": 4, "intermediate_size": 32, "hidden_size": 32}
_WIDER = {**_QWEN_VISION, "out_hidden_size": 64}
_MROPE: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    "head_dim": 16,
}
_HALF_MROPE: dict[str, Any] = {
    "rope_parameters": {**_MROPE["rope_parameters"], "mrope_section": [1, 1, 2]},
    "head_dim": 16,
}
_TIED = {"tie_word_embeddings": True}
# Models that read images, too: their classes, and fields of the language model and of the part that reads images.
WITH_IMAGES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": ("Gemma3", {"head_dim": 16, "query_pre_attn_scalar": 16, **ALTERNATING, **_TIED}, _PATCHES),
    "qwen2-vl": ("Qwen2VL", _MROPE, {**_QWEN_VISION, "embed_dim": 32, "hidden_size": 64}),
    "qwen2.5-vl": ("Qwen2_5_VL", {**_MROPE, **_TIED}, _WIDER),
    "qwen3-vl": ("Qwen3VL", _MROPE, {**_WIDER, "deepstack_visual_indexes": [0]}),
    "mistral3": ("Mistral3", {"model_type": "mistral", "head_dim": 32}, {**_PATCHES, "model_type": "pixtral"}),
    "mistral3-of-ministral3": (
        "Mistral3",
        {"model_type": "ministral3", **NATIVE["ministral3"].fields},
        {**_PATCHES, "model_type": "pixtral"},
    ),
    # transformers does not scale the logits of this one, and of the one with Granite.
    "cohere2-vision": (
        "Cohere2Vision",
        {"model_type": "cohere2", "logit_scale": 1.0, **ALTERNATING, **_TIED},
        _PATCHES,
    ),
    "qwen3-vl-moe": ("Qwen3VLMoe", {**_MROPE, **FEW_EXPERTS}, {**_WIDER, "deepstack_visual_indexes": [0]}),
    "glm4v": ("Glm4v", _MROPE, {**_WIDER, "image_size": 28}),
    "glm4v-moe": (
        "Glm4vMoe",
        {**_HALF_MROPE, **ROUTED, "n_shared_experts": 1, "attention_bias": True},
        {**_WIDER, "image_size": 28},
    ),
    "llava-of-granite": (
        "Llava",
        {"model_type": "granite", **_GRANITE, "logits_scaling": 1.0},
        {**_PATCHES, "model_type": "clip_vision_model"},
    ),
    "gemma4": (
        "Gemma4",
        {**_GEMMA_4, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16, **_TIED},
        {**_VISION, "head_dim": 16},
    ),
    "llava": ("Llava", {"model_type": "llama"}, {**_PATCHES, "model_type": "clip_vision_model"}),
    "idefics3": ("Idefics3", {"model_type": "llama"}, _PATCHES),
}


def make_model_with_images(directory: Path, name: str, *, seed: int = 0) -> PreTrainedModel:
    """As `make_model`, of WITH_IMAGES."""
    family, text, vision = WITH_IMAGES[name]
    # Configurations change the dictionaries that they take.
    fields = copy.deepcopy({"text_config": {**COMMON, **text}, "vision_config": vision})
    config = getattr(transformers, f"{family}Config")(**fields, tie_word_embeddings="tie_word_embeddings" in text)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
    randomize(model, seed)
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return model


def make_model(
    directory: Path, family: Family | str, *, seed: int = 0, max_shard_size: str = "1GB", **changes: Any
) -> PreTrainedModel:
    """Writes a model with random weights, and a tokenizer, into `directory`; returns the model in float32.

    Args:
        family: one, or its name in FAMILIES.
        max_shard_size: small ones give several files and an index.
        changes: fields of the configuration.
    """
    if isinstance(family, str):
        family = FAMILIES[family]
    fields = json.dumps({**COMMON, **family.fields, **changes})
    model, files = _made(family.name, family.config, fields, seed, max_shard_size)
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / name).write_bytes(content)
    return copy.deepcopy(model)


@cache
def _made(
    family: str, config: str | None, fields: str, seed: int, max_shard_size: str
) -> tuple[PreTrainedModel, dict[str, bytes]]:
    """A model, and the files that it is saved as, by name. Many tests of a process use the same."""
    config_class = getattr(transformers, config or f"{family}Config")
    names = [f"{family}ForCausalLM", f"{family}LMHeadModel"]
    model_class = next(getattr(transformers, name) for name in names if hasattr(transformers, name))
    model = model_class(config_class(**json.loads(fields))).eval()
    randomize(model, seed)
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory, max_shard_size=max_shard_size)
        make_tokenizer().save_pretrained(directory)
        return model, {path.name: path.read_bytes() for path in Path(directory).iterdir()}


def randomize(model: PreTrainedModel, seed: int) -> None:
    """Gives every parameter, also biases, norms and corrections of routers, values that change the output."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                is_norm_weight = name.endswith("weight")
                parameter.copy_(1 + 0.2 * noise if is_norm_weight else 0.1 * noise)
            else:
                parameter.copy_(noise * (2.0 / sum(parameter.shape)) ** 0.5 * 1.5)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
            if name.endswith("layer_scalar"):
                buffer.copy_(1 + 0.3 * torch.randn(buffer.shape, generator=generator))


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
    """Changes the tensors of model.safetensors."""
    path = directory / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def make_remote_model(directory: Path, name: str) -> PreTrainedModel:
    """Writes a model of a family that transformers has no class for; returns a model of another one that computes the
    same. The first DeepSeek is Qwen 2 whose shared expert has the weight 1/2; PLM is Youtu with other MLPs."""
    if name == "plm":
        reference = make_model(directory, Family("Youtu", {**WIDE_LATENT, "q_lora_rank": None, "v_head_dim": 24}))
        for layer in reference.model.layers:
            layer.mlp.forward = lambda x, mlp=layer.mlp: mlp.down_proj(torch.relu(mlp.up_proj(x)) ** 2)
        edit_tensors(directory, lambda tensors: {key: tensors[key] for key in tensors if "gate_proj" not in key})
        edit_config(directory, architectures=["PLMForCausalLM"], model_type="plm", hidden_act="relu2")
        return reference
    fields = {"qkv_bias": False, "mlp_only_layers": [0], "shared_expert_intermediate_size": 48}
    reference = make_model(directory, Family("Qwen2Moe", FEW_EXPERTS | fields))
    for layer in reference.model.layers[1:]:
        layer.mlp.shared_expert_gate.weight.data.zero_()

    def halved(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            key.replace("shared_expert.", "shared_experts."): value / 2 if "shared_expert.down" in key else value
            for key, value in tensors.items()
            if "shared_expert_gate" not in key
        }

    edit_tensors(directory, halved)
    numbers = {"n_routed_experts": FEW_EXPERTS["num_experts"], "n_shared_experts": 1, "first_k_dense_replace": 1}
    edit_config(directory, architectures=["DeepseekForCausalLM"], model_type="deepseek", **numbers)
    return reference
