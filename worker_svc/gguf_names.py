"""Names of tensors in GGUF files, by architecture, and the names that transformers gives them.

"*" in a name is the number of an expert, or of a head: all are one tensor in the file.
"""

import re
from collections.abc import Mapping


def _experts(
    experts: str = "mlp.experts",
    router: str = "mlp.gate",
    *,
    shared: str = "mlp.shared_experts",
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    **further: str,
) -> dict[str, str]:
    """The names of experts with gate, up and down, of the expert that all tokens have, and of the router."""
    named = dict(zip(("gate", "up", "down"), parts, strict=True))
    return {
        "ffn_gate_inp": router,
        **{f"ffn_{part}_exps": f"{experts}.*.{name}" for part, name in named.items()},
        **{f"ffn_{part}_shexp": f"{shared}.{name}" for part, name in named.items()},
        **further,
    }


USUAL: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "attn_sinks": "self_attn.sinks",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    **_experts(exp_probs_b="mlp.gate.e_score_correction_bias"),
}
"""Names of modules by their names in the file, without the number of the layer."""
_MIXTRAL = _experts(
    "block_sparse_moe.experts",
    "block_sparse_moe.gate",
    parts=("w1", "w3", "w2"),
    exp_probs_b="block_sparse_moe.e_score_correction_bias",
)
_QWEN_EXPERTS = _experts(shared="mlp.shared_expert", ffn_gate_inp_shexp="mlp.shared_expert_gate")
_GEMMA_2 = {"ffn_norm": "pre_feedforward_layernorm"}
_LAYER_INPUTS = _GEMMA_2 | {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
_MERGED_MLP = {"ffn_up": "mlp.gate_up_proj"}
_STARCODER = {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
_HUNYUAN = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
_DELTA_RULE = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_a": "linear_attn.A_log",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_SHORT_CONVOLUTION = {
    "token_embd_norm": "model.embedding_norm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "attn_norm": "operator_norm",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "attn_output": "self_attn.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}


def _mamba_2(module: str = "mamba") -> dict[str, str]:
    """The names of a layer of Mamba 2."""
    names = {"in": "in_proj", "conv1d": "conv1d", "a": "A_log", "d": "D", "norm": "norm", "out": "out_proj"}
    names["dt"] = "dt_bias"
    return {f"ssm_{name}": f"{module}.{other}" for name, other in names.items()}


def _mamba(module: str) -> dict[str, str]:
    """The names of a layer of Mamba."""
    names = _mamba_2(module) | {"ssm_x": f"{module}.x_proj", "ssm_dt": f"{module}.dt_proj"}
    return names | {f"ssm_{part}_norm": f"{module}.{part}_layernorm" for part in ("dt", "b", "c")}


_BACKBONE = {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "attn_norm": "norm"}
_GRANITE_EXPERTS = _experts(
    "block_sparse_moe.experts",
    "block_sparse_moe.router.layer",
    ffn_gate_shexp="shared_mlp.input_linear.gate",
    ffn_up_shexp="shared_mlp.input_linear.up",
    ffn_down_shexp="shared_mlp.output_linear",
)
_NEMOTRON_H = _mamba_2("mixer") | {
    "attn_norm": "norm",
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    **_experts(
        "mixer.experts",
        "mixer.gate",
        shared="mixer.shared_experts",
        exp_probs_b="mixer.gate.e_score_correction_bias",
    ),
}
_BERT = {
    "token_embd": "embeddings.word_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
    "attn_q": "attention.self.query",
    "attn_k": "attention.self.key",
    "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
    "cls": "pooler.dense",
    "cls.output": "classifier",
}
DIFFERENT: Mapping[str, Mapping[str, str]] = {
    "bert": _BERT,
    "nomic-bert": _BERT
    | {
        "token_embd_norm": "emb_ln",
        "attn_qkv": "attn.Wqkv",
        "attn_output": "attn.out_proj",
        "attn_output_norm": "norm1",
        "ffn_up": "mlp.fc11",
        "ffn_gate": "mlp.fc12",
        "ffn_down": "mlp.fc2",
        "layer_output_norm": "norm2",
    },
    "modern-bert": {
        "token_embd": "embeddings.tok_embeddings",
        "token_embd_norm": "embeddings.norm",
        "output_norm": "final_norm",
        "attn_norm": "attn_norm",
        "attn_qkv": "attn.Wqkv",
        "attn_output": "attn.Wo",
        "ffn_norm": "mlp_norm",
        "ffn_up": "mlp.Wi",
        "ffn_down": "mlp.Wo",
    },
    "gemma-embedding": _GEMMA_2 | {"dense_2": "dense_2", "dense_3": "dense_3"},
    **dict.fromkeys(("llama", "mistral", "phimoe", "minimax-m2"), _MIXTRAL),
    **dict.fromkeys(("qwen2moe", "qwen3moe", "qwen3vlmoe"), _QWEN_EXPERTS),
    **dict.fromkeys(("gemma2", "gemma3"), _GEMMA_2),
    "gemma3n": _LAYER_INPUTS
    | {
        "altup_proj": "model.altup_projections.*",
        "altup_unembd_proj": "model.altup_unembed_projections.*",
        "altup_correct_coef": "altup.correction_coefs",
        "altup_correct_scale": "altup.correct_output_scale",
        "altup_predict_coef": "altup.prediction_coefs",
        "altup_router": "altup.modality_router",
        "altup_router_norm": "altup.router_norm",
        "laurel_l": "laurel.linear_left",
        "laurel_r": "laurel.linear_right",
        "laurel_post_norm": "laurel.post_laurel_norm",
    },
    "gemma4": _LAYER_INPUTS
    | _experts("experts", "router.proj")
    | {
        "layer_output_scale": "layer_scalar",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
        # Not factors of weights, as in other files.
        "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale",
    },
    "phi3": _MERGED_MLP | {"attn_qkv": "self_attn.qkv_proj"},
    "chatglm": _MERGED_MLP,
    "gpt2": {
        "token_embd": "transformer.wte",
        "position_embd": "transformer.wpe",
        "output_norm": "transformer.ln_f",
        "attn_norm": "ln_1",
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    },
    "granitemoe": _GRANITE_EXPERTS,
    "granitehybrid": _mamba_2()
    | _GRANITE_EXPERTS
    | {
        "ffn_gate": "shared_mlp.input_linear.gate",
        "ffn_up": "shared_mlp.input_linear.up",
        "ffn_down": "shared_mlp.output_linear",
    },
    "falcon-h1": _mamba_2()
    | {
        "output_norm": "model.final_layernorm",
        "ffn_norm": "pre_ff_layernorm",
        "ffn_gate": "feed_forward.gate_proj",
        "ffn_up": "feed_forward.up_proj",
        "ffn_down": "feed_forward.down_proj",
    },
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), _NEMOTRON_H),
    "mamba": _mamba("mixer") | _BACKBONE,
    "mamba2": _mamba_2("mixer") | _BACKBONE,
    "jamba": _mamba("mamba")
    | _experts("feed_forward.experts", "feed_forward.router")
    | {
        "output_norm": "model.final_layernorm",
        "ffn_norm": "pre_ff_layernorm",
        "ffn_gate": "feed_forward.gate_proj",
        "ffn_up": "feed_forward.up_proj",
        "ffn_down": "feed_forward.down_proj",
    },
    "qwen35": _DELTA_RULE,
    "qwen35moe": _DELTA_RULE | _QWEN_EXPERTS,
    "qwen3next": _DELTA_RULE
    | _QWEN_EXPERTS
    | {"ssm_in": "linear_attn.in_proj_qkvz", "ssm_ba": "linear_attn.in_proj_ba"},
    "lfm2": _SHORT_CONVOLUTION,
    "lfm2moe": _SHORT_CONVOLUTION
    | _experts(
        "feed_forward.experts",
        "feed_forward.gate",
        parts=("w1", "w3", "w2"),
        exp_probs_b="feed_forward.expert_bias",
    ),
    "glm4": _MERGED_MLP | {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"},
    **dict.fromkeys(("starcoder2", "codeshell"), _STARCODER),
    "stablelm": {
        "attn_q_norm": "self_attn.q_layernorm.norms.*",
        "attn_k_norm": "self_attn.k_layernorm.norms.*",
    },
    "ernie4_5-moe": {"exp_probs_b": "mlp.moe_statics.e_score_correction_bias"},
    **dict.fromkeys(("hunyuan-dense", "hunyuan_vl", "maincoder"), _HUNYUAN),
    "hunyuan-moe": _HUNYUAN | _experts(router="mlp.gate.wg", shared="mlp.shared_mlp"),
    "gpt-oss": {"ffn_gate_inp": "mlp.router"},
    "exaone-moe": {"exp_probs_b": "mlp.e_score_correction_bias"},
    "hy_v3": _experts(router="mlp.router.gate", shared="mlp.shared_mlp", exp_probs_b="mlp.expert_bias"),
}
"""By architecture: the names that are not the usual ones."""
# Their numbers are part of the configuration.
OF_CONFIGURATION = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
LAYERS = {
    "gpt2": "transformer.h",
    **dict.fromkeys(("mamba", "mamba2"), "backbone.layers"),
    "bert": "encoder.layer",
    "nomic-bert": "encoder.layers",
    "modern-bert": "layers",
}
"""The module of all layers, if it is not model.layers."""
OF_KEYS = ("attn_k", "attn_v", "attn_k_norm")
"""Tensors that files also have in layers that read the keys and values of earlier ones."""
DECAYS_OF_STATES = ("mamba", "jamba")
"""Architectures whose decays are a matrix, with a number for each input and number of its state."""
FLAT = ("ssm_a", "ssm_d", "ssm_norm")
"""Tensors that transformers has as vectors."""
CONVOLUTIONS = ("ssm_conv1d", "shortconv.conv")
"""Weights of convolutions, which transformers has with a dimension more."""
TRANSPOSED = re.compile(r"transformer\.h\.\d+\.(attn|mlp)\.c_\w+\.weight")
ROTATED = {"attn_q": "head_count", "attn_k": "head_count_kv"}
"""Tensors of all heads that rotate, and the fields with their numbers."""
ROTATED_HEADS = ("attn_q_norm", "attn_k_norm")
"""Norms of a head after its rotation, or before."""
ROTATES_NEIGHBOURS = frozenset(
    (
        *("llama", "mistral", "mistral3", "granite", "granitemoe", "granitehybrid", "minicpm", "olmo", "smollm3"),
        "arcee",
        *("internlm2", "xverse", "baichuan", "maincoder", "deepseek", "bailingmoe"),
    )
)
"""Architectures whose files have pairs that rotate together as neighbours, and transformers half a head apart."""
NORMS_FROM_1 = frozenset(
    ("gemma", "gemma2", "gemma3", "gemma-embedding", "nemotron", "qwen35", "qwen35moe", "qwen3next")
)
"""Architectures whose files have the factors of norms, and transformers the factors minus 1."""
WITHOUT_KIND = (
    *("self_attn.sinks", "e_score_correction_bias", ".expert_bias", ".A_log", ".dt_bias", ".D"),
    *("correct_output_scale", "layer_scalar", "router.scale", "router.per_expert_scale"),
)
"""Ends of names that are not followed by ".weight" or ".bias"."""
ROWS = ("shared_expert_gate.weight", "moe_statics.e_score_correction_bias")
"""Ends of names of matrices of one row, which files have as vectors."""
BY_KEY = {"ssm_ba": ("ssm_beta", "ssm_alpha")}
"""Tensors that have rows of several for each head of key, if files do not have all inputs of its layer in one."""
BY_VALUE = ("attn_qkv", "attn_gate", "ssm_beta", "ssm_alpha", "ssm_a", "ssm_dt", "ssm_conv1d")
"""Tensors whose last rows are of the heads of value of delta rules."""
FROM_VALUES = "ssm_out"
"""The tensor whose columns are of the heads of value."""
TURNS_VALUES = frozenset(("qwen35", "qwen35moe"))
"""Architectures whose files have the first value of each key, then the second of each; transformers has all values of a
key together."""
JOINED = {
    "shared_mlp.input_linear.weight": ("shared_mlp.input_linear.gate.weight", "shared_mlp.input_linear.up.weight"),
    "self_attn.kv_b_proj.weight": ("self_attn.k_b_proj.weight", "self_attn.v_b_proj.weight"),
}
"""Tensors that files have in two parts, by the ends of their names; the parts have names only here."""
