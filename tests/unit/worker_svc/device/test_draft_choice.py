"""The choice of drafts to verify, and how often rows with useless drafts are examined."""

import numpy as np
import pytest

from worker_svc.device.draft_choice import Guesses, PayingDrafts
from worker_svc.device.pass_times import PassCosts, PassTimes
from worker_svc.sampling.drafters import OF_MODEL

FEW_ROWS_ARE_CHEAP = PassCosts([1, 2, 4, 8, 64], [10.0, 11.0, 13.0, 17.0, 73.0])
ROWS_ARE_ALL = PassCosts([1, 2], [10.0, 20.0])
FOLLOWED, PAIR = 2, 4
"""Kinds of drafts: a prediction that was followed for long, and two tokens that occurred before."""


def guesses_of(rows: list[int], kind: int, num_tokens: int = 7, length: int = 0) -> Guesses:
    of_rows = (np.array(rows), np.full(len(rows), kind), np.full(len(rows), num_tokens), np.full(len(rows), length))
    return Guesses(*of_rows)


def show(choice: PayingDrafts, guesses: Guesses, num_right: int, times: int) -> None:
    for _ in range(times):
        checked = np.maximum(guesses.num_tokens, 1)
        choice.record_outcomes(guesses, checked, np.minimum(num_right, checked))


def due(choice: PayingDrafts, num_rows: int, *, is_first: bool = False) -> np.ndarray:
    """The rows that the next pass examines."""
    if choice.begin_pass(num_rows, 0.0, is_first=is_first):
        return choice.are_due(np.arange(num_rows))
    return np.zeros(num_rows, np.bool_)


def test_one_row_gets_all_that_is_probable_and_less_of_what_is_not() -> None:
    choice = PayingDrafts(4, PassTimes(FEW_ROWS_ARE_CHEAP))
    assert choice.choose(guesses_of([0], FOLLOWED), 1).tolist() == [7]
    assert 0 < choice.choose(guesses_of([1], PAIR), 1)[0] < 3


@pytest.mark.parametrize(
    ("costs", "num_rows", "length"), [(FEW_ROWS_ARE_CHEAP, 60, 0), (ROWS_ARE_ALL, 1, 0)], ids=["full", "compute-bound"]
)
def test_where_a_draft_costs_as_much_as_a_token_there_is_none(costs: PassCosts, num_rows: int, length: int) -> None:
    choice = PayingDrafts(64, PassTimes(costs))
    assert not choice.choose(guesses_of(list(range(num_rows)), FOLLOWED, length=length), num_rows).any()


def test_drafts_of_long_contexts_cost_what_reading_these_costs() -> None:
    def num_drafts(context_s: float, draft_context_s: float, length: int) -> int:
        costs = PassCosts(FEW_ROWS_ARE_CHEAP.num_rows, FEW_ROWS_ARE_CHEAP.seconds, context_s, draft_context_s)
        return int(PayingDrafts(1, PassTimes(costs)).choose(guesses_of([0], PAIR, length=length), 1)[0])

    assert num_drafts(0.1, 0.1, 1) > num_drafts(0.1, 0.1, 1000) == 0
    assert num_drafts(0.1, 0.001, 1000) > num_drafts(0.0, 0.0, 1000)


def test_of_several_rows_those_get_drafts_whose_guesses_were_right() -> None:
    choice = PayingDrafts(3, PassTimes(FEW_ROWS_ARE_CHEAP))
    show(choice, guesses_of([0], FOLLOWED), 7, 10)
    show(choice, guesses_of([1], FOLLOWED), 0, 10)
    counts = choice.choose(guesses_of([0, 1], FOLLOWED), 2)
    assert counts[0] == 7
    assert counts[1] == 0
    choice.enter(1)
    # Results of all rows count for a new row.
    assert choice.choose(guesses_of([1], FOLLOWED), 1)[0] > 0


def test_a_row_that_does_not_pay_is_looked_at_less_and_less_until_its_guesses_are_right() -> None:
    choice = PayingDrafts(1, PassTimes(PassCosts([1, 2], [1.5e-3, 1.8e-3])))
    guesses = guesses_of([0], PAIR)
    show(choice, guesses, 0, 40)
    looks: list[int] = []
    for number in range(200):
        if due(choice, 1)[0]:
            looks.append(number)
            assert choice.choose(guesses, 1).tolist() == [0]
            choice.record_outcomes(guesses, np.array([1]), np.array([0]))
    assert len(looks) < 15
    assert np.diff(looks).max() == np.diff(looks)[-1] == 32
    num_looks = 0
    for _ in range(1000):
        if due(choice, 1)[0]:
            num_looks += 1
            if choice.choose(guesses, 1)[0]:
                break
            choice.record_outcomes(guesses, np.array([1]), np.array([1]))
    assert num_looks < 20
    assert due(choice, 1)[0]


def test_what_drafts_save_is_spent_on_looking_where_others_do_not_pay() -> None:
    def num_looks(*, with_savings: bool) -> int:
        choice = PayingDrafts(2, PassTimes(PassCosts([1, 2, 64], [1e-3, 1.1e-3, 2e-3])))
        count = 0
        for _ in range(300):
            is_due = due(choice, 2)
            if is_due[1]:
                count += 1
                choice.found_nothing([1], [1])
            if with_savings:
                assert choice.choose(guesses_of([0], FOLLOWED), 2).all()
        return count

    assert num_looks(with_savings=False) < 40
    assert num_looks(with_savings=True) > 280


def test_several_rows_have_no_more_drafts_than_what_is_left_of_the_step_or_twice_their_pass_have_time_for() -> None:
    costs = PassCosts([1, 64], [1e-3, 3e-3])
    counts: list[int] = []
    for left_s in (0.0, 4e-3, 1.0):
        choice = PayingDrafts(64, PassTimes(costs))
        choice.begin_pass(16, left_s, is_first=False)
        counts.append(int(choice.choose(guesses_of(list(range(16)), FOLLOWED), 16).sum()))
    plain_s = float(costs.seconds_for(np.array([16]))[0])
    assert 0 < counts[0] < counts[1] < counts[2] == 7 * 16
    for count, limit_s in zip(counts, (2 * plain_s, 4e-3), strict=False):
        assert PassTimes(costs).with_drafts(16, np.array([count]), 16) <= limit_s
    # A row by itself delays no other.
    assert PayingDrafts(1, PassTimes(PassCosts([1, 2], [1e-3, 1.2e-3]))).choose(guesses_of([0], FOLLOWED), 1) == [7]


@pytest.mark.parametrize(("num_rows", "is_looked_at"), [(1, True), (60, False)])
def test_no_row_is_looked_at_where_right_drafts_would_not_pay(num_rows: int, is_looked_at: bool) -> None:
    choice = PayingDrafts(64, PassTimes(FEW_ROWS_ARE_CHEAP))
    assert due(choice, num_rows).any() == is_looked_at


def asked(rows: list[int]) -> Guesses:
    return guesses_of(rows, OF_MODEL)


def test_a_draft_model_guesses_what_pays_for_its_own_passes_too() -> None:
    cheap, dear = (
        PayingDrafts(64, PassTimes(FEW_ROWS_ARE_CHEAP), PassCosts([1, 8], [each, each])) for each in (1.0, 9.0)
    )
    for choice in (cheap, dear):
        show(choice, asked([0]), 5, 10)
        # Once there are guesses, they are verified in any case.
        assert choice.choose(asked([0]), 1)[0] > 3
    assert cheap.plan(asked([0]), 1, 1)[0] > 3
    assert dear.plan(asked([0]), 1, 1)[0] == 0
    # A few right guesses do not pay for a pass of 60 rows.
    assert not cheap.plan(asked(list(range(60))), 60, 60).any()


def test_a_draft_model_that_is_wrong_takes_a_small_part_of_the_time_until_it_is_right() -> None:
    pass_s, of_model_s = 10.0, 2.0
    choice = PayingDrafts(1, PassTimes(PassCosts([1, 2], [pass_s, 10.5])), PassCosts([1, 8], [of_model_s, 2.5]))
    show(choice, asked([0]), 0, 40)
    num_looks = 0
    for _ in range(2000):
        choice.begin_pass(1, 0.0, is_first=False)
        counts = choice.plan(asked([0]), 1, 1)
        assert counts[0] <= 1
        if counts[0]:
            num_looks += 1
            choice.record_outcomes(guesses_of([0], OF_MODEL, num_tokens=1), np.array([1]), np.array([0]))
    assert 0 < num_looks * of_model_s < 0.01 * 2000 * pass_s
    show(choice, asked([0]), 7, 20)
    assert choice.plan(asked([0]), 1, 1)[0] > 3
