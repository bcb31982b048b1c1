"""The table of the families whose layers keep a state of fixed size instead of keys, with rows as in `families`."""

from collections.abc import Callable
from typing import Any

from worker_svc.layers.delta_rule import DeltaRuleConfig
from worker_svc.layers.experts import ExpertsConfig
from worker_svc.models.base import ConfigFields
from worker_svc.models.decoder import DecoderConfig
from worker_svc.models.family_parts import (
    HEAD_NORMS,
    NO_MLP_BIAS,
    Families,
    Values,
    integer,
    qwen_experts,
)

WITH_STATES = Families()
_ATTENTION = "full_attention"

IsState = Callable[[ConfigFields, DecoderConfig, int], bool]


def state_layers(kind: str, is_state: IsState, attention: str = _ATTENTION) -> Any:
    """A reader of the layers that keep a state: those of the type `kind` in `layer_types`; without `layer_types`, those
    that satisfy `is_state`.

    The reader raises ConfigurationError for an unknown type of layer, or if no layer attends.
    """

    def read(fields: ConfigFields, config: DecoderConfig) -> frozenset[int]:
        types, count = fields.values.get("layer_types"), config.num_layers
        if types is None:
            found = frozenset(index for index in range(count) if is_state(fields, config, index))
        elif isinstance(types, list) and len(types) == count and all(each in (kind, attention) for each in types):
            found = frozenset(index for index, each in enumerate(types) if each == kind)
        else:
            raise fields.error("layer_types", types, f"{count} of {kind} and {attention}")
        if len(found) == count:
            raise fields.error("layer_types", types, f"at least one layer of {attention}")
        return found

    return read


def _by_interval(fields: ConfigFields, _: DecoderConfig, index: int) -> bool:
    return (index + 1) % fields.integer("full_attention_interval", 4) > 0


def delta_rule(*, by_key: bool) -> Any:
    """A reader of the sizes of delta rules by Qwen's names. It raises ConfigurationError for heads that do not fit."""

    def read(fields: ConfigFields, config: DecoderConfig) -> DeltaRuleConfig:
        num_keys, num_values = (
            fields.integer("linear_num_key_heads", 16),
            fields.integer("linear_num_value_heads", 32),
        )
        if num_values % num_keys:
            raise fields.error("linear_num_value_heads", num_values, f"a multiple of the {num_keys} heads of key")
        sizes = fields.integer("linear_key_head_dim", 128), fields.integer("linear_value_head_dim", 128)
        if sizes[0] % 16 or sizes[1] % 16:
            raise fields.error("linear_key_head_dim", sizes[0], "a multiple of 16, as linear_value_head_dim")
        return DeltaRuleConfig(
            num_keys,
            num_values,
            *sizes,
            num_taps=fields.integer("linear_conv_kernel_dim", 4, minimum=2),
            activation=config.activation,
            norm_eps=config.norm_eps,
            by_key=by_key,
        )

    return read


_PARTLY: Values = {"partial_rotary_factor": 0.25}

# Layers with delta rules; norms add 1 to their weights, except for those of delta rules; every few layers attend, with
# gates on the results.
_QWEN_3_5 = WITH_STATES.add(
    "Qwen3_5ForCausalLM",
    _PARTLY,
    fixed=NO_MLP_BIAS,
    rotates_partly=True,
    norm_offset=1.0,
    head_norms=HEAD_NORMS,
    gates_attention=True,
    state=delta_rule(by_key=False),
    state_layers=state_layers("linear_attention", _by_interval),
)


def _qwen_next_experts(fields: ConfigFields, config: DecoderConfig) -> ExpertsConfig | None:
    shared = integer("shared_expert_intermediate_size")
    return qwen_experts(shared_inner_size=shared, shared_gate="shared_expert_gate")(fields, config)


# The same with experts.
WITH_STATES.add(
    "Qwen3_5MoeForCausalLM",
    {"num_experts": 256, "shared_expert_intermediate_size": 512, "norm_topk_prob": True},
    like=_QWEN_3_5,
    experts=_qwen_next_experts,
)
WITH_STATES.add(
    "Qwen3NextForCausalLM",
    {"num_experts": 512, "shared_expert_intermediate_size": 512, "norm_topk_prob": True},
    like=_QWEN_3_5,
    state=delta_rule(by_key=True),
    experts=_qwen_next_experts,
)
