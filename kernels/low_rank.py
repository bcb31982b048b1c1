"""Low-rank addends of products, as LoRA adapters have them: `scale * B (A x)` for each token by its own A and B.

The parts of a linear layer (query, key and value; gate and up) have A and B of their own, any of which may be missing.
Slot 0 of a table is for tokens without an adapter, which get nothing added.
"""

from abc import abstractmethod
from collections.abc import Sequence
from ctypes import Array, addressof
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch.nn import functional

from kernels.cpu.library import LowRankPart
from kernels.packed_weight import PackedWeight

_TILE = 16
"""Columns of a tile of B."""
_RANK_STEP = 4
_BLOCK_WORDS = 16
P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class LowRank:
    """What an adapter adds to one part: `scale * b @ (a @ x)`, in any dtype."""

    a: torch.Tensor
    """[rank, in]"""
    b: torch.Tensor
    """[out, rank]"""
    scale: float


class LowRankTable(Generic[P]):
    """The low-rank parts of a linear layer for each slot.

    `pack` takes the time and may run in another thread; `put` is to be called when no product runs.
    """

    @abstractmethod
    def pack(self, parts: Sequence[LowRank | None]) -> P:
        """Copies one adapter's parts, in the order of the layer's, in the order and dtype in which they are read."""

    @abstractmethod
    def put(self, slot: int, packed: P | None) -> None:
        """Replaces what a slot from 1 on has; None empties it."""

    @abstractmethod
    def num_bytes(self, packed: P) -> int:
        """Memory that an adapter takes."""


@dataclass(frozen=True, slots=True)
class PackedLowRank:
    """An adapter's parts for each weight of a layer."""

    held: tuple[torch.Tensor, ...]
    entries: tuple[tuple[LowRankPart, ...], ...]


class PackedTable(LowRankTable[PackedLowRank]):
    """A table for products of the CPU library, which reads it at each product. Adapters have memory of their own.

    Args:
        weights: what the layer multiplies, outputs one after the other. A gated one is alone.
        widths: the outputs of each part, which are as many together.
        max_rank: of any part.
    """

    def __init__(self, weights: Sequence[PackedWeight], widths: Sequence[int], num_slots: int, max_rank: int) -> None:
        self.num_slots, self.num_parts = num_slots + 1, len(widths)
        self.max_rank = -(-max_rank // _RANK_STEP) * _RANK_STEP
        self.in_features, self.dtype = weights[0].in_features, weights[0].dtype
        self._words = 2 if self.dtype == torch.bfloat16 else 1
        self._block = _BLOCK_WORDS if self.dtype == torch.float32 else 2 * _BLOCK_WORDS
        self.padded_in = -(-self.in_features // self._block) * self._block
        self._weights, self._widths = tuple(weights), tuple(widths)
        # One list for each weight, whose columns are counted from its own first one.
        size = self.num_slots * self.num_parts
        self._entries: list[Array[LowRankPart]] = [(LowRankPart * size)() for _ in weights]
        self._held: dict[int, PackedLowRank] = {}

    @property
    def shrunk_dtype(self) -> torch.dtype:
        """Of the products with A."""
        return torch.bfloat16 if self.dtype == torch.bfloat16 else torch.float32

    def address(self, weight: int) -> int:
        """The entries [num_slots, num_parts] of a weight, by its number."""
        return addressof(self._entries[weight])

    def pack(self, parts: Sequence[LowRank | None]) -> PackedLowRank:
        held: list[torch.Tensor] = []
        entries: list[list[LowRankPart]] = [[LowRankPart() for _ in parts] for _ in self._weights]
        begin = 0
        for number, (part, width) in enumerate(zip(parts, self._widths, strict=True)):
            if part is not None:
                a = self._pack_a(part.a)
                held.append(a)
                self._pack_part(number, part, a, begin, entries, held)
            begin += width
        return PackedLowRank(tuple(held), tuple(tuple(each) for each in entries))

    def put(self, slot: int, packed: PackedLowRank | None) -> None:
        first = slot * self.num_parts
        for weight, entries in enumerate(self._entries):
            for number in range(self.num_parts):
                entries[first + number] = LowRankPart() if packed is None else packed.entries[weight][number]
        self._held.pop(slot, None)
        if packed is not None:
            self._held[slot] = packed

    def num_bytes(self, packed: PackedLowRank) -> int:
        return sum(each.numel() * each.element_size() for each in packed.held)

    def _pack_part(
        self,
        number: int,
        part: LowRank,
        a: torch.Tensor,
        begin: int,
        entries: list[list[LowRankPart]],
        held: list[torch.Tensor],
    ) -> None:
        """Fills in the entries of a part whose outputs begin at `begin` of the layer's."""
        start, rank = 0, a.shape[0] * _RANK_STEP
        for of_weight, weight in zip(entries, self._weights, strict=True):
            first, last = max(begin, start), min(begin + part.b.shape[0], start + weight.out_features)
            if first < last:
                b, tile = self._pack_b(part.b[first - begin : last - begin], first - start, weight, rank)
                held.append(b)
                of_weight[number] = LowRankPart(
                    a=a.data_ptr(),
                    b=b.data_ptr(),
                    scale=part.scale,
                    rank=rank,
                    first_tile=tile,
                    last_tile=tile + b.shape[0],
                    column=number * self.max_rank,
                )
            else:
                # The first weight's entries are those that `shrink` reads.
                of_weight[number] = LowRankPart(
                    a=a.data_ptr(), scale=part.scale, rank=rank, column=number * self.max_rank
                )
            start += weight.out_features

    def _pack_a(self, a: torch.Tensor) -> torch.Tensor:
        """Groups of lines [rank / 4, blocks, 4, numbers of a cache line]."""
        packed = torch.zeros(-(-a.shape[0] // _RANK_STEP) * _RANK_STEP, self.padded_in, dtype=self.dtype)
        packed[: a.shape[0], : a.shape[1]] = a
        groups = packed.view(-1, _RANK_STEP, self.padded_in // self._block, self._block)
        return groups.transpose(1, 2).contiguous()

    def _pack_b(self, b: torch.Tensor, begin: int, weight: PackedWeight, rank: int) -> tuple[torch.Tensor, int]:
        """Tiles [tiles, rank / words, 16, words] of rows of B, the first of which is output `begin`, and the number of
        the first tile. Columns of a tile that belong to other parts are zeros."""
        columns = torch.arange(begin, begin + b.shape[0])
        if weight.gated:
            width = weight.out_features // 2
            columns += (columns >= width) * (-width % _TILE)
        tile = int(columns[0]) // _TILE
        tiles = torch.zeros((int(columns[-1]) // _TILE + 1 - tile) * _TILE, rank, dtype=self.dtype)
        tiles[columns - tile * _TILE, : b.shape[1]] = b.to(self.dtype)
        return tiles.view(-1, _TILE, rank // self._words, self._words).transpose(1, 2).contiguous(), tile


@dataclass(frozen=True, slots=True)
class MaskedLowRank:
    """An adapter's parts in the model's dtype, on its device."""

    parts: tuple[LowRank | None, ...]


class MaskedTable(LowRankTable[MaskedLowRank]):
    """A table for products of torch: all slots are multiplied with all tokens, and what is not of a token's own slot is
    left out. Shapes depend on the number of tokens alone, so it can be part of a CUDA graph; memory is allocated for
    `max_rank` of all slots.

    Args:
        like: an empty tensor of the model's dtype on its device.
    """

    def __init__(
        self, in_features: int, widths: Sequence[int], num_slots: int, max_rank: int, *, like: torch.Tensor
    ) -> None:
        self._num_slots, self._max_rank = num_slots, max_rank
        self._a = like.new_zeros(len(widths), num_slots, max_rank, in_features)
        self._b = [like.new_zeros(num_slots, max_rank, width) for width in widths]
        self._scales = torch.zeros(len(widths), num_slots, 1, device=like.device)
        self._slots = torch.arange(1, num_slots + 1, device=like.device)

    def pack(self, parts: Sequence[LowRank | None]) -> MaskedLowRank:
        def placed(x: torch.Tensor) -> torch.Tensor:
            return x.to(self._a)

        return MaskedLowRank(
            tuple(None if each is None else LowRank(placed(each.a), placed(each.b), each.scale) for each in parts)
        )

    def put(self, slot: int, packed: MaskedLowRank | None) -> None:
        at = slot - 1
        self._a[:, at].zero_()
        for number, b in enumerate(self._b):
            b[at].zero_()
            part = None if packed is None else packed.parts[number]
            if part is not None:
                rank = part.a.shape[0]
                self._a[number, at, :rank] = part.a
                b[at, :rank] = part.b.t()
                self._scales[number, at] = part.scale

    def num_bytes(self, packed: MaskedLowRank) -> int:
        elements = self._a[:, 0].numel() + sum(each[0].numel() for each in self._b)
        return elements * self._a.element_size()

    def add(self, product: torch.Tensor, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """The product [..., out] of x [..., in], and the addends of tokens that have an adapter; the others keep their
        bits. `slots` is [tokens] int64."""
        tokens = x.reshape(-1, x.shape[-1])
        shrunk = functional.linear(tokens, self._a.flatten(0, 2)).float()
        own = (slots[:, None] == self._slots)[:, None, :, None]
        shape = (tokens.shape[0], len(self._b), self._num_slots, self._max_rank)
        shrunk = torch.where(own, shrunk.view(shape) * self._scales, 0.0).to(x.dtype)
        addends = [shrunk[:, number].flatten(1) @ b.flatten(0, 1) for number, b in enumerate(self._b)]
        total = product + torch.cat(addends, dim=-1).view(product.shape)
        return torch.where((slots > 0).view(*product.shape[:-1], 1), total, product)


@dataclass(frozen=True, slots=True)
class TokenAddends:
    """The addends of a product's tokens."""

    table: PackedTable
    slots: torch.Tensor
    """[tokens] int64"""
