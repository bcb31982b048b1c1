"""Parts that rows of the tables of families share: the table, windows, rotations and experts.

A `Reader` is a function of the fields of config.json and of the configuration before, which gives a part.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from worker_svc.layers.experts import ExpertsConfig, Scoring
from worker_svc.models.base import ConfigFields
from worker_svc.models.decoder import DecoderConfig, DecoderFamily
from worker_svc.models.rope import MAX_TABLE_LENGTH, RopeConfig

Values = Mapping[str, Any]
Reader = Callable[[ConfigFields, DecoderConfig], Any]
IsSliding = Callable[[int], bool]
"""Whether the layer of this number has a window."""

NO_MLP_BIAS: Values = {"mlp_bias": False}
NO_BIASES: Values = {"attention_bias": False, **NO_MLP_BIAS}
BIASES = ("qkv_bias", "attention_output_bias", "mlp_bias")
HEAD_NORMS = ("q_norm", "k_norm")
WITHOUT_GATE = ("up_proj", "down_proj")
LAYER_NORMS: Values = {"centered_norms": True, "norm_bias": True}
NORMS_AFTER: Values = {
    "attention_norm": None,
    "attention_output_norm": "post_attention_layernorm",
    "mlp_norm": None,
    "mlp_output_norm": "post_feedforward_layernorm",
}
"""Norms after attention and MLP, not before."""
_FULL, _SLIDING = "full_attention", "sliding_attention"
# More than any model has, in all layers. It bounds what a wrong configuration can allocate.
_MAX_EXPERTS = 1 << 16


class Families(dict[str, DecoderFamily]):
    """A table of families, by architecture."""

    def add(
        self,
        architecture: str,
        defaults: Values | None = None,
        *,
        like: DecoderFamily | None = None,
        fixed: Values | None = None,
        only: Values | None = None,
        rotates_partly: bool = False,
        renamed: Mapping[str, str] | None = None,
        **parts: Any,
    ) -> DecoderFamily:
        """A row of the table, as `DecoderFamily` describes it, with what the row `like` has, except for sizes."""
        base = like or DecoderFamily("", {}, {}, {}, {}, False)
        self[architecture] = family = DecoderFamily(
            architecture,
            defaults={**base.defaults, **(defaults or {})},
            parts={**base.parts, **parts},
            fixed={**base.fixed, **(fixed or {})},
            only={**base.only, **(only or {})},
            rotates_partly=rotates_partly or base.rotates_partly,
            renamed=renamed or base.renamed,
        )
        return family

    def add_described(self, architecture: str, defaults: Values, describe: Callable[[Values], DecoderConfig]) -> None:
        """A row that the function `describe` gives, from config.json over the defaults."""
        self[architecture] = DecoderFamily(architecture, defaults, {}, {}, {}, False, describe)


# Single fields


def integer(name: str, default: int | None = None, minimum: int = 1) -> Reader:
    return lambda fields, _: fields.integer(name, default, minimum=minimum)


def number(name: str, default: float | None = None) -> Reader:
    return lambda fields, _: fields.number(name, default)


def optional_number(name: str) -> Reader:
    return lambda fields, _: fields.optional_number(name)


def flag(name: str, default: bool = False) -> Reader:
    return lambda fields, _: fields.flag(name, default)


def all_biases(part: Reader) -> dict[str, Any]:
    """The parts for biases, each read by `part`."""
    return dict.fromkeys(BIASES, part)


def if_flag(name: str, part: object) -> Reader:
    """`part` if the field is true; None if it is false or missing."""
    return lambda fields, _: part if fields.flag(name, False) else None


def state_activation(name: str = "hidden_act") -> Reader:
    """The activation of the convolutions of layers that keep a state, by the field `name`."""

    def read(fields: ConfigFields, _: DecoderConfig) -> str:
        value = fields.text(name, "silu")
        if value not in ("silu", "swish"):
            raise fields.error(name, value, "silu, which is the only activation of layers that keep a state")
        return "silu"

    return read


# Windows


def window_of(fields: ConfigFields) -> int | None:
    """The field `sliding_window`, at most the length of the longest sequence: kernels take no larger numbers."""
    if fields.values.get("sliding_window") is None:
        return None
    return min(fields.integer("sliding_window"), MAX_TABLE_LENGTH)


def used_window_of(fields: ConfigFields) -> int | None:
    """The same if the field `use_sliding_window` is true."""
    return window_of(fields) if fields.flag("use_sliding_window", False) else None


def window_everywhere(fields: ConfigFields, config: DecoderConfig) -> tuple[int | None, ...]:
    """`window_of` in all layers."""
    return (window_of(fields),) * config.num_layers


def windows(
    is_sliding: IsSliding,
    window_of: Callable[[ConfigFields], int | None] = window_of,
    others: Sequence[str] = (),
) -> Callable[[ConfigFields, DecoderConfig], tuple[int | None, ...]]:
    """A window in the sliding layers of `layer_types`; without `layer_types`, in layers that satisfy `is_sliding`.
    Types in `others` are of layers that do not attend.

    The reader raises ConfigurationError for an unknown type of layer, or for a sliding layer without a window.
    """

    def read(fields: ConfigFields, config: DecoderConfig) -> tuple[int | None, ...]:
        window, types, count = window_of(fields), fields.values.get("layer_types"), config.num_layers
        if types is None:
            return tuple(window if is_sliding(index) else None for index in range(count))
        known = (_FULL, _SLIDING, *others)
        if not isinstance(types, list) or len(types) != count or not all(each in known for each in types):
            raise fields.error("layer_types", types, f"{count} of {' and '.join(known)}")
        if window is None and _SLIDING in types:
            raise fields.error("layer_types", types, f"only {_FULL} if no sliding window is used")
        return tuple(window if each == _SLIDING else None for each in types)

    return read


def all_but_last_of(period: int) -> IsSliding:
    """All layers but the last of each `period` layers."""
    return lambda index: (index + 1) % period > 0


def windows_by_pattern(period: int) -> Reader:
    """`windows` in all layers but the last of each `sliding_window_pattern` layers; `period` is its default."""
    return lambda fields, config: windows(all_but_last_of(fields.integer("sliding_window_pattern", period)))(
        fields, config
    )


def upper_windows(default: int | None = 28, window_of: Callable[[ConfigFields], int | None] = used_window_of) -> Reader:
    """`windows` from layer `max_window_layers` on; `default` is its default."""

    def read(fields: ConfigFields, config: DecoderConfig) -> tuple[int | None, ...]:
        first = fields.integer("max_window_layers", default, minimum=0)
        return windows(lambda index: index >= first, window_of)(fields, config)

    return read


def without_window(_: ConfigFields, config: DecoderConfig) -> frozenset[int]:
    """The layers that see the whole context."""
    return frozenset(index for index, window in enumerate(config.sliding_windows) if window is None)


# Rotations


def rope_sections(fields: ConfigFields, theta: float, sliding_name: str, sliding_theta: float) -> tuple[Values, Values]:
    """The configuration with the rope section of layers without a window, and with that of layers with one."""
    given = fields.values.get("rope_parameters") or {_FULL: fields.values.get("rope_scaling") or {}}
    if not isinstance(given, dict) or not given.keys() <= {_FULL, _SLIDING}:
        raise fields.error("rope_parameters", given, f"sections for {_FULL} and {_SLIDING}")
    found = [given.get(kind) or {} for kind in (_FULL, _SLIDING)]
    if not all(isinstance(section, dict) for section in found):
        raise fields.error("rope_parameters", given, "a section for each kind of layer")
    bases = (fields.number("rope_theta", theta), fields.number(sliding_name, sliding_theta))
    # transformers does not read `truncate` in sections.
    found = [{name: value for name, value in section.items() if name != "truncate"} for section in found]
    full, sliding = ({"rope_theta": base, **section} for base, section in zip(bases, found, strict=True))
    plain = {**fields.values, "rope_scaling": None}
    return {**plain, "rope_parameters": full}, {**plain, "rope_parameters": sliding}


def two_rotations(theta: float, sliding_name: str, sliding_theta: float) -> dict[str, Any]:
    """The arguments of a row whose layers with a window have another rotation than the others. transformers 5 writes
    a section for each kind, transformers 4 a field for each base.

    Args:
        theta: the default of `rope_theta`.
        sliding_name: the field of transformers 4 with the base of layers with a window, and its default.
    """

    def sliding_rope(fields: ConfigFields, config: DecoderConfig) -> RopeConfig:
        _, sliding = rope_sections(fields, theta, sliding_name, sliding_theta)
        return RopeConfig.read(ConfigFields(sliding), config.head_dim)

    def full_rope(fields: ConfigFields) -> Values:
        full, _ = rope_sections(fields, theta, sliding_name, sliding_theta)
        return full["rope_parameters"]

    fixed = {**NO_MLP_BIAS, "rope_scaling": None, "rope_parameters": full_rope}
    return {"fixed": fixed, "sliding_rope": sliding_rope}


# Experts

MOE_WIDTH = integer("moe_intermediate_size")


def _given(fields: ConfigFields, names: str | tuple[str, str]) -> str:
    if isinstance(names, str):
        return names
    return names[0] if names[0] in fields.values else names[1]


def experts(
    count: str | tuple[str, str] = "num_experts",
    default_count: int | None = None,
    chosen: str = "num_experts_per_tok",
    default_chosen: int | None = None,
    **parts: Any,
) -> Callable[[ConfigFields, DecoderConfig], ExpertsConfig]:
    """Experts whose numbers are the fields `count` and `chosen`, with parts as rows of families have them. If `count`
    has two names, the second counts only where the first is missing."""

    def read(fields: ConfigFields, config: DecoderConfig) -> ExpertsConfig:
        number = fields.integer(_given(fields, count), default_count)
        if number * config.num_layers > _MAX_EXPERTS:
            raise fields.error("num_experts", number, f"at most {_MAX_EXPERTS} in {config.num_layers} layers together")
        num_chosen = fields.integer(chosen, default_chosen)
        if num_chosen > number:
            raise fields.error(chosen, num_chosen, f"at most {number}, the number of experts")
        read = {name: part(fields, config) if callable(part) else part for name, part in parts.items()}
        sizes: dict[str, Any] = {"inner_size": config.intermediate_size, **read}
        return ExpertsConfig(**sizes, count=number, num_chosen=num_chosen)

    return read


def mixtral_experts(
    default_count: int | None, default_chosen: int, count: str | tuple[str, str] = "num_local_experts", **parts: Any
) -> Reader:
    """Experts by Mixtral's names."""
    named: dict[str, Any] = {"module": "block_sparse_moe", "names": ("w1", "w3", "w2"), "normalized": True, **parts}
    return experts(count, default_count, default_chosen=default_chosen, **named)


def qwen_experts(**parts: Any) -> Reader:
    """Experts in some layers; None if no layer has experts."""

    def dense_layers(fields: ConfigFields, config: DecoderConfig) -> frozenset[int]:
        step, dense = fields.integer("decoder_sparse_step", 1), fields.values.get("mlp_only_layers") or []
        if not isinstance(dense, list) or not all(isinstance(each, int) for each in dense):
            raise fields.error("mlp_only_layers", dense, "a list of layers")
        return frozenset(dense) | {index for index in range(config.num_layers) if (index + 1) % step}

    # transformers 5 writes Qwen3's number by Mixtral's name.
    count = ("num_local_experts", "num_experts")
    named: dict[str, Any] = {
        "inner_size": MOE_WIDTH,
        "normalized": flag("norm_topk_prob"),
        "dense_layers": dense_layers,
        **parts,
    }

    def read(fields: ConfigFields, config: DecoderConfig) -> ExpertsConfig | None:
        return experts(count, **named)(fields, config) if fields.integer(_given(fields, count), minimum=0) else None

    return read


def first_layers(fields: ConfigFields, config: DecoderConfig) -> frozenset[int]:
    """The first `first_k_dense_replace` layers."""
    return frozenset(range(min(fields.integer("first_k_dense_replace", 0, minimum=0), config.num_layers)))


def deepseek_experts(
    count: str = "n_routed_experts",
    num_shared: str = "n_shared_experts",
    scale: str = "routed_scaling_factor",
    **parts: Any,
) -> Callable[[ConfigFields, DecoderConfig], ExpertsConfig]:
    """DeepSeek V3's, in all but the first layers. `count`, `num_shared` and `scale` are fields."""

    def shared_size(fields: ConfigFields, _: DecoderConfig) -> int | None:
        return fields.integer(num_shared, 1, minimum=0) * fields.integer("moe_intermediate_size") or None

    def read(fields: ConfigFields, config: DecoderConfig) -> ExpertsConfig:
        named: dict[str, Any] = {
            "inner_size": MOE_WIDTH,
            "normalized": flag("norm_topk_prob", True),
            "dense_layers": first_layers,
            "scoring": Scoring.SIGMOID,
            "correction": "gate.e_score_correction_bias",
            "num_groups": integer("n_group", 1),
            "num_chosen_groups": integer("topk_group", 1),
            "scale": number(scale, 1.0),
            "shared_inner_size": shared_size,
            "shared": "mlp.shared_experts",
        }
        made = experts(count, **named | parts)(fields, config)
        groups, best = made.num_groups, made.num_chosen_groups
        if made.count % groups or made.count < 2 * groups or best > groups:
            raise fields.error("n_group", groups, f"groups of at least 2 of {made.count} experts, {best} or more")
        if made.num_chosen > made.count // groups * best:
            raise fields.error(
                "num_experts_per_tok", made.num_chosen, f"at most the experts of {best} of {groups} groups"
            )
        return made

    return read


def dense_layers_by_types(fields: ConfigFields, config: DecoderConfig) -> frozenset[int]:
    """The dense layers of `mlp_layer_types`; without it, the first `first_k_dense_replace`.

    Raises:
        ConfigurationError: an unknown type of layer, or types of another number of layers.
    """
    types = fields.values.get("mlp_layer_types")
    if types is None:
        return first_layers(fields, config)
    known = isinstance(types, list) and all(each in ("dense", "sparse") for each in types)
    if not known or len(types) != config.num_layers:
        raise fields.error("mlp_layer_types", types, f"{config.num_layers} of dense and sparse")
    return frozenset(index for index, each in enumerate(types) if each == "dense")
