"""Results on their way to the host, and the times of stages, without making the host wait for the device."""

import itertools
import time

import numpy as np
import torch
from torch import Tensor

from worker_svc.device.streams import Stream


class HostCopy:
    """Tensors on their way to the host, beside what computes. To be made when the kernels that give them are queued."""

    def __init__(self, tensors: list[Tensor], compute: Stream, results: Stream) -> None:
        # Kept until they have arrived: torch would give their memory to the next step.
        self._sources = tensors
        results.wait_for(compute.mark())
        with results.used():
            self._targets = [_begin_copy(each) for each in tensors]
        self._arrived = results.mark()

    def arrays(self) -> list[np.ndarray]:
        """The values; waits for the device."""
        self._arrived.wait()
        self._sources = []
        return [each.numpy() for each in self._targets]


def _begin_copy(source: Tensor) -> Tensor:
    if source.is_cpu:
        return source
    return torch.empty(source.shape, dtype=source.dtype, pin_memory=True).copy_(source, non_blocking=True)


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
