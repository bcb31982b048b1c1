from collections.abc import Sequence

import numpy as np
import torch
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from tests.support.logprobs import lines_of
from tests.support.sampling import make_columns, make_sampling
from worker_svc.sampling.logit_rules import History, apply_logit_rules
from worker_svc.sampling.logprobs import (
    CandidateValues,
    gather_candidates,
    gather_logprobs,
    logprobs_of,
    report_candidates,
    report_logprobs,
)
from worker_svc.step import LogitRules, RowCandidates

LOGITS = torch.tensor([[0.0, 3.0, 1.0, 2.0], [4.0, 1.0, 0.0, 2.0], [1.0, 0.0, 5.0, 2.0]])


def test_rows_get_what_they_ask_for() -> None:
    columns = make_columns(
        [make_sampling(logprobs=2, temperature=2.0), make_sampling(logprobs=0, temperature=0.0), make_sampling()]
    )
    gathered = gather_logprobs(LOGITS, torch.tensor([3, 0, 1]), columns)
    assert gathered is not None
    arrays = gathered.map(torch.Tensor.numpy)
    reported = report_logprobs(columns, arrays, np.ones(3, bool))
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
    assert len(gathered.chosen) == 2
    arrays = gathered.map(torch.Tensor.numpy)
    usable = np.array([False, True, True])
    reported = report_logprobs(columns, arrays, usable)
    assert reported is not None
    assert (reported.samples.tolist(), len(reported.columns)) == ([1], 1)
    assert report_logprobs(columns, arrays, np.zeros(3, bool)) is None


def test_equally_likely_tokens_are_ranked_by_id_as_greedy_choice_does():
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 2.0, -1.0]])
    values = logprobs_of(logits, logits.argmax(dim=1), np.zeros(1, np.float32), 4)
    assert values.top_token_ids.tolist() == [[1, 3, 4, 2]]
    assert values.ranks.tolist() == [1]
    for rank, token_id in enumerate([1, 3, 4, 2, 0, 5], start=1):
        values = logprobs_of(logits, torch.tensor([token_id]), np.zeros(1, np.float32), 1)
        assert (values.ranks.tolist(), values.top_token_ids.tolist()) == ([rank], [[1]])


VOCAB = 40
PROMPT, OUTPUT = [1, 2, 3, 4, 3], [7, 7, 8, 2, 7]


def make_logits(count: int) -> torch.Tensor:
    return torch.randn((count, VOCAB), generator=torch.Generator().manual_seed(3)) * 3


def candidates_of(
    logits: torch.Tensor, rules: Sequence[LogitRules | None], count: int
) -> CandidateValues[torch.Tensor]:
    """Candidates that rows of PROMPT and OUTPUT report."""
    logits = logits.clone()
    columns = make_columns([make_sampling(temperature=0.0, num_candidates=count, rules=each) for each in rules])
    tokens = torch.tensor([PROMPT + OUTPUT] * len(rules), dtype=torch.int32)
    lengths = np.full(len(rules), len(PROMPT))
    apply_logit_rules(logits, columns, History(tokens, np.arange(len(rules)), lengths, lengths + len(OUTPUT)))
    gathered = gather_candidates(logits, columns)
    assert gathered is not None
    return gathered


def report(logits: torch.Tensor, usable: Sequence[bool], **sampling: object) -> tuple[RowCandidates, ...]:
    """Candidates that rows 5, 6, 7... report."""
    columns = make_columns([make_sampling(**sampling)] * len(logits))
    gathered = gather_candidates(logits, columns)
    assert gathered is not None
    rows = np.arange(5, 5 + len(logits), dtype=np.int32)
    return report_candidates(rows, columns, gathered.map(torch.Tensor.numpy), np.array(usable))


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_rules_give_the_scores_of_transformers() -> None:
    """All at once; test_logit_rules.py has each by itself."""
    rules = LogitRules(
        repetition_penalty=0.7,
        bias_token_ids=ints(7, 30),
        bias_values=np.array([9.5, -2.5], np.float32),
        bad_sequences=(ints(9), ints(2, 7, 11), ints(8, 7, 12)),
        min_tokens=9,
        stop_token_ids=ints(0),
    )
    logits = make_logits(2)
    scores = logits.log_softmax(dim=1)
    for processor in (
        SequenceBiasLogitsProcessor([[[7], 9.5], [[30], -2.5]]),
        RepetitionPenaltyLogitsProcessor(0.7),
        NoBadWordsLogitsProcessor([[9], [2, 7, 11], [8, 7, 12]]),
        MinNewTokensLengthLogitsProcessor(len(PROMPT), 9, [0]),
    ):
        # Only the first row has rules.
        scores[:1] = processor(torch.LongTensor([PROMPT + OUTPUT]), scores[:1].clone())
    found = candidates_of(logits, [rules, None], VOCAB)
    expected = scores.sort(dim=1, descending=True, stable=True)
    torch.testing.assert_close(found.logprobs, expected.values, rtol=1e-5, atol=1e-5)
    assert found.token_ids.tolist() == expected.indices.tolist()


def test_banned_tokens_come_last_with_minus_infinity_by_id() -> None:
    rules = LogitRules(allowed_token_ids=ints(30, 4))
    found = candidates_of(torch.zeros((1, VOCAB)), [rules], 6)
    assert found.token_ids.tolist() == [[4, 30, 0, 1, 2, 3]]
    assert found.logprobs[0, :2].isfinite().all()
    assert (found.logprobs[0, 2:] == -torch.inf).all()


def test_temperature_and_truncation_have_no_part_in_candidates() -> None:
    plain = report(LOGITS, [True] * 3, num_candidates=3, temperature=0.0)
    heated = report(LOGITS, [True] * 3, num_candidates=3, temperature=2.5, top_k=1, top_p=0.1)
    for before, after, logits in zip(plain, heated, LOGITS, strict=True):
        np.testing.assert_array_equal(before.logprobs, after.logprobs)
        np.testing.assert_allclose(before.logprobs, logits.log_softmax(0).topk(3).values, rtol=1e-6)
