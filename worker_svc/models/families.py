"""The table of the families without experts that `decoder` runs: what the config.json of each means.

A row is a function under `DENSE.add`, which names the architecture and the defaults of transformers for fields that
config.json lacks and that differ from LLaMA's. The function takes config.json over these defaults.
"""

from dataclasses import replace

from worker_svc.layers.embedding_norm import NormSpan
from worker_svc.layers.experts import MERGED_GATE_UP_DOWN
from worker_svc.models.base import ConfigFields
from worker_svc.models.decoder import DecoderConfig
from worker_svc.models.family_parts import (
    HEAD_NORMS,
    NO_BIASES,
    WITHOUT_GATE,
    Families,
    Values,
    window_of,
    windows_of_layers,
    with_norms_after,
    with_two_rotations,
    with_upper_windows,
    with_windows,
    without_window,
)
from worker_svc.models.rope import RopeConfig

DENSE = Families()


@DENSE.add("LlamaForCausalLM")
def _llama(values: Values) -> DecoderConfig:
    return DecoderConfig.read(values)


_MISTRAL_DEFAULTS = {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}


@DENSE.add("MinistralForCausalLM", _MISTRAL_DEFAULTS)
@DENSE.add("MistralForCausalLM", _MISTRAL_DEFAULTS)
def _mistral(values: Values) -> DecoderConfig:
    """LLaMA whose layers may see a sliding window: all layers, or the sliding ones of `layer_types` (Ministral)."""
    return with_windows(DecoderConfig.read({**values, **NO_BIASES}), ConfigFields(values), lambda _: True)


_QWEN_DEFAULTS = {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
}


@DENSE.add("Qwen2ForCausalLM", _QWEN_DEFAULTS)
def _qwen2(values: Values) -> DecoderConfig:
    """LLaMA with biases on query, key and value. The upper layers may see a sliding window."""
    return replace(with_upper_windows(DecoderConfig.read({**values, **NO_BIASES}), values), qkv_bias=True)


@DENSE.add("Qwen3ForCausalLM", _QWEN_DEFAULTS, head_dim=128)
def _qwen3(values: Values) -> DecoderConfig:
    """LLaMA with norms on the heads of query and key. The upper layers may see a sliding window."""
    config = DecoderConfig.read({**values, "mlp_bias": False})
    return replace(with_upper_windows(config, values), head_norms=HEAD_NORMS)


@DENSE.add(
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
    config = DecoderConfig.read({**values, **NO_BIASES}, rotates_partly=True)
    if (kind := config.rope.rope_type) not in ("default", "longrope"):
        raise config.rope.fields.error("rope_type", kind, "default or longrope")
    return replace(
        config,
        merged_qkv=True,
        mlp_names=MERGED_GATE_UP_DOWN,
        sliding_windows=(window_of(ConfigFields(values)),) * config.num_layers,
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


@DENSE.add(
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


@DENSE.add("Gemma2ForCausalLM", _GEMMA_2_DEFAULTS, final_logit_softcapping=30.0, attn_logit_softcapping=50.0)
def _gemma2(values: Values) -> DecoderConfig:
    """Gemma with norms after attention and MLP, and soft caps on scores and logits; every other layer has a window."""
    config, fields = read_gemma_2(values), ConfigFields(values)
    config = replace(config, soft_cap=fields.optional_number("attn_logit_softcapping"))
    return with_windows(config, fields, lambda index: index % 2 == 0)


@DENSE.add("Gemma3ForCausalLM", _GEMMA_2_DEFAULTS, vocab_size=262208, max_position_embeddings=131072)
def _gemma3(values: Values) -> DecoderConfig:
    """Gemma 2 (text) with norms on the heads of query and key, and another rotation in layers with a window."""
    fields = ConfigFields(values)
    full, sliding = with_two_rotations(fields, 1e6, "rope_local_base_freq", 1e4)
    config = read_gemma_2(full)
    pattern = fields.integer("sliding_window_pattern", 6)
    config = replace(
        config,
        head_norms=HEAD_NORMS,
        sliding_rope=RopeConfig.read(ConfigFields(sliding), config.head_dim),
        # The positions that the scaled rotation reaches already.
        max_model_len=config.rope.max_positions,
    )
    return with_windows(config, fields, lambda index: (index + 1) % pattern > 0)


def _read_gemma(values: Values, activation: str | None) -> DecoderConfig:
    if values.get("use_bidirectional_attention"):
        raise ConfigFields(values).error("use_bidirectional_attention", True, "false: tokens attend to earlier ones")
    config = DecoderConfig.read({**values, "hidden_act": activation or "gelu_pytorch_tanh", "mlp_bias": False})
    return replace(config, norm_offset=1.0, embedding_scale=config.hidden_size**0.5, rounds_embedding_scale=True)


def read_gemma_2(values: Values) -> DecoderConfig:
    """Gemma 2 without windows and without a cap on scores."""
    fields = ConfigFields(values)
    return replace(
        _read_gemma(values, values["hidden_activation"]),
        attention_output_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        mlp_output_norm="post_feedforward_layernorm",
        attention_scale=fields.number("query_pre_attn_scalar") ** -0.5,
        logit_cap=fields.optional_number("final_logit_softcapping"),
    )


@DENSE.add(
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
    config, fields = DecoderConfig.read({**values, **NO_BIASES}), ConfigFields(values)
    rope = config.rope.fields
    growth = rope.optional_number("llama_4_scaling_beta") if rope.values.get("llama_4_scaling_beta") else None
    return replace(
        config,
        query_growth=None if growth is None else (growth, config.rope.original_max_positions),
        sliding_windows=(window_of(fields),) * config.num_layers,
    )


@DENSE.add(
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


@DENSE.add(
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


@DENSE.add("GraniteForCausalLM")
def granite(values: Values) -> DecoderConfig:
    """LLaMA with factors on embeddings, scores, outputs of attention and MLP, and logits."""
    fields = ConfigFields(values)
    return replace(
        DecoderConfig.read(values),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        attention_scale=fields.number("attention_multiplier", 1.0),
        logit_scale=1 / fields.number("logits_scaling", 1.0),
    )


OLMO_DEFAULTS = {"vocab_size": 50304, "rms_norm_eps": 1e-5}


@DENSE.add("Olmo2ForCausalLM", OLMO_DEFAULTS)
def olmo2(values: Values) -> DecoderConfig:
    """LLaMA with norms after attention and MLP, not before, and norms on all heads of query and key together."""
    return replace(
        with_norms_after(DecoderConfig.read({**values, "mlp_bias": False})),
        head_norms=HEAD_NORMS,
        head_norm_span=NormSpan.ALL_HEADS,
    )


@DENSE.add("Olmo3ForCausalLM", OLMO_DEFAULTS, sliding_window=4096)
def _olmo3(values: Values) -> DecoderConfig:
    """OLMo 2 with windows in most layers, whose rotation is not scaled."""
    fields = ConfigFields(values)
    full, sliding = with_two_rotations(fields, 5e5, "rope_theta", 5e5)
    config = olmo2(full)
    config = replace(config, sliding_rope=RopeConfig.read(ConfigFields(sliding), config.head_dim))
    return with_windows(config, fields, lambda index: (index + 1) % 4 > 0)


@DENSE.add(
    "Exaone4ForCausalLM",
    vocab_size=102400,
    intermediate_size=16384,
    num_key_value_heads=32,
    rms_norm_eps=1e-5,
    sliding_window=4096,
    sliding_window_pattern=4,
)
def exaone4(values: Values) -> DecoderConfig:
    """LLaMA with norms after attention and MLP, not before, and norms on the heads of query and key. If some layers
    have a window, only they have a rotation."""
    config, fields = DecoderConfig.read({**values, **NO_BIASES}), ConfigFields(values)
    pattern, last = values["sliding_window_pattern"], config.num_layers - 1

    def is_sliding(index: int) -> bool:
        if isinstance(pattern, str) and pattern:
            return index != last and pattern[index % len(pattern)] == "L"
        return (index + 1) % fields.integer("sliding_window_pattern") > 0

    config = replace(with_norms_after(config), head_norms=HEAD_NORMS)
    if window_of(fields) is None:
        return config
    config = with_windows(config, fields, is_sliding)
    return replace(config, unrotated_layers=without_window(config))


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


@DENSE.add("GlmForCausalLM", _GLM_DEFAULTS)
def _glm(values: Values) -> DecoderConfig:
    """LLaMA with biases on query, key and value; the rotation turns neighbours, in a part of each head."""
    return replace(
        DecoderConfig.read({**values, "mlp_bias": False}, rotates_partly=True),
        attention_output_bias=False,
        mlp_names=MERGED_GATE_UP_DOWN,
        rotates_neighbours=True,
    )


@DENSE.add("Glm4ForCausalLM", _GLM_DEFAULTS)
def _glm4(values: Values) -> DecoderConfig:
    """GLM with norms after attention and MLP, too."""
    return replace(_glm(values), attention_output_norm="post_self_attn_layernorm", mlp_output_norm="post_mlp_layernorm")


_COHERE_DEFAULTS = {
    "vocab_size": 256000,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


@DENSE.add("CohereForCausalLM", _COHERE_DEFAULTS, rope_theta=5e5)
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
        head_norms=HEAD_NORMS if fields.flag("use_qk_norm", False) else None,
        head_norm_span=NormSpan.OWN_HEAD,
        rotates_neighbours=True,
        logit_scale=fields.number("logit_scale", 0.0625),
    )


@DENSE.add("Cohere2ForCausalLM", _COHERE_DEFAULTS, sliding_window=4096)
def _cohere2(values: Values) -> DecoderConfig:
    """Cohere with a window in most layers; only they have a rotation."""
    fields = ConfigFields(values)
    pattern = fields.integer("sliding_window_pattern", 4)
    config = with_windows(_cohere({**values, "use_qk_norm": False}), fields, lambda index: (index + 1) % pattern > 0)
    return replace(config, unrotated_layers=without_window(config))


@DENSE.add(
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


@DENSE.add(
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
    config = DecoderConfig.read({**values, **NO_BIASES, "head_dim": None}, rotates_partly=True)
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


@DENSE.add(
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


@DENSE.add("HunYuanDenseV1ForCausalLM", vocab_size=290943, rms_norm_eps=1e-5)
def hunyuan_dense(values: Values) -> DecoderConfig:
    """LLaMA with norms on the heads of query and key after their rotation, whose base may be scaled (NTK)."""
    config = DecoderConfig.read({**values, "mlp_bias": False})
    rope = config.rope
    if rope.rope_type == "dynamic" and rope.fields.values.get("alpha"):
        theta = rope.theta * rope.fields.number("alpha") ** (rope.head_dim / (rope.head_dim - 2))
        rope = replace(rope, rope_type="default", theta=theta)
    return replace(
        config,
        rope=rope,
        max_model_len=rope.max_model_len,
        head_norms=("query_layernorm", "key_layernorm"),
        norms_rotated_heads=True,
    )


@DENSE.add("OlmoForCausalLM", vocab_size=50304)
def _olmo(values: Values) -> DecoderConfig:
    """LLaMA with layer norms without weights; queries, keys and values may be clamped."""
    config = DecoderConfig.read({**values, "mlp_bias": False})
    limit = ConfigFields(values).optional_number("clip_qkv")
    return replace(config, centered_norms=True, norm_weights=False, norm_eps=1e-5, qkv_limit=limit)


@DENSE.add(
    "HeliumForCausalLM",
    vocab_size=48000,
    hidden_size=2560,
    intermediate_size=7040,
    num_hidden_layers=24,
    num_attention_heads=20,
    num_key_value_heads=20,
    head_dim=128,
    max_position_embeddings=4096,
    rms_norm_eps=1e-8,
    rope_theta=1e5,
)
def _helium(values: Values) -> DecoderConfig:
    """LLaMA with a rotation that turns neighbours."""
    return replace(DecoderConfig.read(values), attention_output_bias=False, rotates_neighbours=True)


@DENSE.add(
    "ArceeForCausalLM",
    hidden_size=2560,
    intermediate_size=18432,
    hidden_act="relu2",
    max_position_embeddings=4096,
    rms_norm_eps=1e-5,
)
def _arcee(values: Values) -> DecoderConfig:
    """LLaMA with an MLP without a gate."""
    return replace(DecoderConfig.read(values), mlp_names=WITHOUT_GATE)


@DENSE.add(
    "NemotronForCausalLM",
    vocab_size=256000,
    hidden_size=6144,
    intermediate_size=24576,
    num_attention_heads=48,
    hidden_act="relu2",
    max_position_embeddings=4096,
    partial_rotary_factor=0.5,
)
def _nemotron(values: Values) -> DecoderConfig:
    """LLaMA with layer norms that add 1 to their weights, an MLP without a gate, and a rotation of a part of each
    head."""
    return replace(
        DecoderConfig.read(values, rotates_partly=True),
        centered_norms=True,
        norm_bias=True,
        norm_offset=1.0,
        norm_eps=ConfigFields(values).number("norm_eps", 1e-5),
        mlp_names=WITHOUT_GATE,
    )


@DENSE.add(
    "Jais2ForCausalLM",
    vocab_size=150272,
    hidden_size=3328,
    intermediate_size=26624,
    num_attention_heads=26,
    hidden_act="relu2",
    max_position_embeddings=8192,
    attention_bias=True,
    mlp_bias=True,
)
def _jais2(values: Values) -> DecoderConfig:
    """LLaMA with layer norms, biases, and an MLP without a gate."""
    return replace(
        DecoderConfig.read(values),
        centered_norms=True,
        norm_bias=True,
        norm_eps=ConfigFields(values).number("layer_norm_eps", 1e-5),
        mlp_names=WITHOUT_GATE,
    )


@DENSE.add("VaultGemmaForCausalLM", _GEMMA_2_DEFAULTS, final_logit_softcapping=30.0, attn_logit_softcapping=50.0)
def _vault_gemma(values: Values) -> DecoderConfig:
    """Gemma 2 without norms after attention and MLP."""
    return replace(_gemma2(values), attention_output_norm=None, mlp_output_norm=None)


@DENSE.add(
    "CwmForCausalLM",
    vocab_size=128256,
    hidden_size=6144,
    intermediate_size=21504,
    num_hidden_layers=64,
    num_attention_heads=48,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    sliding_window=8192,
    rope_theta=1e6,
    rope_parameters={
        "rope_type": "llama3",
        "factor": 16.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    },
)
def _cwm(values: Values) -> DecoderConfig:
    """LLaMA with a window in three of four layers."""
    config = DecoderConfig.read({**values, "attention_bias": False})
    return with_windows(config, ConfigFields(values), lambda index: index % 4 > 0)
