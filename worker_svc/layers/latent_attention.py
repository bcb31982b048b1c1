"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), with its projections absorbed.

All heads of a token share one line in the KV pool: a latent, from which each head could compute its key and its value,
and a rotated part that keys have in addition. Keys and values are never computed. Queries are multiplied with the
projection of keys instead, and attended latents with the projection of values, so that attention reads lines as they
are.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from quire_kernels import ops
from quire_kernels.packed_weight import PackedWeight
from worker_svc.layers.attention import AttentionMetadata, PagedAttention
from worker_svc.layers.embedding_norm import RmsNorm
from worker_svc.layers.linear import HeadOrder, Linear, LinearPart, Split
from worker_svc.weights import Loadable, Placement, TensorReader, TensorSpec

_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """The sizes of latent attention.

    Attributes:
        rank: of a latent, the numbers that keys and values are made of.
        query_rank: of the latent that queries are made of; None if they are made of the layer's input.
        unrotated_dim, rotated_dim: dimensions of a query and key, which has the unrotated ones first.
        value_dim: dimensions of a head's value.
        bias: whether the layers that read the layer's input, and the last one, have biases.
        rotates_neighbours: whether a rotation turns dimension 2i with 2i + 1, instead of i with i + rotated_dim / 2.
    """

    rank: int
    query_rank: int | None
    unrotated_dim: int
    rotated_dim: int
    value_dim: int
    bias: bool
    rotates_neighbours: bool

    @property
    def line_dim(self) -> int:
        """Numbers of a token in the pool."""
        return self.rank + self.rotated_dim

    @property
    def query_dim(self) -> int:
        """Dimensions of a head's query."""
        return self.unrotated_dim + self.rotated_dim


class LatentProjections(Loadable):
    """The layer that makes keys and values of a latent, as two products for each head of this rank.

    A product of `keys` takes the unrotated part of a query to the numbers that are multiplied with latents. A product
    of `values` takes an attended latent to a value.
    """

    keys: list[PackedWeight]
    values: list[PackedWeight]

    def __init__(self, name: str, config: LatentConfig, num_heads: int, placement: Placement) -> None:
        super().__init__()
        self.name = name
        self._config, self._num_heads, self._placement = config, num_heads, placement
        outputs = num_heads * (config.unrotated_dim + config.value_dim)
        self._spec = TensorSpec(f"{name}.weight", (outputs, config.rank))

    def tensors(self) -> Iterator[TensorSpec]:
        yield self._spec

    def load(self, tensors: TensorReader) -> None:
        config, placement = self._config, self._placement
        heads = placement.ranks.shard(self._num_heads)
        by_head = tensors.read(self._spec).view(self._num_heads, -1, config.rank)[heads.slice]
        of_keys, of_values = by_head.split([config.unrotated_dim, config.value_dim], dim=1)
        self.keys = [ops.pack_weight(placement.copy(each.t())) for each in of_keys]
        self.values = [ops.pack_weight(placement.copy(each)) for each in of_values]


class LatentAttention(nn.Module):
    """From the input of a layer's attention to its output; `name` is the module in the checkpoint.

    Args:
        num_heads: of all ranks together. Each rank has some of them, and all latents.
        scale: factor on the scores.
    """

    def __init__(
        self, name: str, config: LatentConfig, num_heads: int, hidden: int, scale: float, placement: Placement
    ) -> None:
        super().__init__()
        self._config, self._num_heads = config, placement.ranks.shard(num_heads).size
        of_query = hidden if config.query_rank is None else config.query_rank
        order = HeadOrder(config.query_dim, config.rotated_dim, config.rotates_neighbours, config.unrotated_dim)
        is_query_direct = config.query_rank is None

        def linear(parts: list[LinearPart], inputs: int, split: Split, *, bias: bool = False) -> Linear:
            return Linear(parts, inputs, bias=bias, placement=placement, split=split)

        self.query_latent: Linear | None = None
        if not is_query_direct:
            self.query_latent = linear(
                [LinearPart(f"{name}.q_a_proj", of_query)], hidden, Split.WHOLE, bias=config.bias
            )
            self.query_norm = RmsNorm(f"{name}.q_a_layernorm", of_query, _NORM_EPS, placement=placement)
        queries = f"{name}.q_proj" if is_query_direct else f"{name}.q_b_proj"
        self.query = linear([LinearPart(queries, num_heads * config.query_dim, order=order)], of_query, Split.OUTPUTS)
        rotated = HeadOrder(config.rotated_dim, config.rotated_dim, config.rotates_neighbours)
        latent = LinearPart(f"{name}.kv_a_proj_with_mqa", config.rank, of=config.line_dim)
        self.line = linear(
            [latent, LinearPart(latent.name, config.rotated_dim, first=config.rank, of=config.line_dim, order=rotated)],
            hidden,
            Split.WHOLE,
            bias=config.bias,
        )
        self.latent_norm = RmsNorm(f"{name}.kv_a_layernorm", config.rank, _NORM_EPS, placement=placement)
        self.projections = LatentProjections(f"{name}.kv_b_proj", config, num_heads, placement)
        self.attention = PagedAttention(self._num_heads, 1, config.line_dim, scale)
        self.output = linear(
            [LinearPart(f"{name}.o_proj", hidden)], num_heads * config.value_dim, Split.INPUTS, bias=config.bias
        )

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        cos_sin_table: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]. `kv_cache` is [1, num_blocks, 1, B, rank + rotated_dim]."""
        config, num_tokens = self._config, x.shape[0]
        query = self.query(x if self.query_latent is None else self.query_norm(self.query_latent(x)))
        query = query.view(num_tokens, self._num_heads, config.query_dim)
        unrotated, rotated = query.split_with_sizes((config.unrotated_dim, config.rotated_dim), 2)

        latent, rotated_key = self.line(x).unsqueeze(1).split_with_sizes((config.rank, config.rotated_dim), 2)
        line = ops.empty((num_tokens, 1, config.line_dim), x)
        self.latent_norm.write(latent.squeeze(1), line[:, 0, : config.rank])
        ops.rotary_into(rotated_key, positions, cos_sin_table, line[..., config.rank :])
        ops.cache_latents(line, kv_cache, metadata.slot_mapping)

        absorbed = ops.empty((num_tokens, self._num_heads, config.line_dim), x)
        ops.head_products_into(unrotated, self.projections.keys, absorbed[..., : config.rank])
        ops.rotary_into(rotated, positions, cos_sin_table, absorbed[..., config.rank :])
        attended = self.attention.attend(absorbed, kv_cache, metadata).view(absorbed.shape)

        values = ops.empty((num_tokens, self._num_heads, config.value_dim), x)
        ops.head_products_into(attended[..., : config.rank], self.projections.values, values)
        return self.output(values.view(num_tokens, -1))
