"""Results on their way to the host, beside the steps that follow."""

import random

import pytest
import torch
from torch import Tensor

from tests.support.fake_streams import FakeDevice
from worker_svc.device import runner
from worker_svc.device.runner import HostCopy, StepValues
from worker_svc.sampling.logprobs import CandidateValues, LogprobValues
from worker_svc.streams import IN_ORDER


def make_values(token_ids: Tensor) -> StepValues[Tensor]:
    return StepValues(token_ids, torch.ones(len(token_ids), dtype=torch.bool))


def test_every_value_arrives_in_its_own_slot() -> None:
    numbers = [torch.tensor([number]) for number in range(13)]
    logprobs, prompts = LogprobValues(*numbers[3:7]), LogprobValues(*numbers[7:11])
    token_ids, is_finite, finite_tokens = numbers[:3]
    sent = StepValues(token_ids, is_finite, finite_tokens, logprobs, CandidateValues(*numbers[11:]), prompts)
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

    monkeypatch.setattr(runner, "_begin_copy", begin_copy)
    device.queue(lambda: (ran.append("step"), result.fill_(7)))
    copy = HostCopy(make_values(result), device.compute, device.results)
    assert not device.results.can_run
    device.queue(lambda: ran.append("next step"))
    while device.compute.can_run:
        device.compute.run_one()
    assert ran == ["step", "next step"]
    assert copy.wait().token_ids.tolist() == [7]
    assert ran[-1] == "copy"
