"""The table of the families that `decoder` runs: what the config.json of each means.

A row is a function under `family`, which names the architecture and the defaults of transformers for fields that
config.json lacks and that differ from LLaMA's. The function takes config.json over these defaults.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from worker_svc.layers.activations import CLAMPED_SWIGLU
from worker_svc.layers.embedding_norm import NormSpan
from worker_svc.layers.experts import MERGED_GATE_UP_DOWN, ExpertsConfig, Scoring
from worker_svc.layers.latent_attention import LatentConfig
from worker_svc.models.base import ConfigFields, head_dim_of
from worker_svc.models.decoder import DecoderConfig, DecoderFamily
from worker_svc.models.rope import RopeConfig

Values = Mapping[str, Any]

DECODERS: dict[str, DecoderFamily] = {}
"""The rows, by architecture."""

_NO_BIASES: Values = {"attention_bias": False, "mlp_bias": False}
_FULL, _SLIDING = "full_attention", "sliding_attention"
_HEAD_NORMS = ("q_norm", "k_norm")
# More than any model has, in all layers. It bounds what a wrong configuration can allocate.
_MAX_EXPERTS = 1 << 16


def family(
    architecture: str, defaults: Values | None = None, **further: Any
) -> Callable[[Callable[[Values], DecoderConfig]], Callable[[Values], DecoderConfig]]:
    """Makes the function below a row of the table, with `defaults` and `further` ones."""

    def add(describe: Callable[[Values], DecoderConfig]) -> Callable[[Values], DecoderConfig]:
        DECODERS[architecture] = DecoderFamily(architecture, {**(defaults or {}), **further}, describe)
        return describe

    return add


@family("LlamaForCausalLM")
def _llama(values: Values) -> DecoderConfig:
    return DecoderConfig.read(values)


@family(
    "MistralForCausalLM",
    intermediate_size=14336,
    num_key_value_heads=8,
    max_position_embeddings=131072,
    sliding_window=4096,
)
def _mistral(values: Values) -> DecoderConfig:
    """LLaMA whose layers may see a sliding window: all layers, or the sliding ones of `layer_types` (Ministral)."""
    return _with_windows(DecoderConfig.read({**values, **_NO_BIASES}), ConfigFields(values), lambda _: True)


_QWEN_DEFAULTS = {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
}


@family("Qwen2ForCausalLM", _QWEN_DEFAULTS)
def _qwen2(values: Values) -> DecoderConfig:
    """LLaMA with biases on query, key and value. The upper layers may see a sliding window."""
    return replace(_with_upper_windows(DecoderConfig.read({**values, **_NO_BIASES}), values), qkv_bias=True)


@family("Qwen3ForCausalLM", _QWEN_DEFAULTS, head_dim=128)
def _qwen3(values: Values) -> DecoderConfig:
    """LLaMA with norms on the heads of query and key. The upper layers may see a sliding window."""
    config = DecoderConfig.read({**values, "mlp_bias": False})
    return replace(_with_upper_windows(config, values), head_norms=_HEAD_NORMS)


@family(
    "Phi3ForCausalLM",
    vocab_size=32064,
    hidden_size=3072,
    intermediate_size=8192,
    max_position_embeddings=4096,
    rms_norm_eps=1e-5,
    original_max_position_embeddings=4096,
)
def _phi3(values: Values) -> DecoderConfig:
    """LLaMA with merged weights, whose rotation may turn a part of each head. Layers may see a sliding window."""
    config = DecoderConfig.read({**values, **_NO_BIASES}, rotates_partly=True)
    if (kind := config.rope.rope_type) not in ("default", "longrope"):
        raise config.rope.fields.error("rope_type", kind, "default or longrope")
    return replace(
        config,
        merged_qkv=True,
        mlp_names=MERGED_GATE_UP_DOWN,
        sliding_windows=(window_of(ConfigFields(values)),) * config.num_layers,
    )


@family(
    "MixtralForCausalLM",
    intermediate_size=14336,
    num_key_value_heads=8,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope_theta=1e6,
)
def _mixtral(values: Values) -> DecoderConfig:
    """LLaMA with experts in each layer, whose weights come to 1. Layers may see a sliding window."""
    config, fields = DecoderConfig.read({**values, **_NO_BIASES}), ConfigFields(values)
    count = fields.integer("num_experts" if "num_experts" in values else "num_local_experts", 8)
    experts = ExpertsConfig(
        count=count,
        num_chosen=_num_chosen(fields, config, count, 2),
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


@family(
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
    config, fields = DecoderConfig.read({**values, **_NO_BIASES}), ConfigFields(values)
    window = window_of(fields) if fields.flag("use_sliding_window", False) else None
    end = fields.integer("max_window_layers", 28, minimum=0)
    experts = _qwen_experts(fields, config)
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


@family(
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
        head_norms=_HEAD_NORMS,
        experts=_qwen_experts(fields, config),
        sliding_windows=(window,) * config.num_layers,
    )


_GEMMA_DEFAULTS = {
    "vocab_size": 256000,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
_GEMMA_2_DEFAULTS = _GEMMA_DEFAULTS | {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}


@family(
    "GemmaForCausalLM",
    _GEMMA_DEFAULTS,
    hidden_size=3072,
    intermediate_size=24576,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=16,
    hidden_act="gelu_pytorch_tanh",
)
def _gemma(values: Values) -> DecoderConfig:
    """LLaMA with scaled embeddings, norms whose factors differ from 1 by their weights, and MLPs gated by GELU."""
    # An old name of the same function.
    return _read_gemma(values, None if values["hidden_act"] == "gelu" else values["hidden_act"])


@family("Gemma2ForCausalLM", _GEMMA_2_DEFAULTS, final_logit_softcapping=30.0, attn_logit_softcapping=50.0)
def _gemma2(values: Values) -> DecoderConfig:
    """Gemma with norms after attention and MLP, and soft caps on scores and logits; every other layer has a window."""
    config, fields = _read_gemma_2(values), ConfigFields(values)
    config = replace(config, soft_cap=fields.optional_number("attn_logit_softcapping"))
    return _with_windows(config, fields, lambda index: index % 2 == 0)


@family("Gemma3ForCausalLM", _GEMMA_2_DEFAULTS, vocab_size=262208, max_position_embeddings=131072)
def _gemma3(values: Values) -> DecoderConfig:
    """Gemma 2 (text) with norms on the heads of query and key, and another rotation in layers with a window."""
    fields = ConfigFields(values)
    full, sliding = _with_two_rotations(fields, 1e6, "rope_local_base_freq", 1e4)
    config = _read_gemma_2(full)
    pattern = fields.integer("sliding_window_pattern", 6)
    config = replace(
        config,
        head_norms=_HEAD_NORMS,
        sliding_rope=RopeConfig.read(ConfigFields(sliding), config.head_dim),
        # The positions that the scaled rotation reaches already.
        max_model_len=config.rope.max_positions,
    )
    return _with_windows(config, fields, lambda index: (index + 1) % pattern > 0)


def _read_gemma(values: Values, activation: str | None) -> DecoderConfig:
    if values.get("use_bidirectional_attention"):
        raise ConfigFields(values).error("use_bidirectional_attention", True, "false: tokens attend to earlier ones")
    config = DecoderConfig.read({**values, "hidden_act": activation or "gelu_pytorch_tanh", "mlp_bias": False})
    return replace(config, norm_offset=1.0, embedding_scale=config.hidden_size**0.5, rounds_embedding_scale=True)


def _read_gemma_2(values: Values) -> DecoderConfig:
    fields = ConfigFields(values)
    return replace(
        _read_gemma(values, values["hidden_activation"]),
        attention_output_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        mlp_output_norm="post_feedforward_layernorm",
        attention_scale=fields.number("query_pre_attn_scalar") ** -0.5,
        logit_cap=fields.optional_number("final_logit_softcapping"),
    )


@family(
    "Ministral3ForCausalLM",
    vocab_size=131072,
    intermediate_size=14336,
    num_hidden_layers=34,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=262144,
    rms_norm_eps=1e-5,
    rope_parameters={
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
)
def _ministral3(values: Values) -> DecoderConfig:
    """LLaMA whose queries grow with their position. Layers may see a sliding window."""
    config, fields = DecoderConfig.read({**values, **_NO_BIASES}), ConfigFields(values)
    growth = config.rope.fields.optional_number("llama_4_scaling_beta")
    return replace(
        config,
        query_growth=None if growth is None else (growth, config.rope.original_max_positions),
        sliding_windows=(window_of(fields),) * config.num_layers,
    )


@family(
    "SmolLM3ForCausalLM",
    vocab_size=128256,
    hidden_size=2048,
    num_hidden_layers=36,
    num_attention_heads=16,
    num_key_value_heads=4,
    max_position_embeddings=32768,
    rope_theta=2e6,
    tie_word_embeddings=True,
)
def _smollm3(values: Values) -> DecoderConfig:
    """LLaMA without a rotation in some layers, which may see a sliding window."""
    config, fields = DecoderConfig.read(values), ConfigFields(values)
    interval, rotated = fields.integer("no_rope_layer_interval", 4), values.get("no_rope_layers")
    if rotated is None:
        rotated = [(index + 1) % interval for index in range(config.num_layers)]
    if not isinstance(rotated, list) or len(rotated) < config.num_layers:
        raise fields.error("no_rope_layers", rotated, f"a list of {config.num_layers} numbers, 0 for no rotation")
    unrotated = frozenset(index for index in range(config.num_layers) if not rotated[index])
    window = window_of(fields) if fields.flag("use_sliding_window", False) else None
    windows = windows_of_layers(fields, config.num_layers, window, lambda index: index in unrotated)
    return replace(config, unrotated_layers=unrotated, sliding_windows=windows)


@family(
    "SeedOssForCausalLM",
    vocab_size=155136,
    intermediate_size=27648,
    num_hidden_layers=64,
    num_attention_heads=80,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=524288,
    attention_bias=True,
)
def _seed_oss(values: Values) -> DecoderConfig:
    """LLaMA with biases on query, key and value."""
    output_bias = ConfigFields(values).flag("attention_out_bias", False)
    return replace(DecoderConfig.read(values), attention_output_bias=output_bias)


@family("GraniteForCausalLM")
def _granite(values: Values) -> DecoderConfig:
    """LLaMA with factors on embeddings, scores, outputs of attention and MLP, and logits."""
    fields = ConfigFields(values)
    return replace(
        DecoderConfig.read(values),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        attention_scale=fields.number("attention_multiplier", 1.0),
        logit_scale=1 / fields.number("logits_scaling", 1.0),
    )


@family("GraniteMoeForCausalLM")
def _granite_moe(values: Values) -> DecoderConfig:
    """Granite with experts, all of one layer in one tensor of the checkpoint."""
    config, fields = _granite(values), ConfigFields(values)
    count = fields.integer("num_local_experts", 8)
    shared_size = fields.integer("shared_intermediate_size", 0, minimum=0)
    experts = ExpertsConfig(
        count=count,
        num_chosen=_num_chosen(fields, config, count, 2),
        inner_size=config.intermediate_size,
        normalized=True,
        module="block_sparse_moe",
        router="router.layer",
        shared_inner_size=shared_size or None,
        shared="shared_mlp",
        shared_names=("input_linear", "input_linear", "output_linear"),
    )
    return replace(config, experts=experts)


family("GraniteMoeSharedForCausalLM")(_granite_moe)

_OLMO_DEFAULTS = {"vocab_size": 50304, "rms_norm_eps": 1e-5}


@family("Olmo2ForCausalLM", _OLMO_DEFAULTS)
def _olmo2(values: Values) -> DecoderConfig:
    """LLaMA with norms after attention and MLP, not before, and norms on all heads of query and key together."""
    return replace(
        _with_norms_after(DecoderConfig.read({**values, "mlp_bias": False})),
        head_norms=_HEAD_NORMS,
        head_norm_span=NormSpan.ALL_HEADS,
    )


@family("Olmo3ForCausalLM", _OLMO_DEFAULTS, sliding_window=4096)
def _olmo3(values: Values) -> DecoderConfig:
    """OLMo 2 with windows in most layers, whose rotation is not scaled."""
    fields = ConfigFields(values)
    full, sliding = _with_two_rotations(fields, 5e5, "rope_theta", 5e5)
    config = _olmo2(full)
    config = replace(config, sliding_rope=RopeConfig.read(ConfigFields(sliding), config.head_dim))
    return _with_windows(config, fields, lambda index: (index + 1) % 4 > 0)


@family(
    "Exaone4ForCausalLM",
    vocab_size=102400,
    intermediate_size=16384,
    num_key_value_heads=32,
    rms_norm_eps=1e-5,
    sliding_window=4096,
    sliding_window_pattern=4,
)
def _exaone4(values: Values) -> DecoderConfig:
    """LLaMA with norms after attention and MLP, not before, and norms on the heads of query and key. If some layers
    have a window, only they have a rotation."""
    config, fields = DecoderConfig.read({**values, **_NO_BIASES}), ConfigFields(values)
    pattern, last = values["sliding_window_pattern"], config.num_layers - 1

    def is_sliding(index: int) -> bool:
        if isinstance(pattern, str) and pattern:
            return index != last and pattern[index % len(pattern)] == "L"
        return (index + 1) % fields.integer("sliding_window_pattern") > 0

    config = replace(_with_norms_after(config), head_norms=_HEAD_NORMS)
    if window_of(fields) is None:
        return config
    config = _with_windows(config, fields, is_sliding)
    return replace(config, unrotated_layers=_without_window(config))


_GLM_DEFAULTS = {
    "vocab_size": 151552,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-7,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
}


@family("GlmForCausalLM", _GLM_DEFAULTS)
def _glm(values: Values) -> DecoderConfig:
    """LLaMA with biases on query, key and value; the rotation turns neighbours, in a part of each head."""
    return replace(
        DecoderConfig.read({**values, "mlp_bias": False}, rotates_partly=True),
        attention_output_bias=False,
        mlp_names=MERGED_GATE_UP_DOWN,
        rotates_neighbours=True,
    )


@family("Glm4ForCausalLM", _GLM_DEFAULTS)
def _glm4(values: Values) -> DecoderConfig:
    """GLM with norms after attention and MLP, too."""
    return replace(_glm(values), attention_output_norm="post_self_attn_layernorm", mlp_output_norm="post_mlp_layernorm")


@family(
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
        head_norms=_HEAD_NORMS if fields.flag("use_qk_norm", False) else None,
        experts=_deepseek_experts(fields, config),
    )


@family(
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
    values = {**values, **_NO_BIASES}
    fields = ConfigFields(values)
    if values.get("rotary_dim") is not None:
        values["partial_rotary_factor"] = fields.integer("rotary_dim") / fields.integer("head_dim")
    config = DecoderConfig.read(values, rotates_partly=True)
    count = fields.integer("num_local_experts")
    experts = ExpertsConfig(
        count=count,
        num_chosen=_num_chosen(fields, config, count, 8),
        inner_size=config.intermediate_size,
        normalized=True,
        module="block_sparse_moe",
        names=("w1", "w3", "w2"),
        scoring=Scoring.SIGMOID,
        correction="e_score_correction_bias",
    )
    return replace(config, head_norms=_HEAD_NORMS, head_norm_span=NormSpan.ALL_HEADS, experts=experts)


_COHERE_DEFAULTS = {
    "vocab_size": 256000,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


@family("CohereForCausalLM", _COHERE_DEFAULTS, rope_theta=5e5)
def _cohere(values: Values) -> DecoderConfig:
    """LLaMA with layer norms without biases, attention and MLP side by side, a rotation that turns neighbours, and
    scaled logits. Each head of query and key may have a norm of its own."""
    config, fields = DecoderConfig.read({**values, "mlp_bias": False}), ConfigFields(values)
    return replace(
        config,
        centered_norms=True,
        norm_eps=fields.number("layer_norm_eps", 1e-5),
        is_parallel=True,
        mlp_norm=None,
        head_norms=_HEAD_NORMS if fields.flag("use_qk_norm", False) else None,
        head_norm_span=NormSpan.OWN_HEAD,
        rotates_neighbours=True,
        logit_scale=fields.number("logit_scale", 0.0625),
    )


@family("Cohere2ForCausalLM", _COHERE_DEFAULTS, sliding_window=4096)
def _cohere2(values: Values) -> DecoderConfig:
    """Cohere with a window in most layers; only they have a rotation."""
    fields = ConfigFields(values)
    pattern = fields.integer("sliding_window_pattern", 4)
    config = _with_windows(_cohere({**values, "use_qk_norm": False}), fields, lambda index: (index + 1) % pattern > 0)
    return replace(config, unrotated_layers=_without_window(config))


@family(
    "Starcoder2ForCausalLM",
    vocab_size=49152,
    hidden_size=3072,
    intermediate_size=12288,
    num_hidden_layers=30,
    num_attention_heads=24,
    num_key_value_heads=2,
    hidden_act="gelu_pytorch_tanh",
    max_position_embeddings=4096,
    tie_word_embeddings=True,
)
def _starcoder2(values: Values) -> DecoderConfig:
    """LLaMA with layer norms, biases, and an MLP without a gate. Layers may see a sliding window."""
    fields = ConfigFields(values)
    bias = fields.flag("use_bias", True)
    config = DecoderConfig.read({**values, "attention_bias": bias, "mlp_bias": bias})
    return replace(
        config,
        centered_norms=True,
        norm_bias=True,
        norm_eps=fields.number("norm_epsilon", 1e-5),
        mlp_names=("c_fc", "c_proj"),
        sliding_windows=(window_of(fields),) * config.num_layers,
    )


@family(
    "StableLmForCausalLM",
    vocab_size=50304,
    hidden_size=2560,
    intermediate_size=6912,
    num_key_value_heads=32,
    max_position_embeddings=4096,
    partial_rotary_factor=0.25,
)
def _stablelm(values: Values) -> DecoderConfig:
    """LLaMA with layer norms, perhaps also on the heads of query and key, and perhaps with attention and MLP side by
    side. The rotation turns a part of each head."""
    fields = ConfigFields(values)
    config = DecoderConfig.read({**values, **_NO_BIASES, "head_dim": None}, rotates_partly=True)
    is_parallel = fields.flag("use_parallel_residual", False)
    return replace(
        config,
        qkv_bias=fields.flag("use_qkv_bias", False),
        centered_norms=True,
        norm_bias=True,
        norm_eps=fields.number("layer_norm_eps", 1e-5),
        is_parallel=is_parallel,
        mlp_norm=None if is_parallel else config.mlp_norm,
        head_norms=("q_layernorm.norms.*", "k_layernorm.norms.*") if fields.flag("qk_layernorm", False) else None,
        head_norm_span=NormSpan.OWN_HEAD,
    )


@family(
    "Ernie4_5ForCausalLM",
    vocab_size=103424,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=18,
    num_attention_heads=16,
    num_key_value_heads=2,
    head_dim=128,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope_theta=5e5,
    tie_word_embeddings=True,
)
def _ernie4_5(values: Values) -> DecoderConfig:
    """LLaMA with a rotation that turns neighbours."""
    bias = ConfigFields(values).flag("use_bias", False)
    return replace(DecoderConfig.read({**values, "attention_bias": bias, "mlp_bias": bias}), rotates_neighbours=True)


@family("HunYuanDenseV1ForCausalLM", vocab_size=290943, rms_norm_eps=1e-5)
def _hunyuan_dense(values: Values) -> DecoderConfig:
    """LLaMA with norms on the heads of query and key after their rotation, whose base may be scaled (NTK)."""
    config = DecoderConfig.read({**values, "mlp_bias": False})
    rope, alpha = config.rope, config.rope.fields.optional_number("alpha")
    if rope.rope_type == "dynamic" and alpha is not None:
        theta = rope.theta * alpha ** (rope.head_dim / (rope.head_dim - 2))
        rope = replace(rope, rope_type="default", theta=theta)
    return replace(
        config,
        rope=rope,
        max_model_len=rope.max_model_len,
        head_norms=("query_layernorm", "key_layernorm"),
        norms_rotated_heads=True,
    )


@family(
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
        num_chosen=_num_chosen(fields, config, count, 2),
        inner_size=config.intermediate_size,
        normalized=False,
        module="block_sparse_moe",
        names=("w1", "w3", "w2"),
        scoring=Scoring.SPARSE_MIXER,
        tolerance=fields.number("router_jitter_noise", 0.01),
    )
    return replace(
        config,
        centered_norms=True,
        norm_bias=True,
        head_bias=fields.flag("lm_head_bias", False),
        experts=experts,
        sliding_windows=(window_of(fields),) * config.num_layers,
    )


@family(
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
        num_chosen=_num_chosen(fields, config, count, 4),
        inner_size=config.intermediate_size,
        normalized=True,
        bias=True,
        router="router",
    )
    config = replace(config, activation=CLAMPED_SWIGLU, has_sinks=True, experts=experts)
    return _with_windows(config, fields, lambda index: index % 2 == 0)


def _with_norms_after(config: DecoderConfig) -> DecoderConfig:
    return replace(
        config,
        attention_norm=None,
        attention_output_norm="post_attention_layernorm",
        mlp_norm=None,
        mlp_output_norm="post_feedforward_layernorm",
    )


def _without_window(config: DecoderConfig) -> frozenset[int]:
    """The layers that see the whole context."""
    return frozenset(index for index, window in enumerate(config.sliding_windows) if window is None)


def _deepseek_experts(fields: ConfigFields, config: DecoderConfig) -> ExpertsConfig:
    """DeepSeek V3's, in all but the first layers."""
    count, inner_size = fields.integer("n_routed_experts"), fields.integer("moe_intermediate_size")
    num_groups = fields.integer("n_group", 1)
    chosen_groups = fields.integer("topk_group", 1)
    if count % num_groups or count < 2 * num_groups or chosen_groups > num_groups:
        raise fields.error("n_group", num_groups, f"groups of at least 2 of {count} experts, {chosen_groups} or more")
    num_shared = fields.integer("n_shared_experts", 1, minimum=0)
    return ExpertsConfig(
        count=count,
        num_chosen=_num_chosen(fields, config, count, None),
        inner_size=inner_size,
        normalized=fields.flag("norm_topk_prob", True),
        dense_layers=frozenset(range(fields.integer("first_k_dense_replace", 0, minimum=0))),
        scoring=Scoring.SIGMOID,
        correction="gate.e_score_correction_bias",
        num_groups=num_groups,
        num_chosen_groups=chosen_groups,
        scale=fields.number("routed_scaling_factor", 1.0),
        shared_inner_size=num_shared * inner_size or None,
        shared="mlp.shared_experts",
    )


def _with_windows(config: DecoderConfig, fields: ConfigFields, is_sliding: Callable[[int], bool]) -> DecoderConfig:
    """`sliding_window` in layers as in `windows_of_layers`."""
    windows = windows_of_layers(fields, config.num_layers, window_of(fields), is_sliding)
    return replace(config, sliding_windows=windows)


def _with_upper_windows(config: DecoderConfig, values: Values) -> DecoderConfig:
    """`sliding_window` in the sliding layers of `layer_types`; without `layer_types`, from `max_window_layers` on."""
    fields = ConfigFields(values)
    window = window_of(fields) if fields.flag("use_sliding_window", False) else None
    first = fields.integer("max_window_layers", 28, minimum=0)
    windows = windows_of_layers(fields, config.num_layers, window, lambda index: index >= first)
    return replace(config, sliding_windows=windows)


def windows_of_layers(
    fields: ConfigFields, num_layers: int, window: int | None, is_sliding: Callable[[int], bool]
) -> tuple[int | None, ...]:
    """`window` in the sliding layers of `layer_types`; without `layer_types`, in layers that satisfy `is_sliding`.

    Raises:
        ConfigurationError: an unknown type of layer, or a sliding layer without a window.
    """
    types = fields.values.get("layer_types")
    if types is None:
        return tuple(window if is_sliding(index) else None for index in range(num_layers))
    if not isinstance(types, list) or len(types) != num_layers or not all(each in (_FULL, _SLIDING) for each in types):
        raise fields.error("layer_types", types, f"{num_layers} of {_FULL} and {_SLIDING}")
    if window is None and _SLIDING in types:
        raise fields.error("layer_types", types, f"only {_FULL} if no sliding window is used")
    return tuple(window if each == _SLIDING else None for each in types)


_DEEPSEEK_V3_DEFAULTS = {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "max_position_embeddings": 4096,
    "q_lora_rank": 1536,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
}


@family("DeepseekV3ForCausalLM", _DEEPSEEK_V3_DEFAULTS)
def _deepseek_v3(values: Values) -> DecoderConfig:
    """Latent attention, and experts that sigmoids choose: DeepSeek V3 and R1, Kimi K2."""
    config = _with_latents(values)
    return replace(config, experts=_deepseek_experts(ConfigFields(values), config))


@family(
    "DeepseekV2ForCausalLM",
    vocab_size=102400,
    intermediate_size=11008,
    q_lora_rank=1536,
    n_routed_experts=64,
    n_shared_experts=2,
    moe_intermediate_size=1407,
    topk_method="greedy",
)
def _deepseek_v2(values: Values) -> DecoderConfig:
    """Latent attention, and experts that a softmax chooses, whose weights do not come to 1."""
    config, fields = _with_latents(values), ConfigFields(values)
    method = fields.text("topk_method")
    if method not in ("greedy", "group_limited_greedy"):
        raise fields.error("topk_method", method, "greedy or group_limited_greedy")
    grouped = values if method == "group_limited_greedy" else {**values, "n_group": 1, "topk_group": 1}
    experts = replace(
        _deepseek_experts(ConfigFields(grouped), config),
        normalized=False,
        scoring=Scoring.SOFTMAX,
        correction=None,
        group_members=1,
    )
    return replace(config, experts=experts)


@family(
    "Glm4MoeLiteForCausalLM",
    _DEEPSEEK_V3_DEFAULTS,
    vocab_size=154880,
    hidden_size=2048,
    intermediate_size=10240,
    moe_intermediate_size=1536,
    num_hidden_layers=47,
    num_attention_heads=20,
    max_position_embeddings=202752,
    rms_norm_eps=1e-5,
    q_lora_rank=768,
    qk_nope_head_dim=192,
    v_head_dim=256,
    n_routed_experts=64,
    num_experts_per_tok=4,
    routed_scaling_factor=1.8,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
)
def _glm4_moe_lite(values: Values) -> DecoderConfig:
    """GLM-4.7-Flash: DeepSeek V3, whose layers with experts may be listed in `mlp_layer_types`."""
    config, types = _deepseek_v3(values), values.get("mlp_layer_types")
    if types is None or config.experts is None:
        return config
    if not isinstance(types, list) or [each for each in types if each not in ("dense", "sparse")]:
        raise ConfigFields(values).error("mlp_layer_types", types, "a list of dense and sparse")
    dense = frozenset(index for index, each in enumerate(types) if each == "dense")
    return replace(config, experts=replace(config.experts, dense_layers=dense))


@family(
    "YoutuForCausalLM",
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=6144,
    num_attention_heads=16,
    q_lora_rank=1536,
    max_position_embeddings=131072,
    tie_word_embeddings=True,
)
def _youtu(values: Values) -> DecoderConfig:
    """LLaMA with latent attention."""
    return _with_latents(values)


@family(
    "MiniCPM3ForCausalLM",
    vocab_size=73448,
    hidden_size=2560,
    intermediate_size=6400,
    num_hidden_layers=62,
    num_attention_heads=40,
    max_position_embeddings=32768,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    q_lora_rank=768,
    kv_lora_rank=256,
    qk_nope_head_dim=64,
    qk_rope_head_dim=32,
    scale_emb=12,
    rope_interleave=False,
)
def _minicpm3(values: Values) -> DecoderConfig:
    """Latent attention, with factors on embeddings, on outputs of layers and on logits."""
    fields = ConfigFields(values)
    values = {
        **values,
        "v_head_dim": values.get("v_head_dim")
        or head_dim_of(fields.integer("hidden_size"), fields.integer("num_attention_heads")),
    }
    config = _with_latents(values)
    depth = fields.optional_number("scale_depth") if "scale_depth" in values else 1.4
    base = fields.optional_number("dim_model_base") if "dim_model_base" in values else 256.0
    return replace(
        config,
        embedding_scale=fields.number("scale_emb"),
        residual_scale=1.0 if depth is None else depth / config.num_layers**0.5,
        logit_scale=1.0 if base is None else base / config.hidden_size,
    )


def _with_latents(values: Values) -> DecoderConfig:
    """LLaMA with latent attention, by the fields that DeepSeek-V2 has for it."""
    fields = ConfigFields(values)
    rotated_dim = fields.integer("qk_rope_head_dim", 64)
    plain = {"num_key_value_heads": None, "mlp_bias": False, "head_dim": rotated_dim}
    config = DecoderConfig.read({**values, **plain})
    latent = LatentConfig(
        rank=fields.integer("kv_lora_rank", 512),
        query_rank=None if values.get("q_lora_rank") is None else fields.integer("q_lora_rank"),
        unrotated_dim=fields.integer("qk_nope_head_dim", 128),
        rotated_dim=rotated_dim,
        value_dim=fields.integer("v_head_dim", 128),
        bias=fields.flag("attention_bias", False),
        rotates_neighbours=fields.flag("rope_interleave", True),
    )
    return replace(
        config,
        latent=latent,
        num_kv_heads=1,
        head_dim=latent.line_dim,
        attention_scale=latent.query_dim**-0.5 * config.rope.score_factor,
    )


def window_of(fields: ConfigFields) -> int | None:
    """The field `sliding_window`."""
    return None if fields.values.get("sliding_window") is None else fields.integer("sliding_window")


def _with_two_rotations(
    fields: ConfigFields, theta: float, sliding_name: str, sliding_theta: float
) -> tuple[Values, Values]:
    """The configuration with the rope section of layers without a window, and with that of layers with one, as
    transformers 5 or 4 write them.

    Args:
        theta: the default of `rope_theta`.
        sliding_name: the field of transformers 4 with the base of layers with a window, and its default.
    """
    values = fields.values
    given = values.get("rope_parameters") or {_FULL: values.get("rope_scaling") or {}}
    if not isinstance(given, dict) or not given.keys() <= {_FULL, _SLIDING}:
        raise fields.error("rope_parameters", given, f"sections for {_FULL} and {_SLIDING}")
    sections = {kind: given.get(kind) or {} for kind in (_FULL, _SLIDING)}
    if not all(isinstance(section, dict) for section in sections.values()):
        raise fields.error("rope_parameters", given, "a section for each kind of layer")
    bases = {_FULL: fields.number("rope_theta", theta), _SLIDING: fields.number(sliding_name, sliding_theta)}
    full, sliding = ({"rope_theta": bases[kind], **section} for kind, section in sections.items())
    plain = {**values, "rope_scaling": None}
    return {**plain, "rope_parameters": full}, {**plain, "rope_parameters": sliding}


def _qwen_experts(fields: ConfigFields, config: DecoderConfig) -> ExpertsConfig | None:
    """None if no layer has experts."""
    # transformers 5 writes Qwen3's number by Mixtral's name.
    count = fields.integer("num_local_experts" if "num_local_experts" in fields.values else "num_experts", minimum=0)
    if not count:
        return None
    step, dense = fields.integer("decoder_sparse_step", 1), fields.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(each, int) for each in dense):
        raise fields.error("mlp_only_layers", dense, "a list of layers")
    return ExpertsConfig(
        count=count,
        num_chosen=_num_chosen(fields, config, count, None),
        inner_size=fields.integer("moe_intermediate_size"),
        normalized=fields.flag("norm_topk_prob", False),
        dense_layers=frozenset(dense) | {index for index in range(config.num_layers) if (index + 1) % step},
    )


def _num_chosen(fields: ConfigFields, config: DecoderConfig, count: int, default: int | None) -> int:
    if count * config.num_layers > _MAX_EXPERTS:
        raise fields.error("num_experts", count, f"at most {_MAX_EXPERTS} in {config.num_layers} layers together")
    chosen = fields.integer("num_experts_per_tok", default)
    if chosen > count:
        raise fields.error("num_experts_per_tok", chosen, f"at most {count}, the number of experts")
    return chosen
