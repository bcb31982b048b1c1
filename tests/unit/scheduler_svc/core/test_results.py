"""A step's result is taken in whole or not at all."""

import math
import pickle
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.core.beam_search import BeamParameters, Candidates
from scheduler_svc.core.fault_isolation import LOSSES_BEFORE_TRIALS, LOSSES_ON_TRIAL
from scheduler_svc.core.request import Request
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step import SampleLogprobs, StepResult
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
    """All that the scheduler knows, and what of it is shared."""
    return pickle.dumps(scheduler)


ids = st.one_of(st.integers(-2, 60), st.sampled_from([-(2**40), 2**31 - 1, 2**31, 2**40]))
values = st.sampled_from([0.0, -1.0, -0.5, -math.inf, math.inf, math.nan, -1e300])
rows = st.integers(-1, 25)
# As columns hold them.
floats = values.filter(lambda value: not -math.inf < value < -1e30)
int32_ids = ids.filter(lambda value: abs(value) < 2**31)
positions = st.builds(Line, floats, st.integers(0, 3), st.lists(int32_ids, max_size=3), st.lists(floats, max_size=3))
candidates = st.builds(Candidates, st.lists(ids, max_size=4), st.lists(values, max_size=4))


@st.composite
def mutations(draw: st.DrawFn) -> Callable[[StepResult], StepResult]:
    """Something that drops, alters or extends one field of a result."""
    field = draw(st.sampled_from(["step_id", "token_ids", "logprobs", "failures", "candidates"]))
    if field == "step_id":
        by = draw(st.sampled_from([-1, 1, 2**60]))
        return lambda result: replace(result, step_id=result.step_id + by)
    if field == "token_ids":
        return draw(
            st.one_of(
                st.builds(lambda i, x: lambda r: with_tokens(r, changed(r.token_ids, i, x)), st.integers(0, 9), ids),
                st.builds(lambda x: lambda r: with_tokens(r, np.append(r.token_ids, x)), ids),
                st.just(lambda r: with_tokens(r, r.token_ids[:-1])),
                st.just(lambda r: with_tokens(r, r.token_ids.astype(float))),
                st.just(lambda r: with_tokens(r, r.token_ids.reshape(1, -1))),
            )
        )
    if field == "logprobs":
        samples = np.array(draw(st.lists(st.integers(-1, 11), max_size=4)), np.int64)
        reported = SampleLogprobs(samples, columns_of(draw(st.lists(positions, max_size=4))))
        return lambda result: replace(result, logprobs=reported)
    row, nth = draw(rows), draw(st.integers(0, 9))
    entry = {"failures": st.just("NaN"), "candidates": candidates}[field]
    added = draw(entry)

    def change(result: StepResult) -> StepResult:
        mapping = dict(getattr(result, field))
        known = list(mapping)
        if known and nth % 3 == 0:
            del mapping[known[nth % len(known)]]
        elif known and nth % 3 == 1:
            mapping[known[nth % len(known)]] = added
        else:
            mapping[row] = added
        return replace(result, **{field: mapping})

    return change


def with_tokens(result: StepResult, token_ids: np.ndarray) -> StepResult:
    return replace(result, token_ids=token_ids)


def with_candidates(result: StepResult, token_ids: list[int], logprobs: list[float]) -> StepResult:
    return replace(result, candidates=dict.fromkeys(result.candidates, Candidates(token_ids, logprobs)))


def with_logprobs_of(result: StepResult, *samples: int, line: Line | None = None) -> StepResult:
    columns = columns_of([line or Line(-1.0)] * len(samples))
    return replace(result, logprobs=SampleLogprobs(np.array(samples), columns))


def changed(array: np.ndarray, index: int, value: int) -> np.ndarray:
    array = array.copy()
    if len(array):
        array[index % len(array)] = value
    return array


@given(num_steps=st.integers(0, 5), changes=st.lists(mutations(), min_size=1, max_size=2))
def test_a_result_that_makes_no_sense_changes_nothing(num_steps, changes):
    driver = make_driver(num_steps)
    result = driver.results[0]
    assert result is not None
    for change in changes:
        result = change(result)
    before = state_of(driver.scheduler)
    try:
        driver.scheduler.apply(result, driver.clock)
    except ValueError:
        assert state_of(driver.scheduler) == before
    else:
        driver.results.popleft()
    driver.check()
    assert driver.scheduler.schedule(driver.clock) is None or len(driver.scheduler.in_flight) > 0
    driver.check()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: replace(r, step_id=9), "the oldest step in flight is"),
        (lambda r: with_tokens(r, r.token_ids[1:]), "sampled 10 rows, its result has 9 tokens"),
        (lambda r: with_tokens(r, r.token_ids - 60), r"sampled tokens from -60 to -?\d+; they are in \[0, 2\*\*31\)"),
        (lambda r: with_tokens(r, r.token_ids * 1.0), "are float64, not integers"),
        (lambda r: replace(r, logprobs=None), r"no log probabilities of rows \[3, 4, 5, 6\]"),
        (lambda r: with_logprobs_of(r, 0, 3, 4, 5, 6), r"log probabilities of rows \[0\], which did not request them"),
        (lambda r: with_logprobs_of(r, 3, 4, 6, 5), r"samples \[3, 4, 6, 5\] out of 10, not rising"),
        (lambda r: with_logprobs_of(r, 3, 4, 5, 10), r"samples \[3, 4, 5, 10\] out of 10"),
        (lambda r: with_logprobs_of(r, 3, 4, 5, 6, line=Line(math.nan)), "is not a number"),
        (lambda r: with_logprobs_of(r, 3, 4, 5, 6, line=Line(-1.0, 1, [1], [math.inf])), "report"),
        (lambda r: with_logprobs_of(r, 3, 4, 5, 6, line=Line(-1.0, 1, [1, 2], [-1.0])), "not of one length"),
        (lambda r: replace(r, failures={23: "NaN"}), r"reports rows \[23\], which do not sample"),
        (lambda r: replace(r, candidates={}), "no candidates of row 7"),
        (lambda r: with_candidates(r, [1, 2], [-1.0]), "2 candidates of row 7"),
        (lambda r: with_candidates(r, [1, 2], [-1.0, -0.5]), "not in order"),
        (lambda r: with_candidates(r, [1], [math.nan]), "not in order"),
    ],
)
def test_what_is_wrong_is_named(change, words):
    driver = make_driver(2)
    result = driver.results[0]
    assert result is not None
    with pytest.raises(ValueError, match=words):
        driver.scheduler.apply(change(result), 0.0)


def test_what_a_result_says_of_rows_that_were_released_since_is_not_looked_at():
    driver = make_driver(2)
    result = driver.results[0]
    assert result is not None
    driver.scheduler.abort(make_request(2).key)
    driver.scheduler.abort(make_request(4).key)
    assert driver.scheduler.apply(result, 0.0)
    driver.check()


@pytest.mark.parametrize("num_valid", [0, 1, 2])
def test_a_request_of_whose_step_the_worker_always_answers_nonsense_fails(num_valid):
    """The worker lives, and answers earlier chunks of the prompt as it should."""
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
    assert failure.message.endswith("at one step of it alone: one token too many")
