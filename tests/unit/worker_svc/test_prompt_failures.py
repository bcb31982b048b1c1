from collections.abc import Iterable

from tests.support.sampling import make_sampling
from tests.support.steps import make_assign, make_batch, make_changes, make_step
from worker_svc.sampling.prompt_logprobs import FailingRows
from worker_svc.steps import Step


def failing_samples(rows: FailingRows, step: Step, failed: Iterable[int]) -> list[bool]:
    fails, refusals = rows.take(step, failed)
    assert not refusals
    return fails.tolist()


def test_a_row_whose_sampling_was_refused_fails_with_all_that_sample_from_it() -> None:
    rows = FailingRows()
    assign = make_assign(3, [1] * 5, [0], make_sampling(refusal="top_p is 7"))
    fails, refusals = rows.take(make_step(make_changes(assign=[assign]), make_batch([3], [4], [0], [])), ())
    assert (fails.tolist(), refusals) == ([], {})
    batch = make_batch([2, 3], [1, 1], [4, 4], [(2, 2), (3, 3), (5, 3)])
    fails, refusals = rows.take(make_step(make_changes(fork=[(3, 5)]), batch), ())
    assert (fails.tolist(), refusals) == ([False, True, True], {3: "top_p is 7", 5: "top_p is 7"})
    changes = make_changes(assign=[make_assign(3, [1] * 5, [0])])
    assert failing_samples(rows, make_step(changes, batch), ()) == [False, False, False]


def test_whoever_samples_from_a_failed_prompt_fails() -> None:
    failures = FailingRows()
    assert failing_samples(failures, make_step(batch=make_batch([3], [4], [0], [])), [3]) == []
    step = make_step(batch=make_batch([2, 3], [1, 1], [4, 4], [(2, 2), (3, 3), (5, 3)]))
    assert failing_samples(failures, step, ()) == [False, True, True]


def test_a_row_is_found_and_fails_in_the_same_step() -> None:
    step = make_step(batch=make_batch([2, 3], [1, 4], [4, 0], [(2, 2), (3, 3)]))
    assert failing_samples(FailingRows(), step, [3]) == [False, True]


def test_the_next_sequence_in_a_row_does_not_fail_however_it_came_there() -> None:
    failures, batch = FailingRows(), make_batch([2, 3, 4], [1, 1, 1], [4, 4, 4])
    assert failing_samples(failures, make_step(batch=batch), [3, 4]) == [False, True, True]
    changes = make_changes(assign=[make_assign(3, [1] * 5, [0])], fork=[(2, 4)])
    assert failing_samples(failures, make_step(changes, batch), ()) == [False, False, False]
