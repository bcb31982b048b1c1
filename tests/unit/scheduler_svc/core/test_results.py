"""A step's result is applied as a whole or not at all."""

import math
import pickle
from dataclasses import replace

import numpy as np
import pytest

from scheduler_svc.core.beam_search import BeamParameters, Candidates
from scheduler_svc.core.fault_isolation import LOSSES_BEFORE_TRIALS, LOSSES_ON_TRIAL
from scheduler_svc.core.request import Request
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step import ClientEvents, SampleLogprobs, StepResult
from tests.support.core_driver import CLIENT, Driver, make_config, make_request
from tests.support.logprobs import Line, columns_of

ENOUGH = LOSSES_BEFORE_TRIALS + LOSSES_ON_TRIAL


def with_logprobs(request: Request, count: int) -> Request:
    return replace(request, sampling=replace(request.sampling, logprobs=count))


def make_driver(num_steps: int) -> Driver:
    """Plain requests, some with log probabilities, best of three, and beams, after some steps; one more was aborted
    with two steps in flight."""
    driver = Driver(make_config(max_num_seqs=24, num_blocks=100), max_in_flight=2)
    for request in (
        make_request(0, max_tokens=3, stop=frozenset({7})),
        make_request(1, max_tokens=9, num_sequences=2),
        with_logprobs(make_request(2, max_tokens=9), 1),
        make_request(3, max_tokens=8, num_sequences=3, num_returned=1),
        make_request(4, max_tokens=8, num_sequences=2, beam=BeamParameters(2), stop=frozenset({3})),
        make_request(5, max_tokens=40),
    ):
        driver.submit(request)
    driver.run_steps(num_steps)
    while driver.plan() is not None:
        pass
    driver.scheduler.abort(make_request(5).key)
    return driver


def state_of(scheduler: Scheduler) -> bytes:
    """All of the scheduler's state, with shared objects."""
    return pickle.dumps(scheduler)


def with_tokens(result: StepResult, token_ids: np.ndarray) -> StepResult:
    return replace(result, token_ids=token_ids)


def with_lines(result: StepResult, first: Line) -> StepResult:
    """Gives row 3, which may have a likely token, this line, and lines without one to the other rows."""
    columns = columns_of([first, *[Line(-1.0)] * 3])
    return replace(result, logprobs=SampleLogprobs(np.array([3, 4, 5, 6]), columns))


def with_first_token(result: StepResult, token_id: int) -> StepResult:
    return with_tokens(result, np.array([token_id, *result.token_ids[1:].tolist()], np.int64))


def with_candidates(result: StepResult, token_ids: list[int], logprobs: list[float]) -> StepResult:
    return replace(result, candidates=dict.fromkeys(result.candidates, Candidates(token_ids, logprobs)))


def with_logprobs_of(result: StepResult, *samples: int, line: Line | None = None) -> StepResult:
    columns = columns_of([line or Line(-1.0)] * len(samples))
    return replace(result, logprobs=SampleLogprobs(np.array(samples), columns))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: replace(r, step_id=9), "the oldest step in flight is"),
        (lambda r: replace(r, step_id=r.step_id + 1), "the oldest step in flight is"),
        (lambda r: with_tokens(r, r.token_ids[1:]), "sampled 10 rows, its result has 9 tokens"),
        (lambda r: with_tokens(r, r.token_ids - 60), r"sampled tokens from -60 to -?\d+; they are in \[0, 2\*\*31\)"),
        (lambda r: with_first_token(r, -1), r"sampled tokens from -1 to "),
        (lambda r: with_first_token(r, 2**31), r"to 2147483648; they are in \[0, 2\*\*31\)"),
        (lambda r: with_tokens(r, r.token_ids * 1.0), "are float64, not integers"),
        (lambda r: with_tokens(r, r.token_ids.reshape(1, -1)), "sampled 10 rows"),
        (lambda r: replace(r, logprobs=None), r"no log probabilities of rows \[3, 4, 5, 6\]"),
        (lambda r: with_logprobs_of(r, 0, 3, 4, 5, 6), r"log probabilities of rows \[0\], which did not request them"),
        (lambda r: with_logprobs_of(r, -1, 4, 5, 6), r"samples \[-1, 4, 5, 6\] out of 10, not rising"),
        (lambda r: with_logprobs_of(r, 3, 4, 4, 6), r"samples \[3, 4, 4, 6\] out of 10, not rising"),
        (lambda r: with_logprobs_of(r, 3, 4, 6, 5), r"samples \[3, 4, 6, 5\] out of 10, not rising"),
        (lambda r: with_logprobs_of(r, 3, 4, 5, 10), r"samples \[3, 4, 5, 10\] out of 10"),
        (lambda r: with_logprobs_of(r, 3, 4, 5, 6, line=Line(math.nan)), "is not a number"),
        (lambda r: with_logprobs_of(r, 3, 4, 5, 6, line=Line(math.inf)), "is not a number"),
        (
            lambda r: with_logprobs_of(r, 3, 4, 5, 6, line=Line(-1.0, 1, [1], [-1.0])),
            r"rows \[4, 5, 6\] report \[1, 1, 1\] likely tokens in step 3; they requested \[0, 0, 0\]",
        ),
        (lambda r: with_lines(r, Line(-1.0, 1, [1], [math.inf])), "is not a number"),
        (lambda r: with_lines(r, Line(-1.0, 1, [1], [math.nan])), "is not a number"),
        (lambda r: with_logprobs_of(r, 3, 4, 5, 6, line=Line(-1.0, 1, [1, 2], [-1.0])), "not of one length"),
        (lambda r: replace(r, logprobs=SampleLogprobs(np.array([3, 4, 5]), r.logprobs.columns)), "not of one length"),
        (lambda r: replace(r, failures={23: "NaN"}), r"reports rows \[23\], which do not sample"),
        (lambda r: replace(r, candidates={}), "no candidates of row 7"),
        (lambda r: with_candidates(r, [1, 2], [-1.0]), "2 candidates of row 7"),
        (lambda r: with_candidates(r, [1, 2], [-1.0, -0.5]), "not in order"),
        (lambda r: with_candidates(r, [1], [math.nan]), "not in order"),
        (lambda r: with_candidates(r, [1], [math.inf]), "not in order"),
        (lambda r: with_candidates(r, [], []), "no candidates of row 7"),
        (lambda r: with_candidates(r, [1, -1], [-1.0, -2.0]), r"a candidate of row 7 outside of \[0, 2\*\*31\)"),
        (lambda r: with_candidates(r, [1, 2**31], [-1.0, -2.0]), r"a candidate of row 7 outside of \[0, 2\*\*31\)"),
    ],
)
def test_what_is_wrong_is_named_and_changes_nothing(change, words):
    driver = make_driver(2)
    result = driver.results[0]
    assert result is not None
    before = state_of(driver.scheduler)
    with pytest.raises(ValueError, match=words):
        driver.scheduler.apply(change(result), 0.0)
    assert state_of(driver.scheduler) == before


def test_the_greatest_token_and_impossible_ones_are_taken():
    driver = make_driver(2)
    result = driver.results[0]
    assert result is not None
    result = with_lines(with_first_token(result, 2**31 - 1), Line(-math.inf, 1, [1], [-math.inf]))
    assert driver.scheduler.apply(with_candidates(result, [0, 2**31 - 1], [-1.0, -math.inf]), 0.0)
    driver.check()


def test_what_a_result_says_of_rows_that_were_released_since_is_not_looked_at():
    driver = make_driver(2)
    result = driver.results[0]
    assert result is not None
    driver.scheduler.abort(make_request(2).key)
    driver.scheduler.abort(make_request(4).key)
    assert driver.scheduler.apply(result, 0.0)
    driver.check()


@pytest.mark.parametrize("kind", ["handles", "finished", "completed", "failed"])
def test_events_of_one_kind_alone_are_events(kind):
    events = ClientEvents()
    assert events.is_empty
    getattr(events, kind).append(1)
    assert not events.is_empty


@pytest.mark.parametrize("num_valid", [0, 2])
def test_a_request_of_whose_step_the_worker_always_answers_nonsense_fails(num_valid):
    """The worker lives, and gives right answers to earlier chunks of the prompt."""
    driver = Driver(make_config(max_num_batched_tokens=8), max_in_flight=1)
    driver.submit(make_request(0, prompt_len=24, max_tokens=4))
    events, num_losses = {}, 0
    while not driver.failed:
        driver.run_steps(num_valid)
        driver.plan()
        result = driver.results.popleft()
        assert result is not None
        with pytest.raises(ValueError, match="its result has"):
            driver.scheduler.apply(with_tokens(result, np.append(result.token_ids, 1)), 0.0)
        num_losses += 1
        events = driver.crash(detail="one token too many")
    assert num_losses == ENOUGH
    (failure,) = events[CLIENT].failed
    assert failure.message.endswith("at the same step, in which only it ran: one token too many")


@pytest.mark.parametrize("num_sets", [1, 2, 12])
def test_a_stop_token_ends_only_the_sequences_that_have_it(num_sets):
    """However many different sets of stop tokens the rows have."""
    scheduler = Scheduler(make_config(max_num_seqs=12, num_blocks=100, max_num_batched_tokens=64))
    for handle in range(12):
        scheduler.submit(make_request(handle, stop=frozenset({100 + handle % num_sets})), 0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    events = scheduler.apply(StepResult(plan.step_id, np.full(12, 100)), 0.0)[CLIENT]
    assert [end.handle for end in events.finished] == list(range(0, 12, num_sets))
    for handle in range(12):
        scheduler.abort(make_request(handle).key)
    assert not scheduler.batch.rows.stop_sets
