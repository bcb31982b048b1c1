"""The table of the families without experts that `decoder` runs: what the config.json of each means.

A row names the architecture, the defaults of transformers for fields that config.json lacks (sizes are in
`family_sizes`), and the parts of the decoder that differ from LLaMA's.
"""

from dataclasses import replace

from worker_svc.layers.embedding_norm import NormSpan
from worker_svc.layers.experts import MERGED_GATE_UP_DOWN
from worker_svc.models.base import ConfigFields
from worker_svc.models.decoder import DecoderConfig
from worker_svc.models.family_parts import (
    HEAD_NORMS,
    LAYER_NORMS,
    NO_BIASES,
    NO_MLP_BIAS,
    NORMS_AFTER,
    WITHOUT_GATE,
    Families,
    Values,
    all_biases,
    all_but_last_of,
    flag,
    if_flag,
    number,
    optional_number,
    two_rotations,
    upper_windows,
    used_window_of,
    window_everywhere,
    window_of,
    windows,
    windows_by_pattern,
    without_window,
)
from worker_svc.models.rope import RopeConfig

DENSE = Families()
_GELU = "gelu_pytorch_tanh"

DENSE.add("LlamaForCausalLM")

# LLaMA with names of its own for tensors and fields.
DENSE.add(
    "ExaoneForCausalLM",
    fixed={
        "num_hidden_layers": lambda fields: fields.integer("num_layers", fields.integer("num_hidden_layers", 32)),
        "rms_norm_eps": lambda fields: fields.number("layer_norm_epsilon", fields.number("rms_norm_eps")),
        "hidden_act": lambda fields: fields.text("activation_function", fields.text("hidden_act", "silu")),
    },
    renamed={
        "transformer.wte.": "model.embed_tokens.",
        "transformer.ln_f.": "model.norm.",
        "transformer.h.": "model.layers.",
        ".attn.attention.": ".self_attn.",
        ".out_proj.": ".o_proj.",
        ".ln_1.": ".input_layernorm.",
        ".ln_2.": ".post_attention_layernorm.",
        ".c_fc_0.": ".gate_proj.",
        ".c_fc_1.": ".up_proj.",
        ".c_proj.": ".down_proj.",
    },
)

# Layers may see a sliding window: all layers, or the sliding ones of `layer_types` (Ministral).
_MISTRAL = DENSE.add("MistralForCausalLM", fixed=NO_BIASES, sliding_windows=windows(lambda _: True))
DENSE.add("MinistralForCausalLM", like=_MISTRAL)

# Biases on query, key and value. The upper layers may see a sliding window.
DENSE.add("Qwen2ForCausalLM", fixed=NO_BIASES, sliding_windows=upper_windows(), qkv_bias=True)

# Norms on the heads of query and key. The upper layers may see a sliding window.
DENSE.add("Qwen3ForCausalLM", fixed=NO_MLP_BIAS, sliding_windows=upper_windows(), head_norms=HEAD_NORMS)


def _phi3_rope(_: ConfigFields, config: DecoderConfig) -> RopeConfig:
    if (kind := config.rope.rope_type) not in ("default", "longrope"):
        raise config.rope.fields.error("rope_type", kind, "default or longrope")
    return config.rope


# Merged weights, and a rotation that may turn a part of each head. Layers may see a sliding window.
DENSE.add(
    "Phi3ForCausalLM",
    {"original_max_position_embeddings": 4096},
    fixed=NO_BIASES,
    rotates_partly=True,
    rope=_phi3_rope,
    merged_qkv=True,
    mlp_names=MERGED_GATE_UP_DOWN,
    sliding_windows=window_everywhere,
)


def _gemma_activation(fields: ConfigFields) -> str:
    """The field says "gelu" for the same function, as an old name of it."""
    name = fields.text("hidden_act", _GELU)
    return _GELU if name == "gelu" else name


# Scaled embeddings, norms whose factors differ from 1 by their weights, and MLPs gated by GELU.
_GEMMA = DENSE.add(
    "GemmaForCausalLM",
    only={"use_bidirectional_attention": False},
    fixed={**NO_MLP_BIAS, "hidden_act": _gemma_activation},
    norm_offset=1.0,
    embedding_scale=lambda _, config: config.hidden_size**0.5,
    rounds_embedding_scale=True,
)

# Gemma with norms after attention and MLP, and a soft cap on logits.
GEMMA_2 = Families().add(
    "the part of Gemma 2 that later ones have",
    {"query_pre_attn_scalar": 256, "final_logit_softcapping": None},
    like=_GEMMA,
    fixed={"hidden_act": lambda fields: fields.text("hidden_activation", _GELU)},
    attention_output_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_output_norm="post_feedforward_layernorm",
    attention_scale=lambda fields, _: fields.number("query_pre_attn_scalar") ** -0.5,
    logit_cap=optional_number("final_logit_softcapping"),
)

# The same with soft caps on scores, too; every other layer has a window.
_CAPPED = DENSE.add(
    "Gemma2ForCausalLM",
    {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
    like=GEMMA_2,
    soft_cap=optional_number("attn_logit_softcapping"),
    sliding_windows=windows(lambda index: index % 2 == 0),
)

# Gemma 2 (text) with norms on the heads of query and key, and another rotation in layers with a window.
DENSE.add(
    "Gemma3ForCausalLM",
    like=GEMMA_2,
    **two_rotations(1e6, "rope_local_base_freq", 1e4),
    # The positions that the scaled rotation reaches already.
    max_model_len=lambda _, config: config.rope.max_positions,
    head_norms=HEAD_NORMS,
    sliding_windows=windows_by_pattern(6),
)

# Gemma 2 without norms after attention and MLP.
DENSE.add("VaultGemmaForCausalLM", like=_CAPPED, attention_output_norm=None, mlp_output_norm=None)


def _query_growth(_: ConfigFields, config: DecoderConfig) -> tuple[float, int] | None:
    rope = config.rope
    if not rope.fields.values.get("llama_4_scaling_beta"):
        return None
    return rope.fields.number("llama_4_scaling_beta"), rope.original_max_positions


# Queries grow with their position. Layers may see a sliding window.
DENSE.add(
    "Ministral3ForCausalLM",
    {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        }
    },
    fixed=NO_BIASES,
    query_growth=_query_growth,
    sliding_windows=window_everywhere,
)


def _unrotated_layers(fields: ConfigFields, config: DecoderConfig) -> frozenset[int]:
    """The layers with a 0 in `no_rope_layers`; without it, the last of each `no_rope_layer_interval`."""
    interval, rotated = fields.integer("no_rope_layer_interval", 4), fields.values.get("no_rope_layers")
    if rotated is None:
        rotated = [(index + 1) % interval for index in range(config.num_layers)]
    if not isinstance(rotated, list) or len(rotated) < config.num_layers:
        raise fields.error("no_rope_layers", rotated, f"a list of {config.num_layers} numbers, 0 for no rotation")
    return frozenset(index for index in range(config.num_layers) if not rotated[index])


# No rotation in some layers, which may see a sliding window.
DENSE.add(
    "SmolLM3ForCausalLM",
    unrotated_layers=_unrotated_layers,
    sliding_windows=lambda fields, config: windows(config.unrotated_layers.__contains__, used_window_of)(
        fields, config
    ),
)

# Biases on query, key and value.
DENSE.add("SeedOssForCausalLM", {"attention_bias": True}, attention_output_bias=flag("attention_out_bias"))

# Factors on embeddings, scores, outputs of attention and MLP, and logits.
GRANITE = DENSE.add(
    "GraniteForCausalLM",
    embedding_scale=number("embedding_multiplier", 1.0),
    residual_scale=number("residual_multiplier", 1.0),
    attention_scale=number("attention_multiplier", 1.0),
    logit_scale=lambda fields, _: 1 / fields.number("logits_scaling", 1.0),
)

# Norms after attention and MLP, not before, and norms on all heads of query and key together.
OLMO_2 = DENSE.add(
    "Olmo2ForCausalLM", fixed=NO_MLP_BIAS, **NORMS_AFTER, head_norms=HEAD_NORMS, head_norm_span=NormSpan.ALL_HEADS
)

# OLMo 2 with windows in most layers, whose rotation is not scaled.
DENSE.add(
    "Olmo3ForCausalLM",
    like=OLMO_2,
    **two_rotations(5e5, "rope_theta", 5e5),
    sliding_windows=windows(all_but_last_of(4)),
)


def _exaone_windows(fields: ConfigFields, config: DecoderConfig) -> tuple[int | None, ...]:
    pattern, last = fields.values["sliding_window_pattern"], config.num_layers - 1
    if window_of(fields) is None:
        return config.sliding_windows

    def is_sliding(index: int) -> bool:
        if isinstance(pattern, str) and pattern:
            return index != last and pattern[index % len(pattern)] == "L"
        return all_but_last_of(fields.integer("sliding_window_pattern"))(index)

    return windows(is_sliding)(fields, config)


# Norms after attention and MLP, not before, and norms on the heads of query and key. If some layers have a window, only
# they have a rotation.
EXAONE_4 = DENSE.add(
    "Exaone4ForCausalLM",
    {"sliding_window_pattern": 4},
    fixed=NO_BIASES,
    **NORMS_AFTER,
    head_norms=HEAD_NORMS,
    sliding_windows=_exaone_windows,
    unrotated_layers=lambda fields, config: (
        frozenset() if window_of(fields) is None else without_window(fields, config)
    ),
)

# Biases on query, key and value; the rotation turns neighbours, in a part of each head.
_GLM = DENSE.add(
    "GlmForCausalLM",
    {"partial_rotary_factor": 0.5, "attention_bias": True},
    fixed=NO_MLP_BIAS,
    rotates_partly=True,
    attention_output_bias=False,
    mlp_names=MERGED_GATE_UP_DOWN,
    rotates_neighbours=True,
)

# GLM with norms after attention and MLP, too.
DENSE.add(
    "Glm4ForCausalLM", like=_GLM, attention_output_norm="post_self_attn_layernorm", mlp_output_norm="post_mlp_layernorm"
)

# Layer norms without biases, attention and MLP side by side, a rotation that turns neighbours, and scaled logits. Each
# head of query and key may have a norm of its own.
_COHERE = DENSE.add(
    "CohereForCausalLM",
    fixed=NO_MLP_BIAS,
    centered_norms=True,
    norm_eps=number("layer_norm_eps", 1e-5),
    is_parallel=True,
    mlp_norm=None,
    head_norms=if_flag("use_qk_norm", HEAD_NORMS),
    head_norm_span=NormSpan.OWN_HEAD,
    rotates_neighbours=True,
    logit_scale=number("logit_scale", 0.0625),
)

# Cohere with a window in most layers; only they have a rotation.
DENSE.add(
    "Cohere2ForCausalLM",
    like=_COHERE,
    head_norms=None,
    sliding_windows=windows_by_pattern(4),
    unrotated_layers=without_window,
)

# Layer norms, biases, and an MLP without a gate. Layers may see a sliding window.
DENSE.add(
    "Starcoder2ForCausalLM",
    {"hidden_act": _GELU},
    fixed=NO_BIASES,
    **all_biases(flag("use_bias", True)),
    **LAYER_NORMS,
    norm_eps=number("norm_epsilon", 1e-5),
    mlp_names=("c_fc", "c_proj"),
    sliding_windows=window_everywhere,
)

# Layer norms, perhaps also on the heads of query and key, and perhaps with attention and MLP side by side. The rotation
# turns a part of each head.
DENSE.add(
    "StableLmForCausalLM",
    {"partial_rotary_factor": 0.25},
    fixed={**NO_BIASES, "head_dim": None},
    rotates_partly=True,
    qkv_bias=flag("use_qkv_bias"),
    **LAYER_NORMS,
    norm_eps=number("layer_norm_eps", 1e-5),
    is_parallel=flag("use_parallel_residual"),
    mlp_norm=lambda _, config: None if config.is_parallel else config.mlp_norm,
    head_norms=if_flag("qk_layernorm", ("q_layernorm.norms.*", "k_layernorm.norms.*")),
    head_norm_span=NormSpan.OWN_HEAD,
)

# A rotation that turns neighbours.
DENSE.add("Ernie4_5ForCausalLM", fixed=NO_BIASES, **all_biases(flag("use_bias")), rotates_neighbours=True)


def _ntk_rope(_: ConfigFields, config: DecoderConfig) -> RopeConfig:
    """The rotation, whose base the field `alpha` scales."""
    rope = config.rope
    if rope.rope_type != "dynamic" or not rope.fields.values.get("alpha"):
        return rope
    theta = rope.theta * rope.fields.number("alpha") ** (rope.head_dim / (rope.head_dim - 2))
    return replace(rope, rope_type="default", theta=theta)


# Norms on the heads of query and key after their rotation, whose base may be scaled (NTK).
HUNYUAN = DENSE.add(
    "HunYuanDenseV1ForCausalLM",
    fixed=NO_MLP_BIAS,
    rope=_ntk_rope,
    max_model_len=lambda _, config: config.rope.max_model_len,
    head_norms=("query_layernorm", "key_layernorm"),
    norms_rotated_heads=True,
)

# Layer norms without weights; queries, keys and values may be clamped.
DENSE.add(
    "OlmoForCausalLM",
    fixed=NO_MLP_BIAS,
    centered_norms=True,
    norm_weights=False,
    norm_eps=1e-5,
    qkv_limit=optional_number("clip_qkv"),
)

# A rotation that turns neighbours.
DENSE.add("HeliumForCausalLM", attention_output_bias=False, rotates_neighbours=True)

# An MLP without a gate.
_RELU_2: Values = {"hidden_act": "relu2"}
DENSE.add("ArceeForCausalLM", _RELU_2, mlp_names=WITHOUT_GATE)

# Layer norms that add 1 to their weights, an MLP without a gate, and a rotation of a part of each head.
DENSE.add(
    "NemotronForCausalLM",
    {**_RELU_2, "partial_rotary_factor": 0.5},
    rotates_partly=True,
    **LAYER_NORMS,
    norm_offset=1.0,
    norm_eps=number("norm_eps", 1e-5),
    mlp_names=WITHOUT_GATE,
)

# Layer norms, biases, and an MLP without a gate.
DENSE.add(
    "Jais2ForCausalLM",
    {**_RELU_2, "attention_bias": True, "mlp_bias": True},
    **LAYER_NORMS,
    norm_eps=number("layer_norm_eps", 1e-5),
    mlp_names=WITHOUT_GATE,
)

# A window in three of four layers.
DENSE.add(
    "CwmForCausalLM",
    {
        "rope_parameters": {
            "rope_type": "llama3",
            "factor": 16.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        }
    },
    fixed={"attention_bias": False},
    sliding_windows=windows(lambda index: index % 4 > 0),
)
