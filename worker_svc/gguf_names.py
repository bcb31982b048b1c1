"""Names of tensors in GGUF files, by architecture, and the names that transformers gives them.

"*" in a name is the number of an expert, or of a head: all are one tensor in the file.
"""

import re
from collections.abc import Mapping

_OF_LLAMA = {
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
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OF_MIXTRAL = _OF_LLAMA | {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.*.w1",
    "ffn_down_exps": "block_sparse_moe.experts.*.w2",
    "ffn_up_exps": "block_sparse_moe.experts.*.w3",
}
_OF_QWEN_WITH_EXPERTS = _OF_LLAMA | {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.*.gate_proj",
    "ffn_up_exps": "mlp.experts.*.up_proj",
    "ffn_down_exps": "mlp.experts.*.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_OF_GEMMA_2 = _OF_LLAMA | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OF_PHI_3 = _OF_LLAMA | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_OF_GPT2 = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}


def _experts(experts: str, router: str, *, shared: str = "mlp.shared_experts", **further: str) -> dict[str, str]:
    """The names of experts with gate, up and down, of the expert that all tokens have, and of the router."""
    parts = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    return {
        "ffn_gate_inp": router,
        **{f"ffn_{part}_exps": f"{experts}.*.{name}" for part, name in parts.items()},
        **{f"ffn_{part}_shexp": f"{shared}.{name}" for part, name in parts.items()},
        **further,
    }


_OF_GRANITE_MOE = _OF_LLAMA | _experts(
    "block_sparse_moe.experts",
    "block_sparse_moe.router.layer",
    ffn_gate_shexp="shared_mlp.input_linear.gate",
    ffn_up_shexp="shared_mlp.input_linear.up",
    ffn_down_shexp="shared_mlp.output_linear",
)
_NORM_BEFORE_MLP = {"post_attention_norm": "post_attention_layernorm"}
_NORMS_AFTER = _OF_LLAMA | _NORM_BEFORE_MLP | {"post_ffw_norm": "post_feedforward_layernorm"}
_OF_GLM = _OF_LLAMA | {"ffn_up": "mlp.gate_up_proj"}
_OF_GLM_4 = _OF_GLM | {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"}
_OF_HUNYUAN = _OF_LLAMA | {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
_OF_STABLE_LM = _OF_LLAMA | {
    "attn_q_norm": "self_attn.q_layernorm.norms.*",
    "attn_k_norm": "self_attn.k_layernorm.norms.*",
}
_DEEPSEEK_EXPERTS = _experts("mlp.experts", "mlp.gate", exp_probs_b="mlp.gate.e_score_correction_bias")
_OF_DEEPSEEK = (
    _OF_LLAMA
    | _DEEPSEEK_EXPERTS
    | {
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",
        "attn_k_b": "self_attn.k_b_proj",
        "attn_v_b": "self_attn.v_b_proj",
    }
)
NAMES: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(("llama", "mistral", "phimoe"), _OF_MIXTRAL),
    **dict.fromkeys(
        ("qwen2", "qwen3", "qwen2vl", "qwen3vl", "gemma", "granite", "minicpm", "olmo", "smollm3"), _OF_LLAMA
    ),
    **dict.fromkeys(
        ("mistral3", "exaone", "command-r", "cohere2", "ernie4_5", "nemotron", "arcee", "jais2"), _OF_LLAMA
    ),
    **dict.fromkeys(("internlm2", "xverse", "pangu-embedded"), _OF_LLAMA),
    **dict.fromkeys(("qwen2moe", "qwen3moe", "qwen3vlmoe", "olmoe"), _OF_QWEN_WITH_EXPERTS),
    **dict.fromkeys(("gemma2", "gemma3"), _OF_GEMMA_2),
    "phi3": _OF_PHI_3,
    "gpt2": _OF_GPT2,
    "granitemoe": _OF_GRANITE_MOE,
    **dict.fromkeys(("olmo2", "exaone4"), _NORMS_AFTER),
    "seed_oss": _OF_LLAMA | _NORM_BEFORE_MLP,
    "chatglm": _OF_GLM,
    "glm4": _OF_GLM_4,
    "glm4moe": _OF_LLAMA | _NORM_BEFORE_MLP | _DEEPSEEK_EXPERTS,
    "starcoder2": _OF_LLAMA | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    "stablelm": _OF_STABLE_LM,
    "ernie4_5-moe": _OF_LLAMA
    | _experts("mlp.experts", "mlp.gate", exp_probs_b="mlp.moe_statics.e_score_correction_bias"),
    "hunyuan-dense": _OF_HUNYUAN,
    "hunyuan-moe": _OF_HUNYUAN | _experts("mlp.experts", "mlp.gate.wg", shared="mlp.shared_mlp"),
    "gpt-oss": _OF_LLAMA | _NORM_BEFORE_MLP | _experts("mlp.experts", "mlp.router", attn_sinks="self_attn.sinks"),
    "deepseek2": _OF_DEEPSEEK,
    "minimax-m2": _OF_MIXTRAL | {"exp_probs_b": "block_sparse_moe.e_score_correction_bias"},
    "dots1": _OF_LLAMA | _DEEPSEEK_EXPERTS,
    "exaone-moe": _OF_LLAMA | _DEEPSEEK_EXPERTS | {"exp_probs_b": "mlp.e_score_correction_bias"},
    "hy_v3": _OF_LLAMA
    | _experts("mlp.experts", "mlp.router.gate", shared="mlp.shared_mlp", exp_probs_b="mlp.expert_bias"),
}
"""By architecture: names of modules by their names in the file, without the number of the layer."""
# Their numbers are part of the configuration.
OF_CONFIGURATION = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
LAYERS = {"gpt2": "transformer.h"}
"""The module of all layers, if it is not model.layers."""
TRANSPOSED = re.compile(r"transformer\.h\.\d+\.(attn|mlp)\.c_\w+\.weight")
ROTATED = {"attn_q": "head_count", "attn_k": "head_count_kv"}
ROTATES_NEIGHBOURS = frozenset(
    (
        *("llama", "mistral", "mistral3", "granite", "granitemoe", "minicpm", "olmo", "smollm3", "arcee"),
        *("internlm2", "xverse"),
    )
)
"""Architectures whose files have pairs that rotate together as neighbours, and transformers half a head apart."""
NORMS_FROM_1 = frozenset(("gemma", "gemma2", "gemma3", "nemotron"))
"""Architectures whose files have the factors of norms, and transformers the factors minus 1."""
WITHOUT_KIND = ("self_attn.sinks", "e_score_correction_bias", "mlp.expert_bias")
"""Ends of names that are not followed by ".weight" or ".bias"."""
ROWS = ("shared_expert_gate.weight", "moe_statics.e_score_correction_bias")
"""Ends of names of matrices of one row, which files have as vectors."""
JOINED = {
    "shared_mlp.input_linear.weight": ("shared_mlp.input_linear.gate.weight", "shared_mlp.input_linear.up.weight"),
    "self_attn.kv_b_proj.weight": ("self_attn.k_b_proj.weight", "self_attn.v_b_proj.weight"),
}
"""Tensors that files have in two parts, by the ends of their names; the parts have names only here."""
