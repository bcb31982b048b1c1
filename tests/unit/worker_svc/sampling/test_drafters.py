"""Drafts of each drafter, and where a drafter continues after wrong ones."""

import numpy as np
import pytest

from worker_svc.sampling.drafters import (
    FollowedPrediction,
    NgramDrafter,
    PredictedTokens,
    PredictionDrafter,
    RowText,
    SharedDrafter,
)

PROMPT = [7, 7, 7]
PREDICTED = list(range(100, 160))


def followed_by(predicted: list[int]) -> FollowedPrediction:
    return FollowedPrediction(PredictedTokens(np.array(predicted, np.int32)), len(PROMPT))


def draft(followed: FollowedPrediction, output: list[int], max_drafts: int = 3) -> list[int]:
    text = RowText(np.array([*PROMPT, *output], np.int32), followed)
    return PredictionDrafter().draft(text, max_drafts).token_ids.tolist()


@pytest.fixture
def followed() -> FollowedPrediction:
    return followed_by(PREDICTED)


def test_a_prediction_is_drafted_from_its_start_to_its_end(followed: FollowedPrediction) -> None:
    assert draft(followed, []) == [100, 101, 102]
    assert draft(followed, PREDICTED[:1]) == [101, 102, 103]
    assert draft(followed, PREDICTED[:58]) == [158, 159]
    assert draft(followed, PREDICTED) == []
    assert draft(followed, [*PREDICTED, 5]) == []


def test_behind_a_token_that_is_another_one_the_prediction_goes_on(followed: FollowedPrediction) -> None:
    output = PREDICTED[:10]
    assert draft(followed, output) == [110, 111, 112]
    output = [*output, 5]
    assert draft(followed, output) == []
    assert draft(followed, [*output, 111]) == [112, 113, 114]


def test_behind_tokens_that_are_left_out_or_added_it_goes_on_from_where_they_are(followed: FollowedPrediction) -> None:
    output = [*PREDICTED[:10], 120, 121]
    assert draft(followed, output) == [122, 123, 124]
    output += [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    assert draft(followed, output) == []
    assert draft(followed, [*output, 122, 123]) == [124, 125, 126]


def test_of_places_with_the_same_tokens_it_takes_the_one_that_is_nearest() -> None:
    record = [1, 2, 3, 4]
    followed = followed_by([*record, 50, *record, 60, *record, 70])
    assert draft(followed, [*record, 50, *record]) == [60, 1, 2]
    # One token differs, and the prediction continues after it.
    assert draft(followed, [*record, 50, *record, 9, *record]) == [70]


def test_the_drafts_are_those_of_the_tokens_however_they_came(followed: FollowedPrediction) -> None:
    rng = np.random.default_rng(5)
    output = [token if rng.random() > 0.15 else int(rng.integers(20)) for token in PREDICTED]
    for end in range(len(output)):
        assert draft(followed, output[:end]) == draft(followed.anew(), output[:end])


def test_what_the_output_has_instead_is_expected_in_all_of_the_rest() -> None:
    old, new, between = [50, 51, 52], [60, 61], list(range(1, 20))
    followed = followed_by([*between, *old, *between, *old, 96, 97, *old, 98])
    output = [*between, *new]
    assert draft(followed, output) == []
    assert draft(followed, [*output, 1], 30) == [*between[1:], *new, 96, 97, *new, 98]
    assert draft(followed.anew(), between) == old


def test_a_single_token_is_replaced_nowhere_else() -> None:
    comma, stop = 90, 91
    followed = followed_by([1, 2, comma, 3, 4, comma, 5])
    assert draft(followed, [1, 2, stop, 3], 4) == [4, comma, 5]


def test_a_row_without_a_prediction_has_no_drafts_of_it() -> None:
    text = RowText(np.array(PROMPT, np.int32))
    assert not len(PredictionDrafter().draft(text, 4).token_ids)


def test_the_longest_and_last_occurrence_is_what_follows() -> None:
    def ngram(*token_ids: int, max_drafts: int = 2) -> list[int]:
        return NgramDrafter().draft(RowText(np.array(token_ids, np.int32)), max_drafts).token_ids.tolist()

    assert ngram(1, 2, 3, 4, 9, 2, 3, 5, 8, 1, 2, 3) == [4, 9]
    assert ngram(4, 4, 4, max_drafts=3) == [4, 4, 4]
    assert ngram(1, 2, 3) == []


def test_earlier_outputs_are_guesses_within_their_scope_only_and_the_oldest_are_forgotten() -> None:
    drafter = SharedDrafter()

    def end(output: list[int], scope: bytes = b"a") -> None:
        drafter.add_output(RowText(np.array([*PROMPT, *output], np.int32), scope=scope), len(PROMPT))

    def guess(output: list[int], scope: bytes = b"a") -> list[int]:
        return drafter.draft(RowText(np.array([*PROMPT, *output], np.int32), scope=scope), 3).token_ids.tolist()

    end(PREDICTED)
    end([8, *PREDICTED[5:20]])
    end([])
    end(list(range(500, 520)), scope=b"")
    assert guess([8]) == [105, 106, 107]
    assert guess([1, 2, *PREDICTED[17:20]]) == []
    assert guess([1, *PREDICTED[16:20]]) == [120, 121, 122]
    assert guess([1, *PREDICTED[50:60]]) == []
    assert guess([1, *PREDICTED[:57]]) == [157, 158, 159]
    assert guess([8], scope=b"b") == guess([500, 501, 502, 503, 504], scope=b"") == []
    for number in range(5):
        end([2000 + number] * 4000)
    assert guess([1, *PREDICTED[16:20]]) == []
    assert guess([2004, 2004, 2004, 2004, 2004])
    for number in range(64):
        end(PREDICTED, scope=bytes([number]))
    assert not guess([2004, 2004, 2004, 2004, 2004])
    assert guess([1, *PREDICTED[16:20]], scope=bytes([63]))
