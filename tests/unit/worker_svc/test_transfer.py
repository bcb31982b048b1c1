"""Results on their way to the host, beside the steps that follow."""

import random

import pytest
import torch

from tests.support.fake_streams import FakeDevice
from worker_svc.device import transfer
from worker_svc.device.streams import IN_ORDER
from worker_svc.device.transfer import HostCopy


def test_on_the_cpu_the_values_are_there_at_once() -> None:
    tensors = [torch.tensor([3, 4]), torch.tensor([True])]
    assert [array.tolist() for array in HostCopy(tensors, IN_ORDER, IN_ORDER).arrays()] == [[3, 4], [True]]
    assert HostCopy([], IN_ORDER, IN_ORDER).arrays() == []


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

    monkeypatch.setattr(transfer, "_begin_copy", begin_copy)
    device.queue(lambda: (ran.append("step"), result.fill_(7)))
    copy = HostCopy([result], device.compute, device.results)
    assert not device.results.can_run
    device.queue(lambda: ran.append("next step"))
    while device.compute.can_run:
        device.compute.run_one()
    assert ran == ["step", "next step"]
    assert copy.arrays()[0].tolist() == [7]
    assert ran[-1] == "copy"
