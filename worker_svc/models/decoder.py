"""A decoder with rotary positions and grouped-query attention, whose parts a `DecoderConfig` describes.

LLaMA and the families that differ from it by configuration are rows of the table in `families`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from quire_kernels import ops
from quire_kernels.states import StateUnits
from worker_svc.layers.altup import AltUpConfig, AltUpLayer, AltUpStreams
from worker_svc.layers.attention import AttentionMetadata, PagedAttention
from worker_svc.layers.embedding_norm import (
    Embedding,
    Factor,
    HeadNorm,
    LayerNorm,
    NoNorm,
    NormSpan,
    Numbers,
    RmsNorm,
    UnitNorm,
)
from worker_svc.layers.experts import GATE_UP_DOWN, Experts, ExpertsBesideMlp, ExpertsConfig, Mlp
from worker_svc.layers.latent_attention import LatentAttention, LatentConfig
from worker_svc.layers.linear import HeadOrder, Linear, LinearPart, Split, Spread
from worker_svc.layers.per_layer_inputs import PerLayerConfig, PerLayerGate, PerLayerInputs
from worker_svc.layers.shared_blocks import SharedBlocksConfig, SharedUse, make_uses
from worker_svc.layers.state_layer import StateConfig, StateLayer, StateLayout, StateSize
from worker_svc.models.base import (
    CacheLayer,
    ConfigFields,
    ModelInput,
    NativeCausalLM,
    RotationByLength,
    head_dim_of,
    make_head,
)
from worker_svc.models.family_sizes import SIZES
from worker_svc.models.rope import RopeConfig
from worker_svc.parallel.ranks import ALONE, Ranks, Segment, check_division, heads_of_rank
from worker_svc.weights import Placement


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The parts of a decoder. `read` has the fields of config.json that most families share."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    activation: str
    norm_eps: float
    qkv_bias: bool
    attention_output_bias: bool
    mlp_bias: bool
    tied: bool
    rope: RopeConfig
    sliding_windows: tuple[int | None, ...]
    """The window of each layer; None for the whole context."""
    max_model_len: int
    latent: LatentConfig | None = None
    """The sizes of latent attention (MLA): then `num_kv_heads` is 1, and `head_dim` the number of elements of a line in
    the pool. None for heads of key and value."""
    full_heads: tuple[int, int] | None = None
    """The number of heads of key and the head size of layers without a window, if they differ from `num_kv_heads` and
    `head_dim`. Then `rope` is for these heads, and `sliding_rope` for the others."""
    num_shared_layers: int = 0
    """The number of last layers without keys of their own: each reads the keys of the last earlier layer that has the
    same window."""
    values_are_keys: frozenset[int] = frozenset()
    """Layers whose values are their keys, before the norms of both."""
    norms_values: bool = False
    """Whether each head of the values has a norm, without weights."""
    state: StateConfig | None = None
    """The sizes of layers that keep a state for each sequence, and no keys."""
    state_layers: frozenset[int] = frozenset()
    """These layers. With them, all layers of attention have the same heads."""
    mlp_layers: frozenset[int] = frozenset()
    """Layers that are only an MLP, or experts."""
    layers_without_mlp: frozenset[int] = frozenset()
    state_norms: tuple[str, str] | None = None
    """The norms before the state and before the MLP of these layers, if layers of attention have other norms."""
    states_beside_attention: bool = False
    """Whether these layers attend, too; the results are added."""
    shared: SharedBlocksConfig | None = None
    """Blocks that some of these layers use: what a block returns is added to the input of the state only."""
    experts: ExpertsConfig | None = None
    intermediate_sizes: tuple[int, ...] | None = None
    """The inner sizes of the MLPs of each layer, if they differ from `intermediate_size`."""
    sparsities: tuple[float, ...] | None = None
    """As in `Mlp`, of each layer."""
    mlp_names: tuple[str, ...] = GATE_UP_DOWN
    """As in `Mlp`."""
    mlp_module: str = "mlp"
    """The name of the MLP in the layer."""
    final_norm: str = "norm"
    """The name of the norm after all layers."""
    attention_module: str = "self_attn"
    """The name of attention in the layer."""
    output_module: str = "o_proj"
    """The name of the output layer of attention."""
    gates_attention: bool = False
    """Whether attention's output is multiplied by the sigmoid of gates, which the checkpoint has behind the queries of
    each head."""
    head_gates: str | None = None
    """The layer of further gates, one of each head, by its name in attention: attention's output is multiplied by their
    sigmoid."""
    merged_qkv: bool = False
    """Whether the checkpoint has query, key and value in one layer."""
    head_bias: bool = False
    """Whether the output layer has biases."""

    attention_norm: str | None = "input_layernorm"
    """The norm before attention, by its name in the layer; None if there is none."""
    attention_output_norm: str | None = None
    """The norm of attention's output, before it is added to the residual stream."""
    mlp_norm: str | None = "post_attention_layernorm"
    """The norm before the MLP."""
    mlp_output_norm: str | None = None
    is_parallel: bool = False
    """Whether the MLP has the same input as attention: there is only the norm before attention."""
    centered_norms: bool = False
    """Whether norms subtract the mean, as LayerNorm does."""
    norm_bias: bool = False
    norm_weights: bool = True
    norm_offset: float = 0.0
    """Number that norms add to their weights."""
    head_norms: tuple[str, str] | None = None
    """The norms of query and key, by their names in attention. "*" in a name is the number of the head."""
    head_norm_span: NormSpan = NormSpan.HEAD
    norms_rotated_heads: bool = False
    """Whether query and key are rotated before their norms."""

    qkv_scales: tuple[float, float] = (1.0, 1.0)
    """Factors on the input of attention and on the keys, before they are rotated."""
    attention_output_scale: float = 1.0
    mlp_scales: tuple[float, float] = (1.0, 1.0)
    """As in `Mlp`."""
    qkv_limit: float | None = None
    """The largest absolute value of queries, keys and values, which are clamped before they are rotated."""
    sliding_rope: RopeConfig | None = None
    """The rotation of layers with a window, if it differs."""
    unrotated_layers: frozenset[int] = frozenset()
    """Layers whose query and key are not rotated."""
    rotates_neighbours: bool = False
    """Whether RoPE is interleaved: it rotates dimension 2i with 2i + 1, instead of i with i + half of the rotated."""
    query_growth: tuple[float, int] | None = None
    """(b, n): queries are multiplied by 1 + b log(1 + position // n)."""

    attention_scale: float | None = None
    """Factor on the scores; None for the default of the head size."""
    soft_cap: float | None = None
    """Cap of the scores, as in `ops.paged_attention`."""
    has_sinks: bool = False
    """Whether attention has sinks, as in `ops.paged_attention`."""
    embedding_scale: float = 1.0
    rounds_embedding_scale: bool = False
    """Whether the scale of the embedding is rounded to the dtype of the model."""
    per_layer: PerLayerConfig | None = None
    """Inputs of each layer of their own."""
    layer_scale: str | None = None
    """A number by its name in the layer: a factor on the residual stream after the layer."""
    altup: AltUpConfig | None = None
    """Several residual streams."""
    residual_scale: float = 1.0
    """Factor on the outputs of attention and MLP."""
    logit_scale: float = 1.0
    logit_cap: float | None = None
    """Logits are `cap * tanh(logit / cap)`."""

    def rotation_for(self, max_positions: int | None) -> RotationByLength | None:
        """The rotation of a server whose sequences have this length, see `served_len`."""
        length = self.served_len(max_positions)
        found = [each for rope in self._ropes if (each := rope.rotation_for(length, self.max_model_len)) is not None]
        if not found:
            return None
        return replace(min(found, key=lambda each: each.original), name=", ".join(each.name for each in found))

    def served_len(self, max_positions: int | None) -> int:
        """The length of the longest sequence: as it is asked for, else up to where a rotation would change."""
        if max_positions is not None:
            return min(max_positions, self.max_model_len)
        return min([self.max_model_len, *(rope.changes_beyond for rope in self._ropes if rope.changes_beyond)])

    def heads_of(self, index: int) -> tuple[int, int]:
        """The number of heads of key and the head size of a layer."""
        is_full = self.sliding_windows[index] is None and self.full_heads is not None
        return self.full_heads if is_full and self.full_heads is not None else (self.num_kv_heads, self.head_dim)

    @property
    def key_layers(self) -> tuple[int, ...]:
        """The layers with keys of their own."""
        without = self.mlp_layers | (frozenset() if self.states_beside_attention else self.state_layers)
        without -= frozenset(() if self.shared is None else self.shared.layers)
        return tuple(index for index in range(self.num_layers - self.num_shared_layers) if index not in without)

    def reads_keys_of(self, index: int) -> int:
        """The layer whose keys a layer reads, as an index of `key_layers`."""
        layers, window = self.key_layers, self.sliding_windows[index]
        if index in layers:
            return layers.index(index)
        return max(number for number, each in enumerate(layers) if self.sliding_windows[each] == window)

    def divide(self, ranks: Ranks) -> None:
        """Raises ConfigurationError if these ranks cannot share the model."""
        if self.shared is not None:
            self.shared.check_ranks(ranks)
        for index in self.key_layers:
            heads_of_rank(ranks, self.num_heads, self.heads_of(index)[0])
        self.state_size(ranks)

    def state_size(self, ranks: Ranks = ALONE) -> StateSize | None:
        """A rank's part of the state of a sequence; None if no layer keeps one."""
        if self.state is None:
            return None
        return StateLayout(self.state.of_rank(ranks).state_shapes).size(len(self.state_layers))

    def state_units(self, index: int, ranks: Ranks) -> list[StateUnits]:
        """Where the parts of the state of a layer that keeps one are, on a rank."""
        assert self.state is not None
        layout = StateLayout(self.state.of_rank(ranks).state_shapes)
        return layout.units(sum(each < index for each in self.state_layers))

    @property
    def head_order(self) -> HeadOrder | None:
        """The order of the outputs of query and key in the checkpoint; None if it is the order of `ops.rotary`."""
        if self.rope.rotated_dim == self.rope.head_dim and not self.rotates_neighbours:
            return None
        return HeadOrder(self.rope.head_dim, self.rope.rotated_dim, self.rotates_neighbours)

    @property
    def _ropes(self) -> tuple[RopeConfig, ...]:
        return (self.rope,) if self.sliding_rope is None else (self.rope, self.sliding_rope)

    @classmethod
    def read(cls, values: Mapping[str, Any], *, rotates_partly: bool = False) -> "DecoderConfig":
        """A plain LLaMA. `values` are config.json over the defaults of the family; the defaults here are LLaMA's.

        Raises:
            ConfigurationError: a field has another type or is out of range.
        """
        fields = ConfigFields(values)
        hidden_size = fields.integer("hidden_size", 4096)
        num_heads = fields.integer("num_attention_heads", 32)
        num_kv_heads = fields.integer("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise fields.error("num_key_value_heads", num_kv_heads, f"a divisor of num_attention_heads, {num_heads}")
        given = values.get("head_dim")
        head_dim = head_dim_of(hidden_size, num_heads) if given is None else fields.integer("head_dim")
        if head_dim % 2:
            raise fields.error("head_dim", head_dim, "an even number: rotary embeddings rotate pairs")
        attention_bias = fields.flag("attention_bias", False)
        num_layers = fields.integer("num_hidden_layers", 32)
        rope = RopeConfig.read(fields, head_dim, may_be_partial=rotates_partly)
        return cls(
            vocab_size=fields.integer("vocab_size", 32000),
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size", 11008),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            activation=fields.text("hidden_act", "silu"),
            norm_eps=fields.number("rms_norm_eps", 1e-6),
            qkv_bias=attention_bias,
            attention_output_bias=attention_bias,
            mlp_bias=fields.flag("mlp_bias", False),
            tied=fields.flag("tie_word_embeddings", False),
            rope=rope,
            sliding_windows=(None,) * num_layers,
            max_model_len=rope.max_model_len,
        )


@dataclass(frozen=True, slots=True)
class Rotation:
    """The tables of `ops.rotary` for the layers of one kind.

    Attributes:
        of_query: the table of queries, if it differs from that of keys.
    """

    table: torch.Tensor
    of_query: torch.Tensor | None = None


class DecoderLayer(nn.Module):
    """One decoder layer, number `index`. `rotation` is None if its query and key are not rotated.

    Attributes:
        cache: the number of the layer whose keys it reads, among the layers with keys; None if it keeps a state.
    """

    def __init__(self, index: int, config: DecoderConfig, rotation: Rotation | None, placement: Placement) -> None:
        super().__init__()
        name = f"model.layers.{index}"
        hidden = config.hidden_size
        self._rotation = rotation
        self.state: StateLayer | None = None
        self.shared: SharedUse | None = None
        self._sum = NoNorm()
        is_state = config.state is not None and index in config.state_layers
        self.is_mlp, self.has_mlp = index in config.mlp_layers, index not in config.layers_without_mlp
        attends = not self.is_mlp and (not is_state or config.states_beside_attention)
        self.cache = config.reads_keys_of(index) if attends else None
        self._writes_keys = index in config.key_layers
        self._qkv_limit = config.qkv_limit
        self.is_parallel, self._norms_rotated = config.is_parallel, config.norms_rotated_heads
        norms = config.attention_norm, config.attention_output_norm, config.mlp_norm, config.mlp_output_norm
        if is_state and config.state_norms is not None:
            norms = config.state_norms[0], None, config.state_norms[1], None
        attention_norm, attention_output_norm, mlp_norm, mlp_output_norm = norms
        self.attention_norm = make_norm(name, None if self.is_mlp else attention_norm, config, placement)
        self.latent: LatentAttention | None = None
        if config.state is not None and is_state:
            self.state = config.state.make_layer(name, hidden, config.state_units(index, placement.ranks), placement)
        if not attends:
            pass
        elif config.latent is None:
            self._add_heads(index, name, config, placement)
        else:
            scale = config.latent.query_dim**-0.5 if config.attention_scale is None else config.attention_scale
            self.latent = LatentAttention(
                f"{name}.{config.attention_module}", config.latent, config.num_heads, hidden, scale, placement
            )
        self.attention_output_norm = make_norm(name, attention_output_norm, config, placement, in_stream=False)
        self.mlp_norm = make_norm(name, mlp_norm if self.has_mlp else None, config, placement)
        self.mlp = self._make_mlp(index, name, config, placement) if self.has_mlp else nn.Identity()
        self.experts: ExpertsBesideMlp | None = None
        if config.experts is not None and config.experts.beside_mlp is not None:
            sizes = (hidden, config.activation, config.norm_eps)
            self.experts = ExpertsBesideMlp(name, config.experts, *sizes, placement)
        self.mlp_output_norm = make_norm(name, mlp_output_norm, config, placement, in_stream=False)
        self.altup: AltUpLayer | None = None
        if config.altup is not None:
            self.altup = AltUpLayer(name, config.altup, hidden, config.norm_eps, placement)
        self.ending: LayerEnding | None = None
        if config.per_layer is not None or config.layer_scale is not None:
            self.ending = LayerEnding(name, config, placement)

    def _add_heads(self, index: int, name: str, config: DecoderConfig, placement: Placement) -> None:
        """The parts of attention with heads of key and value."""
        hidden, of_key, head_dim = config.hidden_size, *config.heads_of(index)
        num_heads, num_kv_heads = heads_of_rank(placement.ranks, config.num_heads, of_key)
        self.qkv = Linear(
            self._parts_of_heads(index, f"{name}.{config.attention_module}", config),
            hidden,
            bias=config.qkv_bias,
            placement=placement,
            split=Split.OUTPUTS,
        )
        norms = self._make_head_norms(f"{name}.{config.attention_module}", of_key, head_dim, config, placement)
        self.head_norms = nn.ModuleList(norms if self._writes_keys else norms[:1])
        has_norm = config.norms_values and self._writes_keys
        self.value_norm = UnitNorm(head_dim, config.norm_eps, placement) if has_norm else None
        self.attention = PagedAttention(
            num_heads,
            num_kv_heads if self._writes_keys else 0,
            head_dim,
            head_dim**-0.5 if config.attention_scale is None else config.attention_scale,
            values_are_keys=index in config.values_are_keys,
            sliding_window=config.sliding_windows[index],
            soft_cap=config.soft_cap,
            sinks=Numbers(f"{name}.{config.attention_module}.sinks", config.num_heads, placement)
            if config.has_sinks
            else None,
        )
        self._num_gates = num_heads * head_dim if config.gates_attention else 0
        self.head_gates: Linear | None = None
        if config.head_gates is not None:
            part = LinearPart(f"{name}.{config.attention_module}.{config.head_gates}", config.num_heads)
            self.head_gates = Linear([part], hidden, bias=False, placement=placement, split=Split.OUTPUTS)
        self.attention_output = Linear(
            [
                LinearPart(
                    f"{name}.{config.attention_module}.{config.output_module}",
                    hidden,
                    scale=config.attention_output_scale,
                )
            ],
            config.num_heads * head_dim,
            bias=config.attention_output_bias,
            placement=placement,
            split=Split.INPUTS,
        )

    @staticmethod
    def _parts_of_heads(index: int, name: str, config: DecoderConfig) -> list[LinearPart]:
        """Query, key and value; without value if it is the key, and only the query if it reads another layer's keys."""
        num_kv_heads, head_dim = config.heads_of(index)
        query, key = config.num_heads * head_dim, num_kv_heads * head_dim
        of_heads, order = (Segment(key, num_kv_heads),), config.head_order
        of_input, of_key = config.qkv_scales
        parts = [
            LinearPart(f"{name}.q_proj", query, order=order, input_scale=of_input),
            LinearPart(f"{name}.k_proj", key, segments=of_heads, order=order, scale=of_key, input_scale=of_input),
            LinearPart(f"{name}.v_proj", key, segments=of_heads, input_scale=of_input),
        ]
        if index not in config.key_layers:
            return parts[:1]
        if config.gates_attention:
            spread = Spread(head_dim, 2 * head_dim)
            query_and_gate = replace(parts[0], of=2 * query, spread=spread)
            return [replace(query_and_gate, first=head_dim, order=None), query_and_gate, *parts[1:]]
        if not config.merged_qkv:
            return parts[:2] if index in config.values_are_keys else parts
        firsts = (0, query, query + key)
        return [
            replace(part, name=f"{name}.qkv_proj", first=first, of=query + 2 * key, apart=part.name)
            for part, first in zip(parts, firsts, strict=True)
        ]

    @staticmethod
    def _make_head_norms(
        name: str, num_kv_heads: int, head_dim: int, config: DecoderConfig, placement: Placement
    ) -> list[HeadNorm]:
        """The norms of query and key, if there are any."""
        return [
            HeadNorm(
                f"{name}.{module}",
                config.head_norm_span,
                count,
                head_dim,
                config.norm_eps,
                placement=placement,
                order=config.head_order,
                offset=config.norm_offset,
                centered=config.centered_norms,
            )
            for module, count in zip(config.head_norms or (), (config.num_heads, num_kv_heads), strict=False)
        ]

    @staticmethod
    def _make_mlp(index: int, name: str, config: DecoderConfig, placement: Placement) -> nn.Module:
        """[T, hidden] -> [T, hidden]; `name` is the name of the layer."""
        experts = config.experts
        if experts is not None and index not in experts.dense_layers and experts.beside_mlp is None:
            return Experts(name, experts, config.hidden_size, config.activation, placement)
        return Mlp(
            f"{name}.{config.mlp_module}",
            config.hidden_size,
            config.intermediate_size if config.intermediate_sizes is None else config.intermediate_sizes[index],
            config.activation,
            placement=placement,
            bias=config.mlp_bias,
            names=config.mlp_names,
            sparsity=0.0 if config.sparsities is None else config.sparsities[index],
            scales=config.mlp_scales,
        )

    def attend(
        self, x: torch.Tensor, positions: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """x [T, hidden], after the norm -> what is added to the residual stream, [T, hidden]."""
        if self.latent is not None:
            assert self._rotation is not None
            table = self._rotation.table
            return self.attention_output_norm(self.latent(x, positions, table, kv_cache, metadata))
        gate, qkv = None, self.qkv(x)
        if self._num_gates:
            gate, qkv = qkv[:, : self._num_gates], qkv[:, self._num_gates :]
        query, key, value = self.attention.split(qkv)
        if not self._norms_rotated:
            query, key = self._normed(query, key)
        if self.value_norm is not None:
            value = self.value_norm(value)
        if (limit := self._qkv_limit) is not None:
            query, key, value = (each.clamp(-limit, limit) for each in (query, key, value))
        rotation = self._rotation
        if rotation is not None and rotation.of_query is None and not self._norms_rotated and self._writes_keys:
            query = ops.rotary_and_cache(query, key, value, positions, rotation.table, kv_cache, metadata.slot_mapping)
            attended = self.attention.attend(query, kv_cache, metadata)
        else:
            if rotation is not None:
                grown = None if rotation.of_query is None else ops.rotary(query, key, positions, rotation.of_query)[0]
                query, key = ops.rotary(query, key, positions, rotation.table)
                query = query if grown is None else grown
            if self._norms_rotated:
                query, key = self._normed(query, key)
            if self._writes_keys:
                ops.reshape_and_cache(key, value, kv_cache, metadata.slot_mapping)
            attended = self.attention.attend(query, kv_cache, metadata)
        width = attended.shape[1]
        if self.head_gates is not None:
            gates = self.head_gates(x)
            gate = gates.repeat_interleave(width // gates.shape[1], dim=1)
        if gate is not None:
            attended = ops.gated_norm(attended, gate, None, 1.0, width, norm_first=True, activation="sigmoid")
        return self.attention_output_norm(self.attention_output(attended))

    def mix(self, x: torch.Tensor, inputs: ModelInput) -> torch.Tensor:
        """The first half of the layer, by attention or by its state: x [T, hidden], after the norm -> what is added to
        the residual stream, [T, hidden]."""
        found: torch.Tensor | None = None
        if self.state is not None:
            assert inputs.states is not None, "the states of the rows"
            found = self.state(x, inputs.states)
            if self.cache is None:
                return self.attention_output_norm(found)
        assert self.cache is not None
        attended = self.attend(x, inputs.positions, inputs.kv_caches[self.cache], inputs.attention_of(self.cache))
        return attended if found is None else self._sum.add(found, attended)[0]

    def add_shared(self, residual: torch.Tensor, embedded: torch.Tensor, inputs: ModelInput) -> torch.Tensor:
        """The input of the state, after the norm, with what the layer's shared block returns. All are [T, hidden]."""
        assert self.shared is not None
        cache, table = self.shared.cache, None if self._rotation is None else self._rotation.table
        attention = inputs.kv_caches[cache], inputs.attention_of(cache)
        output = self.shared(residual, embedded, inputs.positions, table, *attention)
        return self.attention_norm(residual + output)

    def _normed(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.head_norms:
            return query, key
        of_query, *of_key = self.head_norms
        return of_query(query), of_key[0](key) if of_key else key

    def feed_forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The same of the MLP, and of experts in addition to it, which read the residual stream [T, hidden]."""
        output = self.mlp(x)
        return self.mlp_output_norm(output if self.experts is None else self.experts(output, residual))


class LayerEnding(nn.Module):
    """The last part of a layer: its own input is added to the residual stream, which gets a factor."""

    def __init__(self, layer: str, config: DecoderConfig, placement: Placement) -> None:
        super().__init__()
        hidden, own = config.hidden_size, config.per_layer
        self.gate: PerLayerGate | None = None
        if own is not None:
            self.gate = PerLayerGate(layer, own, hidden, config.activation, config.norm_eps, placement)
        scale = config.layer_scale
        self.scale = None if scale is None else Factor(f"{layer}.{scale}", hidden, placement)
        self._sum = NoNorm()

    def forward(self, output: torch.Tensor, residual: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """output of the MLP [T, hidden], residual [T, hidden], own [T, size], the layer's own input -> the residual
        stream of the next layer."""
        _, residual = self._sum.add(output, residual)
        if self.gate is not None:
            _, residual = self._sum.add(self.gate(residual, own), residual)
        return residual if self.scale is None else self.scale(residual)


class Decoder(NativeCausalLM):
    """The decoder that a configuration describes."""

    base_prefix = "model."

    def __init__(self, architecture: str, config: DecoderConfig, placement: Placement) -> None:
        layers = [(*config.heads_of(index), config.sliding_windows[index]) for index in config.key_layers]
        super().__init__(
            placement,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            vocab_size=config.vocab_size,
            max_model_len=config.max_model_len if placement.max_positions else config.served_len(None),
            lines_per_token=2 if config.latent is None else 1,
            cache_layers=[
                CacheLayer(heads_of_rank(placement.ranks, config.num_heads, count)[1], head_dim, window)
                for count, head_dim, window in layers
            ],
            state=config.state_size(placement.ranks),
        )
        self.architecture = architecture
        self.waits_for_device = config.experts is not None
        self.rotation = config.rotation_for(placement.max_positions)
        hidden = config.hidden_size
        self.embedding = Embedding("model.embed_tokens", config.vocab_size, hidden, placement=placement, split=True)
        self.per_layer: PerLayerInputs | None = None
        if config.per_layer is not None:
            sizes = (config.per_layer, config.num_layers, hidden, config.norm_eps)
            self.per_layer = PerLayerInputs(*sizes, placement)
        self.streams = None if config.altup is None else AltUpStreams(config.altup, hidden, placement)
        own_sizes = () if config.per_layer is None else (config.per_layer.size,) * config.num_layers
        self._embedded_sizes = (hidden, *own_sizes)
        rotations = _rotations(config, placement)
        decoders = [DecoderLayer(index, config, rotation, placement) for index, rotation in enumerate(rotations)]
        if config.shared is not None:
            caches = [config.reads_keys_of(index) for index in config.shared.layers]
            for index, use in make_uses(config.shared, caches, hidden, placement).items():
                decoders[index].shared = use
        self._has_shared = config.shared is not None
        self.layers = nn.ModuleList(decoders)
        self.norm = make_norm("model", config.final_norm, config, placement)
        self._norms = [*(each.mlp_norm if each.is_mlp else each.attention_norm for each in decoders), self.norm]
        self.head = make_head(
            self.embedding, hidden, config.vocab_size, tied=config.tied, bias=config.head_bias, placement=placement
        )
        scale = config.embedding_scale
        if config.rounds_embedding_scale:
            scale = torch.tensor(scale, dtype=placement.dtype).item()
        # The residual stream is divided by `residual_scale`, so that outputs are added as they are.
        self._embedding_scale = scale / config.residual_scale
        self._logit_scale, self._logit_cap = config.logit_scale, config.logit_cap

    def embed(self, inputs: ModelInput) -> torch.Tensor:
        """With the inputs of all layers next to the embedding, if they have inputs of their own."""
        embedded = self.embedding(inputs.token_ids)
        embedded = embedded if self._embedding_scale == 1 else embedded * self._embedding_scale
        if self.per_layer is None:
            return embedded
        return torch.cat((embedded, self.per_layer(inputs.token_ids, embedded)), dim=1)

    def run_layers(self, x: torch.Tensor, inputs: ModelInput) -> torch.Tensor:
        x, *own = x.split_with_sizes(self._embedded_sizes, dim=1)
        if self.streams is not None:
            return self._run_streams(self.streams, x, own, inputs)
        embedded = x.clone() if self._has_shared else x
        x, residual = self._norms[0](x), x
        # The norm that follows a layer, the next layer's or the final one, adds the layer's output to the residual.
        for index, (layer, next_norm) in enumerate(zip(self.layers, self._norms[1:], strict=True)):
            assert isinstance(layer, DecoderLayer)
            if not layer.is_mlp:
                if layer.shared is not None:
                    x = layer.add_shared(residual, embedded, inputs)
                output = layer.mix(x, inputs)
                if not layer.has_mlp:
                    x, residual = next_norm.add(output, residual)
                    continue
                if layer.is_parallel:
                    _, residual = layer.mlp_norm.add(output, residual)
                else:
                    x, residual = layer.mlp_norm.add(output, residual)
            output = layer.feed_forward(x, residual)
            if layer.ending is None:
                x, residual = next_norm.add(output, residual)
            else:
                residual = layer.ending(output, residual, own[index] if own else output)
                x = next_norm(residual)
        return x

    def _run_streams(
        self, all_streams: AltUpStreams, x: torch.Tensor, own: Sequence[torch.Tensor], inputs: ModelInput
    ) -> torch.Tensor:
        """`run_layers` over several residual streams."""
        streams = all_streams.spread(x)
        for layer, of_layer in zip(self.layers, own, strict=True):
            assert isinstance(layer, DecoderLayer)
            assert layer.altup is not None
            assert layer.ending is not None
            assert layer.ending.gate is not None
            streams = layer.altup.predict(streams)
            active = streams[layer.altup.active]
            x = layer.attention_norm(active)
            output = layer.mix(x, inputs)
            residual = (active + output + layer.altup.laurel(x)) * 0.5**0.5
            output = residual + layer.feed_forward(layer.mlp_norm(residual), residual)
            streams, active = layer.altup.correct(streams, output)
            streams[1:] += layer.ending.gate(active, of_layer)
        return self.norm(all_streams.merge(streams))

    def finish(self, outputs: torch.Tensor) -> torch.Tensor:
        logits, cap = super().finish(outputs), self._logit_cap
        if self._logit_scale != 1:
            logits = logits.mul_(self._logit_scale)
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def make_norm(
    owner: str, module: str | None, config: DecoderConfig, placement: Placement, *, in_stream: bool = True
) -> RmsNorm | LayerNorm | NoNorm:
    """The norm `module` of `owner` over the hidden size; nothing if it is None.

    Args:
        in_stream: it is a norm of the residual stream, which is divided by `residual_scale`.
    """
    if module is None:
        return NoNorm()
    name, hidden = f"{owner}.{module}", config.hidden_size
    eps = config.norm_eps / config.residual_scale**2 if in_stream else config.norm_eps
    if config.centered_norms:
        return LayerNorm(
            name,
            hidden,
            eps,
            placement=placement,
            affine=config.norm_weights,
            bias=config.norm_bias,
            offset=config.norm_offset,
        )
    return RmsNorm(name, hidden, eps, placement=placement, offset=config.norm_offset)


def _rotations(config: DecoderConfig, placement: Placement) -> list[Rotation | None]:
    """The rotation of each layer."""
    num_positions = config.served_len(placement.max_positions)

    def rotation(rope: RopeConfig) -> Rotation:
        table = rope.cos_sin_table(placement.device, num_positions)
        growth = config.query_growth
        if growth is None or num_positions <= growth[1]:
            return Rotation(table)
        steps = torch.arange(num_positions, device=table.device) // growth[1]
        return Rotation(table, table * (1 + growth[0] * (1 + steps).log())[:, None])

    num_unrotated = len(config.unrotated_layers)
    usual = rotation(config.rope) if num_unrotated < config.num_layers else None
    sliding = usual if config.sliding_rope is None else rotation(config.sliding_rope)
    unrotated = None
    if num_unrotated and config.latent is not None:
        # Latent attention turns a part of its lines: by nothing here.
        half = config.latent.rotated_dim // 2
        turns = torch.tensor([1.0] * half + [0.0] * half, device=placement.device)
        unrotated = Rotation(turns.repeat(num_positions, 1))
    return [
        unrotated if index in config.unrotated_layers else usual if window is None else sliding
        for index, window in enumerate(config.sliding_windows)
    ]


@dataclass(frozen=True, slots=True)
class DecoderFamily:
    """A row of the table of families: what differs from LLaMA.

    Attributes:
        architecture: its name in config.json.
        defaults: of transformers, for fields that config.json lacks, except for sizes, which are in `family_sizes`.
        parts: of `DecoderConfig`, which replace LLaMA's in their order. A function of the fields and of the
            configuration before gives the part.
        fixed: fields that mean this to `DecoderConfig.read` whatever config.json says. A function of the fields gives
            the value.
        only: fields that may have only this value.
        rotates_partly: whether the rotation may turn a part of each head.
        describe: what config.json means, over the defaults, if a function says it as a whole.
        renamed: parts of the names of tensors in the checkpoint, as in `Checkpoint.with_names`.
    """

    architecture: str
    defaults: Mapping[str, Any]
    parts: Mapping[str, Any]
    fixed: Mapping[str, Any]
    only: Mapping[str, Any]
    rotates_partly: bool
    describe: Callable[[Mapping[str, Any]], DecoderConfig] | None = None
    base_prefix: str = "model."
    renamed: Mapping[str, str] = field(default_factory=dict)

    def read_config(self, values: Mapping[str, Any]) -> DecoderConfig:
        """Raises ConfigurationError for a field of another type or out of range."""
        fields = ConfigFields({**SIZES.get(self.architecture, {}), **self.defaults, **values})
        if self.describe is not None:
            return self.describe(fields.values)
        for name, value in self.only.items():
            fields.check_only(name, value)
        fixed = {name: value(fields) if callable(value) else value for name, value in self.fixed.items()}
        config = DecoderConfig.read({**fields.values, **fixed}, rotates_partly=self.rotates_partly)
        for name, part in self.parts.items():
            config = replace(config, **{name: part(fields, config) if callable(part) else part})
        return config

    def from_config(self, config: Mapping[str, Any], placement: Placement) -> Decoder:
        """Raises as `read_config`, and ConfigurationError if the ranks cannot share the model."""
        described = self.read_config(config)
        check_division(placement.ranks, described.divide)
        return Decoder(self.architecture, described, placement)
