"""The table of the families with experts that `decoder` runs, with rows as in `families`."""

from dataclasses import replace

from worker_svc.layers.activations import CLAMPED_SWIGLU
from worker_svc.layers.embedding_norm import NormSpan
from worker_svc.layers.experts import ExpertsConfig, Scoring
from worker_svc.models.base import ConfigFields
from worker_svc.models.decoder import DecoderConfig
from worker_svc.models.families import OLMO_DEFAULTS, exaone4, granite, hunyuan_dense, olmo2
from worker_svc.models.family_parts import (
    HEAD_NORMS,
    NO_BIASES,
    Families,
    Values,
    by_layer_types,
    deepseek_experts,
    num_chosen,
    plain_experts,
    qwen_experts,
    window_of,
    windows_of_layers,
    with_windows,
)

WITH_EXPERTS = Families()


@WITH_EXPERTS.add(
    "MixtralForCausalLM",
    intermediate_size=14336,
    num_key_value_heads=8,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope_theta=1e6,
)
def _mixtral(values: Values) -> DecoderConfig:
    """LLaMA with experts in each layer, whose weights come to 1. Layers may see a sliding window."""
    config, fields = DecoderConfig.read({**values, **NO_BIASES}), ConfigFields(values)
    count = fields.integer("num_experts" if "num_experts" in values else "num_local_experts", 8)
    experts = ExpertsConfig(
        count=count,
        num_chosen=num_chosen(fields, config, count, 2),
        inner_size=config.intermediate_size,
        normalized=True,
        module="block_sparse_moe",
        names=("w1", "w3", "w2"),
    )
    return replace(config, experts=experts, sliding_windows=(window_of(fields),) * config.num_layers)


_QWEN_MOE_DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
}


@WITH_EXPERTS.add(
    "Qwen2MoeForCausalLM",
    _QWEN_MOE_DEFAULTS,
    intermediate_size=5632,
    num_attention_heads=16,
    num_key_value_heads=16,
    moe_intermediate_size=1408,
    shared_expert_intermediate_size=5632,
    num_experts_per_tok=4,
    num_experts=60,
)
def _qwen2_moe(values: Values) -> DecoderConfig:
    """LLaMA with biases on query, key and value, and with experts, including one shared by all tokens. Every other one
    of the lower layers may see a sliding window."""
    config, fields = DecoderConfig.read({**values, **NO_BIASES}), ConfigFields(values)
    window = window_of(fields) if fields.flag("use_sliding_window", False) else None
    end = fields.integer("max_window_layers", 28, minimum=0)
    experts = qwen_experts(fields, config)
    if experts is not None:
        shared_size = fields.integer("shared_expert_intermediate_size")
        experts = replace(experts, shared_inner_size=shared_size, shared_gate="shared_expert_gate")
    return replace(
        config,
        qkv_bias=fields.flag("qkv_bias", True),
        experts=experts,
        sliding_windows=windows_of_layers(
            fields, config.num_layers, window, lambda index: index % 2 == 0 and index < end
        ),
    )


@WITH_EXPERTS.add(
    "Qwen3MoeForCausalLM",
    _QWEN_MOE_DEFAULTS,
    intermediate_size=6144,
    num_attention_heads=32,
    num_key_value_heads=4,
    moe_intermediate_size=768,
    num_experts_per_tok=8,
    num_experts=128,
)
def _qwen3_moe(values: Values) -> DecoderConfig:
    """Qwen3 with experts. Layers may see a sliding window."""
    config, fields = DecoderConfig.read({**values, "mlp_bias": False}), ConfigFields(values)
    window = window_of(fields) if fields.flag("use_sliding_window", False) else None
    return replace(
        config,
        head_norms=HEAD_NORMS,
        experts=qwen_experts(fields, config),
        sliding_windows=(window,) * config.num_layers,
    )


@WITH_EXPERTS.add("GraniteMoeForCausalLM")
def _granite_moe(values: Values) -> DecoderConfig:
    """Granite with experts, all of one layer in one tensor of the checkpoint."""
    config, fields = granite(values), ConfigFields(values)
    count = fields.integer("num_local_experts", 8)
    shared_size = fields.integer("shared_intermediate_size", 0, minimum=0)
    experts = ExpertsConfig(
        count=count,
        num_chosen=num_chosen(fields, config, count, 2),
        inner_size=config.intermediate_size,
        normalized=True,
        module="block_sparse_moe",
        router="router.layer",
        shared_inner_size=shared_size or None,
        shared="shared_mlp",
        shared_names=("input_linear", "input_linear", "output_linear"),
    )
    return replace(config, experts=experts)


WITH_EXPERTS.add("GraniteMoeSharedForCausalLM")(_granite_moe)


@WITH_EXPERTS.add(
    "Glm4MoeForCausalLM",
    vocab_size=151552,
    intermediate_size=10944,
    num_hidden_layers=46,
    num_attention_heads=96,
    num_key_value_heads=8,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    partial_rotary_factor=0.5,
    n_routed_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=1408,
    first_k_dense_replace=1,
)
def _glm4_moe(values: Values) -> DecoderConfig:
    """LLaMA with the experts of DeepSeek V3, whose rotation turns a part of each head."""
    config, fields = DecoderConfig.read({**values, "mlp_bias": False}, rotates_partly=True), ConfigFields(values)
    return replace(
        config,
        attention_output_bias=False,
        head_norms=HEAD_NORMS if fields.flag("use_qk_norm", False) else None,
        experts=deepseek_experts(fields, config),
    )


WITH_EXPERTS.add(
    "SolarOpenForCausalLM",
    vocab_size=196608,
    num_hidden_layers=48,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope_theta=1e6,
    n_routed_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=1280,
)(_glm4_moe)


@WITH_EXPERTS.add(
    "ExaoneMoeForCausalLM",
    vocab_size=102400,
    intermediate_size=16384,
    num_key_value_heads=32,
    rms_norm_eps=1e-5,
    sliding_window=4096,
    sliding_window_pattern=4,
    num_experts=64,
    num_experts_per_tok=8,
    num_shared_experts=1,
    moe_intermediate_size=1024,
    routed_scaling_factor=2.5,
    first_k_dense_replace=1,
)
def _exaone_moe(values: Values) -> DecoderConfig:
    """EXAONE 4 with norms before attention and MLP, and the experts of DeepSeek V3."""
    config, plain = exaone4(values), DecoderConfig.read(values)
    return replace(
        config,
        attention_norm=plain.attention_norm,
        attention_output_norm=None,
        mlp_norm=plain.mlp_norm,
        mlp_output_norm=None,
        experts=replace(_experts_by_number(values, config), correction="e_score_correction_bias"),
    )


@WITH_EXPERTS.add(
    "HYV3ForCausalLM",
    vocab_size=120832,
    intermediate_size=13312,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope_theta=11158840.0,
    num_experts=192,
    num_experts_per_tok=8,
    num_shared_experts=1,
    moe_intermediate_size=1536,
    router_scaling_factor=2.826,
    first_k_dense_replace=1,
)
def _hy_v3(values: Values) -> DecoderConfig:
    """LLaMA with norms on the heads of query and key, and the experts of DeepSeek V3."""
    config = DecoderConfig.read(values)
    experts = _experts_by_number({**values, "routed_scaling_factor": values["router_scaling_factor"]}, config)
    experts = replace(experts, router="router.gate", correction="expert_bias", shared="mlp.shared_mlp")
    return replace(config, head_norms=HEAD_NORMS, experts=experts)


def _experts_by_number(values: Values, config: DecoderConfig) -> ExpertsConfig:
    """`deepseek_experts` by other names of the numbers, and in the sparse layers of `mlp_layer_types`."""
    names = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
    fields = ConfigFields({**values, **{name: values[other] for name, other in names.items()}})
    return by_layer_types(deepseek_experts(fields, config), fields, config)


@WITH_EXPERTS.add(
    "MiniMaxM2ForCausalLM",
    vocab_size=200064,
    hidden_size=3072,
    intermediate_size=1536,
    num_hidden_layers=62,
    num_attention_heads=48,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=196608,
    rope_theta=5e6,
    num_local_experts=256,
)
def _minimax_m2(values: Values) -> DecoderConfig:
    """LLaMA with experts that are chosen by sigmoids, and norms on all heads of query and key together. The rotation
    may turn a part of each head."""
    values = {**values, **NO_BIASES}
    fields = ConfigFields(values)
    if values.get("rotary_dim") is not None:
        values["partial_rotary_factor"] = fields.integer("rotary_dim") / fields.integer("head_dim")
    config = DecoderConfig.read(values, rotates_partly=True)
    count = fields.integer("num_local_experts")
    experts = ExpertsConfig(
        count=count,
        num_chosen=num_chosen(fields, config, count, 8),
        inner_size=config.intermediate_size,
        normalized=True,
        module="block_sparse_moe",
        names=("w1", "w3", "w2"),
        scoring=Scoring.SIGMOID,
        correction="e_score_correction_bias",
    )
    return replace(config, head_norms=HEAD_NORMS, head_norm_span=NormSpan.ALL_HEADS, experts=experts)


@WITH_EXPERTS.add(
    "PhimoeForCausalLM",
    vocab_size=32064,
    intermediate_size=6400,
    num_key_value_heads=8,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope_theta=1e6,
)
def _phimoe(values: Values) -> DecoderConfig:
    """Mixtral with layer norms, biases, and another choice of experts."""
    config, fields = DecoderConfig.read({**values, "mlp_bias": False}), ConfigFields(values)
    count = fields.integer("num_local_experts", 16)
    experts = ExpertsConfig(
        count=count,
        num_chosen=num_chosen(fields, config, count, 2),
        inner_size=config.intermediate_size,
        normalized=False,
        module="block_sparse_moe",
        names=("w1", "w3", "w2"),
        scoring=Scoring.SPARSE_MIXER,
        tolerance=fields.number("router_jitter_noise", 0.01) if values.get("router_jitter_noise") != 0 else 0.0,
    )
    return replace(
        config,
        centered_norms=True,
        norm_bias=True,
        head_bias=fields.flag("lm_head_bias", False),
        experts=experts,
        sliding_windows=(window_of(fields),) * config.num_layers,
    )


@WITH_EXPERTS.add(
    "GptOssForCausalLM",
    vocab_size=201088,
    hidden_size=2880,
    intermediate_size=2880,
    num_hidden_layers=36,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=64,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    attention_bias=True,
    sliding_window=128,
    rope_theta=150000.0,
    rope_parameters={
        "rope_type": "yarn",
        "factor": 32.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    num_local_experts=128,
)
def _gpt_oss(values: Values) -> DecoderConfig:
    """LLaMA with attention sinks, windows in every other layer, and experts with biases and clamped activations, all
    of one layer in one tensor of the checkpoint."""
    config, fields = DecoderConfig.read({**values, "mlp_bias": False}), ConfigFields(values)
    for name, only in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        if fields.number(name, only) != only:
            raise fields.error(name, values[name], str(only))
    count = fields.integer("num_local_experts")
    experts = ExpertsConfig(
        count=count,
        num_chosen=num_chosen(fields, config, count, 4),
        inner_size=config.intermediate_size,
        normalized=True,
        bias=True,
        router="router",
    )
    config = replace(config, activation=CLAMPED_SWIGLU, has_sinks=True, experts=experts)
    return with_windows(config, fields, lambda index: index % 2 == 0)


@WITH_EXPERTS.add(
    "OlmoeForCausalLM",
    OLMO_DEFAULTS,
    hidden_size=2048,
    intermediate_size=2048,
    num_hidden_layers=16,
    num_attention_heads=16,
    max_position_embeddings=4096,
    num_experts=64,
    num_experts_per_tok=8,
)
def _olmoe(values: Values) -> DecoderConfig:
    """LLaMA with experts, and norms on all heads of query and key together, which may be clamped."""
    config, fields = DecoderConfig.read({**values, "mlp_bias": False}), ConfigFields(values)
    return replace(
        config,
        head_norms=HEAD_NORMS,
        head_norm_span=NormSpan.ALL_HEADS,
        qkv_limit=fields.optional_number("clip_qkv"),
        experts=plain_experts(fields, config),
    )


@WITH_EXPERTS.add(
    "FlexOlmoForCausalLM",
    vocab_size=100352,
    max_position_embeddings=4096,
    rope_theta=5e5,
    num_experts=7,
    num_experts_per_tok=5,
)
def _flex_olmo(values: Values) -> DecoderConfig:
    """OLMo 2 with experts."""
    config = olmo2(values)
    return replace(config, experts=plain_experts(ConfigFields(values), config))


@WITH_EXPERTS.add(
    "Dots1ForCausalLM",
    vocab_size=152064,
    hidden_size=4608,
    intermediate_size=10944,
    num_hidden_layers=62,
    num_key_value_heads=32,
    moe_intermediate_size=1408,
    norm_topk_prob=False,
    sliding_window=4096,
    max_window_layers=62,
)
def _dots1(values: Values) -> DecoderConfig:
    """Qwen3 with the experts of DeepSeek V3."""
    config, fields = DecoderConfig.read({**values, "mlp_bias": False}), ConfigFields(values)
    first = fields.integer("max_window_layers", minimum=0)
    config = replace(config, head_norms=HEAD_NORMS, experts=deepseek_experts(fields, config))
    return with_windows(config, fields, lambda index: index >= first)


@WITH_EXPERTS.add(
    "Ernie4_5_MoeForCausalLM",
    vocab_size=103424,
    hidden_size=2560,
    intermediate_size=12288,
    num_hidden_layers=28,
    num_attention_heads=20,
    num_key_value_heads=4,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope_theta=5e5,
    tie_word_embeddings=True,
)
def _ernie4_5_moe(values: Values) -> DecoderConfig:
    """ERNIE 4.5 with experts whose choice is corrected, in some of the layers."""
    fields = ConfigFields(values)
    if fields.flag("use_bias", False):
        raise fields.error("use_bias", True, "false")
    config = replace(DecoderConfig.read({**values, **NO_BIASES}), rotates_neighbours=True)
    count, inner_size = fields.integer("moe_num_experts", 64), fields.integer("moe_intermediate_size", 1536)
    interval, start = fields.integer("moe_layer_interval", 1), fields.integer("moe_layer_start_index", 1, minimum=0)
    end = fields.integer("moe_layer_end_index", -1, minimum=-1)
    last = config.num_layers - 1 if end == -1 else end
    dense = [index for index in range(config.num_layers) if (index + 1) % interval or not start <= index <= last]
    num_shared = fields.integer("moe_num_shared_experts", 2, minimum=0)
    experts = ExpertsConfig(
        count=count,
        num_chosen=num_chosen(fields, config, count, 6, "moe_k"),
        inner_size=inner_size,
        normalized=True,
        dense_layers=frozenset(dense),
        correction="moe_statics.e_score_correction_bias",
        correction_is_row=True,
        shared_inner_size=num_shared * inner_size or None,
        shared="mlp.shared_experts",
    )
    return replace(config, experts=experts)


@WITH_EXPERTS.add("HunYuanMoEV1ForCausalLM", vocab_size=290943, rms_norm_eps=1e-5)
def _hunyuan_moe(values: Values) -> DecoderConfig:
    """HunYuan with experts, including one shared by all tokens."""
    # A number for each layer, or one for all.
    for name in ("num_experts", "moe_topk"):
        given = values.get(name)
        if isinstance(given, list) and given and given == given[:1] * len(given):
            values = {**values, name: given[0]}
    config, fields = hunyuan_dense(values), ConfigFields(values)
    count = fields.integer("num_experts", 1)
    experts = ExpertsConfig(
        count=count,
        num_chosen=num_chosen(fields, config, count, 1, "moe_topk"),
        inner_size=config.intermediate_size,
        normalized=True,
        router="gate.wg",
        shared_inner_size=config.intermediate_size,
        shared="mlp.shared_mlp",
    )
    return replace(config, experts=experts)
