"""The reference's split of its work does not change its results."""

import pytest
import torch

from quire_kernels import ops, reference
from tests.unit.kernels.test_paged_attention import assert_matches_naive, make_batch


@pytest.fixture(autouse=True)
def use_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "implementation_for", lambda device: reference)


def test_groups_split_for_memory_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch([(1, n) for n in (3, 200, 7, 64, 65, 1, 129)])
    whole = batch.attend()
    monkeypatch.setattr(reference, "MAX_GATHERED_ELEMENTS", 1)
    torch.testing.assert_close(batch.attend(), whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.0, 2.0, -9.0, 6.0])], ids=["plain", "sinks"])
@pytest.mark.parametrize("sliding_window", [None, 3])
def test_chunks_longer_than_a_slice_match_naive(
    sliding_window: int | None, sinks: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "QUERY_SLICE", 4)
    batch = make_batch([(9, 9), (8, 21), (1, 3), (5, 40)])
    assert_matches_naive(batch, sliding_window=sliding_window, sinks=sinks)
