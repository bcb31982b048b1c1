"""Bytes that a sequence takes, for the shapes of published models, and where their layers are."""

import math

import pytest

from quire.messages.layer_groups import ONE_GROUP, LayerGroups
from worker_svc.device.layer_cut import LayerCut, cut_layers, place_layers
from worker_svc.models.base import CacheLayer

BLOCK_SIZE, MAX_MODEL_LEN = 16, 131_072


def layers(kinds: str, heads: tuple[int, int], window: int, heads_of_full: tuple[int, int] | None = None):
    """One layer for each letter: f for full, w for windowed."""
    full = CacheLayer(*(heads_of_full or heads))
    return [full if kind == "f" else CacheLayer(*heads, window) for kind in kinds]


def every(period: int, count: int, *, first: int | None = None) -> str:
    """The last of each `period` layers is full."""
    return "".join("f" if index % period == (period - 1 if first is None else first) else "w" for index in range(count))


PUBLISHED = {
    "Gemma 3 1B": (layers(every(6, 26), (1, 256), 512), LayerGroups(1, 6, 513), 4),
    "Gemma 3 4B": (layers(every(6, 34), (4, 256), 1024), LayerGroups(1, 6, 1025), 5),
    "Gemma 3 27B": (layers(every(6, 62), (16, 128), 1024), LayerGroups(2, 11, 1025), 5),
    "gpt-oss 20B": (layers(every(2, 24), (8, 64), 128), LayerGroups(1, 1, 129), 12),
    "gpt-oss 120B": (layers(every(2, 36), (8, 64), 128), LayerGroups(1, 1, 129), 18),
    "Olmo 3 7B": (layers(every(4, 32), (32, 128), 4096), LayerGroups(1, 3, 4097), 8),
    "Gemma 4 31B": (layers(every(6, 60), (16, 256), 1024, (4, 512)), LayerGroups(1, 10, 1025), 5),
    "Gemma 4 E4B": (layers(every(6, 24), (2, 256), 512, (2, 512)), LayerGroups(1, 3, 513), 4),
    "Mistral 7B v0.1": (layers("w" * 32, (8, 128), 4096), LayerGroups(0, 1, 4097), 32),
    "Llama 3 8B": (layers("f" * 32, (8, 128), 1), ONE_GROUP, 32),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_sequence_takes_what_its_architecture_needs(name: str) -> None:
    model, groups, num_slots = PUBLISHED[name]
    cut = cut_layers(model, MAX_MODEL_LEN, BLOCK_SIZE)
    assert (cut.groups, len(cut.slots)) == (groups, num_slots)
    width_of_block = BLOCK_SIZE * sum(each.num_kv_heads * each.head_dim for each in cut.slots)
    for num_tokens in (8192, 32_768, MAX_MODEL_LEN):
        # Rounded up to blocks, and by one more where a window begins within a block.
        needed = sum(
            each.num_kv_heads * each.head_dim * min(num_tokens, BLOCK_SIZE * (math.ceil(each.window / BLOCK_SIZE) + 1))
            if each.window
            else each.num_kv_heads * each.head_dim * num_tokens
            for each in model
        )
        assert needed <= cut.groups.max_blocks(num_tokens, BLOCK_SIZE) * width_of_block <= 1.05 * needed


@pytest.mark.parametrize("name", PUBLISHED)
def test_each_layer_has_a_place_of_its_own_in_a_group_of_its_kind(name: str) -> None:
    model, groups, num_slots = PUBLISHED[name]
    places = place_layers(model, num_slots, groups)
    assert len(set(places)) == len(model)
    widest = max(each.num_kv_heads * each.head_dim for each in model)
    for layer, place in zip(model, places, strict=True):
        assert (place.group >= groups.num_full) == (layer.window is not None)
        assert place.group < groups.num_groups
        assert place.slot < num_slots
        assert (place.part + 1) * layer.num_kv_heads * layer.head_dim <= widest


@pytest.mark.parametrize(
    ("max_model_len", "model"),
    [
        (513, layers("wwf", (2, 8), 512)),
        (4096, layers("wwf", (2, 8), 512, (3, 8))),
        (4096, [CacheLayer(1, 8, 512), CacheLayer(2, 8, 512)]),
    ],
    ids=["window of the longest sequence", "no multiple", "windowed layers differ"],
)
def test_layers_stay_in_one_group(max_model_len: int, model: list[CacheLayer]) -> None:
    assert cut_layers(model, max_model_len, BLOCK_SIZE) == LayerCut(tuple(model))


def test_a_window_that_no_sequence_exceeds_is_none_and_the_largest_of_the_others_counts() -> None:
    model = [CacheLayer(1, 8, window) for window in (300, 100, 9000, None)]
    cut = cut_layers(model, 8192, BLOCK_SIZE)
    assert cut.groups == LayerGroups(1, 1, 301)
    assert [place.group for place in place_layers(model, len(cut.slots), cut.groups)] == [1, 1, 0, 0]
