"""Low-rank addends of products, as LoRA adapters have them: `scale * B (A x)` for each token by its own A and B.

Each part of a linear layer (query, key and value; gate and up) has its own A and B, which may be missing. Slot 0 of a
table is for tokens without an adapter, which get nothing added.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch.nn import functional

P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class LowRank:
    """The addend of an adapter for one part: `scale * b @ (a @ x)`, in any dtype."""

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
        """Replaces the adapter in a slot from 1 on; None empties it."""

    @abstractmethod
    def num_bytes(self, packed: P) -> int:
        """Memory that an adapter takes."""


@dataclass(frozen=True, slots=True)
class MaskedLowRank:
    """An adapter's parts in the model's dtype, on its device."""

    parts: tuple[LowRank | None, ...]


class MaskedTable(LowRankTable[MaskedLowRank]):
    """A table for products of torch: all slots are multiplied with all tokens, and only the results of a token's own
    slot are added. Shapes depend only on the number of tokens, so the products can be part of a CUDA graph; memory is
    allocated for `max_rank` of all slots.

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
        # The last of many ranks may have no inputs.
        tokens = x.reshape(slots.shape[0], x.shape[-1])
        shrunk = functional.linear(tokens, self._a.flatten(0, 2)).float()
        own = (slots[:, None] == self._slots)[:, None, :, None]
        shape = (tokens.shape[0], len(self._b), self._num_slots, self._max_rank)
        shrunk = torch.where(own, shrunk.view(shape) * self._scales, 0.0).to(x.dtype)
        addends = [shrunk[:, number].flatten(1) @ b.flatten(0, 1) for number, b in enumerate(self._b)]
        total = product + torch.cat(addends, dim=-1).view(product.shape)
        return torch.where((slots > 0).view(*product.shape[:-1], 1), total, product)
