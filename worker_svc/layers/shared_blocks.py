"""Blocks of attention and an MLP that layers use in turns, as Zamba 2 has them (arXiv 2411.15242).

A block reads the residual stream and the embedding next to each other. Each use has keys, an output layer and adapters
of its own; the other weights are in memory once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from quire.runtime.settings import ConfigurationError
from quire_kernels import ops
from worker_svc.layers.activations import ActivationKind
from worker_svc.layers.attention import AttentionMetadata, PagedAttention
from worker_svc.layers.embedding_norm import RmsNorm
from worker_svc.layers.linear import Linear, LinearPart
from worker_svc.parallel.ranks import Ranks
from worker_svc.weights import Placement


@dataclass(frozen=True, slots=True)
class SharedBlocksConfig:
    """The sizes of these blocks.

    Attributes:
        layers: the layers that use a block; they take the blocks in turns.
        num_blocks: blocks with weights of their own.
        inner_size: of the MLPs.
        bias: whether the MLPs have biases.
        adapter_rank: the inner size of adapters.
        adapts_attention: whether query, key and value have adapters, as gate and up have.
    """

    layers: tuple[int, ...]
    num_blocks: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    inner_size: int
    activation: str
    norm_eps: float
    bias: bool
    adapter_rank: int
    adapts_attention: bool

    def check_ranks(self, ranks: Ranks) -> None:
        """Raises ConfigurationError if there are several ranks, which would have to divide the heads of each use."""
        if ranks.size > 1:
            raise ConfigurationError(
                f"--tensor-parallel-size is {ranks.size}; it must be 1 for a model whose layers share blocks of "
                "attention"
            )


def _linear(name: str, in_features: int, out_features: int, placement: Placement) -> Linear:
    return Linear([LinearPart(name, out_features)], in_features, bias=False, placement=placement)


class SharedBlock(nn.Module):
    """The weights that all uses of a block share; `layer` is the name of the first layer that uses it."""

    def __init__(self, layer: str, config: SharedBlocksConfig, hidden: int, placement: Placement) -> None:
        super().__init__()
        self.name, self.config = f"{layer}.shared_transformer", config
        attention, mlp = f"{self.name}.self_attn", f"{self.name}.feed_forward"
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        parts = [
            LinearPart(f"{attention}.{name}_proj", size) for name, size in zip("qkv", (query, key, key), strict=True)
        ]
        self.attention_norm = RmsNorm(f"{self.name}.input_layernorm", 2 * hidden, config.norm_eps, placement=placement)
        self.qkv = Linear(parts, 2 * hidden, bias=False, placement=placement)
        self.attention_output = _linear(f"{attention}.o_proj", query, hidden, placement)
        self.mlp_norm = RmsNorm(f"{self.name}.pre_ff_layernorm", hidden, config.norm_eps, placement=placement)
        gates = [LinearPart(f"{mlp}.gate_up_proj", 2 * config.inner_size)]
        self.gate_up = Linear(gates, hidden, bias=config.bias, placement=placement)
        down = [LinearPart(f"{mlp}.down_proj", hidden)]
        self.down = Linear(down, config.inner_size, bias=config.bias, placement=placement)


class Adapter(nn.Module):
    """A product of two matrices, which is added to outputs of a shared layer."""

    def __init__(self, name: str, in_features: int, rank: int, out_features: int, placement: Placement) -> None:
        super().__init__()
        self.down = _linear(f"{name}.0", in_features, rank, placement)
        self.up = _linear(f"{name}.1", rank, out_features, placement)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] -> [T, out]."""
        return self.up(self.down(x))


class SharedUse(nn.Module):
    """The use of a block by a layer.

    Args:
        layer: its name in the checkpoint.
        number: of the use, among the uses of all blocks.

    Attributes:
        cache: the number of its keys, among the layers with keys.
    """

    def __init__(
        self, layer: str, number: int, block: SharedBlock, cache: int, hidden: int, placement: Placement
    ) -> None:
        super().__init__()
        config, self.cache, self.block = block.config, cache, block
        width, rank = config.num_heads * config.head_dim, config.adapter_rank
        self.attention = PagedAttention(
            config.num_heads, config.num_kv_heads, config.head_dim, (config.head_dim / 2) ** -0.5
        )
        self.attention_adapters = nn.ModuleList(
            Adapter(f"{block.name}.self_attn.linear_{name}_adapter_list.{number}", 2 * hidden, rank, width, placement)
            for name in ("qkv" if config.adapts_attention else "")
        )
        name = f"{block.name}.feed_forward.gate_up_proj_adapter_list.{number}"
        self.mlp_adapter = Adapter(name, hidden, rank, 2 * config.inner_size, placement)
        self.output = _linear(f"{layer}.linear", hidden, hidden, placement)
        self._activation = ActivationKind(config.activation, gated=True).function

    def forward(
        self,
        residual: torch.Tensor,
        embedded: torch.Tensor,
        positions: torch.Tensor,
        table: torch.Tensor | None,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """residual and embedded [T, hidden]; `table` as in `ops.rotary`, None without rotation -> [T, hidden]."""
        block = self.block
        x = block.attention_norm(torch.cat((residual, embedded), dim=1))
        qkv = block.qkv(x)
        if self.attention_adapters:
            qkv = qkv + torch.cat([adapter(x) for adapter in self.attention_adapters], dim=1)
        query, key, value = self.attention.split(qkv)
        if table is not None:
            query, key = ops.rotary(query, key, positions, table)
        attended = self.attention(query, key, value, kv_cache, metadata)
        x = block.mlp_norm(block.attention_output(attended))
        inner = self._activation(block.gate_up(x) + self.mlp_adapter(x))
        return self.output(block.down(inner))


def make_uses(
    config: SharedBlocksConfig, caches: Sequence[int], hidden: int, placement: Placement
) -> dict[int, SharedUse]:
    """The uses, by the layer. `caches` has the number of the keys of each."""
    names = [f"model.layers.{index}" for index in config.layers]
    blocks = [SharedBlock(name, config, hidden, placement) for name in names[: config.num_blocks]]
    return {
        index: SharedUse(names[number], number, blocks[number % config.num_blocks], cache, hidden, placement)
        for number, (index, cache) in enumerate(zip(config.layers, caches, strict=True))
    }
