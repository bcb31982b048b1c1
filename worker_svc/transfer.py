"""Small arrays to the device and back, without making the host wait for it."""

import itertools
import time

import numpy as np
import torch
from torch import Tensor


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """The array on the device. On CUDA it goes through pinned memory in stream order, and the host goes on at once.

    On the CPU the tensor shares the array's memory, so the caller must not write to it any more.
    """
    # torch warns about read-only memory, which is what views of messages are.
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """Tensors on their way to the host. Make it after the kernels that produce them are queued."""

    def __init__(self, tensors: list[Tensor]) -> None:
        device = tensors[0].device if tensors else torch.device("cpu")
        if device.type == "cpu":
            self._tensors, self._event = tensors, None
            return
        self._tensors = [torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in tensors]
        for target, source in zip(self._tensors, tensors, strict=True):
            target.copy_(source, non_blocking=True)
        self._event = torch.cuda.Event(blocking=True)
        self._event.record()

    def arrays(self) -> list[np.ndarray]:
        """The values; waits for the device."""
        if self._event is not None:
            self._event.synchronize()
        return [each.numpy() for each in self._tensors]


class Stopwatch:
    """Times of the stages of one step, as the device sees them: on CUDA by events, which cost the host nothing."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._marks: list[torch.cuda.Event] = []
        self._times_ns: list[int] = []
        self.mark()

    def mark(self) -> None:
        """Ends a stage."""
        if self._on_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._times_ns.append(time.perf_counter_ns())

    def stages_us(self) -> list[int]:
        """Duration of each stage in microseconds; to be asked when the device has passed the last mark."""
        if self._on_cuda:
            return [round(a.elapsed_time(b) * 1000) for a, b in itertools.pairwise(self._marks)]
        return [(b - a) // 1000 for a, b in itertools.pairwise(self._times_ns)]
