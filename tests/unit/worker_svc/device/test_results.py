"""Results on their way to the host, beside the steps that follow."""

import random
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from tests.support.fake_streams import FakeDevice
from tests.support.sampling import make_sampling
from tests.support.steps import make_assign, make_batch, make_changes, make_step
from worker_svc.device import results
from worker_svc.device.results import FailingRows, HostCopy, StepValues
from worker_svc.device.streams import IN_ORDER
from worker_svc.sampling.logprobs import CandidateValues, LogprobValues
from worker_svc.step import Step


def make_values(token_ids: Tensor) -> StepValues[Tensor]:
    return StepValues(token_ids, torch.ones(len(token_ids), dtype=torch.bool))


def test_on_the_cpu_the_values_are_there_at_once() -> None:
    values = HostCopy(make_values(torch.tensor([3, 4])), IN_ORDER, IN_ORDER).wait()
    assert (values.token_ids.tolist(), values.is_finite.tolist()) == ([3, 4], [True, True])
    assert (values.finite_tokens, values.logprobs, values.candidates, values.prompt_logprobs) == (None,) * 4


def test_every_value_arrives_in_its_own_slot() -> None:
    numbers = [torch.tensor([number]) for number in range(13)]
    logprobs, prompts = LogprobValues(*numbers[3:7]), LogprobValues(*numbers[7:11])
    sent = StepValues(*numbers[:3], logprobs, CandidateValues(*numbers[11:]), prompts)
    assert HostCopy(sent, IN_ORDER, IN_ORDER).wait() == sent.map(Tensor.numpy)


def test_results_leave_after_they_were_computed_and_the_next_step_does_not_wait_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = FakeDevice(random.Random(0))
    result = torch.zeros(1, dtype=torch.int64)
    ran: list[str] = []

    def begin_copy(source: torch.Tensor) -> torch.Tensor:
        target = torch.empty_like(source)
        device.queue(lambda: (ran.append("copy"), target.copy_(source)))
        return target

    monkeypatch.setattr(results, "_begin_copy", begin_copy)
    device.queue(lambda: (ran.append("step"), result.fill_(7)))
    copy = HostCopy(make_values(result), device.compute, device.results)
    assert not device.results.can_run
    device.queue(lambda: ran.append("next step"))
    while device.compute.can_run:
        device.compute.run_one()
    assert ran == ["step", "next step"]
    assert copy.wait().token_ids.tolist() == [7]
    assert ran[-1] == "copy"


def failing_samples(rows: FailingRows, step: Step, failed: Iterable[int]) -> list[bool]:
    fails, refusals = rows.update(step, failed)
    assert not refusals
    return fails.tolist()


def test_a_row_whose_sampling_was_refused_fails_with_all_that_sample_from_it() -> None:
    rows = FailingRows()
    assign = make_assign(3, [1] * 5, [0], make_sampling(refusal="top_p is 7"))
    fails, refusals = rows.update(make_step(make_changes(assign=[assign]), make_batch([3], [4], [0], [])), ())
    assert (fails.tolist(), refusals) == ([], {})
    batch = make_batch([2, 3], [1, 1], [4, 4], [(2, 2), (3, 3), (5, 3)])
    fails, refusals = rows.update(make_step(make_changes(fork=[(3, 5)]), batch), ())
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
