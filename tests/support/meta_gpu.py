"""A GPU whose tensors have shapes and no values, and whose kernels do nothing: all that the worker asks of torch and
Triton is asked, and nothing is computed. What needs a value of such a tensor raises."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from triton.runtime.jit import JITFunction

from kernels import backends, cuda, ops
from tests.support.fake_cuda import FakeCuda

GPU = torch.device("cuda", 0)
_META = torch.device("meta")
# Of programs of one launch along each dimension.
_LARGEST_GRID = (2**31 - 1, 65535, 65535)


class MetaGpu(TorchFunctionMode):
    """While it is entered, tensors for `GPU` are made, and copied between it and the host.

    Attributes:
        cuda: the calls of its streams and graphs.
        launches: kernels by name, each with the stream that it was launched on.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.cuda = FakeCuda()
        self.cuda.install(monkeypatch)
        self.launches: list[tuple[str, str]] = []
        monkeypatch.setattr(JITFunction, "run", self._launching())
        monkeypatch.setattr(backends, "fastest_for", lambda device: cuda)
        monkeypatch.setattr(ops, "block_moves_for", lambda device: cuda)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = {name: _moved(value) for name, value in (kwargs or {}).items() if name != "pin_memory"}
        if func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.is_pinned:
            return True
        if func is torch.Tensor.copy_ and args[1].is_meta and args[0].is_cpu:
            return args[0].zero_()
        return func(*map(_moved, args), **options)

    def _launching(self) -> Callable[..., None]:
        def run(kernel: JITFunction[Any], *_: Any, grid: tuple[int, ...], **__: Any) -> None:
            assert all(0 < size <= most for size, most in zip(grid, _LARGEST_GRID, strict=False)), grid
            self.launches.append((kernel.__name__, self.cuda.current))

        return run


def _moved(value: Any) -> Any:
    return _META if isinstance(value, torch.device) and value.type == "cuda" else value
