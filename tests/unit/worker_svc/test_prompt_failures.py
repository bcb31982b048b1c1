from tests.support.steps import make_assign, make_batch, make_changes, make_step
from worker_svc.sampling.prompt_logprobs import PromptFailures


def test_whoever_samples_from_a_failed_prompt_fails() -> None:
    failures = PromptFailures()
    assert failures.take(make_step(batch=make_batch([3], [4], [0], [])), [3]).tolist() == []
    step = make_step(batch=make_batch([2, 3], [1, 1], [4, 4], [(2, 2), (3, 3), (5, 3)]))
    assert failures.take(step, ()).tolist() == [False, True, True]


def test_a_row_is_found_and_fails_in_the_same_step() -> None:
    step = make_step(batch=make_batch([2, 3], [1, 4], [4, 0], [(2, 2), (3, 3)]))
    assert PromptFailures().take(step, [3]).tolist() == [False, True]


def test_the_next_sequence_in_a_row_does_not_fail_however_it_came_there() -> None:
    failures, batch = PromptFailures(), make_batch([2, 3, 4], [1, 1, 1], [4, 4, 4])
    assert failures.take(make_step(batch=batch), [3, 4]).tolist() == [False, True, True]
    changes = make_changes(assign=[make_assign(3, [1] * 5, [0])], fork=[(2, 4)])
    assert failures.take(make_step(changes, batch), ()).tolist() == [False, False, False]
