import numpy as np
import torch

from tests.support.logprobs import lines_of
from tests.support.sampling import make_columns, make_sampling
from worker_svc.sampling.logprobs import gather_logprobs, logprobs_of, report_logprobs

LOGITS = torch.tensor([[0.0, 3.0, 1.0, 2.0], [4.0, 1.0, 0.0, 2.0], [1.0, 0.0, 5.0, 2.0]])


def test_nothing_is_computed_when_no_row_asks() -> None:
    assert gather_logprobs(LOGITS, torch.tensor([0, 0, 0]), make_columns([make_sampling()] * 3)) is None


def test_rows_get_what_they_ask_for() -> None:
    columns = make_columns(
        [make_sampling(logprobs=2, temperature=2.0), make_sampling(logprobs=0, temperature=0.0), make_sampling()]
    )
    gathered = gather_logprobs(LOGITS, torch.tensor([3, 0, 1]), columns)
    assert gathered is not None
    arrays = [tensor.numpy() for tensor in gathered.values.tensors()]
    reported = report_logprobs(columns, gathered.indices, arrays, np.ones(3, bool))
    assert reported is not None
    assert reported.samples.tolist() == [0, 1]
    first, second = lines_of(reported.columns)
    scaled = (LOGITS[0] / 2).log_softmax(0)
    assert first.rank == 2
    np.testing.assert_allclose(first.logprob, scaled[3], rtol=1e-5)
    assert first.top_token_ids == [1, 3]
    np.testing.assert_allclose(first.top_logprobs, scaled[[1, 3]], rtol=1e-5)
    assert (second.rank, second.top_token_ids) == (1, [])
    np.testing.assert_allclose(second.logprob, LOGITS[1].log_softmax(0)[0], rtol=1e-5)


def test_rows_that_are_not_usable_get_nothing_and_rows_that_search_ask_for_nothing_here() -> None:
    columns = make_columns([make_sampling(logprobs=1), make_sampling(logprobs=1), make_sampling(num_candidates=2)])
    gathered = gather_logprobs(LOGITS, torch.tensor([0, 0, 0]), columns)
    assert gathered is not None
    assert gathered.indices.tolist() == [0, 1]
    arrays = [tensor.numpy() for tensor in gathered.values.tensors()]
    usable = np.array([False, True, True])
    reported = report_logprobs(columns, gathered.indices, arrays, usable)
    assert reported is not None
    assert (reported.samples.tolist(), len(reported.columns)) == ([1], 1)
    assert report_logprobs(columns, gathered.indices, arrays, np.zeros(3, bool)) is None


def test_equally_likely_tokens_are_ranked_by_id_as_greedy_choice_does():
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 2.0, -1.0]])
    values = logprobs_of(logits, logits.argmax(dim=1), np.zeros(1, np.float32), 4)
    assert values.top_token_ids.tolist() == [[1, 3, 4, 2]]
    assert values.ranks.tolist() == [1]
    for rank, token_id in enumerate([1, 3, 4, 2, 0, 5], start=1):
        values = logprobs_of(logits, torch.tensor([token_id]), np.zeros(1, np.float32), 1)
        assert (values.ranks.tolist(), values.top_token_ids.tolist()) == ([rank], [[1]])
