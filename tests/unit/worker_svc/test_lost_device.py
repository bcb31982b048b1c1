"""Which errors leave a device useless."""

import pytest
import torch

from worker_svc.device.lost_device import is_lost


@pytest.mark.parametrize("lost", [False, True])
def test_a_gpu_is_lost_when_waiting_for_it_fails(monkeypatch: pytest.MonkeyPatch, lost: bool) -> None:
    def synchronize(device: torch.device) -> None:
        assert device == torch.device("cuda", 1)
        if lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    assert is_lost(torch.device("cuda", 1)) == lost


def test_a_processor_is_never_lost() -> None:
    assert not is_lost(torch.device("cpu"))
