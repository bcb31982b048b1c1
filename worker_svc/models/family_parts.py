"""Parts that rows of the tables of families share: the table, windows, rotations and experts."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from worker_svc.layers.experts import ExpertsConfig, Scoring
from worker_svc.models.base import ConfigFields
from worker_svc.models.decoder import DecoderConfig, DecoderFamily
from worker_svc.models.rope import MAX_TABLE_LENGTH

Values = Mapping[str, Any]
NO_BIASES: Values = {"attention_bias": False, "mlp_bias": False}
_FULL, _SLIDING = "full_attention", "sliding_attention"
HEAD_NORMS = ("q_norm", "k_norm")
# More than any model has, in all layers. It bounds what a wrong configuration can allocate.
_MAX_EXPERTS = 1 << 16
WITHOUT_GATE = ("up_proj", "down_proj")


class Families(dict[str, DecoderFamily]):
    """A table of families, by architecture."""

    def add(
        self, architecture: str, defaults: Values | None = None, **further: Any
    ) -> Callable[[Callable[[Values], DecoderConfig]], Callable[[Values], DecoderConfig]]:
        """Makes the function below a row of the table, with `defaults` and `further` ones."""

        def add(describe: Callable[[Values], DecoderConfig]) -> Callable[[Values], DecoderConfig]:
            self[architecture] = DecoderFamily(architecture, {**(defaults or {}), **further}, describe)
            return describe

        return add


def plain_experts(fields: ConfigFields, config: DecoderConfig) -> ExpertsConfig:
    """Experts in all layers, chosen by a softmax."""
    count = fields.integer("num_experts")
    return ExpertsConfig(
        count=count,
        num_chosen=num_chosen(fields, config, count, None),
        inner_size=config.intermediate_size,
        normalized=fields.flag("norm_topk_prob", False),
    )


def with_norms_after(config: DecoderConfig) -> DecoderConfig:
    return replace(
        config,
        attention_norm=None,
        attention_output_norm="post_attention_layernorm",
        mlp_norm=None,
        mlp_output_norm="post_feedforward_layernorm",
    )


def without_window(config: DecoderConfig) -> frozenset[int]:
    """The layers that see the whole context."""
    return frozenset(index for index, window in enumerate(config.sliding_windows) if window is None)


def deepseek_experts(fields: ConfigFields, config: DecoderConfig) -> ExpertsConfig:
    """DeepSeek V3's, in all but the first layers."""
    count, inner_size = fields.integer("n_routed_experts"), fields.integer("moe_intermediate_size")
    num_groups = fields.integer("n_group", 1)
    chosen_groups = fields.integer("topk_group", 1)
    if count % num_groups or count < 2 * num_groups or chosen_groups > num_groups:
        raise fields.error("n_group", num_groups, f"groups of at least 2 of {count} experts, {chosen_groups} or more")
    chosen = num_chosen(fields, config, count, None)
    if chosen > count // num_groups * chosen_groups:
        raise fields.error(
            "num_experts_per_tok", chosen, f"at most the experts of {chosen_groups} of {num_groups} groups"
        )
    num_shared = fields.integer("n_shared_experts", 1, minimum=0)
    num_dense = min(fields.integer("first_k_dense_replace", 0, minimum=0), config.num_layers)
    return ExpertsConfig(
        count=count,
        num_chosen=chosen,
        inner_size=inner_size,
        normalized=fields.flag("norm_topk_prob", True),
        dense_layers=frozenset(range(num_dense)),
        scoring=Scoring.SIGMOID,
        correction="gate.e_score_correction_bias",
        num_groups=num_groups,
        num_chosen_groups=chosen_groups,
        scale=fields.number("routed_scaling_factor", 1.0),
        shared_inner_size=num_shared * inner_size or None,
        shared="mlp.shared_experts",
    )


def by_layer_types(experts: ExpertsConfig, fields: ConfigFields, config: DecoderConfig) -> ExpertsConfig:
    """`experts` in the sparse layers of `mlp_layer_types`; as they are without `mlp_layer_types`.

    Raises:
        ConfigurationError: an unknown type of layer, or types of another number of layers.
    """
    types = fields.values.get("mlp_layer_types")
    if types is None:
        return experts
    known = isinstance(types, list) and all(each in ("dense", "sparse") for each in types)
    if not known or len(types) != config.num_layers:
        raise fields.error("mlp_layer_types", types, f"{config.num_layers} of dense and sparse")
    return replace(experts, dense_layers=frozenset(index for index, each in enumerate(types) if each == "dense"))


def with_windows(config: DecoderConfig, fields: ConfigFields, is_sliding: Callable[[int], bool]) -> DecoderConfig:
    """`sliding_window` in layers as in `windows_of_layers`."""
    windows = windows_of_layers(fields, config.num_layers, window_of(fields), is_sliding)
    return replace(config, sliding_windows=windows)


def with_upper_windows(config: DecoderConfig, values: Values) -> DecoderConfig:
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


def window_of(fields: ConfigFields) -> int | None:
    """The field `sliding_window`, at most the length of the longest sequence: kernels take no larger numbers."""
    if fields.values.get("sliding_window") is None:
        return None
    return min(fields.integer("sliding_window"), MAX_TABLE_LENGTH)


def with_two_rotations(
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


def qwen_experts(fields: ConfigFields, config: DecoderConfig) -> ExpertsConfig | None:
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
        num_chosen=num_chosen(fields, config, count, None),
        inner_size=fields.integer("moe_intermediate_size"),
        normalized=fields.flag("norm_topk_prob", False),
        dense_layers=frozenset(dense) | {index for index in range(config.num_layers) if (index + 1) % step},
    )


def num_chosen(
    fields: ConfigFields, config: DecoderConfig, count: int, default: int | None, name: str = "num_experts_per_tok"
) -> int:
    if count * config.num_layers > _MAX_EXPERTS:
        raise fields.error("num_experts", count, f"at most {_MAX_EXPERTS} in {config.num_layers} layers together")
    chosen = fields.integer(name, default)
    if chosen > count:
        raise fields.error(name, chosen, f"at most {count}, the number of experts")
    return chosen
