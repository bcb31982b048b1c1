"""The table of the families whose last layers may read the keys of earlier ones, with rows as in `families`."""

from dataclasses import replace

from worker_svc.layers.altup import AltUpConfig
from worker_svc.layers.per_layer_inputs import PerLayerConfig
from worker_svc.models.base import ConfigFields
from worker_svc.models.decoder import DecoderConfig
from worker_svc.models.families import GEMMA_2
from worker_svc.models.family_parts import (
    HEAD_NORMS,
    MOE_WIDTH,
    Families,
    Values,
    all_but_last_of,
    experts,
    rope_sections,
    windows,
    without_window,
)
from worker_svc.models.rope import RopeConfig

WITH_SHARED_KEYS = Families()

_GEMMA_DEFAULTS = {
    "head_dim": 256,
    "num_attention_heads": 8,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 512,
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
    # Scores are not scaled.
    "query_pre_attn_scalar": 1,
}
_GEMMA_4_DEFAULTS = _GEMMA_DEFAULTS | {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    },
}


_GEMMA_3N_DEFAULTS = _GEMMA_DEFAULTS | {
    "vocab_size": 262400,
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_hidden_layers": 35,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "num_kv_shared_layers": 15,
    "final_logit_softcapping": 30.0,
}


def _gemma4(values: Values) -> DecoderConfig:
    """Gemma 3 (text) with plain norms, also of values, and with factors on layers. Layers without a window have other
    heads, whose values may be their keys. Layers may have inputs of their own, and experts in addition to the MLP."""
    if values.get("use_bidirectional_attention") == "vision":
        # Between the parts of an image.
        values = {**values, "use_bidirectional_attention": None}
    fields, types = ConfigFields(values), values.get("layer_types")
    last = fields.integer("num_hidden_layers") - 1
    if isinstance(types, list) and len(types) > last:
        values = {**values, "layer_types": [*types[:last], "full_attention", *types[last + 1 :]]}
    full, sliding = rope_sections(ConfigFields(values), 1e6, "rope_local_base_freq", 1e4)
    config, fields = GEMMA_2.read_config(sliding), ConfigFields(full)
    slides = windows(lambda index: (index + 1) % 6 > 0 and index != last)
    config = replace(config, sliding_windows=slides(fields, config))
    heads = _heads_without_window(fields, config)
    config = replace(
        _with_shared_keys(config, fields),
        full_heads=heads,
        rope=RopeConfig.read(fields, heads[1]),
        sliding_rope=config.rope,
        norm_offset=0.0,
        layer_scale="layer_scalar",
        values_are_keys=without_window(fields, config) if fields.flag("attention_k_eq_v", False) else frozenset(),
        experts=_EXPERTS_BESIDE_MLP(fields, config) if fields.flag("enable_moe_block", False) else None,
    )
    if not fields.flag("use_double_wide_mlp", False):
        return config
    of_shared = config.num_shared_layers * (2 * config.intermediate_size,)
    return replace(config, intermediate_sizes=len(config.key_layers) * (config.intermediate_size,) + of_shared)


def _gemma3n(values: Values) -> DecoderConfig:
    """Gemma 3 (text) with plain norms, also of values; inputs of each layer of their own, several residual streams, and
    sparse MLPs in some layers."""
    inner, count = values["intermediate_size"], ConfigFields(values).integer("num_hidden_layers")
    sizes = inner if isinstance(inner, list) else [inner] * count
    sparse = values.get("activation_sparsity_pattern")
    sparse = [0.95] * 10 + [0.0] * (count - 10) if sparse is None and count > 10 else sparse or [0.0] * count
    for name, each in (("intermediate_size", sizes), ("activation_sparsity_pattern", sparse)):
        limit = 1 if each is sparse else 1 << 24
        if not isinstance(each, list) or len(each) != count or not all(_is_below(number, limit) for number in each):
            raise ConfigFields(values).error(name, each, f"a list of {count} numbers from 0 to below {limit}")
    values = {**values, "intermediate_size": sizes[0]}
    full, sliding = rope_sections(ConfigFields(values), 1e6, "rope_local_base_freq", 1e4)
    config, fields = GEMMA_2.read_config(full), ConfigFields(full)
    slides = windows(all_but_last_of(5))(fields, config)
    config = _with_shared_keys(replace(config, sliding_windows=slides), fields)
    if config.per_layer is None:
        raise fields.error("hidden_size_per_layer_input", 0, "an integer of at least 1")
    num_inputs = fields.integer("altup_num_inputs", 4)
    active = fields.integer("altup_active_idx", 0, minimum=0)
    if active >= num_inputs:
        raise fields.error("altup_active_idx", active, f"below altup_num_inputs, {num_inputs}")
    return replace(
        config,
        sliding_rope=RopeConfig.read(ConfigFields(sliding), config.head_dim),
        norm_offset=0.0,
        intermediate_sizes=tuple(sizes),
        sparsities=tuple(map(float, sparse)),
        altup=AltUpConfig(
            num_inputs, active, fields.integer("laurel_rank", 64), fields.flag("altup_correct_scale", True)
        ),
    )


def _is_below(value: object, limit: float) -> bool:
    return isinstance(value, int | float) and 0 <= value < limit


def _heads_without_window(fields: ConfigFields, config: DecoderConfig) -> tuple[int, int]:
    """As published, or as transformers 5 writes them for each layer."""
    layers, written = without_window(fields, config), fields.values.get("per_layer_config")
    names = ("num_global_key_value_heads", "global_head_dim")
    if written is None:
        count = config.num_kv_heads
        if fields.flag("attention_k_eq_v", False):
            count = fields.integer(names[0], count)
        heads = count, fields.integer(names[1], 512)
    else:
        section = written.get(str(config.num_layers - 1)) if isinstance(written, dict) else None
        if not isinstance(section, dict) or written != {str(index): section for index in layers}:
            raise fields.error("per_layer_config", written, "the same heads of all layers without a window, only")
        own = ConfigFields({**fields.values, **section}, f"{fields.section}: per_layer_config")
        heads = own.integer("num_key_value_heads"), own.integer("head_dim")
    if config.num_heads % heads[0] or heads[1] % 2:
        expected = f"a divisor of num_attention_heads, {config.num_heads}, and an even head size"
        raise fields.error(" and ".join(names), heads, expected)
    return heads


def _with_shared_keys(config: DecoderConfig, fields: ConfigFields) -> DecoderConfig:
    """Norms of heads and inputs of each layer's own, as in Gemma 3n and 4, and keys for `num_kv_shared_layers`."""
    size, shared = (
        fields.integer(name, 0, minimum=0) for name in ("hidden_size_per_layer_input", "num_kv_shared_layers")
    )
    windows, first = config.sliding_windows, config.num_layers - shared
    if first < 1 or not {*windows[first:]} <= {*windows[:first]}:
        raise fields.error("num_kv_shared_layers", shared, "fewer layers: each reads the keys of one of its kind")
    return replace(
        config,
        head_norms=HEAD_NORMS,
        norms_values=True,
        num_shared_layers=shared,
        per_layer=PerLayerConfig(size, fields.integer("vocab_size_per_layer_input")) if size else None,
    )


_EXPERTS_BESIDE_MLP = experts(
    chosen="top_k_experts",
    inner_size=MOE_WIDTH,
    normalized=True,
    module="",
    router="router.proj",
    router_scale="router.scale",
    expert_scales="router.per_expert_scale",
    beside_mlp=(
        "post_feedforward_layernorm_1",
        "pre_feedforward_layernorm_2",
        "post_feedforward_layernorm_2",
    ),
)
WITH_SHARED_KEYS.add_described("Gemma4ForCausalLM", _GEMMA_4_DEFAULTS, _gemma4)
_UNIFIED = {"max_position_embeddings": 262144, "sliding_window": 1024, "hidden_size_per_layer_input": 0}
WITH_SHARED_KEYS.add_described("Gemma4UnifiedForCausalLM", _GEMMA_4_DEFAULTS | _UNIFIED, _gemma4)
WITH_SHARED_KEYS.add_described("Gemma3nForCausalLM", _GEMMA_3N_DEFAULTS, _gemma3n)
