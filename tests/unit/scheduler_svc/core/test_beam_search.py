"""The search computed by hand, from small tables of probabilities; and searches in the scheduler."""

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from scheduler_svc.core.beam_search import (
    BeamParameters,
    BeamSearch,
    Candidates,
    Continuation,
    EarlyStopping,
    NoCandidatesError,
    num_candidates,
)
from scheduler_svc.core.request import Request
from tests.support.core_driver import CLIENT, Driver, candidates_after, make_config, make_request

STOP = 9
BANNED = 0.0


def make_search(width: int, max_tokens: int, length_penalty: float = 1.0, early_stopping=EarlyStopping.FALSE):
    return BeamSearch(BeamParameters(width, length_penalty, early_stopping), max_tokens, frozenset({STOP}))


def make_candidates(probabilities: Mapping[int, float]) -> Candidates:
    """Token id -> probability, most likely first."""
    return Candidates(
        list(probabilities), [math.log(each) if each > BANNED else -math.inf for each in probabilities.values()]
    )


def make_all_candidates(*tables: Mapping[int, float]) -> list[Candidates]:
    return [make_candidates(table) for table in tables]


def assert_continues(continuation: Continuation, parent: int, token_id: int, rank: int, probability: float) -> None:
    assert (continuation.parent, continuation.token_id, continuation.place) == (parent, token_id, rank)
    assert continuation.cumulative_logprob == pytest.approx(math.log(probability))


def texts(search: BeamSearch) -> list[tuple[int, ...]]:
    return [each.token_ids for each in search.best()]


class Uncopied(list[int]):
    """Output tokens of a beam that becomes no hypothesis."""

    def __iter__(self):
        raise AssertionError("the output is copied")


def test_two_beams_over_three_steps_give_what_a_pencil_gives():
    search = BeamSearch(BeamParameters(2), max_tokens=3, stop_token_ids=frozenset({STOP}))
    assert search.scores == [0.0]

    # The stop token is third, outside the two best: it finishes nothing.
    step = search.advance(make_all_candidates(*[{1: 0.5, 2: 0.3, STOP: 0.2}] * 2), [[], []])
    assert_continues(step.continuations[0], 0, 1, 0, 0.5)
    assert_continues(step.continuations[1], 0, 2, 1, 0.3)
    assert (len(step.continuations), step.finished) == (2, [])

    # 1-9: 0.30, ends; 2-3: 0.27; 1-3: 0.20; 2-9: 0.03
    step = search.advance(make_all_candidates({STOP: 0.6, 3: 0.4}, {3: 0.9, STOP: 0.1}), [[1], Uncopied([2])])
    assert_continues(step.continuations[0], 1, 3, 0, 0.27)
    assert_continues(step.continuations[1], 0, 3, 1, 0.20)
    (short,) = step.finished
    assert (short.token_ids, short.parent, short.place, short.ended_by_token) == ((1, STOP), 0, 0, True)
    assert (short.cumulative_logprob, short.score) == pytest.approx((math.log(0.3), math.log(0.3) / 2))
    assert search.best() == [short]

    # 1-3-4: 0.18, log / 3 = -0.57; 2-3-4: 0.135, log / 3 = -0.67, is worse than 1-9: log / 2 = -0.60
    step = search.advance(make_all_candidates({4: 0.5, STOP: 0.5}, {4: 0.9, STOP: 0.1}), [Uncopied([2, 3]), [1, 3]])
    assert not step.continuations
    (long,) = step.finished
    assert (long.token_ids, long.parent, long.place, long.ended_by_token) == ((1, 3, 4), 1, 0, False)
    assert long.score == pytest.approx(math.log(0.18) / 3)
    assert search.best() == [long, short]
    assert search.scores == []


def test_with_nothing_allowed_the_search_ends_with_what_is_finished():
    search = make_search(width=2, max_tokens=4)
    search.advance(make_all_candidates(*[{1: 0.6, STOP: 0.4}] * 2), [[], []])
    step = search.advance(make_all_candidates({3: BANNED}, {}), [[1], [1]])
    assert (step.continuations, step.finished, texts(search)) == ((), [], [(STOP,), (STOP,)])


def test_with_nothing_allowed_and_nothing_finished_the_search_fails():
    with pytest.raises(NoCandidatesError):
        make_search(width=2, max_tokens=4).advance(make_all_candidates({1: BANNED}, {1: BANNED}), [[], []])


@pytest.mark.parametrize("length_penalty", [1e308, 400.0, -400.0, -1e308])
def test_a_length_penalty_beyond_all_floats_ends_in_hypotheses(length_penalty):
    search = make_search(2, 3, length_penalty, EarlyStopping.NEVER)
    for length in range(3):
        search.advance(make_all_candidates(*[{1: 0.6, STOP: 0.4}] * 2), [[1] * length] * 2)
    assert len(search.best()) == 2
    assert not any(math.isnan(each.score) for each in search.best())
    # 1 to any power is 1.
    search = make_search(2, 1, length_penalty)
    search.advance(make_all_candidates(*[{1: 0.6, STOP: 0.4}] * 2), [[]] * 2)
    assert [each.score for each in search.best()] == [math.log(0.6), math.log(0.4)]


@pytest.mark.parametrize(("width", "num_stops", "expected"), [(1, 0, 2), (4, 0, 8), (4, 1, 8), (4, 2, 12)])
def test_beams_report_enough_for_every_stop_token_to_be_left_out(width, num_stops, expected):
    assert num_candidates(width, num_stops) == expected


@pytest.mark.parametrize(
    ("parameters", "message"),
    [((0,), "width is 0"), ((2, math.nan), "length_penalty is nan"), ((2, -math.inf), "length_penalty is -inf")],
)
def test_parameters_that_make_no_sense_are_refused(parameters, message):
    with pytest.raises(ValueError, match=message):
        BeamParameters(*parameters)


def test_a_search_for_no_tokens_is_refused():
    with pytest.raises(ValueError, match="max_tokens is 0"):
        make_search(width=2, max_tokens=0)


@pytest.mark.parametrize(
    ("candidates", "outputs", "message"),
    [
        ([Candidates([1], [-1.0])], [[], []], "candidates of 1 and outputs of 2 beams; width is 2"),
        ([Candidates([1], [-1.0])] * 2, [[]], "candidates of 2 and outputs of 1 beams; width is 2"),
        ([Candidates([1], [-1.0])] * 2, [[1], [1, 2]], r"\[1, 2\] tokens"),
        ([Candidates([1, 2], [-1.0])] * 2, [[], []], "shorter"),
    ],
)
def test_input_that_does_not_describe_the_beams_is_refused(candidates, outputs, message):
    with pytest.raises(ValueError, match=message):
        make_search(width=2, max_tokens=4).advance(candidates, outputs)


def make_beams(handle: int, width: int = 3, **options) -> Request:
    defaults: dict[str, Any] = {"prompt_len": 6, "max_tokens": 8, "num_returned": width}
    return make_request(handle, num_sequences=width, beam=BeamParameters(width), **(defaults | options))


def test_beams_wait_for_their_result_and_others_do_not():
    driver = Driver(make_config(), max_in_flight=2)
    driver.submit(make_beams(1, width=2))
    driver.submit(make_request(2, max_tokens=8))
    first, second = driver.plan(), driver.plan()
    assert first is not None
    assert second is not None
    assert first.samples[:, 0].tolist() == [0, 1, 2]
    # The search has no tokens yet; the other request continues.
    assert second.rows.tolist() == [2]
    driver.deliver()
    third = driver.plan()
    assert third is not None
    assert third.rows.tolist() == [0, 1, 2]
    assert third.set_tokens[:, :2].tolist() == [[0, 6], [1, 6]]


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_beam_all_of_whose_tokens_are_banned_is_dropped_and_the_others_go_on(lost):
    driver = Driver(make_config(), max_in_flight=1)
    request = make_beams(1, width=3)
    driver.submit(request)
    driver.run_steps(2)
    group = driver.scheduler.running.get(request.key)
    assert group.beams is not None
    beams = list(group.beams.beams)
    search = copy.deepcopy(group.beams.search)
    candidates = [candidates_after(each.token_ids, 6) for each in beams]
    candidates[lost] = Candidates(range(6), [-math.inf] * 6)
    expected = search.advance(candidates, [each.output for each in beams])
    banned = list(beams[lost].token_ids)
    driver.device.candidates = lambda tokens, count: (
        candidates[lost] if tokens == banned else candidates_after(tokens, count)
    )
    driver.run_steps(1)
    assert lost not in {each.parent for each in expected.continuations}
    assert group.beams.search.scores == search.scores
    driver.run_until_idle()
    assert driver.finished == {1}
    assert driver.scheduler.batch.blocks.pool.num_used == 0


@pytest.mark.parametrize(("constraint", "reason"), [(b"", "NON_FINITE_LOGITS"), (b"a", "INVALID_SAMPLING")])
def test_a_search_without_any_token_left_fails_as_a_sampled_row_does(constraint, reason):
    driver = Driver(make_config(), max_in_flight=1)
    driver.device.candidates = lambda tokens, count: Candidates(range(count), [-math.inf] * count)
    driver.submit(make_beams(1, width=3, constraint=constraint))
    driver.plan()
    (failure,) = driver.deliver()[CLIENT].failed
    assert failure.reason == reason
    assert failure.message.startswith("every candidate of every beam is banned")
    driver.check()


def test_log_probabilities_are_kept_of_the_best_hypotheses_alone():
    """Longer texts score better, so almost every step finishes one that is better than all before."""
    driver = Driver(make_config())
    request = make_beams(1, width=2, max_tokens=60, stop=frozenset(range(20)))
    beam = BeamParameters(2, length_penalty=8.0, early_stopping=EarlyStopping.NEVER)
    driver.submit(replace(request, beam=beam, sampling=replace(request.sampling, logprobs=1)))
    num_finished = most = 0
    (group,) = driver.scheduler.groups()
    assert group.beams is not None
    while driver.scheduler.num_live:
        before = group.beams.search.best()
        driver.run_steps(1)
        num_finished += len({*group.beams.search.best()} - {*before})
        most = max(most, len(group.beams.logprobs))
    assert num_finished > 10
    assert most == 2
