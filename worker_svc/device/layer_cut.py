"""Cuts a model's layers into groups whose blocks have equal bytes (Jenga, arXiv 2503.18292, section 4).

A group has as many layers as the pool has tensors, its slots; the last groups of a kind may have fewer. With few slots
little memory is left empty there. With many slots there are few groups, so that block tables are short and blocks are
read in long stretches.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from quire.messages.layer_groups import ONE_GROUP, LayerGroups
from worker_svc.models.base import CacheLayer

_COMPARED_TOKENS = 8192
_MAX_WASTE = 1.03
"""Cuts are compared by the memory of a sequence of `_COMPARED_TOKENS` tokens, and may take this much of the least."""


@dataclass(frozen=True, slots=True)
class LayerCut:
    """The shapes of the pool's tensors, one for each layer of a group, and the groups."""

    slots: tuple[CacheLayer, ...]
    groups: LayerGroups = ONE_GROUP


def cut_layers(layers: Sequence[CacheLayer], max_model_len: int, block_size: int) -> LayerCut:
    """The cut with the most layers a group among those that take little memory.

    A window that is not smaller than the longest sequence is none. There is one window for all groups, the largest,
    and one token more: a prompt token that is alone in its step is computed together with the token before it.
    """
    whole = LayerCut(tuple(layers))
    windows = [each.window for each in layers if each.window is not None and each.window + 1 < max_model_len]
    if not windows:
        return whole
    num_windowed, window = len(windows), max(windows) + 1
    num_full = len(layers) - num_windowed
    num_tokens = min(_COMPARED_TOKENS, max_model_len)

    def blocks_of(cut: LayerCut) -> int:
        """Blocks of one layer that a sequence takes."""
        return len(cut.slots) * cut.groups.max_blocks(num_tokens, block_size)

    def cut_into(num_slots: int) -> LayerCut:
        full, windowed = (-(-count // num_slots) for count in (num_full, num_windowed))
        return LayerCut(tuple(layers[:1]) * num_slots, LayerGroups(full, windowed, window))

    cuts = [whole, *map(cut_into, range(len(layers), 0, -1))]
    maximum = _MAX_WASTE * min(map(blocks_of, cuts))
    return next(cut for cut in cuts if blocks_of(cut) <= maximum)


def place_layers(layers: Sequence[CacheLayer], num_slots: int, groups: LayerGroups) -> list[tuple[int, int]]:
    """The group and the slot of each layer. Neighbours of one kind share a group."""
    places: list[tuple[int, int]] = []
    num_placed = [0, 0]
    for layer in layers:
        is_windowed = layer.window is not None and layer.window < groups.window
        group, slot = divmod(num_placed[is_windowed], num_slots)
        num_placed[is_windowed] += 1
        places.append((groups.num_full * is_windowed + group, slot))
    return places
