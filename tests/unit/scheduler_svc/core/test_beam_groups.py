"""Beam searches in the scheduler: what depends on their results, what does not, and what interrupts them."""

import copy
import math
from dataclasses import replace

import pytest

from scheduler_svc.core.beam_search import BeamParameters, Candidates, EarlyStopping
from scheduler_svc.core.config import PreemptionMode
from scheduler_svc.core.errors import RefusedError
from scheduler_svc.core.request import EmittedSequence, Request
from scheduler_svc.core.step import StepResult
from tests.support.core_driver import CLIENT, Driver, candidates_after, expected_output, make_config, make_request


def make_beams(handle: int, width: int = 3, **options) -> Request:
    defaults = {"prompt_len": 6, "max_tokens": 8, "num_returned": width}
    return make_request(handle, num_sequences=width, beam=BeamParameters(width), **(defaults | options))


def assert_finishes(driver: Driver, *requests: Request) -> None:
    driver.run_until_idle()
    for request in requests:
        for index in range(request.num_returned):
            assert driver.samples[request.key.handle, index] == expected_output(request, index)
    assert driver.scheduler.batch.blocks.pool.num_used == 0


def test_beams_wait_for_their_result_and_others_do_not():
    driver = Driver(make_config(), max_in_flight=2)
    driver.submit(make_beams(1, width=2))
    driver.submit(make_request(2, max_tokens=8))
    first, second = driver.plan(), driver.plan()
    assert first is not None
    assert second is not None
    assert first.samples[:, 0].tolist() == [0, 1, 2]
    # The search has no tokens yet; the other request goes on.
    assert second.rows.tolist() == [2]
    driver.deliver()
    third = driver.plan()
    assert third is not None
    assert third.rows.tolist() == [0, 1, 2]
    assert third.set_tokens[:, :2].tolist() == [[0, 6], [1, 6]]


def test_the_prompt_of_a_search_is_computed_once():
    driver = Driver(make_config())
    request = make_beams(1, width=4, prompt_len=10, max_tokens=5)
    driver.submit(request)
    assert_finishes(driver, request)
    assert driver.device.num_computed == 10 + 4 * 4


@pytest.mark.parametrize("early_stopping", EarlyStopping)
def test_searches_of_all_widths_in_one_batch(early_stopping):
    driver = Driver(make_config(max_num_seqs=32, num_blocks=200))
    requests = [
        make_request(
            width,
            prompt_len=5 + width,
            max_tokens=12,
            stop=frozenset({3, 11}),
            num_sequences=width,
            num_returned=width,
            beam=BeamParameters(width, 0.5, early_stopping),
        )
        for width in range(1, 7)
    ]
    for request in requests:
        driver.submit(request)
    assert_finishes(driver, *requests)


def test_a_search_in_a_pool_that_holds_no_other_takes_turns():
    driver = Driver(make_config(num_blocks=14, block_size=4, num_host_blocks=30, max_num_seqs=12))
    requests = [make_beams(handle, width=4, prompt_len=7, max_tokens=8) for handle in range(5)]
    for request in requests:
        driver.submit(request)
    assert_finishes(driver, *requests)


def test_beams_that_are_computed_again_in_several_steps_wait_for_each_other():
    """Interrupted once more when only some of them have their candidates: those come again, since the tokens before
    them do."""
    driver = Driver(make_config(max_num_batched_tokens=10, block_size=4, preemption_mode=PreemptionMode.RECOMPUTE), 1)
    request = make_beams(1, width=3, prompt_len=17, max_tokens=6)
    driver.submit(request)
    for _ in range(5):
        driver.plan()
        driver.deliver()
    interrupted = 0
    for _ in range(40):
        group = next(iter(driver.scheduler.groups()), None)
        if group is None:
            break
        assert group.beams is not None
        if 0 < len(group.beams.candidates) < 3 and interrupted < 3:
            interrupted += 1
            assert driver.scheduler.preempt(request.key, driver.clock)
            assert not group.beams.candidates
        elif group.request.key in driver.scheduler.running and interrupted == 0:
            driver.scheduler.preempt(request.key, driver.clock)
        driver.plan()
        driver.deliver()
    assert interrupted
    assert_finishes(driver, request)


def test_an_abort_of_one_hypothesis_changes_nothing():
    driver = Driver(make_config())
    request = make_beams(1)
    driver.submit(request)
    driver.plan()
    assert driver.scheduler.abort_sequence(request.key, 0)
    assert_finishes(driver, request)


def test_a_result_without_candidates_is_refused():
    driver = Driver(make_config())
    driver.submit(make_beams(1))
    plan = driver.scheduler.schedule(0.0)
    assert plan is not None
    bare = StepResult(plan.step_id, driver.device.run(plan).token_ids)
    with pytest.raises(ValueError, match="the result of step 1 has no candidates of row 0"):
        driver.scheduler.apply(bare, 0.0)


def test_a_search_that_contradicts_itself_is_refused():
    driver = Driver(make_config())
    with pytest.raises(RefusedError, match="beam_width is 3, best_of is 2: both must be equal"):
        driver.submit(make_request(1, num_sequences=2, beam=BeamParameters(3)))
    emitted = Request(
        make_beams(2).key,
        "r",
        [1],
        make_beams(2).sampling,
        4,
        num_sequences=1,
        beam=BeamParameters(1),
        emitted=[EmittedSequence((1,))],
    )
    with pytest.raises(RefusedError, match="cannot go on from emitted tokens"):
        driver.submit(emitted)


def fail_rows(driver: Driver, *rows: int) -> None:
    """The oldest result says that these rows had no finite logits, as a worker says where no token is allowed."""
    result = driver.results[0]
    assert result is not None
    candidates = {row: each for row, each in result.candidates.items() if row not in rows}
    driver.results[0] = replace(result, candidates=candidates, failures=dict.fromkeys(rows, "nothing is finite"))


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_beam_whose_row_fails_is_dropped_and_the_others_go_on(lost):
    driver = Driver(make_config(), max_in_flight=1)
    request = make_beams(1, width=3)
    driver.submit(request)
    driver.run_steps(2)
    group = driver.scheduler.running.get(request.key)
    assert group.beams is not None
    beams = list(group.beams.beams)
    search = copy.deepcopy(group.beams.search)
    candidates = [candidates_after(each.token_ids, 6) for each in beams]
    candidates[lost] = Candidates((), ())
    expected = search.advance(candidates, [each.output for each in beams])
    driver.plan()
    row = beams[lost].row
    assert row is not None
    fail_rows(driver, row)
    driver.deliver()
    assert lost not in {each.parent for each in expected.continuations}
    assert group.beams.search.scores == search.scores
    driver.run_until_idle()
    assert driver.finished == {1}
    assert driver.scheduler.batch.blocks.pool.num_used == 0


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_a_search_fails_alone_once_all_its_beams_do(num_steps):
    driver = Driver(make_config(), max_in_flight=1)
    search, other = make_beams(1, width=3), make_request(2, max_tokens=8)
    driver.submit(search)
    driver.submit(other)
    driver.run_steps(num_steps)
    driver.plan()
    fail_rows(driver, 0, 1, 2)
    (failure,) = driver.deliver()[CLIENT].failed
    assert (failure.key, failure.reason, failure.message) == (search.key, "NON_FINITE_LOGITS", "nothing is finite")
    assert_finishes(driver, other)


def test_candidates_that_are_all_banned_fail_a_search_as_failed_rows_do():
    driver = Driver(make_config(), max_in_flight=1)
    driver.device.candidates = lambda tokens, count: Candidates([1, 2, 3], [-math.inf] * 3)
    driver.submit(make_beams(1, width=3))
    driver.plan()
    (failure,) = driver.deliver()[CLIENT].failed
    assert failure.reason == "NON_FINITE_LOGITS"
    assert failure.message.startswith("every candidate of every beam is banned")
    driver.check()
