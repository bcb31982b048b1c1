import torch

from worker_svc.ranking import best_scores, most_likely


def test_ranking_on_the_cpu_is_that_of_torch() -> None:
    scores = torch.randn((9, 1000), generator=torch.Generator().manual_seed(1))
    highest, token_ids = most_likely(scores)
    assert highest.tolist() == scores.amax(1).tolist()
    assert token_ids.tolist() == scores.argmax(1).tolist()
    for width in (1, 37, 1000):
        assert torch.equal(best_scores(scores, width), scores.topk(width, dim=1).values)


def test_of_equals_the_first_is_most_likely_and_nan_is_highest() -> None:
    highest, token_ids = most_likely(torch.tensor([[1.0, 3.0, 3.0], [torch.inf, torch.nan, 0.0]]))
    assert token_ids.tolist() == [1, 1]
    assert highest[1].isnan()
