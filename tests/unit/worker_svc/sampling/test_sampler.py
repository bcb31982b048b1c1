"""The sampler compared with a few lines of numpy: distribution, truncation, repeatability, independence of batches."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from quire_kernels import ops
from tests.support.sampling import make_columns, make_sampling
from worker_svc.sampling.logit_rules import History, apply_logit_rules
from worker_svc.sampling.logprobs import gather_candidates
from worker_svc.sampling.sampler import CHUNK, draw, inverse_cdf, padded_width, philox4x32, uniform
from worker_svc.sampling.truncation import lowest_kept
from worker_svc.step import LogitRules, RowSampling

LOGITS = np.array([2.0, 1.0, 0.0, -0.5, 1.5, -3.0, 0.5, 2.2, -1.0, 0.1], dtype=np.float32)


@pytest.fixture(autouse=True, params=["library", "torch"])
def _drawn_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On processors the library draws, elsewhere torch."""
    if request.param == "torch":
        monkeypatch.setattr(ops, "can_draw", lambda _: False)


def naive_distribution(logits: np.ndarray, sampling: RowSampling) -> np.ndarray:
    """Temperature, then min-p, then top-k, then top-p, each followed by renormalisation."""
    asked = sampling.parameters
    scaled = logits.astype(np.float64) / asked.temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    p[p < asked.min_p * p.max()] = 0
    order = np.argsort(-p, kind="stable")
    if asked.top_k:
        p[order[asked.top_k :]] = 0
    p /= p.sum()
    before = np.concatenate(([0.0], np.cumsum(p[order])[:-1]))
    if asked.top_p < 1:
        p[order[before >= asked.top_p]] = 0
    return p / p.sum()


def draw_rows(logits: torch.Tensor, rows: list[RowSampling], positions: list[int]) -> list[int]:
    return draw(logits, make_columns(rows), np.array(positions)).token_ids.tolist()


PARAMETERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 3},
    {"top_k": 99},
    {"top_p": 0.5},
    {"top_p": 0.9},
    # The smallest number of single precision.
    {"top_p": 1e-45},
    {"min_p": 1e-45},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"min_p": 0.1, "top_k": 5, "top_p": 0.8, "temperature": 1.7},
    {"top_k": 4, "top_p": 0.7},
]


@pytest.mark.parametrize("changes", PARAMETERS, ids=str)
def test_frequencies_follow_the_distribution(changes: dict[str, Any]) -> None:
    count = 4000
    sampling = make_sampling(seed=1234, **changes)
    logits = torch.from_numpy(LOGITS).repeat(count, 1)
    counts = np.bincount(draw_rows(logits, [sampling] * count, list(range(count))), minlength=len(LOGITS))
    expected = naive_distribution(LOGITS, sampling)
    possible = expected > 0
    assert not counts[~possible].any()
    if possible.sum() > 1:
        assert chisquare(counts[possible], expected[possible] * count).pvalue > 1e-4


def test_truncation_keeps_what_numpy_keeps_over_a_large_vocabulary() -> None:
    generator = np.random.default_rng(3)
    logits = (generator.standard_normal((24, 5000)) * generator.uniform(0.5, 8, (24, 1))).astype(np.float32)
    rows = [
        make_sampling(
            temperature=float(generator.uniform(0.3, 2)),
            top_k=int(generator.choice([0, 1, 40, 300, 4999, 6000])),
            top_p=float(generator.choice([1.0, 0.95, 0.5, 0.999])),
            min_p=float(generator.choice([0.0, 0.02])),
        )
        for _ in logits
    ]
    columns = make_columns(rows)
    scores = torch.from_numpy((logits - logits.max(1, keepdims=True)) / columns.temperature[:, None])
    floor = lowest_kept(scores, scores.exp(), columns)
    assert floor is not None
    kept = (scores >= floor[:, None]).numpy()
    for each, line, sampling in zip(kept, logits, rows, strict=True):
        expected = naive_distribution(line, sampling) > 0
        # A token on the very edge may fall either way by rounding.
        assert abs(int(each.sum()) - int(expected.sum())) <= 1
        assert (each != expected).sum() <= 1


def test_tokens_that_tie_with_the_last_one_kept_are_kept() -> None:
    scores = torch.tensor([[0.0, -1.0, -1.0, -1.0, -2.0]])
    floor = lowest_kept(scores, scores.exp(), make_columns([make_sampling(top_k=2)]))
    assert floor is not None
    assert floor.tolist() == [-1.0]


def test_of_equals_the_first_is_most_likely() -> None:
    assert draw_rows(torch.tensor([[1.0, 3.0, 3.0]]), [make_sampling(temperature=0.0)], [0]) == [1]


def test_greedy_takes_the_most_likely_token_whatever_the_rest_says() -> None:
    logits = torch.randn((4, 50), generator=torch.Generator().manual_seed(1))
    rows = [make_sampling(temperature=0.0, top_k=3, top_p=0.5, seed=seed) for seed in range(4)]
    assert draw_rows(logits, rows, [0, 1, 2, 3]) == logits.argmax(1).tolist()


def make_mixed_rows(count: int) -> list[RowSampling]:
    kinds = [
        {"temperature": 0.0},
        {},
        {"top_k": 5},
        {"top_p": 0.6},
        {"min_p": 0.05, "temperature": 1.5},
        {"top_p": 0.97, "top_k": 700},
        {"num_candidates": 3},
    ]
    return [make_sampling(seed=2**63 + index, **kinds[index % len(kinds)]) for index in range(count)]


def test_a_sample_does_not_depend_on_the_batch_around_it() -> None:
    count = 28
    logits = torch.randn((count, 3000), generator=torch.Generator().manual_seed(2)) * 3
    rows, positions = make_mixed_rows(count), list(range(100, 100 + count))
    together = draw_rows(logits, rows, positions)
    alone = [draw_rows(logits[i : i + 1], [rows[i]], [positions[i]])[0] for i in range(count)]
    order = np.random.default_rng(0).permutation(count)
    shuffled = draw_rows(logits[order], [rows[i] for i in order], [positions[i] for i in order])
    assert together == alone
    assert [together[i] for i in order] == shuffled


def test_samples_repeat_with_their_seed_and_differ_between_seeds_and_positions() -> None:
    logits = torch.zeros((64, 1000))
    same = [make_sampling(seed=9)] * 64
    by_position = draw_rows(logits, same, list(range(64)))
    assert by_position == draw_rows(logits, same, list(range(64)))
    by_seed = draw_rows(logits, [make_sampling(seed=seed) for seed in range(64)], [7] * 64)
    assert len(set(by_position)) > 55
    assert len(set(by_seed)) > 55


@pytest.mark.parametrize("temperature", [1e-30, 1e-45, 1e30])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    logits = torch.tensor([[1e30, -1e30, 0.0], [3.0, 2.0, -torch.inf]])
    rows = [make_sampling(temperature=temperature, top_p=0.9)] * 2
    drawn = draw(logits, make_columns(rows), np.array([0, 1]))
    assert drawn.is_finite.all()
    if temperature < 1:
        assert drawn.token_ids.tolist() == [0, 0]
    assert drawn.token_ids[1] != 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_rows_with_logits_that_are_not_finite_are_named_and_others_are_unaffected(
    temperature: float, bad: float
) -> None:
    logits = torch.randn((5, 40), generator=torch.Generator().manual_seed(4))
    rows = [make_sampling(temperature=temperature, seed=seed, top_p=0.9) for seed in range(5)]
    good = draw_rows(logits, rows, [0] * 5)
    logits[1, 3] = bad
    logits[3] = -torch.inf
    drawn = draw(logits, make_columns(rows), np.zeros(5, np.int64))
    assert drawn.is_finite.tolist() == [True, False, True, False, True]
    assert drawn.token_ids.tolist() == [good[0], 0, good[2], 0, good[4]]


BANS = LogitRules(allowed_token_ids=np.array([3], np.int32), bad_sequences=(np.array([3], np.int32),))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_beam_whose_tokens_are_all_banned_is_finite_and_one_with_nan_or_infinity_is_not(bad: float) -> None:
    """A row that draws needs a token; the beam of a row that reports candidates may end without one."""
    logits = torch.randn((5, 40), generator=torch.Generator().manual_seed(4))
    logits[1, 3], logits[2] = bad, -torch.inf
    rows = [make_sampling(num_candidates=4, rules=rules) for rules in (BANS, BANS, BANS, None)]
    columns = make_columns([*rows, make_sampling(rules=BANS)])
    tokens, ones = torch.ones((5, 1), dtype=torch.int32), np.ones(5, np.int64)
    apply_logit_rules(logits, columns, History(tokens, np.arange(5), ones, ones))
    assert draw(logits, columns, ones).is_finite.tolist() == [True, False, False, True, False]
    # The model's logits were not finite: no rule has banned the tokens.
    logits[3] = -torch.inf
    assert draw(logits, columns, ones).is_finite.tolist() == [True, False, False, False, False]
    candidates = gather_candidates(logits, columns)
    assert candidates is not None
    assert candidates.token_ids[0].tolist() == [0, 1, 2, 3]
    assert candidates.logprobs[0].tolist() == [-torch.inf] * 4


def make_weights(lines: np.ndarray) -> torch.Tensor:
    """Pads lines as the sampler does."""
    padded = torch.zeros((len(lines), padded_width(lines.shape[1])))
    padded[:, : lines.shape[1]] = torch.from_numpy(lines)
    return padded


def test_the_place_is_that_of_a_plain_cumulative_sum() -> None:
    generator = np.random.default_rng(1)
    lines = generator.exponential(size=(200, 3 * CHUNK + 17)).astype(np.float32)
    lines[generator.random(lines.shape) < 0.7] = 0
    numbers = generator.random(200)
    cumulative = lines.astype(np.float64).cumsum(axis=1)
    expected = (cumulative <= numbers[:, None] * cumulative[:, -1:]).sum(axis=1)
    places = inverse_cdf(make_weights(lines), torch.from_numpy(numbers)).numpy()
    # The two sums round differently, so that once in millions a number crosses the edge between tokens.
    assert (places != expected).sum() <= 1
    assert (np.take_along_axis(lines, places[:, None], axis=1) > 0).all()


def test_the_ends_of_the_range_fall_on_tokens_that_are_possible() -> None:
    lines = np.zeros((2, 2 * CHUNK), np.float32)
    lines[:, [5, 300]] = 0.1, 0.3
    edges = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert inverse_cdf(make_weights(lines), edges).tolist() == [5, 300]


# Random123's known answers for philox4x32-10: counter, key, output.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def make_array(values: list[list[int]]) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


def test_known_answers_in_any_company() -> None:
    counters = make_array([words(counter) for counter, _, _ in KNOWN_ANSWERS])
    keys = make_array([words(key) for _, key, _ in KNOWN_ANSWERS])
    expected = [words(output) for _, _, output in KNOWN_ANSWERS]
    assert philox4x32(counters, keys).tolist() == expected
    assert [philox4x32(counters[i : i + 1], keys[i : i + 1]).tolist()[0] for i in range(3)] == expected


def test_uniform_takes_the_seed_as_key_and_the_position_as_counter() -> None:
    seed = 0x299F31D0A4093822
    (first, second, *_) = philox4x32(make_array([[17, 0, 0, 0]]), make_array([[0xA4093822, 0x299F31D0]]))[0].tolist()
    expected = ((first >> 5) * 2**26 + (second >> 6)) / 2**53
    assert uniform(np.array([seed], dtype=np.uint64), np.array([17])).tolist() == [expected]
