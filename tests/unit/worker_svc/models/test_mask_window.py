"""What a mask function of transformers means for paged attention."""

from collections.abc import Callable

import pytest
import torch
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from worker_svc.models.mask_window import window_of
from worker_svc.models.transformers_refusals import UnsupportedModelError


def test_a_causal_mask_has_no_window() -> None:
    assert window_of(causal_mask_function, 100) is None


@pytest.mark.parametrize("window", [1, 2, 7, 50, 99])
def test_a_sliding_window_is_found(window: int) -> None:
    assert window_of(sliding_window_causal_mask_function(window), 100) == window


@pytest.mark.parametrize("window", [100, 101, 4096])
def test_a_window_that_nothing_leaves_is_none(window: int) -> None:
    assert window_of(sliding_window_causal_mask_function(window), 100) is None


@pytest.mark.parametrize("num_positions", [1, 2, 3])
def test_a_short_model_has_its_mask_looked_at(num_positions: int) -> None:
    assert window_of(causal_mask_function, num_positions) is None


@pytest.mark.parametrize(
    "mask_function",
    [
        bidirectional_mask_function,
        sliding_window_bidirectional_mask_function(5),
        chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.int64)),
        chunked_causal_mask_function(25, torch.zeros(1, dtype=torch.int64)),
        chunked_causal_mask_function(60, torch.zeros(1, dtype=torch.int64)),
        or_masks(causal_mask_function, lambda batch, head, query, key: key < 10),
        and_masks(causal_mask_function, lambda batch, head, query, key: key % 2 == 0),
        and_masks(causal_mask_function, lambda batch, head, query, key: key < 0),
    ],
)
def test_another_pattern_is_refused(mask_function: Callable[..., torch.Tensor]) -> None:
    with pytest.raises(UnsupportedModelError, match="neither causal nor a sliding window"):
        window_of(mask_function, 100)
