"""Tables of low-rank addends for products of the CPU library, in the order in which it reads them (low_rank.h)."""

from collections.abc import Sequence
from ctypes import Array, addressof
from dataclasses import dataclass

import torch

from quire_kernels.cpu.library import LowRankPart
from quire_kernels.low_rank import LowRank, LowRankTable
from quire_kernels.packed_weight import PackedWeight

_TILE = 16
"""Columns of a tile of B."""
_RANK_STEP = 4
_BLOCK_WORDS = 16


@dataclass(frozen=True, slots=True)
class PackedLowRank:
    """An adapter's parts for each weight of a layer."""

    held: tuple[torch.Tensor, ...]
    entries: tuple[tuple[LowRankPart, ...], ...]


class PackedTable(LowRankTable[PackedLowRank]):
    """A table for products of the CPU library, which reads it at each product. Adapters have memory of their own.

    Args:
        weights: The weights that the layer multiplies, whose outputs follow each other. A gated weight is the only one.
        widths: The number of outputs of each part; the sum is the number of outputs of the weights.
        max_rank: The maximum rank of a part.
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
        """Dtype of the products with A."""
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
                start, rank = 0, a.shape[0] * _RANK_STEP
                for of_weight, weight in zip(entries, self._weights, strict=True):
                    # `shrink` reads the entries of the first weight, even without outputs there.
                    entry = of_weight[number]
                    entry.a, entry.scale, entry.rank = a.data_ptr(), part.scale, rank
                    entry.column = number * self.max_rank
                    first, last = max(begin, start), min(begin + part.b.shape[0], start + weight.out_features)
                    if first < last:
                        b, tile = self._pack_b(part.b[first - begin : last - begin], first - start, weight, rank)
                        held.append(b)
                        entry.b, entry.first_tile, entry.last_tile = b.data_ptr(), tile, tile + b.shape[0]
                    start += weight.out_features
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

    def _pack_a(self, a: torch.Tensor) -> torch.Tensor:
        """Groups of lines [rank / 4, blocks, 4, numbers of a cache line]."""
        packed = torch.zeros(-(-a.shape[0] // _RANK_STEP) * _RANK_STEP, self.padded_in, dtype=self.dtype)
        packed[: a.shape[0], : a.shape[1]] = a
        groups = packed.view(-1, _RANK_STEP, self.padded_in // self._block, self._block)
        return groups.transpose(1, 2).contiguous()

    def _pack_b(self, b: torch.Tensor, begin: int, weight: PackedWeight, rank: int) -> tuple[torch.Tensor, int]:
        """Tiles [tiles, rank / words, 16, words] of rows of B, whose first row is output `begin`, and the number of the
        first tile. Columns of a tile that belong to other parts are zeros."""
        columns = torch.arange(begin, begin + b.shape[0])
        if weight.gated:
            width = weight.out_features // 2
            columns += (columns >= width) * (-width % _TILE)
        tile = int(columns[0]) // _TILE
        tiles = torch.zeros((int(columns[-1]) // _TILE + 1 - tile) * _TILE, rank, dtype=self.dtype)
        tiles[columns - tile * _TILE, : b.shape[1]] = b.to(self.dtype)
        return tiles.view(-1, _TILE, rank // self._words, self._words).transpose(1, 2).contiguous(), tile


@dataclass(frozen=True, slots=True)
class TokenAddends:
    """The addends of a product's tokens."""

    table: PackedTable
    slots: torch.Tensor
    """[tokens] int64"""
