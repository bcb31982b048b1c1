from collections.abc import Callable

import pytest
import torch

from worker_svc.sampling.truncation import best_tokens, best_tokens_by_key

BEST = pytest.mark.parametrize("best", [best_tokens, best_tokens_by_key])


@BEST
@pytest.mark.parametrize("count", [0, 1, 2, 7, 49, 50])
@pytest.mark.parametrize("levels", [1, 3, 1000])
def test_the_best_tokens_are_those_of_a_stable_sort_however_many_are_equal(
    best: Callable[..., torch.Tensor], count: int, levels: int
) -> None:
    scores = torch.randint(-levels, levels, (20, 50), generator=torch.Generator().manual_seed(levels)).float() / 4
    scores[3:6, ::2] = -torch.inf
    scores[5, 1:] = -torch.inf
    scores[6, 10:30] = -0.0
    expected = scores.sort(dim=1, descending=True, stable=True).indices[:, :count]
    assert torch.equal(best(scores, count), expected)


@BEST
def test_rows_with_nan_or_infinity_leave_the_others_alone(best: Callable[..., torch.Tensor]) -> None:
    scores = torch.tensor([[1.0, 3.0, 3.0, 2.0]] * 5)
    scores[0, 2] = torch.nan
    scores[1] = torch.nan
    scores[2] = -torch.inf
    scores[3, 3] = torch.inf
    found = best(scores, 3)
    assert found[2:].tolist() == [[0, 1, 2], [3, 1, 2], [1, 2, 3]]
    assert ((found >= 0) & (found < 4)).all()
