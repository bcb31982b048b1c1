"""Selection of kernels by tensors."""

import pytest
import torch
import triton

from quire_kernels import backends, cuda, ops, reference


def test_cuda_tensors_get_the_triton_kernels() -> None:
    assert backends.implementation_for(torch.device("cuda")) is cuda
    assert backends.block_moves_for(torch.device("cuda", 1)) is cuda


def test_where_triton_does_not_work_the_log_says_why_and_plain_torch_takes_its_place(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:

    class Broken:
        def get_current_target(self) -> None:
            raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(triton.runtime.driver, "_active", Broken())
    assert backends.fastest_for.__wrapped__(torch.device("cuda")) is reference
    assert "Triton does not work here, the operations on the GPU run in plain torch: Failed to find C" in caplog.text


def test_every_operation_has_a_kernel_and_a_reference() -> None:
    operations = [name for name in dir(backends.GpuOperations) if not name.startswith("_")]
    assert "paged_attention" in operations
    assert all(callable(getattr(module, name)) for module in (cuda, reference) for name in operations)


def test_layers_on_several_devices_are_refused() -> None:
    layers = [torch.ones(2, 2, 1, 1, 8), torch.ones(2, 2, 1, 1, 8, device="meta")]
    with pytest.raises(ValueError, match="kv_caches is on meta; expected cpu"):
        ops.copy_blocks(layers, torch.tensor([[0, 1]]))
