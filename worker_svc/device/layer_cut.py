"""Cuts a model's layers into groups whose blocks have equal bytes (Jenga, arXiv 2503.18292, section 4).

A group has as many layers as the pool has tensors, its slots; the last groups of a kind may have fewer. With few slots
little memory is left empty there. With many slots there are few groups, and so few block tables. Where layers differ,
a slot has the widest layer or several narrower ones.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from quire.messages.layer_groups import ONE_GROUP, LayerGroups
from worker_svc.models.base import CacheLayer

_logger = logging.getLogger(__name__)
_COMPARED_TOKENS = 8192
_MAX_WASTE = 1.03
"""Cuts are compared by the memory of a sequence of `_COMPARED_TOKENS` tokens, and may take this much of the least."""


@dataclass(frozen=True, slots=True)
class LayerCut:
    """The shapes of the pool's tensors, one for each layer of a group, and the groups."""

    slots: tuple[CacheLayer, ...]
    groups: LayerGroups = ONE_GROUP


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Where a layer's keys and values are: a slot of the blocks of its group, or one of several parts of the slot."""

    group: int
    slot: int
    part: int


def cut_layers(layers: Sequence[CacheLayer], max_model_len: int, block_size: int) -> LayerCut:
    """The cut with the most layers a group that takes little memory.

    A window that is not smaller than the longest sequence is none. There is one window for all groups, the largest,
    and one token more: a prompt token with no other one in its step is computed together with the token before it.
    """
    whole = LayerCut(tuple(layers))
    windowed = [each for each in layers if each.window is not None and each.window + 1 < max_model_len]
    if not windowed:
        return whole
    window = max(each.window or 0 for each in windowed) + 1
    kinds = [each for each in layers if each not in windowed], windowed
    parts = [_parts(layers, kind) for kind in kinds]
    if not all(parts):
        _logger.info("layers with a window keep all tokens: their keys do not fit into the keys of other layers")
        return whole
    widest, num_tokens = max(layers, key=width), min(_COMPARED_TOKENS, max_model_len)

    def cut_into(num_slots: int) -> LayerCut:
        full, windowed = (-(-len(kind) // (num_slots * each)) for kind, each in zip(kinds, parts, strict=True))
        return LayerCut((widest,) * num_slots, LayerGroups(full, windowed, window))

    def memory_of(cut: LayerCut) -> int:
        """Numbers of a sequence, for each token of a block."""
        return sum(map(width, cut.slots)) * cut.groups.max_blocks(num_tokens, block_size)

    cuts = [whole, *map(cut_into, range(len(layers), 0, -1))]
    maximum = _MAX_WASTE * min(map(memory_of, cuts))
    return next(cut for cut in cuts if memory_of(cut) <= maximum)


def place_layers(layers: Sequence[CacheLayer], num_slots: int, groups: LayerGroups) -> list[LayerPlace]:
    """The places of layers that were cut like this. Neighbours of one kind share a group."""
    if not groups.num_windowed:
        return [LayerPlace(0, slot, 0) for slot in range(len(layers))]
    places: list[LayerPlace] = []
    widest, num_placed = max(map(width, layers)), [0, 0]
    for layer in layers:
        is_windowed, parts = layer.window is not None and layer.window < groups.window, widest // width(layer)
        group, rest = divmod(num_placed[is_windowed], num_slots * parts)
        places.append(LayerPlace(groups.num_full * is_windowed + group, *divmod(rest, parts)))
        num_placed[is_windowed] += 1
    return places


def width(layer: CacheLayer) -> int:
    return layer.num_kv_heads * layer.head_dim


def _parts(layers: Sequence[CacheLayer], kind: Sequence[CacheLayer]) -> int:
    """The number of layers of a kind that fill a slot of the widest of all layers; 0 if no number does."""
    widest, widths = max(map(width, layers)), set(map(width, kind)) or {1}
    return 0 if len(widths) > 1 or widest % max(widths) else widest // max(widths)
