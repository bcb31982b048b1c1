"""Embedding tables, the output layer that shares one, norms, and plain vectors of numbers."""

from collections.abc import Iterator
from enum import Enum, auto

import torch
from torch import nn
from torch.nn import functional

from quire_kernels import ops
from quire_kernels.packed_weight import CodedWeight
from worker_svc.layers.linear import HeadOrder
from worker_svc.layers.products import Product, make_coded_product, make_product, with_float32_outputs
from worker_svc.parallel.ranks import Ranks, Shard
from worker_svc.weights import Loadable, Placement, TensorReader, TensorSpec, frozen


class Embedding(Loadable):
    """A table of `num_embeddings` vectors.

    Args:
        name: of its module in the checkpoint.
        split: each rank holds some of the vectors.
    """

    matrix: torch.Tensor | CodedWeight
    """[vectors of this rank, dim], in the file's coding if it is coded and this device can look it up."""

    def __init__(self, name: str, num_embeddings: int, dim: int, *, placement: Placement, split: bool = False) -> None:
        super().__init__()
        self._spec = TensorSpec(f"{name}.weight", (num_embeddings, dim))
        self._placement = placement
        self._shard = placement.ranks.shard(num_embeddings) if split else Shard(0, num_embeddings)
        self._is_split = self._shard.size < num_embeddings

    def tensors(self) -> Iterator[TensorSpec]:
        yield self._spec

    def load(self, tensors: TensorReader) -> None:
        coded = None
        placement = self._placement
        if ops.has_coded_products(placement.device, placement.dtype, placement.quantization):
            coded = tensors.coded(self._spec)
        whole = slice(0, self._spec.shape[1])
        # Coded rows are only looked up if each row also holds its scales.
        part = None if coded is None or coded.scales is not None else coded.part(self._shard.slice, whole)
        if part is not None:
            self.matrix = part.to(placement.device)
        else:
            self.matrix = placement.copy(tensors.read(self._spec)[self._shard.slice])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [T] int64 -> [T, dim]."""
        if not self._is_split:
            return self._look_up(ids)
        if not self._shard.size:  # a vocabulary smaller than the square of the ranks
            return self._placement.ranks.sum(self._placement.empty(*ids.shape, self._spec.shape[1]).zero_())
        ids = ids - self._shard.start
        is_here = (ids >= 0) & (ids < self._shard.size)
        vectors = self._look_up(ids.where(is_here, 0))
        return self._placement.ranks.sum(vectors.where(is_here.unsqueeze(-1), 0))

    def _look_up(self, ids: torch.Tensor) -> torch.Tensor:
        if isinstance(self.matrix, CodedWeight):
            return ops.look_up(self.matrix, ids, self._placement.dtype)
        return functional.embedding(ids, self.matrix)


class TiedHead(Loadable):
    """The output layer of a model whose output matrix is its embedding.

    If a packed product is faster, the matrix is held twice: packed for the product, by rows for the embedding. Every
    sampled token reads all of it, and the plain product takes twice as long.
    """

    def __init__(self, embedding: Embedding, placement: Placement) -> None:
        super().__init__()
        self._embedding = embedding
        self._placement = placement
        self._product: Product

    @property
    def embedding_spec(self) -> TensorSpec:
        """The matrix of both."""
        (spec,) = self._embedding.tensors()
        return spec

    def tensors(self) -> Iterator[TensorSpec]:
        yield from ()

    def load(self, tensors: TensorReader) -> None:
        """Takes the embedding's matrix, which is loaded before."""
        matrix = self._embedding.matrix
        if isinstance(matrix, CodedWeight):
            product = make_coded_product([matrix], None, None, self._placement)
        else:
            product = make_product(matrix)
        self._product = with_float32_outputs(product)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [S, dim] -> [S, num_embeddings], or this rank's part of them if the embedding is split."""
        return self._product(hidden)


class RmsNorm(Loadable):
    """Root mean square norm; `name` is its module in the checkpoint. The factors are `offset` and its weight."""

    weight: nn.Parameter

    def __init__(self, name: str, dim: int, eps: float, *, placement: Placement, offset: float = 0.0) -> None:
        super().__init__()
        self._spec = TensorSpec(f"{name}.weight", (dim,))
        self._eps, self._offset = eps, offset
        self._placement = placement

    def tensors(self) -> Iterator[TensorSpec]:
        yield self._spec

    def load(self, tensors: TensorReader) -> None:
        self.weight = frozen(self._placement.copy(tensors.read(self._spec)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.rms_norm(x, self.weight, self._eps, self._offset)

    def write(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """The norm of x [T, dim] to `out`, whose lines may lie apart. The offset is 0."""
        ops.rms_norm_into(x, self.weight, self._eps, out)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of x + residual, x + residual)."""
        return ops.add_rms_norm(x, residual, self.weight, self._eps, self._offset)


class UnitNorm(Loadable):
    """Root mean square norm without weights."""

    weight: torch.Tensor

    def __init__(self, dim: int, eps: float, placement: Placement) -> None:
        super().__init__()
        self._dim, self._eps, self._placement = dim, eps, placement

    def tensors(self) -> Iterator[TensorSpec]:
        yield from ()

    def load(self, tensors: TensorReader) -> None:
        self.weight = self._placement.empty(self._dim).fill_(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., dim]; returns the same shape."""
        return ops.rms_norm(x, self.weight, self._eps)


class Factor(Loadable):
    """A number of the checkpoint that x [T, dim] is multiplied by."""

    values: torch.Tensor
    """[dim], all the same."""

    def __init__(self, name: str, dim: int, placement: Placement) -> None:
        super().__init__()
        self._spec, self._dim, self._placement = TensorSpec(name, (1,)), dim, placement

    def tensors(self) -> Iterator[TensorSpec]:
        yield self._spec

    def load(self, tensors: TensorReader) -> None:
        self.values = self._placement.copy(tensors.read(self._spec).expand(self._dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.multiply(x, self.values)


class LayerNorm(Loadable):
    """Layer norm. Without `affine` it has neither weight nor bias; without `bias` only a weight, to which `offset` is
    added."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        name: str,
        dim: int,
        eps: float,
        *,
        placement: Placement,
        affine: bool = True,
        bias: bool = True,
        offset: float = 0.0,
    ) -> None:
        super().__init__()
        self._weight_spec = TensorSpec(f"{name}.weight", (dim,)) if affine else None
        self._bias_spec = TensorSpec(f"{name}.bias", (dim,)) if affine and bias else None
        self._eps, self._offset = eps, offset
        self._placement = placement
        self.weight = None
        self.bias = None

    def tensors(self) -> Iterator[TensorSpec]:
        yield from (spec for spec in (self._weight_spec, self._bias_spec) if spec is not None)

    def load(self, tensors: TensorReader) -> None:
        if self._weight_spec is not None:
            self.weight = frozen(self._placement.copy(tensors.read(self._weight_spec)).add_(self._offset))
        if self._bias_spec is not None:
            self.bias = frozen(self._placement.copy(tensors.read(self._bias_spec)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.layer_norm(x, self.weight, self.bias, self._eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of x + residual, x + residual); the sum may be written into `residual`."""
        return ops.add_layer_norm(x, residual, self.weight, self.bias, self._eps)


class NoNorm(nn.Module):
    """The place of a norm that a model does not have."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x + residual, twice; the sum may be written into `residual`."""
        # A norm whose result is not used: its sum is an operation that can be recorded.
        _, total = ops.add_layer_norm(x, residual, None, None, 1.0)
        return total, total


class NormSpan(Enum):
    """The numbers of a query or key that are normalised together."""

    HEAD = auto()
    """Each head, all with the same weights."""
    OWN_HEAD = auto()
    """Each head, with weights of its own."""
    ALL_HEADS = auto()


class HeadNorm(Loadable):
    """The norm of the query or the key of a token.

    Args:
        name: of its module in the checkpoint. With "*", the number of the head, each head has a module.
        num_heads: of all ranks together.
        order: of the outputs of each head in the checkpoint, None if it is the order of the inputs here.
        offset: as in `RmsNorm`.
        centered: it is a layer norm without bias. Not for `ALL_HEADS`.
    """

    weight: nn.Parameter
    """[head_dim], or [heads of this rank, head_dim]."""

    def __init__(
        self,
        name: str,
        span: NormSpan,
        num_heads: int,
        head_dim: int,
        eps: float,
        *,
        placement: Placement,
        order: HeadOrder | None,
        offset: float,
        centered: bool,
    ) -> None:
        super().__init__()
        self._name = name
        self._span, self._num_heads, self._head_dim = span, num_heads, head_dim
        self._eps, self._offset, self._centered, self._order = eps, offset, centered, order
        self._placement = placement

    def tensors(self) -> Iterator[TensorSpec]:
        num_heads, head_dim = self._num_heads, self._head_dim
        if "*" in self._name:
            for head in range(num_heads):
                yield TensorSpec(f"{self._name.replace('*', str(head))}.weight", (head_dim,))
            return
        shapes = {NormSpan.HEAD: (head_dim,), NormSpan.ALL_HEADS: (num_heads * head_dim,)}
        yield TensorSpec(f"{self._name}.weight", shapes.get(self._span, (num_heads, head_dim)))

    def load(self, tensors: TensorReader) -> None:
        weight = torch.cat([tensors.read(spec).view(-1, self._head_dim) for spec in self.tensors()])
        if self._order is not None:
            weight = weight[:, self._order.places]
        if self._span is NormSpan.HEAD:
            weight = weight[0]
        else:
            ranks = self._placement.ranks
            weight = weight[ranks.shard(self._num_heads, min(ranks.size, self._num_heads)).slice]
        self.weight = frozen(self._placement.copy(weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, heads of this rank, head_dim]; returns the same shape."""
        if self._span is NormSpan.HEAD:
            if self._centered:
                return ops.layer_norm(x, self.weight, None, self._eps)
            return ops.rms_norm(x, self.weight, self._eps, self._offset)
        if self._span is NormSpan.OWN_HEAD:
            return ops.layer_norm(x, None, None, self._eps) * self.weight
        if (ranks := self._placement.ranks).size == 1:
            return ops.rms_norm(x.flatten(1), self.weight.view(-1), self._eps, self._offset).view(x.shape)
        # Ranks that share a head of the key have the same squares.
        count = self._num_heads * self._head_dim * max(ranks.size // self._num_heads, 1)
        factor = rms_factor(x.flatten(1), count, self._eps, ranks)
        return (x * factor[..., None] * (self.weight + self._offset)).to(x.dtype)


def rms_factor(x: torch.Tensor, count: int, eps: float, ranks: Ranks, num_groups: int = 1) -> torch.Tensor:
    """The factors of a root mean square norm of lines that ranks have in parts: x [T, n], one rank's part -> [T, 1]
    float32.

    Args:
        count: numbers that are normalised together.
        num_groups: Each rank is in one of these groups of neighbours. Every group has a norm of its own.
    """
    own = ranks.rank * num_groups // ranks.size
    squares = x.new_zeros(x.shape[0], num_groups, dtype=torch.float32)
    squares[:, own] = x.float().square().sum(dim=1)
    return (ranks.sum(squares)[:, own, None] / count + eps).rsqrt()


class Numbers(Loadable):
    """A vector of the checkpoint, in float32; if `split`, the part of this rank. `shape` is its shape in the
    checkpoint, if that is not [count]."""

    values: torch.Tensor

    def __init__(
        self,
        name: str,
        count: int,
        placement: Placement,
        *,
        split: bool = True,
        shape: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__()
        self._spec = TensorSpec(name, shape or (count,))
        self._placement, self._split = placement, split

    def tensors(self) -> Iterator[TensorSpec]:
        yield self._spec

    def load(self, tensors: TensorReader) -> None:
        values = tensors.read(self._spec).view(-1)
        if self._split:
            values = values[self._placement.ranks.shard(len(values)).slice]
        self.values = torch.empty_like(values, dtype=torch.float32, device=self._placement.device).copy_(values)
